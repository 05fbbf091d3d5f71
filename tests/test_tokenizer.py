"""Text ↔ token ids."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from engine.tokenizer import (
    END_OF_TEXT,
    RESERVED,
    SMALLEST_BPE,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    named_tokenizer,
    train_bpe,
    train_huggingface,
)


def gapped() -> BPETokenizer:
    """Built like p50k_base: the end of text stands amid the ranks, and one id stands for nothing."""
    ranks = {bytes((byte,)): byte for byte in range(256)} | {b"ab": 257, b"abab": 258, b" ab": 260}
    special = {END_OF_TEXT: 256}
    return BPETokenizer(
        tiktoken.Encoding("gapped", pat_str=r"\s?\w+|\W", mergeable_ranks=ranks, special_tokens=special)
    )


@pytest.fixture(scope="module", params=["char", "byte", "gapped", "bpe", "gpt2", "cl100k_base"])
def tokenizer(request: pytest.FixtureRequest, strings: list[str], code: str) -> Tokenizer:
    if request.param in ("gpt2", "cl100k_base"):
        request.getfixturevalue("tiktoken_cache")
        return named_tokenizer(request.param)
    make = {
        "char": lambda: CharTokenizer("".join(sorted({*"".join(strings)}))),
        "byte": ByteTokenizer,
        "gapped": gapped,
        "bpe": lambda: train_bpe([code], 1000),
    }
    return make[request.param]()


def test_ids_decode_to_the_text(tokenizer: Tokenizer, strings: list[str]):
    for text in strings:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and (ids < tokenizer.vocab_size).all()
        assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
        assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == text.encode()


def test_part_of_a_character_decodes_to_a_replacement():
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


def test_spelled_out_end_of_text_is_ordinary_text(tokenizer: Tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_end_of_text_decodes_to_its_name(tokenizer: Tokenizer):
    if tokenizer.kind == "char":
        assert tokenizer.end_of_text is None
    else:
        assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_loaded_is_what_was_saved(tokenizer: Tokenizer, strings: list[str], tmp_path: Path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    monkeypatch.delattr(tiktoken, "get_encoding")  # the file must be enough
    loaded = load_tokenizer(path)
    for name in ("kind", "vocab_size", "end_of_text"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    unused = tokenizer.unused_ids()
    assert loaded.unused_ids() == unused
    for text in strings:
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
    every_id = [i for i in range(tokenizer.vocab_size) if i not in unused]
    assert loaded.decode_bytes(every_id) == tokenizer.decode_bytes(every_id)


def test_unused_ids_are_all_ids_that_stand_for_nothing(tokenizer: Tokenizer):
    expected = {"cl100k_base": [100256, *range(100258, 100277)], "gapped": [259], "bpe": [996, 997, 998, 999]}
    assert tokenizer.unused_ids() == expected.get(tokenizer.kind, [])


def test_half_a_character_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"the text has '\\udc80', half of a character, at 2|not know .*\(U\+DC80\)"):
        tokenizer.encode("ab\udc80c")


@pytest.mark.parametrize("unknown", ["é", "\U0001f680", "\ud83d"])
def test_unknown_character_is_named(unknown: str):
    with pytest.raises(ValueError, match=re.escape(f"{unknown!r} (U+{ord(unknown):04X})")):
        CharTokenizer("abc").encode(f"ab{unknown}c?")


def test_trained_bpe_encodes_as_hugging_face_does(strings: list[str], code: str):
    # Two regex engines must cut text into the same words, whatever stands by a letter, a digit or a space.
    code_points = [i for i in (*range(0x1000), *range(0x1000, 0x110000, 100)) if not 0xD800 <= i < 0xE000]
    all_sorts = "".join(f"a{c} {c}1{c}{c}\n{c}" for c in map(chr, code_points))
    texts = [*strings, all_sorts, code]
    theirs, ours = train_huggingface(texts, 1000), train_bpe(texts, 1000 + len(RESERVED))
    assert ours.vocab_size == 1000 + len(RESERVED)
    for text in texts:
        assert ours.encode(text).tolist() == theirs.encode(text).ids


def test_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"^--tokenizer gpt5 is unknown; .* char, byte, bpe, .*gpt2"):
        named_tokenizer("gpt5")


def test_bpe_has_as_many_tokens_as_asked_or_as_the_text_has(code: str):
    assert train_bpe([code], 500).vocab_size == 500
    assert train_bpe(["aa"], 500).vocab_size == SMALLEST_BPE + 1
    assert train_bpe([], SMALLEST_BPE).vocab_size == SMALLEST_BPE


def test_bpe_takes_digits_in_pairs():
    assert len(train_bpe(["202420 " * 9], 500).encode("202420")) == 3


@pytest.mark.parametrize("run", [" " * 300_000, "a" * 300_000, "\n" * 300_000, "-" * 300_000, "7" * 300_000])
def test_no_word_of_a_trained_bpe_is_endless(run: str):
    trained = train_bpe([run], 300)
    assert all(len(token) <= 128 for token in trained.encoding._mergeable_ranks)
    for text in (run, f"x{run}x", f"{run}\n{run}"):
        assert trained.decode(trained.encode(text).tolist()) == text


def test_a_character_that_a_large_tokenizer_does_not_know_is_named_with_some_that_it_does():
    many = CharTokenizer("".join(map(chr, range(0x4E00, 0x9000))))
    with pytest.raises(ValueError, match=re.escape("'a' (U+0061); its 16,896 are '一丁丂")) as caught:
        many.encode("a")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"kind": "char"},
        {"kind": "char", "characters": ""},
        {"kind": "char", "characters": "\ud800"},
        {"tokens": None},
        {"tokens": "a"},
        {"tokens": "é"},
        {"pattern": "("},
        {"special_tokens": {}},
        {"special_tokens": {END_OF_TEXT: -1}},
        {"special_tokens": {END_OF_TEXT: 2**24}},
        {"tokens": " ".join(["", *(base64.b64encode(bytes((byte,))).decode() for byte in range(255))])},
    ],
)
def test_damaged_file_is_refused_by_name(changes: dict, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    gapped().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} (is damaged|has format 2).* again$"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1', b"\xff"])
def test_what_is_no_tokenizer_is_refused_by_name(content: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is damaged"):
        load_tokenizer(path)
