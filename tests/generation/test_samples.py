"""Samples of a run: their prompts, and texts that are those of the command."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import make_dataset, random_model

from engine.data.dataset import Dataset, open_dataset
from engine.data.split import Examples
from engine.data.tokenizer import ByteTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.samples import choose_prompts, stream_samples, trim_incomplete_characters
from engine.generation.text_generator import TextGenerator
from model import ModelConfig

BYTES = ByteTokenizer()


def make_pairs(folder: Path) -> Dataset:
    lines = [{"p": f"question {i}", "c": f"answer {i}"} for i in range(40)]
    path = make_dataset(folder, lines, prompt_field="p", completion_field="c")
    return open_dataset(path)


@pytest.mark.parametrize("kind", ["pairs", "chats"])
def test_samples_end_where_those_of_the_command_end(tmp_path, kind):
    tokenizer = BYTES.with_special(SPECIAL_TOKENS)
    data = make_pairs(tmp_path)
    manifest = {**data.manifest, "origin": {"examples": kind}}
    data = replace(data, tokenizer=tokenizer, manifest=manifest)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=16, d_model=16)
    model = random_model(config)
    model.head.weight.data.zero_()  # every token is drawn, also the ends
    prompts = choose_prompts(data)
    texts = [""] * len(prompts)
    for index, text in stream_samples(model, data, prompts, 100, seed=3):
        texts[index] += text
    generator = TextGenerator(model, tokenizer, [0], is_chat_model=kind == "chats")
    options = {"max_new_tokens": 100, "seed": 3}
    assert texts == [generator.generate(tokenizer.decode(ids), **options) for ids in prompts]


@pytest.mark.parametrize(("num_examples", "prompts"), [(2, [[98]]), (1, [[97, 256]])])
def test_prompts_of_examples_are_those_that_are_not_empty(tmp_path, num_examples, prompts):
    data = make_pairs(tmp_path)
    tokens = np.array([97, 256, ~98, 97, 256][: 3 * num_examples - 1], np.int32)
    starts, lengths = (np.array(values[:num_examples]) for values in ([0, 2], [2, 3]))
    data = replace(data, val=Examples(tokens, starts, lengths))
    assert choose_prompts(data) == prompts


def test_incomplete_characters_are_left_out_at_both_ends():
    ids = list("né漢!".encode())
    for start, stop, text in ((2, 6, "漢"), (0, 5, "né"), (0, 7, "né漢!"), (4, 5, "\ufffd")):
        assert BYTES.decode(trim_incomplete_characters(BYTES, ids[start:stop])) == text
