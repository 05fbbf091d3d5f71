"""Prompts with completions, and chats, as token ids, and which of them are targets."""

import math
import random
import re
import time

import numpy as np
import pytest
from helpers import train_sentencepiece

from engine.core.errors import UserError
from engine.data.chats.chat import CHATML_TOKENS, names_pattern, special_token_names, turn_ends
from engine.data.chats.chat_template import PLAIN_TEMPLATE
from engine.data.chats.examples import chat_parser, parse_chat, parse_pair
from engine.data.ids import count_targets, encode_examples, encode_texts
from engine.data.shards.dataset_summary import escape_unprintable, render_with_targets
from engine.data.split import is_target, token_ids
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, from_document
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TEXT, END_OF_TURN
from engine.data.tokenizer_training import train_bpe_tokenizer

CHAT = [
    ("system", "Be kind."),
    ("user", "Hé?"),
    ("assistant", "Ja."),
    ("user", "Ok"),
    ("assistant", ""),
]


def with_special_tokens(tokenizer: Tokenizer, chat: bool) -> Tokenizer:
    return tokenizer.with_special(special_token_names(tokenizer, chat))


BYTES = with_special_tokens(ByteTokenizer(), chat=True)


@pytest.mark.parametrize(("prompt", "num_targets"), [("1+1=", 2), ("", 1)])
def test_the_completion_and_its_end_are_targets(prompt: str, num_targets: int):
    turns, _ = parse_pair({"q": prompt, "a": "2"}, ["q"], "a")
    example = encode_examples(ByteTokenizer(), turns)[0]
    assert example.dtype == np.int32
    assert example.tolist() == [*(~byte for byte in prompt.encode()), ord("2"), 256]
    expected = [False] * (len(prompt) or 1) + [True] * num_targets
    assert is_target(example).tolist() == expected  # never the first token


def test_texts_of_the_assistant_and_their_ends_are_targets():
    names = (END_OF_TEXT, *CHAT_ROLES.values(), END_OF_TURN)
    assert BYTES.special_tokens == {name: 256 + i for i, name in enumerate(names)}
    system, user, assistant, end = range(257, 261)
    context = [system, *b"Be kind.", end, user, *"Hé?".encode(), end, assistant]
    expected = [*(~token for token in context), *b"Ja.", end]
    expected += [*(~token for token in (user, *b"Ok", end, assistant)), end]
    assert encode_examples(BYTES, CHAT)[0].tolist() == expected
    assert [*turn_ends(BYTES, True).token_ids] == [end]


def tokenizer_of(kind: str, text: str) -> Tokenizer:
    make = {
        "char": lambda: CharTokenizer("".join({*text})),
        "byte": ByteTokenizer,
        "bpe": lambda: train_bpe_tokenizer([text], 400),
        "sentencepiece": lambda: train_sentencepiece([text]),
    }
    return make[kind]()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize(
    ("speakers", "num_special"), [(("user", "assistant"), 4), (("prompt", "completion"), 1)]
)
def test_text_never_becomes_a_special_token(kind, speakers, num_special):
    text = "".join((END_OF_TEXT, *CHAT_ROLES.values(), END_OF_TURN, *CHATML_TOKENS))
    tokenizer = with_special_tokens(tokenizer_of(kind, text), chat="user" in speakers)
    example = encode_examples(tokenizer, [(speaker, text) for speaker in speakers])[0]
    ids = token_ids(example).tolist()
    assert np.isin(ids, [*tokenizer.special_tokens.values()]).sum() == num_special
    assert tokenizer.decode(ids).count(text) == 2


def test_names_are_parsed_where_asked_and_noncharacters_stay():
    text = f"a\ufdd0b\ufdd0\ufdd0{END_OF_TEXT}\ufdd1"
    (ids,) = encode_texts(BYTES, [text], parse_special=True)
    assert ids.tolist() == [*"a\ufdd0b\ufdd0\ufdd0".encode(), 256, *"\ufdd1".encode()]


def test_markup_in_a_question_is_a_token_unless_the_template_uses_it():
    """Gemma has tokens of HTML, and models that reason have tokens such as <think>."""
    document = BYTES.with_special(["<b>", "<think>"]).document
    flags = [token | {"special": token["id"] < 261} for token in document["added_tokens"]]
    markup = from_document(document | {"added_tokens": flags})
    template = PLAIN_TEMPLATE + "{# <think> #}"
    bold, think = (markup.special_tokens[name] for name in ("<b>", "<think>"))
    text = "a<b><think>"
    example = encode_examples(
        markup.with_chat_template(template), [("user", text), ("assistant", text)]
    )[0]
    question, answer = token_ids(example[example < 0]), example[example >= 0]
    assert question[1:-2].tolist() == [ord("a"), bold, *b"<think>"]
    assert answer[:-1].tolist() == [ord("a"), bold, think]


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece"])
def test_the_bytes_of_targets_are_those_of_their_text(kind: str, code: str):
    tokenizer = tokenizer_of(kind, code[:30_000])
    for text in ("return héllo 漢 x", "words of a text"):
        for prompt in ("a question?", ""):  # without a prompt nothing predicts the first token
            ids = (tokenizer.without_space.encode if prompt else tokenizer.encode)(text).tolist()
            example = encode_examples(tokenizer, [("prompt", prompt), ("completion", text)])[0]
            is_predicted = bool(prompt or tokenizer.text_start)
            first = b"" if is_predicted else tokenizer.decode_bytes(ids[:1])
            num_bytes = len(text.encode()) - len(first)
            assert count_targets(tokenizer, example) == (len(ids) + is_predicted, num_bytes)


