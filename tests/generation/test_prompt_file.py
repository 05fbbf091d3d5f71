"""Files of prompts: an interrupted command leaves what was finished in a file of its own."""

import itertools

import pytest
from helpers import SMALL, random_model, read_lines, write_lines

from engine.data.tokenizer import CharTokenizer
from engine.generation.prompt_file import complete_file
from engine.generation.text_generator import TextGenerator

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJä")


def test_a_file_is_written_at_the_end_and_what_was_finished_before(plain_steps, tmp_path):
    generator = TextGenerator(random_model(SMALL), LETTERS, [0])
    records = [{"prompt": prompt} for prompt in ("abc", "q", "xyz" * 9, "abc", "ä", "")]
    files = (write_lines(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl", False)
    options = {"max_new_tokens": 9, "stop": "b", "batch_size": 2}
    calls = itertools.count()

    def interrupt(*arguments: object) -> None:
        if next(calls) == 20:
            raise KeyboardInterrupt

    generator.decoder.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        complete_file(generator, *files, **options)
    assert not files[1].exists()
    finished = read_lines(tmp_path / "out.jsonl.partial")
    assert 0 < len(finished) < len(records)
    complete_file(generator, *files, **options)
    prompts = [{"prompt": record["prompt"]} for record in read_lines(files[1])]
    assert prompts == records and not (tmp_path / "out.jsonl.partial").exists()
    assert all(record in read_lines(files[1]) for record in finished)
