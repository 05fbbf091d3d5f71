"""Answers in chat templates of every kind: ids, targets, and where a model stops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.data.chats.chat import encode_chat, encode_example
from engine.data.split import token_ids
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.tokenizer_json import END_OF_TEXT
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.generation.text_generator import TextGenerator
from engine.huggingface import directory
from model import GPT, ModelConfig

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
        "<|user|>",
        "<|end|>",
    ),
    "words and last token": (
        EACH % ("{{ '[' + m.role + '] ' + m.content }}{% if loop.last %}<|end|>{% endif %}")
        + PROMPT % "[assistant] ",
        "[user]",
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
    "thinking": (EACH % THINKING + PROMPT % "### assistant: ", "\n### user:", "\n<|endoftext|>"),
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
# What starts the targets of the two answers.
STARTS = {
    "rounds": ("[2] ", "[4] "),
    "token, no prompt": ("<|assistant|>", "<|assistant|>"),
    "words, no prompt": ("### assistant: ", "### assistant: "),
    "thinking": ("", " <think>\n\n</think>\n\n"),
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


def find_targets(tokenizer: Tokenizer, example: np.ndarray) -> list[str]:
    """Return the text of each run of targets."""
    pieces = np.split(example, np.flatnonzero(np.diff(example >= 0)) + 1)
    return [tokenizer.decode(piece.tolist()) for piece in pieces if piece[0] >= 0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_any_kind_is_used_as_it_is(name: str, words: Tokenizer, tmp_path: Path):
    template, *ends = TEMPLATES[name]
    tokenizer, hf_tokenizer = load_with(words, template, tmp_path)
    assert directory.chat_template(tokenizer, is_chat_model=True) == template
    for turns in CHATS:
        messages = [{"role": role, "content": text} for role, text in turns]
        is_answered = turns[-1][0] == "assistant"
        question = messages[:-1] if is_answered else messages
        options = {"add_generation_prompt": True, "return_dict": False}
        expected = hf_tokenizer.apply_chat_template(question, **options)
        assert encode_chat(tokenizer, turns[: len(question)]) == expected
        example = encode_example(tokenizer, turns)
        extra = [tokenizer.end_of_text_id] * (ends[1].endswith(END_OF_TEXT) and is_answered)
        hf_ids = hf_tokenizer.apply_chat_template(messages, return_dict=False)
        assert token_ids(example).tolist() == [*hf_ids, *extra]
    starts = STARTS.get(name, ("", ""))
    targets = find_targets(tokenizer, encode_example(tokenizer, CHATS[1]))
    assert targets == [f"{starts[0]}yes\n### c{ends[0]}", f"{starts[1]}no{ends[1]}"]


@pytest.mark.parametrize("name", ["next token", "words and last token", "instructions", "nothing"])
def test_a_model_stops_by_itself(name: str, words: Tokenizer, tmp_path: Path):
    tokenizer, _ = load_with(words, TEMPLATES[name][0], tmp_path)
    turns = [("user", "king?"), ("assistant", "I like king.")] * 2
    example = torch.from_numpy(encode_example(tokenizer, turns)).long()
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=words.vocab_size, num_layers=1, num_heads=2, d_model=32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    targets = example[1:].where(example[1:] >= 0, -100)
    for _ in range(60):
        logits = model(example.where(example >= 0, ~example)[None, :-1])
        torch.nn.functional.cross_entropy(logits[0], targets, ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    generator = TextGenerator(model.eval(), tokenizer, [0], is_chat_model=True)
    for question in (turns[:1], turns[:3]):
        answer = generator.stream_answer(question, max_new_tokens=60, temperature=0)
        assert "".join(answer) == "I like king."


def test_an_answer_that_calls_a_tool_ends_after_the_call(words: Tokenizer, tmp_path: Path):
    tokenizer, _ = load_with(words, TEMPLATES["tools"][0], tmp_path)
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
    turns = [("user", "b"), ("assistant", "yes", call), ("tool", "c"), ("assistant", "no")]
    targets = find_targets(tokenizer, encode_example(tokenizer, turns))
    assert targets == ['yescall f{"a": 1}\n### tool:', "no\n<|endoftext|>"]
