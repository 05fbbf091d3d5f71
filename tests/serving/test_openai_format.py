"""OpenAI's form of requests and answers."""

from types import SimpleNamespace
from typing import Any

from engine.serving.batching import Token
from engine.serving.openai_format import ChoiceWriter


def test_of_alternatives_with_equal_texts_the_most_likely_is_listed():
    texts = {1: b"a", 2: b"a", 3: b"b"}
    tokenizer: Any = SimpleNamespace(decode_bytes=lambda ids: texts[ids[0]])
    writer = ChoiceWriter(tokenizer, 0, is_chat=False, has_logprobs=True)
    tokens = [Token(2, "a", -2.0, [(1, -0.5), (3, -1.0), (2, -2.0)]), Token(3, "b", -1.0, [])]
    scores = writer.full_choice(tokens, "stop")["logprobs"]
    assert scores["top_logprobs"] == [{"a": -0.5, "b": -1.0}, {}]
    assert scores["tokens"] == ["a", "b"] and scores["text_offset"] == [0, 1]
    assert writer.next_chunk(tokens[0])["logprobs"]["text_offset"] == [2]