TURN = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"text": "a"}, "'messages'"),
        *[({"messages": messages}, "'messages'") for messages in ("hi", [], 5.0, None)],
        *[({"messages": [TURN, turn]}, "message 2") for turn in ("hi", {"role": "user"}, [])],
        *[({"messages": [TURN | {"role": role}]}, "message 1") for role in ("robot", [], 1.0)],
        *[({"messages": [TURN | {"content": text}]}, "message 1") for text in (math.inf, [1], {})],
        *[({"messages": [TURN | {"content": text}]}, "assistant") for text in (None, [], "")],
        ({"messages": [TURN | {"role": "user"}]}, "assistant"),
        ({"messages": [TURN, TURN | {"function_call": {"name": "f"}}]}, "function_call"),
        ({"messages": [TURN | {"content": [{"toolUse": {"name": "f"}}]}]}, "'toolUse'"),
        ({"messages": [TURN], "label": True}, "'label'"),
        ({"system": [{"image": {}}], "messages": [TURN]}, "'image'"),
    ],
)
def test_an_unsuitable_chat_is_refused(record: dict, word: str):
    with pytest.raises(UserError, match=word):
        parse_chat(record)


@pytest.mark.parametrize(
    "record",
    [  # the forms of Anthropic and Bedrock, of Gemini, and of OpenAI
        {
            "system": [{"text": "Be "}, {"type": "text", "text": "kind."}],
            "messages": [
                {"role": "user", "content": [{"text": "Hi"}]},
                {"role": "assistant", "content": [{"text": "a"}]},
            ],
        },
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be kind."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "H"}, {"text": "i"}]},
                {"role": "model", "parts": [{"text": "a"}]},
            ],
        },
        {"system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}, TURN]},
    ],
)
def test_a_system_text_and_messages_may_be_lists_of_parts(record: dict):
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "a")]
    field = "contents" if "contents" in record else None
    assert chat_parser(field, None).parse(record) == (turns, [])


def test_the_longest_of_many_names_is_found():
    names = [f"<unused{n}>" for n in range(3000)] + ["\n" * n for n in range(1, 30)] + ["<u", "<un"]
    tokenizer = ByteTokenizer().with_special(names)
    text = "".join(random.Random(0).choices([*names[-40:], "<unused", "12", ">", "<b>"], k=1500))
    longest_first = "|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len)[::-1]))
    assert names_pattern(tokenizer).findall(text) == re.findall(longest_first, text)
    start = time.process_time()
    assert not names_pattern(tokenizer).search("<b>" * 100_000)
    assert time.process_time() - start < 0.5  # one alternative after the other: 2 s


def test_a_key_that_is_not_used_is_noted_once_for_an_example():
    record = {"messages": [TURN | {"id": 1}, TURN | {"id": 2}], "id": 3}
    assert "".join(chat_parser(None, None).parse(record)[1]).count("'id'") == 1


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"a": "b", "c": "d"}, "--prompt-field"),
        ({"q": "b", "c": "d"}, "--completion-field"),
        ({"q": math.nan, "a": "b"}, "'q'"),
        ({"q": "b", "a": None}, "'a'"),
        ({"q": "b", "a": ""}, "'a'"),
    ],
)
def test_an_unsuitable_pair_is_refused(record: dict, word: str):
    with pytest.raises(UserError, match=word):
        parse_pair(record, ["q"], "a")


def test_targets_are_rendered_in_brackets():
    rendered = render_with_targets(BYTES, encode_examples(BYTES, CHAT[1:])[0])
    answers = [
        "<|user|>Hé?<|end|><|assistant|>⟦Ja.<|end|>⟧",
        "<|user|>Ok<|end|><|assistant|>⟦<|end|>⟧",
    ]
    assert rendered == "".join(answers)
    turns = [("prompt", "\x1b[2Ja\nb"), ("completion", "c")]
    rendered = render_with_targets(BYTES, encode_examples(BYTES, turns)[0])
    assert escape_unprintable(rendered) == "\\x1b[2Ja\nb⟦c<|endoftext|>⟧"


@pytest.mark.parametrize(
    "turns", [CHAT * 50, [("prompt", "long " * 999), ("completion", "text " * 999)]]
)
def test_a_long_example_is_rendered_shorter(turns: list[tuple[str, str]]):
    rendered = render_with_targets(BYTES, encode_examples(BYTES, turns)[0])
    assert len(rendered) < 700 and " …" in rendered
    assert rendered.count("⟦") == rendered.count("⟧") > 0
