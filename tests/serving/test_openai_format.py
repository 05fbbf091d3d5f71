"""OpenAI's form of requests and answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.generation.text_stream import TextStream
from engine.serving.batching import TextRequest, Token
from engine.serving.openai_format import ChoiceWriter


def new_writer(
    texts: dict[int, bytes], adds_leading_space: bool = False, **options: bool
) -> ChoiceWriter:
    """Return a writer for a completion, with a tokenizer of these tokens."""
    tokenizer: Any = SimpleNamespace(
        decode_bytes=lambda ids: texts[ids[0]],
        adds_leading_space=adds_leading_space,
        special_tokens={"</s>": 0},
        end_of_text=0,
    )
    prompt = [0] if options.pop("starts_text", False) else [1]
    stream = TextStream(tokenizer, prompt)
    request = TextRequest(stream, 0, {}, lambda arrival: None, num_logprobs=1, **options)
    return ChoiceWriter(request, 0, is_chat=False)


def test_of_alternatives_with_equal_texts_the_most_likely_is_listed():
    texts = {1: b"a", 2: b"a", 3: b"b"}
    writer = new_writer(texts)
    tokens = [Token(2, "a", -2.0, [(1, -0.5), (3, -1.0), (2, -2.0)]), Token(3, "b", -1.0, [])]
    scores = writer.full_choice(tokens, "stop")["logprobs"]
    assert scores["top_logprobs"] == [{"a": -0.5, "b": -1.0}, {}]
    assert scores["tokens"] == ["a", "b"] and scores["text_offset"] == [0, 1]
    assert writer.next_chunk(tokens[0])["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        ({}, [0, 2]),
        ({"starts_text": True}, [0, 1]),
        ({"reports_prompt": True}, [0, 1]),
        ({"starts_text": True, "reports_prompt": True}, [0, 4, 5]),
    ],
)
def test_offsets_do_not_count_the_space_that_a_tokenizer_adds_at_the_start(options, offsets):
    writer = new_writer({0: b"</s>", 1: b" a", 2: b" b"}, adds_leading_space=True, **options)
    tokens = [Token(1, "a", -1.0), Token(2, " b", -1.0)]
    if len(offsets) > len(tokens):
        tokens.insert(0, Token(0, "</s>"))
    assert writer.full_choice(tokens, "stop")["logprobs"]["text_offset"] == offsets
