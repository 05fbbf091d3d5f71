"""Files of prompts: an interrupted command continues, and no file is half-written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL, random_model, write_lines

from engine.data.tokenizer import CharTokenizer
from engine.generation.prompt_file import complete_file
from engine.generation.text_generator import TextGenerator

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJä")
GENERATOR = TextGenerator(random_model(SMALL), LETTERS, [0])
PROMPTS = ["abc", "q", "xyz" * 9, "abc", "Hä", ""]


def complete(folder: Path, name: str, stop_at: int = 0, error: Any = None, **options: Any) -> int:
    """Complete a file; return how often the model was called. One of the calls raises an error.

    The file "killed" is then the partial one as a killed process leaves it.
    """
    num_calls = 0

    def count(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == stop_at:
            (partial,) = folder.glob(f"{name}.*.partial")
            shutil.copy(partial, folder / "killed")
            raise error

    prompts = [*PROMPTS, options.pop("last_prompt", "dog")]
    records = [{"prompt": prompt, "id": index} for index, prompt in enumerate(prompts)]
    files = (write_lines(folder / "in.jsonl", records), folder / name, False)
    hook = GENERATOR.decoder.register_forward_pre_hook(count)
    try:
        complete_file(GENERATOR, *files, {"seed": options.get("seed", 1)}, 9, "b", **options)
    finally:
        hook.remove()
    return num_calls


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2}, {"num_beams": 2}])
@pytest.mark.parametrize("torn", [b"", b'[4, "\xc3', b'[4, "x"]'])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_same_command_continues_an_interrupted_file(
    plain_steps, options, torn, error, tmp_path, capsys
):
    num_calls = complete(tmp_path, "whole.jsonl", **options)
    expected = (tmp_path / "whole.jsonl").read_bytes()
    records = [*map(json.loads, expected.splitlines())]
    assert [(record["id"], record["prompt"]) for record in records[:-1]] == [*enumerate(PROMPTS)]
    num_finished = []
    for stop_at in (num_calls // 2, 3, 12):
        with pytest.raises(error):
            complete(tmp_path, "out.jsonl", stop_at, error(), **options)
        (partial,) = tmp_path.glob("out.jsonl.*.partial")
        finished = [*map(json.loads, partial.read_text().splitlines())]
        assert all(text == records[index]["completion"] for index, text in finished)
        assert not (tmp_path / "out.jsonl").exists()
        num_finished.append(len(finished))
        assert (tmp_path / "killed").read_bytes() == partial.read_bytes()
        partial.write_bytes(partial.read_bytes() + torn)
    assert 0 < num_finished[0] <= num_finished[1] < num_finished[2] < len(records)
    capsys.readouterr()
    assert complete(tmp_path, "out.jsonl", **options) < num_calls // 2
    assert (tmp_path / "out.jsonl").read_bytes() == expected and not partial.exists()
    assert f"{len(records) - num_finished[2]} prompt" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"last_prompt": "cat"}, {"seed": 2}])
def test_another_command_does_not_continue_it(change, tmp_path):
    num_calls = complete(tmp_path, "whole.jsonl", batch_size=2, **change)
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, "out.jsonl", 30, KeyboardInterrupt(), batch_size=2)
    assert complete(tmp_path, "out.jsonl", batch_size=2, **change) == num_calls
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
