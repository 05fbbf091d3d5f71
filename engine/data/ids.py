"""Stage 4 of 5: documents → ids and targets.

Special tokens, chat templates, and the tokens that begin and end a text are added here and nowhere
else: see chats/. A batch of documents is encoded by one thread at a time.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.data.chats.chat import (
    NO_NAMES,
    Turn,
    encode_answers,
    encode_rendered,
    escape_names,
    names_pattern,
)
from engine.data.documents import corpus
from engine.data.documents.corpus import Piece, SplitRule, Unit
from engine.data.documents.document import Document
from engine.data.sources.notes import Notes
from engine.data.tokenizer import Tokenizer

NAMES_NOTE = "names of special tokens, plain characters here"
NAMES_ADVICE = ": see --parse-special, and --separator for plain text"


class EncodedText(NamedTuple):
    """Consecutive pieces of a document for one split, or an example of it, as token ids."""

    split: str
    ids: np.ndarray
    num_targets: int  # of an example
    num_bytes: int  # in UTF-8; of an example, those of its targets
    ends_document: bool
    source: str


@dataclass
class Batch:
    """Encoded documents of a unit."""

    unit: Unit
    texts: np.ndarray  # TEXT_DTYPE (N,)
    encoded: list[EncodedText] = field(default_factory=list)
    num_characters: int = 0
    notes: Notes = field(default_factory=Notes)


@dataclass(frozen=True)
class EncodingRule:
    """How documents become ids, besides the tokenizer."""

    split_rule: SplitRule
    parse_special: bool = False  # names of special tokens in texts become these tokens
    separator: str = ""  # ends a document where the tokenizer has no token for it


def encode_batch(
    unit: Unit, documents: Sequence[Document], rule: EncodingRule, tokenizer: Tokenizer
) -> Batch:
    """Split, hash and encode documents; the pieces of one are joined first."""
    numbered: list[tuple[int, Piece]] = []  # with the number of the document's first piece here
    rows = []
    first = 0
    for number, document in enumerate(documents):
        digest = corpus.digest_of(document)
        rows.append((digest[corpus.HASH_BYTES], 0, document.ends_document))
        first = number if document.offset == 0 else first
        pieces = rule.split_rule.pieces(document, digest, unit.split)
        numbered += [(first, piece) for piece in pieces]
    batch = Batch(unit, np.array(rows, corpus.TEXT_DTYPE))
    numbers, joined = join_pieces(numbered)
    encoded = encode_pieces(tokenizer, joined, rule)
    for number, piece, examples in zip(numbers, joined, encoded, strict=True):
        for index, text in enumerate(examples, 1):
            ends = piece.ends_document and index == len(examples)
            batch.encoded.append(EncodedText(piece.split, *text, ends, documents[number].source))
        batch.texts["tokens"][number] += max(len(ids) for ids, _, _ in examples)
    content = "\0".join(document.text for document in documents)
    batch.num_characters = len(content)
    if not rule.parse_special:
        advice = "" if rule.split_rule.has_examples else NAMES_ADVICE
        names = names_pattern(tokenizer, "").findall(content)
        batch.notes.add(NAMES_NOTE + advice, len(names))
    return batch


def join_pieces(numbered: Sequence[tuple[int, Piece]]) -> tuple[list[int], list[Piece]]:
    """Join the pieces of each document and split; return the documents' numbers and the pieces."""
    numbers = []
    joined = []
    for (number, split), group in itertools.groupby(numbered, lambda pair: (pair[0], pair[1][0])):
        _, texts, starts, ends = zip(*(piece for _, piece in group), strict=True)
        numbers.append(number)
        joined.append(Piece(split, "".join(texts), starts[0], ends[-1]))
    return numbers, joined


def encode_pieces(
    tokenizer: Tokenizer, pieces: Sequence[Piece], rule: EncodingRule
) -> Iterator[list[tuple[np.ndarray, int, int]]]:
    """Yield ids, targets and bytes (see EncodedText) of each text, or of the examples in it."""
    if rule.split_rule.has_examples:
        for piece in pieces:
            examples = encode_examples(tokenizer, json.loads(piece.text), rule.parse_special)
            yield [(ids, *count_targets(tokenizer, ids)) for ids in examples]
        return
    texts = [piece.text for piece in pieces]
    for piece, ids in zip(pieces, encode_texts(tokenizer, texts, rule.parse_special), strict=True):
        _, text, starts, ends = piece
        num_bytes = len(text.encode()) + len(rule.separator) * ends
        yield [(add_ends(tokenizer, ids, starts, ends, rule.separator), 0, num_bytes)]


def encode_prompt(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> np.ndarray:
    """Return the ids of a text that begins a document, uint32 (N,): see :func:`encode_texts`."""
    return add_ends(tokenizer, encode_texts(tokenizer, [text], parse_special)[0], starts=True)


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], parse_special: bool = False
) -> list[np.ndarray]:
    """Return the ids of texts, in which the names of markup are tokens, uint32 (N,) each.

    With ``parse_special`` the names of all special tokens are.
    """
    if not parse_special and not tokenizer.markup:
        return tokenizer.encode_batch(texts)
    pattern = NO_NAMES if parse_special else names_pattern(tokenizer, "")
    escaped = (escape_names(pattern, text) for text in texts)
    return [np.array(encode_rendered(tokenizer, text)[0], np.uint32) for text in escaped]


def add_ends(
    tokenizer: Tokenizer,
    ids: np.ndarray,
    starts: bool = False,
    ends: bool = False,
    separator: str = "",
) -> np.ndarray:
    """Add the tokens that begin and end a document, unless its text spells them itself.

    The separator ends it if the tokenizer has no such token.
    """
    start = tokenizer.text_start if starts else []
    if start and ids[: len(start)].tolist() != start:
        ids = np.concatenate((np.array(start, np.uint32), ids))
    end_id = tokenizer.end_of_text_id
    if not ends or (len(ids) and ids[-1] == end_id):
        return ids
    end = tokenizer.encode(separator) if end_id is None else np.array([end_id], np.uint32)
    return np.concatenate((ids, end))


def encode_examples(
    tokenizer: Tokenizer, turns: Sequence[Turn], parse_special: bool = False
) -> list[np.ndarray]:
    """Encode a pair or a chat as examples, int32 (N,): an id where it is a target, ~id elsewhere.

    A pair is one example, a chat as many as :func:`encode_answers` returns.
    """
    if turns[0][0] != "prompt":
        return encode_answers(tokenizer, turns)
    prompt = encode_prompt(tokenizer, turns[0][1], parse_special)
    continuing = tokenizer.without_space if turns[0][1] else tokenizer
    (completion,) = encode_texts(continuing, [turns[1][1]], parse_special)
    targets = add_ends(continuing, completion, ends=True)
    return [np.concatenate((~prompt.astype(np.int32), targets.astype(np.int32)))]


def count_targets(tokenizer: Tokenizer, example: np.ndarray) -> tuple[int, int]:
    """Count the targets of an example, and the UTF-8 bytes of their text."""
    special = {*tokenizer.special_tokens.values()}
    ids = example.tolist()
    targets = [(before, token) for before, token in itertools.pairwise(ids) if token >= 0]
    texts = [(before, token) for before, token in targets if token not in special]
    num_bytes = len(tokenizer.decode_bytes([token for _, token in texts]))
    if tokenizer.adds_leading_space:
        first_ids = [i for before, i in texts if tokenizer.adds_space_after(max(before, ~before))]
        num_bytes -= sum(tokenizer.decode_bytes([i]).startswith(b" ") for i in first_ids)
    return len(targets), num_bytes
