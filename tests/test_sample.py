"""Sampling, through the real command: prompts, streams, batches, pictures, mistakes."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

import sample
import train
from prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on bytes, so that characters come in parts."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("äöü€ abcdefgh.\n" * 500, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    flags = f"--data {folder}/data --out {folder}/run --steps 120 --num-layers 2 --num-heads 2 --d-model 32"
    flags += " --context-length 24 --batch-size 8 --warmup-steps 2 --learning-rate 0.02 --device cpu"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
        assert train.main() == 0
    return folder / "run"


@pytest.fixture
def sampled(trained, monkeypatch, capsys):
    """What sample.py prints, run in this process."""

    def sampled(*flags: object, path: Path = trained) -> str:
        monkeypatch.setattr(sys, "argv", ["sample.py", str(path), "--device", "cpu", *map(str, flags)])
        sample.main()
        return capsys.readouterr().out

    return sampled


def test_a_prompt_is_continued_past_the_context(sampled):
    text = sampled("--prompt", "äö", "--temperature", 0, "--max-new-tokens", 120)
    assert text.startswith("äöü€ abcdefgh.\näöü€ abc") and "�" not in text.rstrip("\n�") and len(text) > 60, text


def test_the_same_seed_gives_the_same_text(sampled):
    flags = ["--temperature", 2, "--max-new-tokens", 40, "--seed"]
    assert sampled(*flags, 5) == sampled(*flags, 5) != sampled(*flags, 6)


def test_several_samples_are_one_batch_and_differ(sampled):
    text = sampled("--num-samples", 3, "--temperature", 2, "--max-new-tokens", 30, "--prompt", "ä")
    parts = text.split("--- sample ")[1:]
    assert [part[0] for part in parts] == ["1", "2", "3"]
    assert len({part[1:] for part in parts}) == 3 and all(part.split("---\n")[1].startswith("ä") for part in parts)


def test_a_stop_text_ends_a_sample(sampled):
    text = sampled("--prompt", "ä", "--temperature", 0, "--stop", "def", "--max-new-tokens", 100)
    assert text == "äöü€ abc\n"


def test_prompts_come_from_files_and_standard_input_too(run, trained, tmp_path):
    (tmp_path / "prompt.txt").write_text("äö", encoding="utf-8")
    flags = ["--temperature", "0", "--max-new-tokens", "10"]
    said = run("sample.py", trained, "--prompt", "äö", *flags)
    assert said.returncode == 0, said.stderr
    assert run("sample.py", trained, "--prompt-file", "prompt.txt", *flags).stdout == said.stdout
    assert run("sample.py", trained, "-", *flags, input="äö").stdout == said.stdout


def test_a_checkpoint_serves_by_its_own_path(sampled, trained):
    best = sampled("--temperature", 0, "--max-new-tokens", 10)
    assert sampled("--temperature", 0, "--max-new-tokens", 10, path=trained / "checkpoints" / "step-00000120") == best


@pytest.mark.parametrize("layer", [0, 2])
def test_attention_is_drawn(sampled, tmp_path, layer):
    picture = tmp_path / "attention.png"
    sampled("--prompt", "abcdefgh", "--attention", picture, "--layer", layer)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--layer", 3, "--attention", "a.png", "--prompt", "x"],
            "--layer 3 is not there; the model has layers 1",
        ),
        (["--attention", "a.png", "--prompt", "x" * 30], "the prompt has 30 tokens; a picture shows at most 24"),
    ],
)
def test_mistakes_are_named(sampled, flags, message):
    with pytest.raises(ValueError, match=message):
        sampled(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["nowhere"],
        [ROOT],
        ["RUN", "--temperature", "-1"],
        ["RUN", "--top-p", "0"],
        ["RUN", "--num-samples", "0"],
        ["RUN", "--prompt", "a", "--prompt-file", "b"],
        ["RUN", "--prompt-file", "nothing.txt"],
        ["RUN", "--tempreature", "1"],
    ],
)
def test_mistakes_end_in_one_line(flags, trained, monkeypatch, capsys):
    arguments = [str(trained if flag == "RUN" else flag) for flag in flags]
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        sample.run_command(sample.main)
    errors = capsys.readouterr().err
    assert stop.value.code in (1, 2) and errors.startswith("error: ") and errors.count("\n") == 1


def test_an_unknown_character_is_named(run, tmp_path):
    (tmp_path / "abc.txt").write_text("abc\n" * 300, encoding="utf-8")
    run("prepare.py", "abc.txt", "--tokenizer", "char", check=True)
    flags = "--data data/abc --out out/abc --steps 1 --num-layers 1 --num-heads 1 --d-model 8 --context-length 8"
    run("train.py", *flags.split(), check=True)
    refused = run("sample.py", "out/abc", "--prompt", "abß")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "'ß' (U+00DF)" in refused.stderr
