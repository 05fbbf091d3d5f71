"""Prompts with completions, and chats, as token ids, and which of them count."""

import numpy as np
import pytest

from engine.data.chat import (
    CHATML,
    chat_of,
    encode_chat,
    encode_example,
    end_of_turn,
    is_target,
    learned_bytes,
    marked,
    pair_of,
    special_names,
)
from engine.data.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    ROLES,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    named_tokenizer,
)

PAIR = [("prompt", "1+1="), ("completion", "2")]
CHAT = [("system", "Be kind."), ("user", "Hé?"), ("assistant", "Ja."), ("user", "Ok"), ("assistant", "")]


def prepared(tokenizer: Tokenizer, chat: bool) -> Tokenizer:
    return tokenizer.with_special(special_names(tokenizer, chat))


def test_of_a_pair_the_completion_and_its_end_count():
    example = encode_example(ByteTokenizer(), PAIR)
    assert example.dtype == np.int32
    assert example.tolist() == [*(~byte for byte in b"1+1="), ord("2"), 256]
    assert is_target(example).tolist() == [False] * 4 + [True] * 2 and learned_bytes(PAIR) == 1


def test_the_first_token_is_no_target_though_it_is_the_completion_s():
    assert is_target(encode_example(ByteTokenizer(), pair_of({"q": "", "a": "yes"}, "q", "a"))).tolist() == [0, 1, 1, 1]


def test_of_a_chat_what_the_assistant_says_and_its_end_count():
    tokenizer = prepared(ByteTokenizer(), chat=True)
    assert tokenizer.special_tokens == {
        name: 256 + i for i, name in enumerate((END_OF_TEXT, *ROLES.values(), END_OF_TURN))
    }
    said = [*b"\x01Be kind.\x04", *"\x02Hé?\x04\x03".encode()], [*b"Ja.\x04"], [*b"\x02Ok\x04\x03"], [*b"\x04"]
    ids = [[256 + one if one < 5 else one for one in some] for some in said]  # the special tokens' ids follow 256
    expected = [*(~i for i in ids[0]), *ids[1], *(~i for i in ids[2]), *ids[3]]
    example = encode_example(tokenizer, CHAT)
    assert example.tolist() == expected
    assert is_target(example).sum() == len("Ja.") + 1 + 1 and learned_bytes(CHAT) == 3
    assert end_of_turn(tokenizer) == 260


def test_imported_chats_keep_their_own_tokens():
    tokenizer = ByteTokenizer().with_special(CHATML)
    assert special_names(tokenizer, chat=True) == [] and end_of_turn(tokenizer) == 258
    example = encode_example(tokenizer, CHAT[1:3])
    text = "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\nJa.<|im_end|>\n"
    assert tokenizer.decode(np.maximum(example, ~example).tolist()) == text
    assert tokenizer.decode(example[example >= 0].tolist()) == "Ja.<|im_end|>"


@pytest.mark.parametrize("tokenizer", [CharTokenizer("<|>_abcdefghijklmnopqrstuvwxyz"), ByteTokenizer(), "gpt2"])
@pytest.mark.parametrize("chat", [True, False])
def test_text_that_spells_a_special_token_never_becomes_it(tokenizer, chat: bool, tiktoken_cache):
    tokenizer = prepared(named_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer, chat)
    spelled = "".join((END_OF_TEXT, *ROLES.values(), END_OF_TURN, *CHATML))
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


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "a"}, "has only 'text'; a chat should have 'messages'"),
        *[({"messages": messages}, "has 'messages' that should be a list of") for messages in ("hi", [], 5.0, None)],
        *[({"messages": [one]}, "has a message 1 that is not of the form") for one in ("hi", {"role": "user"}, [])],
        *[({"messages": [{"role": role, "content": "a"}]}, "has a message 1 of the role") for role in ("bot", [], 1.0)],
        *[({"messages": [{"role": "user", "content": one}]}, "has .* content is not text") for one in (7.0, None, [])],
        ({"messages": [{"role": "user", "content": "a"}]}, "has no message of the assistant with text"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "has no message of the assistant with text"),
    ],
)
def test_what_is_no_chat_to_learn_is_refused(record: dict, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        chat_of(record)


@pytest.mark.parametrize(
    "record, message",
    [
        ({"a": "b"}, r"has only 'a'; it should have 'q' \(see --prompt-field\)"),
        ({"q": "b"}, r"has only 'q'; it should have 'a' \(see --completion-field\)"),
        ({"q": 1.0, "a": "b"}, r"has no text in 'q' \(see --prompt-field\)"),
        ({"q": "b", "a": None}, r"has no text in 'a' \(see --completion-field\)"),
        ({"q": "b", "a": ""}, "has an empty 'a': there would be nothing to learn"),
    ],
)
def test_what_is_no_pair_to_learn_is_refused(record: dict, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        pair_of(record, "q", "a")


def test_an_example_is_shown_with_what_counts_marked():
    tokenizer = prepared(ByteTokenizer(), chat=True)
    shown = marked(tokenizer, encode_example(tokenizer, CHAT[1:]))
    assert shown == "<|user|>Hé?<|end|><|assistant|>⟦Ja.<|end|>⟧<|user|>Ok<|end|><|assistant|>⟦<|end|>⟧"
    harmful = marked(tokenizer, encode_example(tokenizer, [("prompt", "\x1b[2Ja\nb"), ("completion", "c")]))
    assert harmful == "\\x1b[2Ja\nb⟦c<|endoftext|>⟧"
    for turns in (CHAT * 50, [("prompt", "long " * 999), ("completion", "text " * 999)]):
        shown = marked(tokenizer, encode_example(tokenizer, turns))
        assert len(shown) < 520 and "⟦" in shown and shown.count("⟦") == shown.count("⟧") and " … " in shown + " "
