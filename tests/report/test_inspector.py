"""The numbers of the live page are the model's, with all heads and without some."""

import base64
import copy
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import SMALL, VARIANTS, decode, random_model

from engine.core.errors import UserError
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.decoding_engine import window_start
from engine.generation.text_generator import TextGenerator
from engine.report.attention_maps import attention_maps, token_label
from engine.report.inspector import MAX_INSPECTED_TOKENS, NUM_LIKELY_TOKENS, ModelInspector
from model import GPT, ModelConfig

LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
TEXT = "(&1'*2+,$-0#"
LONG = [*range(37), *range(36, -1, -1)]  # ids, more than the context
SETTINGS = {"name": "small", "text": TEXT, "max_new_tokens": 20}


def inspect(model: GPT) -> ModelInspector:
    return ModelInspector(TextGenerator(model, LETTERS, [0]), SETTINGS)


@pytest.fixture(scope="module")
def inspector() -> ModelInspector:
    return inspect(random_model(SMALL))


@pytest.fixture(scope="module")
def chat_inspector() -> ModelInspector:
    tokenizer = ByteTokenizer().with_special(SPECIAL_TOKENS)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=64, d_model=16)
    generator = TextGenerator(random_model(config), tokenizer, [0], is_chat_model=True)
    return ModelInspector(generator, SETTINGS)


def is_close(values: Any, expected: Any) -> bool:
    return torch.allclose(torch.as_tensor(values), torch.as_tensor(expected), rtol=1e-3, atol=1e-5)


def written_tokens(lines: Iterator[dict]) -> list[dict]:
    first, *rest, _ = lines
    return [*first["tokens"], *[line["token"] for line in rest]]


@pytest.mark.parametrize("ids", [LETTERS.encode(TEXT).tolist(), LONG], ids=["prompt", "long"])
@torch.no_grad()
def test_probabilities_and_surprises_are_the_models(inspector, ids):
    (answer,) = inspector.read({"ids": ids, "temperature": 0.5, "top_k": 4, "top_p": 0.8})
    model = inspector.generator.model
    assert [token["id"] for token in answer["tokens"]] == ids
    assert "bits" not in answer["tokens"][0]
    for index, token in enumerate([*answer["tokens"][1:], answer["next"]]):
        window = ids[window_start(index + 1, SMALL.context_length) : index + 1]
        log_p = model(torch.tensor([window]))[0, -1].log_softmax(dim=-1)
        p = log_p.exp()
        top = p.topk(NUM_LIKELY_TOKENS)
        _, labels, values, _, drawn = zip(*token["likely"], strict=True)
        assert is_close(values, top.values)
        assert [*labels] == [token_label(LETTERS, i) for i in top.indices.tolist()]
        four = p[top.indices[:4]] ** 2  # temperature 1/2 squares
        four /= four.sum()
        kept = four * (four.cumsum(0) - four < 0.8)
        expected = [*(kept / kept.sum()).tolist(), *[0] * (NUM_LIKELY_TOKENS - 4)]
        assert is_close(drawn, expected)
        if "bits" in token:
            assert is_close(token["bits"], [-log_p[ids[index + 1]] / math.log(2)] * 2)
            assert is_close(token["p"][:2], [p[ids[index + 1]]] * 2)


def test_the_written_text_is_that_of_generation_with_the_numbers_of_reading(inspector):
    options = {"temperature": 1.5, "top_p": 0.9}
    lines = [*inspector.write({"text": TEXT, "seed": 7, "max_new_tokens": 30, **options})]
    written = written_tokens(lines)
    prompt = LETTERS.encode(TEXT).tolist()
    (ids,) = decode(inspector.generator.model, [prompt], 30, seed=7, **options)
    assert [token["id"] for token in written] == prompt + ids
    assert "".join(line["text"] for line in lines[1:-1]) == LETTERS.decode(ids)
    (read,) = inspector.read({"ids": prompt + ids, **options})
    for token, expected in zip(written[1:], read["tokens"][1:], strict=True):
        assert is_close(token["bits"], expected["bits"]) and is_close(token["p"], expected["p"])
    assert all(token["p"][2] > 0 for token in written[len(prompt) :])
    assert "length" in lines[-1]["end"]


