"""What is known of documents from the rows of their pieces."""

import numpy as np

from engine.data import ledger
from engine.data.ledger import COLUMNS, LAST, content_of, facts_of, first_of_their_kind, per_document


def rows(*pieces: tuple[int, int, bool]) -> np.ndarray:
    """A ledger of pieces: digest, tokens, and whether the document ends."""
    found = np.zeros((len(pieces), COLUMNS), np.uint64)
    for row, (digest, tokens, last) in zip(found, pieces, strict=True):
        row[[0, 1, 3, 5]] = digest, digest * 7, tokens, LAST * last
    return found


WHOLE = rows((1, 5, True), (2, 3, False), (3, 4, True), (1, 5, True), (5, 9, True), (4, 1, False), (1, 6, True))


def test_documents_are_the_sums_of_their_pieces_however_ledgers_are_cut(monkeypatch):
    monkeypatch.setattr(ledger, "ROWS", 2)
    for cut in range(len(WHOLE) + 1):
        found = np.concatenate([*per_document([WHOLE[:cut], WHOLE[cut:]])])
        assert found.tolist() == [[1, 7, 5], [5, 35, 7], [1, 7, 5], [5, 35, 9], [5, 35, 7]]
        assert content_of([WHOLE[:cut], WHOLE[cut:]]) == content_of([WHOLE])


def test_the_content_is_the_texts_in_their_order_and_no_matter_where_they_end():
    assert content_of([WHOLE[::-1]]) != content_of([WHOLE]) != content_of([WHOLE[:-1]])
    tails = np.insert(WHOLE, 2, 0, axis=0)  # what comes after a cut between two splits has no digest of its own
    assert content_of([tails]) == content_of([WHOLE]) and len(content_of([])) == 32


def test_the_first_of_several_repeats_is_no_repeat(monkeypatch):
    for compared in (100, 2, 1):  # in one pass and in several
        monkeypatch.setattr(ledger, "COMPARED", compared)
        assert first_of_their_kind([WHOLE[:3], WHOLE[3:]]).tolist() == [True, True, False, False, False]
        assert facts_of([WHOLE]) == {"documents": 5, "repeats": 3, "longest": 9}


def test_no_document_at_all():
    assert facts_of([]) == facts_of([rows()]) == {"documents": 0, "repeats": 0, "longest": 0}


def test_digests_that_differ_in_either_half_are_others():
    found = rows((1, 1, True), (1, 1, True), (1, 1, True))
    found[1, 0], found[2, 1] = 2, 2
    assert first_of_their_kind([found]).all()
