"""OpenAI's form of answers, whole and in chunks."""

from types import SimpleNamespace
from typing import Any

from engine.generation.text_batch import Token
from engine.serving.openai_format import AnswerFormat, CompletionSettings

TEXTS = {1: b"a", 2: b"a", 3: b"\xe2"}
TOKENIZER: Any = SimpleNamespace(decode_bytes=lambda ids: TEXTS[ids[0]])
TOKENS = [Token(2, "a", 5, -2.0, [(1, -0.5), (3, -1.0), (2, -2.0)]), Token(3, "", 6, -1.0)]


def test_of_alternatives_with_equal_texts_the_most_likely_is_listed():
    form = AnswerFormat("name", TOKENIZER, CompletionSettings(prompt="a", logprobs=3))
    choice = form.choice(7, TOKENS, SimpleNamespace(hit_token_limit=False))
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xe2"],
        "token_logprobs": [-2.0, -1.0],
        "top_logprobs": [{"a": -0.5, "bytes:\\xe2": -1.0}, {}],
        "text_offset": [5, 6],
    }
    del choice["logprobs"]
    assert choice == {"index": 7, "text": "a", "finish_reason": "stop"}
