"""TextGenerator: text in, text out; fitting a chat into the context."""

import dataclasses

import pytest
import torch
from helpers import SMALL, random_model
from reference import decoding_definition

from engine.core.errors import UserError
from engine.data.chats.chat import encode_chat, turn_ends
from engine.data.ids import encode_examples
from engine.data.split import prompt_ids
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.text_generator import TextGenerator, fit_chat
from model import GPT

LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
CHAT = ByteTokenizer().with_special(SPECIAL_TOKENS)
OPTIONS = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return TextGenerator(random_model(SMALL), LETTERS, initial_tokens=[0])


def test_text_is_that_of_the_decoded_ids_whole_or_streamed(generator):
    (ids,) = decoding_definition(generator.model, [LETTERS.encode("(&1").tolist()], 30, **OPTIONS)
    expected = LETTERS.decode(ids)
    assert generator.generate("(&1", max_new_tokens=30, **OPTIONS) == expected
    pieces = list(generator.stream("(&1", max_new_tokens=30, **OPTIONS))
    assert "".join(pieces) == expected and len(pieces) >= 30
    stopped = generator.generate("(&1", max_new_tokens=30, stop=[expected[7:9]], **OPTIONS)
    assert stopped == expected[: expected.index(expected[7:9])]
    first = LETTERS.decode(generator.initial_tokens)
    assert generator.generate(max_new_tokens=9) == generator.generate(first, max_new_tokens=9)


@pytest.mark.parametrize(("max_new_tokens", "answer"), [(500, "xxx"), (2, "xx")])
def test_an_answer_or_a_text_ends_with_its_turn(max_new_tokens, answer):
    class EndsTurn(GPT):
        """Always predicts x, and after three of them the end of the turn."""

        def forward(self, tokens, contexts, last):
            is_last = contexts[0].next_positions().max() >= 6  # <user> h <end> <assistant> x x x
            (end,) = turn_ends(CHAT, True).token_ids
            logits = torch.eye(CHAT.vocab_size)[end if is_last else ord("x")]
            return logits.expand(len(tokens), 1, -1)

    generator = TextGenerator(EndsTurn(SMALL), CHAT, [0], is_chat_model=True)
    options = {"max_new_tokens": max_new_tokens, "temperature": 0}
    assert "".join(generator.stream_answer([("user", "h")], **options)) == answer
    assert generator.encode_prompt("<|user|>") == [*b"<|user|>"]
    text = "xxxx"[:max_new_tokens]
    assert generator.generate("<|a", **options) == text  # the three characters are text
    assert generator.generate_samples(2, "<|a", **options) == [text, text]


def test_an_unknown_option_names_the_one_that_is_meant(generator):
    with pytest.raises(UserError, match=r"max_tokens: .*Did you mean max_new_tokens\?"):
        generator.generate("(", max_tokens=3)
    with pytest.raises(UserError, match=r"temprature: .*Did you mean temperature\?"):
        generator.generate_samples(2, "(", temprature=1.0)


def test_a_typed_prompt_of_a_pair_is_encoded_as_in_training(generator):
    tokenizer = ByteTokenizer()
    pairs = TextGenerator(generator.model, tokenizer, [0])
    for prompt in ("What is a king?", " <|endoftext|>", "ä\n"):
        example = encode_examples(tokenizer, [("prompt", prompt), ("completion", "c")])[0]
        assert pairs.encode_prompt(prompt) == prompt_ids(example)


def encode(*turns: tuple[str, str]) -> list[int]:
    """The ids of a chat, up to where the answer starts."""
    return encode_chat(CHAT, turns)


def test_the_oldest_turns_are_dropped_and_the_system_turn_never(capsys):
    system = ("system", "be kind")
    first = [("user", "one"), ("assistant", "two")]
    second = [("user", "three"), ("assistant", "four")]
    last = ("user", "five")
    chat = [system, *first, *second, last]
    length = len(encode(*chat))
    for limit in (1, 20):  # tokens of the answer
        assert fit_chat(CHAT, chat, length + limit, limit) == (encode(*chat), limit)
        for context_length in (length - 1, length - 5):  # no answer stays without its question
            ids, remaining = fit_chat(CHAT, chat, context_length + limit, limit)
            assert ids == encode(system, *second, last) and remaining == limit
        context_length = len(encode(system, last)) + limit
        assert fit_chat(CHAT, chat, context_length, limit)[0] == encode(system, last)
    ids = encode(last)
    assert fit_chat(CHAT, [last], 20, 500) == (ids, 20 - len(ids))  # at least half of the context
    assert capsys.readouterr().err == ""


def test_turns_before_the_first_question_are_kept_if_they_fit():
    greeting = ("assistant", "Hello.")
    systems = [("system", "be kind"), ("system", "be brief")]
    for chat in ([greeting, ("user", "hi")], [*systems, greeting, ("user", "1"), ("user", "2")]):
        length = len(encode(*chat)) + 9
        assert fit_chat(CHAT, chat, length, 9)[0] == encode(*chat)
        assert fit_chat(CHAT, chat, length - 1, 9)[0] != encode(*chat)


def test_a_turn_that_alone_is_too_long_is_refused():
    turns = [("user", "dropped"), ("assistant", "too"), ("user", "0123456789")]
    ids = encode(turns[-1])
    assert fit_chat(CHAT, turns, len(ids) + 1, 500) == (ids, 1)
    with pytest.raises(UserError, match="too long"):
        fit_chat(CHAT, turns, len(ids), 1)


def test_a_second_text_captures_nothing_again(graphs, generator):
    generator = dataclasses.replace(generator)  # without a decoder of other tests
    texts = []
    counts = []
    for _ in range(2):
        texts.append(generator.generate("12", max_new_tokens=20))
        counts.append(graphs.captures)
    assert counts == [1, 1] and texts[0] == texts[1]
    streams = [generator.stream("12", max_new_tokens=20) for _ in range(2)]
    pieces = [*zip(*streams, strict=True)]  # in turn
    assert ["".join(text) for text in zip(*pieces, strict=True)] == texts