def test_the_end_of_text_ends_it_and_unused_ids_are_never_drawn():
    model = random_model(ModelConfig(vocab_size=300, context_length=16, d_model=16))
    model.head.weight.data.zero_()
    generator = TextGenerator(model, ByteTokenizer(), [256])
    *_, token, last = ModelInspector(generator, SETTINGS).write({"max_new_tokens": 2000})
    assert token["token"]["text"] == "<|endoftext|>" and "model" in last["end"]
    rows = [row for row in token["token"]["likely"] if "unused" not in row[1]]
    assert all(row[4] == pytest.approx(1 / 257, rel=1e-3) for row in rows)


@pytest.mark.parametrize("name", ["default", "gpt2", "2017", "relu2"])
def test_a_head_that_is_off_is_one_whose_values_are_zero(name):
    model = random_model(VARIANTS[name])
    without = copy.deepcopy(model)
    for layer, head in ((0, 1), (1, 2)):
        for parameter in without.blocks[layer].attention.heads[head].value.parameters():
            parameter.data.zero_()
    off = {"off": [[1, 2], [2, 3]]}
    question = {"text": TEXT, "max_new_tokens": 30}
    written = written_tokens(inspect(model).write(question | off))
    ids = {"ids": [token["id"] for token in written]}
    (read,) = inspect(model).read(ids | off)
    (full,) = inspect(model).read(ids)
    answers = (written, read["tokens"], written_tokens(inspect(without).write(question)))
    for *tokens, ablated, unchanged in zip(*answers, full["tokens"], strict=True):
        assert {token["id"] for token in tokens} == {ablated["id"]}
        for token in tokens if "bits" in ablated else ():
            assert is_close(token["bits"], [unchanged["bits"][0], ablated["bits"][1]])
            assert is_close(token["p"][2], ablated["p"][2])
    assert not is_close(written[-1]["bits"], full["tokens"][-1]["bits"])


@pytest.mark.parametrize("name", ["qwen3", "2017"])
def test_attention_is_that_of_the_heads_beyond_the_context_too(name):
    config = VARIANTS[name]
    model = random_model(config)
    inspector = inspect(model)
    without = copy.deepcopy(model)
    without.blocks[0].attention.projection.weight.data[:, : config.head_width] = 0
    for position, off in itertools.product((0, 15, 16, len(LONG) - 1), ([], [[1, 1]])):
        start = window_start(position + 1, SMALL.context_length)
        tokens = torch.tensor(LONG[start : position + 1])
        maps = attention_maps(without if off else model, tokens)
        question = {"ids": LONG, "at": position, "off": off}
        for layer, head in itertools.product(range(2), range(config.num_heads)):
            (answer,) = inspector.attention({**question, "layer": layer + 1, "head": head + 1})
            assert answer["start"] == start
            weights = read_triangle(answer["weights"], answer["size"])
            expected = maps[layer, head]
            assert (weights[: len(tokens), : len(tokens)] - expected).abs().max() < 0.004
        (answer,) = inspector.heads(question)
        size = answer["size"]  # small enough for thumbnails without loss
        thumbnails = read_triangle(answer["weights"], size).unflatten(0, maps.shape[:2])
        assert (thumbnails[..., : len(tokens), : len(tokens)] - maps).abs().max() < 0.004


