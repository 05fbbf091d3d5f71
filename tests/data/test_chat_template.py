"""Chats as prepare.py encodes them, compared with apply_chat_template of transformers."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.data.chat_template import CHATML_TEMPLATE, PLAIN_TEMPLATE
from engine.data.dataset import open_dataset
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.huggingface import directory
from prepare import PrepareConfig, prepare

# ANSWER(…) marks what the model writes; only weights of 1 are targets.
ANSWER = "{%- set is_learned = message.weight != 0 %}"
CHATML = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are Kim.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}"
    "{%- set body %}{{- message.content }}{%- for call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endset %}"
    "BODY{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{%- set body %}{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    '{{- \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}{{- message.content | tojson }}"
    "{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endset %}"
    "BODY{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set system = '' %}"
    "{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in turns %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set body %}{{- ' ' + (message.content | trim) + eos_token }}{%- endset %}"
    "{%- if message.role == 'user' %}{{- '[INST] ' + (system if loop.last or loop.revindex == 2 "
    "and turns[-1].role == 'assistant' else '') + message.content + '[/INST]' }}"
    "{%- else %}BODY{%- endif %}{%- endfor %}"
)
NAMES = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
NAMES += ["<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<s>", "</s>"]
FAMILIES = {
    "plain": (PLAIN_TEMPLATE, None, False),
    "chatml": (CHATML_TEMPLATE, None, False),
    "chatml-tools": (CHATML, "<|endoftext|>", True),
    "llama3": (LLAMA3, "<|begin_of_text|>", True),
    "mistral": (MISTRAL, "<s>", False),
}
WORDS = [
    "Hello",
    "héllo wörld",
    "漢字かな",
    "🚀👩🏽",
    " ",
    "\n",
    "\n\n",
    "  x",
    "a\tb",
    "",
    '"',
    "\\n",
    "{}",
]
TYPED_NAMES = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|user|>",
    "<|<|im_end|>",
    "[INST]",
    "\ufdd0",
]
ALIASES = {
    "system": ["system", "developer", "System"],
    "user": ["user", "human", " USER "],
    "assistant": ["assistant", "gpt", "bot", "model", "Assistant"],
    "tool": ["tool", "function"],
}


def with_body(template: str, tagged: bool) -> str:
    """Fill in the body of a turn; tagged, as transformers marks what the assistant learns."""
    if not tagged:
        return template.replace("BODY", "{{- body }}")
    for text in (" + message['content'] + '<|end|>'", " + message['content'] + '<|im_end|>\\n'"):
        body, newline = text.replace("\\n", ""), "{{ '\\n' }}" if "\\n" in text else ""
        set_body = "{% set body = " + body.removeprefix(" + ") + " %}"
        template = template.replace(text + " }}", " }}" + set_body + "BODY" + newline)
    learned = "{%- if message.role == 'assistant' and message.weight != 0 %}"
    branches = "{%- generation %}{{- body }}{%- endgeneration %}{%- else %}{{- body }}{%- endif %}"
    return template.replace("BODY", learned + branches)


def random_chat(rng: random.Random, family: str) -> list[dict[str, Any]]:
    """Return a chat in the form of transformers; at least one answer is learned."""
    has_tools = FAMILIES[family][2]
    words = WORDS + TYPED_NAMES * rng.randrange(2)

    def random_text() -> str:
        return "".join(rng.choices(words, k=rng.randrange(6)))

    chat = [{"role": "system", "content": random_text() + "."}] * rng.randrange(2)
    for _ in range(rng.randint(1, 4)):
        chat.append({"role": "user", "content": random_text() + "?"})
        if has_tools and rng.random() < 0.4:
            arguments = {"city": random_text(), "n": rng.randrange(9), "all": True}
            function = {"name": "weather", "arguments": arguments}
            call = {"type": "function", "function": function}
            chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
            chat.append({"role": "tool", "content": random_text(), "name": "weather"})
        if has_tools and rng.random() < 0.2:
            chat.append({"role": "user", "content": random_text()})
        chat.append({"role": "assistant", "content": random_text()})
        if rng.random() < 0.2:
            chat[-1]["weight"] = rng.randrange(2)
    chat[-1] = {"role": "assistant", "content": random_text() + "!"}
    return chat + [{"role": "user", "content": "…"}] * (rng.random() < 0.1)


def disguise(chat: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """Return a record that means the chat, in one of the accepted shapes."""
    messages = []
    role_key, content_key = rng.choice([("role", "content"), ("from", "value")])
    for message in chat:
        content = message["content"]
        if rng.random() < 0.2:
            cut = rng.randrange(len(content) + 1)
            content = [{"type": "text", "text": content[:cut]}, content[cut:]]
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        if "tool_calls" in rest:
            content = rng.choice([None, "", content])
            (call,) = rest.pop("tool_calls")
            function = call["function"]
            if rng.random() < 0.5:
                function = {**function, "arguments": json.dumps(function["arguments"])}
            shapes = [{"function_call": function}, {"tool_calls": [function]}]
            rest |= rng.choice([*shapes, {"tool_calls": [{**call, "function": function}]}])
        role = rng.choice(ALIASES[message["role"]])
        messages.append({role_key: role, content_key: content, **rest})
    shapes = [{"messages": messages}, {"conversations": messages}]
    answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    if len(answers) == 1:
        shapes.append({"prompt": messages[: answers[0]], "completion": messages[answers[0] :]})
    return rng.choice([*shapes, {"messages": json.dumps(messages)}])


@pytest.fixture(scope="module")
def words(code: str) -> Tokenizer:
    return train_bpe_tokenizer([code, " ".join(WORDS)], 500, "qwen2")


def save_model(family: str, words: Tokenizer, folder: Path) -> Tokenizer:
    """Write the tokenizer of a chat model in the layout of transformers; return it as imported."""
    template, bos_token, _ = FAMILIES[family]
    folder.mkdir(parents=True)
    if family == "chatml":
        words = words.with_special(NAMES[:2])
    if bos_token:
        words = words.with_special([*NAMES, "<tool_call>", "</tool_call>"])
        chat_template = with_body(template, tagged=False)
        config = {"eos_token": "<|endoftext|>", "bos_token": bos_token}
        config_path = folder / "tokenizer_config.json"
        config_path.write_text(json.dumps({**config, "chat_template": chat_template}))
    words.save(folder / "tokenizer.json")
    return load_tokenizer(folder / "tokenizer.json")


def ids_of_text(tokenizer: Any, chat: list[dict[str, Any]], names: list[str]) -> list[int]:
    """Return the ids of a chat in which people typed special tokens, which stay text.

    Characters stand for them until the text of the template is cut at its special tokens.
    """
    content = json.dumps(chat, ensure_ascii=False)
    for index, name in enumerate(names):
        content = content.replace(name, chr(0xE000 + index))
    text = tokenizer.apply_chat_template(json.loads(content), tokenize=False)
    ids = []
    for segment in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        options = {"add_special_tokens": False, "split_special_tokens": segment not in names}
        for index, name in enumerate(names):
            segment = segment.replace(chr(0xE000 + index), name)
        ids += tokenizer.encode(segment, **options)
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_300_random_chats_have_the_ids_and_targets_of_transformers(
    family: str, words: Tokenizer, tmp_path: Path
):
    rng = random.Random(0)
    chats = [random_chat(rng, family) for _ in range(300)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(disguise(chat, rng)) + "\n" for chat in chats))
    save_model(family, words, tmp_path / "model")
    tokenizer_path = str(tmp_path / "model" / "tokenizer.json")
    out = tmp_path / "data"
    prepare(PrepareConfig((str(path),), tokenizer=tokenizer_path, chat=True, out=out))
    dataset = open_dataset(out)
    examples = [
        split.example(index).tolist()
        for split in (dataset.train, dataset.val)
        for index in range(split.num_examples)
    ]
    actual = {tuple(max(token, ~token) for token in ids): ids for ids in examples}

    template = directory.chat_template(dataset.tokenizer, is_chat_model=True)
    directory.write_tokenizer(tmp_path, dataset.tokenizer, 64, template)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    names = [*dataset.tokenizer.special_tokens]
    num_masks = 0
    for chat in chats:
        if any(name in json.dumps(chat) for name in names):
            assert tuple(ids_of_text(exported, chat, names)) in actual
            continue
        ids = tuple(exported.apply_chat_template(chat, return_dict=False))
        tagged = with_body(FAMILIES[family][0], tagged=True)
        options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = exported.apply_chat_template(chat, chat_template=tagged, **options)
        assert tuple(encoded["input_ids"]) == ids
        pairs = zip(ids, encoded["assistant_masks"], strict=True)
        assert actual[ids] == [token if is_target else ~token for token, is_target in pairs]
        num_masks += 1
    assert num_masks > 30 and len(examples) == 300
