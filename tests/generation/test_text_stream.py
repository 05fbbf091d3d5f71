"""Streaming text: whole characters, stop texts, ends."""

import pytest

from engine.data.chats.chat import TurnEnds
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.generation.text_stream import TextStream


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ("aé€😀".encode(), ["a", "", "é", "", "", "€", "", "", "", "😀", ""]),
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
        ("😀".encode()[:-1], ""),
        ("EN€".encode()[:-1], "EN"),  # which may begin a stop text
        (b"a\xffb\xe2\x82", "a\ufffdb"),  # bytes that no token can complete stay visible
        ("a�".encode(), "a�"),
    ],
)
def test_a_character_that_the_limit_cuts_is_left_out(content, text):
    for limit, end in ((len(content), []), (100, [256])):
        stream = TextStream(ByteTokenizer(), max_tokens=limit, stop=["END"])
        pieces = [stream.push(token) for token in [*content, *end]]
        assert stream.is_finished and "".join(pieces) == text
        assert stream.push(97) == stream.end() == "" and stream.hit_token_limit == (not end)


def test_the_first_stop_text_of_a_token_counts():
    class Words(CharTokenizer):
        def decode_bytes(self, ids) -> bytes:
            return b"one two three"

    stream = TextStream(Words("a"), stop=["three", "two"])
    assert stream.push(0) == "one " and stream.is_finished


@pytest.mark.parametrize("ends", [[], [99]])
def test_the_end_of_text_and_given_ends_end_the_stream(ends):
    stream = TextStream(ByteTokenizer(), ends=TurnEnds(tuple(ends)))
    assert [*map(stream.push, [97, *ends, 256, 98])] == ["a", "", "", *[""] * len(ends)]
    assert stream.is_finished and len(stream.new_ids) == 2