def read_triangle(text: str, size: int) -> torch.Tensor:
    """Decode the lower triangles of maps: (size, size), or several."""
    levels = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    rows, columns = torch.tril_indices(size, size)
    maps = torch.zeros(len(levels) // len(rows), size, size)
    maps[:, rows, columns] = (levels.view(len(maps), -1) / 255) ** 2
    return maps.squeeze(0)


def test_the_worth_of_heads_is_that_of_passes_with_one_head_at_zero(inspector):
    ids = [*LONG, 5, 6]
    first, *heads = inspector.measure({"ids": ids})
    (read,) = inspector.read({"ids": ids})
    full = [token["bits"][0] for token in read["tokens"][1:]]
    assert first["bits"] == pytest.approx(statistics.fmean(full), rel=1e-3)
    assert [(head["layer"], head["head"]) for head in heads] == [
        *itertools.product(range(1, 3), range(1, SMALL.num_heads + 1))
    ]
    head = heads[-1]
    without = copy.deepcopy(inspector.generator.model)
    attention = without.blocks[head["layer"] - 1].attention
    for parameter in attention.heads[head["head"] - 1].value.parameters():
        parameter.data.zero_()
    (read,) = inspect(without).read({"ids": ids})
    bits = [token["bits"][0] for token in read["tokens"][1:]]
    added = statistics.fmean(bits) - statistics.fmean(full)
    assert head["bits"] == pytest.approx(added, abs=2e-4)
    (again,) = inspector.read({"ids": ids})
    assert [token["bits"][0] for token in again["tokens"][1:]] == full


def test_a_table_follows_the_settings_without_reading_the_text_again(inspector):
    settings = {"temperature": 0.7, "top_p": 0.6, "off": [[1, 2]]}
    (read,) = inspector.read({"ids": LONG, **settings})
    for at in (1, 9, 17, len(LONG) - 1, len(LONG)):
        (table,) = inspector.predict({"ids": LONG, "at": at, **settings})
        expected = [*read["tokens"], read["next"]][at]
        for row, expected_row in zip(table["likely"], expected["likely"], strict=True):
            assert row[:2] == expected_row[:2] and is_close(row[2:], expected_row[2:])
        assert "bits" not in table or is_close(table["bits"], expected["bits"])


def test_text_continues_ids_and_a_long_one_is_neither_refused_nor_overrun(inspector):
    ids = LETTERS.encode(TEXT).tolist()
    (read,) = inspector.read({"ids": ids, "text": "!!"})
    assert [token["id"] for token in read["tokens"]] == [*ids, 0, 0] and read["text"] == TEXT + "!!"
    almost = [1] * (MAX_INSPECTED_TOKENS - 2)
    lines = [*inspector.write({"ids": almost, "max_new_tokens": 9})]
    assert len(lines) == 4
    with pytest.raises(UserError, match="too long to continue"):
        next(inspector.write({"ids": [*almost, 1, 1]}))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ([], "settings"),
        ({"prompt": "a"}, "prompt"),
        ({"text": "!" * 50_001}, "50,000"),
        ({"text": "!" * 5000}, "4,096"),
        ({"text": "é"}, "é"),
        ({"ids": [37]}, "id must"),
        ({"layer": 3}, "layer"),
        ({"off": [[1, 4]]}, "head"),
        ({"turns": ["a", "b"]}, "turns"),
    ],
)
def test_an_unsuitable_question_is_an_error_in_one_line(
    inspector, chat_inspector, question, message
):
    answers = [inspector.read, inspector.write, inspector.attention]
    for answer in [chat_inspector.chat] if "turns" in question else answers:
        with pytest.raises(UserError, match=message) as error:
            next(answer(question))
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_the_answer_in_a_chat_is_that_of_the_text_generator(inspector, chat_inspector):
    options = {"temperature": 0.9, "top_p": 0.8, "seed": 3, "max_new_tokens": 20}

    def answer(turns: list[str], **fields: Any) -> tuple[str, Any]:
        *pieces, end = chat_inspector.chat({"turns": turns, **options, **fields})
        return "".join(piece["text"] for piece in pieces), end

    texts = ["<|user|> é", "مر", "c"]
    turns = [*zip(("user", "assistant", "user"), texts, strict=True)]
    expected = "".join(chat_inspector.generator.stream_answer(turns, **options))
    text, last = answer(texts)
    assert text == expected and not last["is_shortened"]
    ids, _ = chat_inspector.generator.encode_turns(turns, 20)
    assert last["ids"][: len(ids)] == ids
    assert answer(texts, off=[[1, 1]])[0] != expected
    assert answer(["a" * 40, "b", "c"])[1]["is_shortened"]
    assert "chat" not in inspector.answers
