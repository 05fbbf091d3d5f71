"""Answers in chat templates of every kind: ids, targets, and where a model stops."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from engine.data.chats.chat import encode_chat, encode_examples, encode_rendered, turn_ends
from engine.data.shards.dataset_summary import render_with_targets
from engine.data.split import token_ids
from engine.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from engine.data.tokenizer_json import END_OF_TEXT
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.generation.text_stream import TextStream
from engine.huggingface import directory

PROMPT = "{%% if add_generation_prompt %%}%s{%% endif %%}"
EACH = "{%% for m in messages %%}%s{%% endfor %%}"
HEADING = "{{ '### ' + m.role + ': ' + m.content + '\\n' }}"
VICUNA = EACH % HEADING + PROMPT % "### assistant: "
ALPACA = (
    "{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
    "{% else %}{{ '### ' + ('Instruction' if m.role == 'user' else 'Response') + ':\\n' }}"
    "{{ m.content | trim + '\\n\\n' }}{% endif %}"
)
THINKING = (
    "{% if m.role == 'assistant' %}{{ '### assistant: ' }}"
    "{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content + '\\n' }}"
    "{% else %}" + HEADING + "{% endif %}"
)
TOOLS = (
    "{{ '### ' + m.role + ': ' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ 'call ' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}{{ '\\n' }}"
)
TAGGED = "{{ '<|' + m.role + '|>' + m.content }}"
# Name → template, and the ends of two answers: the first is followed by a question.
TEMPLATES = {
    "token": (EACH % (TAGGED + "<|end|>") + PROMPT % "<|assistant|>", "<|end|>", "<|end|>"),
    "token, no prompt": (EACH % (TAGGED + "<|end|>"), "<|end|>", "<|end|>"),
    "next token": (EACH % TAGGED + PROMPT % "<|assistant|>", "<|user|>", "<|endoftext|>"),
    "last token": (
        EACH % (TAGGED + "{% if m.role == 'user' or loop.last %}<|end|>{% endif %}")
        + PROMPT % "<|assistant|>",
        "<|end|>",
        "<|end|>",
    ),
    "words and last token": (
        EACH % ("{{ '[' + m.role + '] ' + m.content }}{% if loop.last %}<|end|>{% endif %}")
        + PROMPT % "[assistant] ",
        "<|end|>",
        "<|end|>",
    ),
    "words and token": (
        EACH % ("{{ m.role + '\\n' + m.content + '\\n##<|end|>\\n' }}") + PROMPT % "assistant\n",
        "\n##<|end|>",
        "\n##<|end|>",
    ),
    "words": (VICUNA, "\n### user:", "\n<|endoftext|>"),
    "words, no prompt": (EACH % HEADING, "\n### user:", "\n<|endoftext|>"),
    "instructions": (
        EACH % ALPACA + PROMPT % "### Response:\n",
        "\n\n### Instruction:",
        "\n\n<|endoftext|>",
    ),
    "thinking": (
        EACH % THINKING + PROMPT % "### assistant: ",
        "\n<|endoftext|>",
        "\n<|endoftext|>",
    ),
    "tools": (
        "{{ tools or '' }}" + EACH % TOOLS + PROMPT % "### assistant: ",
        "\n### user:",
        "\n<|endoftext|>",
    ),
    "end line": (
        EACH % ("{{ m.role + '\\n' + m.content + '\\n--end--\\n' }}") + PROMPT % "assistant\n",
        "\n--end--\nuser",
        "\n--end--\n<|endoftext|>",
    ),
    "rounds": (
        EACH % "{{ '[' + (loop.index | string) + '] ' + m.content + '\\n' }}",
        "\n[",
        "\n<|endoftext|>",
    ),
    "nothing": (EACH % "{{ m.content }}", "", "<|endoftext|>"),
}
ROLES = ("user", "assistant") * 2
# Templates that write an answer in another way when turns follow.
REWRITING = ("last token", "words and last token", "thinking")
# What starts the targets of the two answers.
STARTS = {
    "rounds": ("[2] ", "[4] "),
    "token, no prompt": ("<|assistant|>", "<|assistant|>"),
    "words, no prompt": ("### assistant: ", "### assistant: "),
    "thinking": (" <think>\n\n</think>\n\n", " <think>\n\n</think>\n\n"),
}
CHATS = [
    [("user", "king?"), ("assistant", "I like king.")],
    [("user", "b"), ("assistant", "yes\n### c"), ("user", "\n### user: x"), ("assistant", "no")],
    [("user", "king"), ("assistant", "king"), ("user", "king"), ("assistant", "king")],
    [("system", "be kind"), ("user", "a"), ("assistant", "b")],
    [("user", "a"), ("assistant", "b"), ("user", "c")],
]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    text = "king queen river user assistant ### Instruction Response : [user] --end-- <think>" * 9
    names = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
    return train_bpe_tokenizer([text], 300, "gpt2").with_special(names)


def load_with(words: Tokenizer, template: str, folder: Path) -> tuple[Tokenizer, Any]:
    """Return a tokenizer with a chat template, as it is imported here and by transformers."""
    directory.write_tokenizer(folder, words, 64, template)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return load_tokenizer(folder / "tokenizer.json"), hf_tokenizer


def find_targets(tokenizer: Tokenizer, turns: list) -> list[str]:
    """Return the text of each run of targets in the examples of a chat."""
    texts = []
    for example in encode_examples(tokenizer, turns):
        pieces = np.split(example, np.flatnonzero(np.diff(example >= 0)) + 1)
        texts += [tokenizer.decode(piece.tolist()) for piece in pieces if piece[0] >= 0]
    return texts


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_any_kind_is_used_as_it_is_and_its_texts_end_where_targets_do(
    name: str, words: Tokenizer, tmp_path: Path
):
    template, *ends = TEMPLATES[name]
    tokenizer, hf_tokenizer = load_with(words, template, tmp_path)
    assert directory.chat_template(tokenizer, is_chat_model=True) == template
    starts = STARTS.get(name, ("", ""))
    for turns in CHATS:
        messages = [{"role": role, "content": text} for role, text in turns]
        is_answered = turns[-1][0] == "assistant"
        question = messages[:-1] if is_answered else messages
        options = {"add_generation_prompt": True, "return_dict": False}
        expected = hf_tokenizer.apply_chat_template(question, **options)
        assert encode_chat(tokenizer, turns[: len(question)]) == expected
        extra = [tokenizer.end_of_text_id] * (ends[1].endswith(END_OF_TEXT) and is_answered)
        expected = [[*hf_tokenizer.apply_chat_template(messages, return_dict=False), *extra]]
        if name in REWRITING:
            options["tokenize"] = False
            answers = [i for i, (role, _) in enumerate(turns) if role == "assistant"]
            prompts = [hf_tokenizer.apply_chat_template(messages[:i], **options) for i in answers]
            rests = [f"{starts[0].lstrip()}{turns[i][1]}{ends[1]}" for i in answers]
            expected = [
                hf_tokenizer.encode(p + rest) for p, rest in zip(prompts, rests, strict=True)
            ]
        examples = encode_examples(tokenizer, turns)
        assert [token_ids(example).tolist() for example in examples] == expected
    targets = find_targets(tokenizer, CHATS[1])
    assert targets == [f"{starts[0]}yes\n### c{ends[0]}", f"{starts[1]}no{ends[1]}"]
    targets = find_targets(tokenizer, CHATS[0] * 2)
    for start, target, end in zip(starts, targets, ends, strict=True):
        stream = TextStream(tokenizer, ends=turn_ends(tokenizer, True))
        text = "".join(map(stream.push, encode_rendered(tokenizer, target)[0]))
        assert (text, stream.is_finished) == (f"{start}I like king.", bool(end))


def test_an_answer_that_calls_a_tool_ends_after_the_call(words: Tokenizer, tmp_path: Path):
    tokenizer, _ = load_with(words, TEMPLATES["tools"][0], tmp_path)
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
    turns = [("user", "b"), ("assistant", "yes", call), ("tool", "c"), ("assistant", "no")]
    targets = find_targets(tokenizer, turns)
    assert targets == ['yescall f{"a": 1}\n### tool:', "no\n<|endoftext|>"]


@pytest.mark.parametrize("name", ["token", "words", "thinking", "rounds"])
def test_noncharacters_in_a_text_change_nothing(name: str):
    special = ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
    tokenizer = ByteTokenizer().with_special(special).with_chat_template(TEMPLATES[name][0])
    rng = random.Random(0)
    for _ in range(20):
        texts = ["".join(rng.choices("ab ", k=rng.randrange(4))) + "c" for _ in range(4)]
        examples = []
        for letters in ("abc", "\ufdd0\ufdd1\ufdd2", "\ufdd1\ufdd2\ufdd0"):
            table = str.maketrans("abc", letters)
            turns = [(role, text.translate(table)) for role, text in zip(ROLES, texts, strict=True)]
            back = str.maketrans(letters, "abc")
            targets = find_targets(tokenizer, turns)
            examples.append([text.translate(back) for text in targets])
        assert examples[1] == examples[2] == examples[0]


# Mistral's: the system text precedes the last question, unless an answer follows it.
MOVING = (
    "{% set turns = messages if messages[0].role != 'system' else messages[1:] %}"
    "{% for m in turns %}{% if m.role == 'user' %}{{ '<|user|>' }}"
    "{% if loop.last and turns != messages %}{{ messages[0].content + '\n' }}{% endif %}"
    "{{ m.content + '<|assistant|>' }}{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
)
# That of gpt-oss: thoughts before a call are left out as soon as a final answer follows.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% if m.tool_calls %}{% if loop.last %}{{ 'think ' + m.content + '<|end|><|assistant|>' }}"
    "{% endif %}{{ 'call ' + m.tool_calls[0].function.name + '<|call|>' }}"
    "{% else %}{{ 'final ' + m.content + ('<|end|>' if loop.last else '<|user|>') }}{% endif %}"
    "{% else %}{{ '<|user|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
F_CALL = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (
            MOVING,
            [("system", "S"), *CHATS[1]],
            [
                "<|user|>S\nb<|assistant|>⟦yes\n### c<|end|>⟧",
                "<|user|>b<|assistant|>yes\n### c<|end|>"
                "<|user|>S\n\n### user: x<|assistant|>⟦no<|end|>⟧",
            ],
        ),
        (MOVING, CHATS[0], ["<|user|>king?<|assistant|>⟦I like king.<|end|>⟧"]),
        (
            CHANNELS,
            [("user", "a"), ("assistant", "b", F_CALL), ("tool", "c"), ("assistant", "d")],
            [
                "<|user|>a<|end|><|assistant|>⟦think b<|end|><|assistant|>call f<|call|>⟧",
                "<|user|>a<|end|><|assistant|>call f<|call|>"
                "<|user|>c<|end|><|assistant|>⟦final d<|end|>⟧",
            ],
        ),
        (CHANNELS, [("assistant", "a")], ["<|assistant|>final ⟦a<|end|>⟧"]),
        (
            VICUNA,
            [("assistant", "a"), ("user", "b"), ("assistant", "c", {"weight": 0})],
            ["### assistant: ⟦a\n### user:⟧ b\n### assistant: c\n"],
        ),
    ],
)
def test_each_answer_follows_what_inference_sees(template: str, turns: list, expected: list[str]):
    special = ["<|user|>", "<|assistant|>", "<|end|>", "<|call|>"]
    tokenizer = ByteTokenizer().with_special(special).with_chat_template(template)
    examples = encode_examples(tokenizer, turns)
    assert [render_with_targets(tokenizer, example) for example in examples] == expected
