"""Streaming text: whole characters, stop texts, ends."""

import json

import pytest
from helpers import numbers_text, train_sentencepiece

from engine.data.tokenizer import ByteTokenizer, CharTokenizer, from_document
from engine.data.tokenizer_json import with_extension
from engine.generation.text_stream import TextStream


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ("aé€😀".encode(), ["a", "", "é", "", "", "€", "", "", "", "😀", ""]),
        (b"\xe2", ["", ""]),
        (b" EN ENDof", [" ", "", "", "EN ", "", "", "", "", "", ""]),
        (b"EEN", ["", "E", "", "EN"]),  # which may begin a stop text
        (b"a\n\nb", ["a", "", "", "", ""]),
    ],
)
def test_a_stream_writes_what_later_tokens_cannot_change(content, pieces):
    stream = TextStream(ByteTokenizer(), stop=["END", "\n\n"])
    assert [*map(stream.push, content), stream.end()] == pieces


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ä€".encode()[:-1], "ä"),
        ("ä€".encode()[:-2], "ä"),
        ("😀".encode()[:-1], ""),
        ("EN€".encode()[:-1], "EN"),  # which may begin a stop text
        (b"a\xffb\xe2\x82", "a\ufffdb"),  # bytes that no token can complete stay visible
        (b"a\xe2(", "a\ufffd("),
        ("a�".encode(), "a�"),
    ],
)
def test_a_character_that_the_limit_cuts_is_left_out(content, text):
    for limit, end in ((len(content), []), (100, [256])):
        stream = TextStream(ByteTokenizer(), max_tokens=limit, stop=["END"])
        pieces = [stream.push(token) for token in [*content, *end]]
        assert stream.ended and "".join(pieces) == text
        assert stream.push(97) == stream.end() == "" and stream.is_cut == (not end)


def test_the_first_stop_text_of_a_token_counts():
    class Words(CharTokenizer):
        def decode_bytes(self, ids) -> bytes:
            return b"one two three"

    stream = TextStream(Words("a"), stop=["three", "two"])
    assert stream.push(0) == "one " and stream.ended


@pytest.mark.parametrize("ends", [[], [99]])
def test_the_end_of_text_and_given_ends_end_the_stream(ends):
    stream = TextStream(ByteTokenizer(), ends=ends)
    assert [*map(stream.push, [97, *ends, 256, 98])] == ["a", "", "", *[""] * len(ends)]
    assert stream.ended and stream.num_tokens == 2


@pytest.mark.parametrize("prompt", ["", "7 is", "</s>"])
def test_a_space_that_the_tokenizer_adds_is_not_written(prompt):
    document = json.loads(train_sentencepiece([numbers_text(200)]).to_str())
    tokenizer = from_document(with_extension(document, end_of_text="</s>"))
    end = tokenizer.special_tokens["</s>"]
    prompt_ids = [end] if prompt == "</s>" else tokenizer.encode(prompt).tolist()
    stream = TextStream(tokenizer, prompt=prompt_ids)
    ids = tokenizer.encode("followed by 8.").tolist()
    text = "".join(map(stream.push, ids)) + stream.end()
    assert text == (" followed by 8." if prompt == "7 is" else "followed by 8.")
    assert stream.num_characters == len(text)
