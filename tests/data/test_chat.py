"""Prompts with completions, and chats, as token ids, and which of them count."""

import numpy as np
import pytest

from engine.core.errors import UserError
from engine.data.chat import (
    CHATML,
    encode_chat,
    encode_example,
    end_of_turn,
    is_target,
    parse_chat,
    parse_pair,
    render_with_targets,
    special_token_names,
    target_bytes,
)
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, named_tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TEXT, END_OF_TURN

PAIR = [("prompt", "1+1="), ("completion", "2")]
CHAT = [
    ("system", "Be kind."),
    ("user", "Hé?"),
    ("assistant", "Ja."),
    ("user", "Ok"),
    ("assistant", ""),
]


def prepared(tokenizer: Tokenizer, chat: bool) -> Tokenizer:
    return tokenizer.with_special(special_token_names(tokenizer, chat))


def test_of_a_pair_the_completion_and_its_end_count():
    example = encode_example(ByteTokenizer(), PAIR)
    assert example.dtype == np.int32
    assert example.tolist() == [*(~byte for byte in b"1+1="), ord("2"), 256]
    assert is_target(example).tolist() == [False] * 4 + [True] * 2 and target_bytes(PAIR) == 1


def test_the_first_token_is_no_target_though_it_is_the_completion_s():
    assert is_target(encode_example(ByteTokenizer(), parse_pair({"q": "", "a": "yes"}, "q", "a"))).tolist() == [
        0,
        1,
        1,
        1,
    ]


def test_of_a_chat_what_the_assistant_says_and_its_end_count():
    tokenizer = prepared(ByteTokenizer(), chat=True)
    assert tokenizer.special_tokens == {
        name: 256 + i for i, name in enumerate((END_OF_TEXT, *CHAT_ROLES.values(), END_OF_TURN))
    }
    said = (
        [*b"\x01Be kind.\x04", *"\x02Hé?\x04\x03".encode()],
        [*b"Ja.\x04"],
        [*b"\x02Ok\x04\x03"],
        [*b"\x04"],
    )
    ids = [[256 + one if one < 5 else one for one in some] for some in said]  # the special tokens' ids follow 256
    expected = [*(~i for i in ids[0]), *ids[1], *(~i for i in ids[2]), *ids[3]]
    example = encode_example(tokenizer, CHAT)
    assert example.tolist() == expected
    assert is_target(example).sum() == len("Ja.") + 1 + 1 and target_bytes(CHAT) == 3
    assert end_of_turn(tokenizer) == 260


def test_imported_chats_keep_their_own_tokens():
    tokenizer = ByteTokenizer().with_special(CHATML)
    assert special_token_names(tokenizer, chat=True) == [] and end_of_turn(tokenizer) == 258
    example = encode_example(tokenizer, CHAT[1:3])
    text = "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\nJa.<|im_end|>\n"
    assert tokenizer.decode(np.maximum(example, ~example).tolist()) == text
    assert tokenizer.decode(example[example >= 0].tolist()) == "Ja.<|im_end|>"


@pytest.mark.parametrize("tokenizer", [CharTokenizer("<|>_abcdefghijklmnopqrstuvwxyz"), ByteTokenizer(), "gpt2"])
@pytest.mark.parametrize("chat", [True, False])
def test_text_that_spells_a_special_token_never_becomes_it(tokenizer, chat: bool, tiktoken_cache):
    tokenizer = prepared(named_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer, chat)
    spelled = "".join((END_OF_TEXT, *CHAT_ROLES.values(), END_OF_TURN, *CHATML))
    turns = [("user", spelled), ("assistant", spelled)] if chat else [("prompt", spelled), ("completion", spelled)]
    example = encode_example(tokenizer, turns)
    ids = np.where(example < 0, ~example, example)
    assert np.isin(ids, [*tokenizer.special_tokens.values()]).sum() == (4 if chat else 1)
    assert tokenizer.decode(ids.tolist()).count(spelled) == 2


def test_a_chat_goes_on_where_an_example_has_the_assistant_s_text():
    for tokenizer in (prepared(ByteTokenizer(), chat=True), ByteTokenizer().with_special(CHATML)):
        example = encode_example(tokenizer, CHAT[:3])
        begun = [i for ids in encode_chat(tokenizer, CHAT[:2]) for i in ids]
        assert begun == np.where(example < 0, ~example, example)[: len(begun)].tolist()
        assert (example[: len(begun)] < 0).all() and example[len(begun)] == ord("J")


GOOD = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"text": "a"}, "'messages'"),
        *[({"messages": messages}, "'messages'") for messages in ("hi", [], 5.0, None)],
        *[({"messages": [GOOD, turn]}, "message 2") for turn in ("hi", {"role": "user"}, [])],
        *[({"messages": [GOOD | {"role": role}]}, "role") for role in ("bot", [], 1.0)],
        *[({"messages": [GOOD | {"content": text}]}, "content") for text in (7.0, None, [])],
        ({"messages": [GOOD | {"role": "user"}]}, "assistant"),
        ({"messages": [GOOD | {"content": ""}]}, "assistant"),
    ],
)
def test_a_chat_that_cannot_be_learned_is_refused(record: dict, word: str):
    with pytest.raises(UserError, match=word):
        parse_chat(record)


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"a": "b"}, "--prompt-field"),
        ({"q": "b"}, "--completion-field"),
        ({"q": 1.0, "a": "b"}, "--prompt-field"),
        ({"q": "b", "a": None}, "--completion-field"),
        ({"q": "b", "a": ""}, "'a' is empty"),
    ],
)
def test_a_pair_that_cannot_be_learned_is_refused(record: dict, word: str):
    with pytest.raises(UserError, match=word):
        parse_pair(record, "q", "a")


def test_an_example_is_shown_with_what_counts_render_with_targets():
    tokenizer = prepared(ByteTokenizer(), chat=True)
    shown = render_with_targets(tokenizer, encode_example(tokenizer, CHAT[1:]))
    assert shown == "<|user|>Hé?<|end|><|assistant|>⟦Ja.<|end|>⟧<|user|>Ok<|end|><|assistant|>⟦<|end|>⟧"
    harmful = render_with_targets(
        tokenizer, encode_example(tokenizer, [("prompt", "\x1b[2Ja\nb"), ("completion", "c")])
    )
    assert harmful == "\\x1b[2Ja\nb⟦c<|endoftext|>⟧"
    for turns in (CHAT * 50, [("prompt", "long " * 999), ("completion", "text " * 999)]):
        shown = render_with_targets(tokenizer, encode_example(tokenizer, turns))
        assert len(shown) < 520 and "⟦" in shown and shown.count("⟦") == shown.count("⟧") and " … " in shown + " "
