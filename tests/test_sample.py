"""Sampling, through the real command: prompts, streams, batches, pictures, mistakes."""

import re
import shutil
import sys
from pathlib import Path

import matplotlib.image
import pytest
import safetensors.torch
import torch
from helpers import ROOT, VARIANTS, exit_code_of, randomised, seal

import sample
import train
from engine.run_folder import checkpoints_by_loss, list_checkpoints
from engine.tokenizer import load_tokenizer
from prepare import PrepareConfig, prepare

SHAPE = "--num-layers 2 --num-heads 2 --d-model 32 --context-length 24 --batch-size 8 --device cpu"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on bytes, so that characters come in parts."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("äöü€ abcdefgh.\n" * 500, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    flags = f"--data {folder}/data --out {folder}/run --steps 120 --warmup-steps 2 --learning-rate 0.02"
    assert train.main([*flags.split(), *SHAPE.split()]) == 0
    return folder / "run"


@pytest.fixture
def sampled(trained, capsys):
    """What sample.py prints, run in this process."""

    def sampled(*flags: object, path: Path = trained) -> str:
        capsys.readouterr()
        sample.main([str(path), "--device", "cpu", *map(str, flags)])
        return capsys.readouterr().out

    return sampled


# Text.


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


def test_a_stop_text_ends_a_sample_and_each_of_several(sampled):
    flags = ["--prompt", "ä", "--temperature", 0, "--stop", "def", "--max-new-tokens", 100]
    assert sampled(*flags) == "äöü€ abc\n"
    assert sampled(*flags, "--num-samples", 2) == "--- sample 1 ---\näöü€ abc\n--- sample 2 ---\näöü€ abc\n"


def test_prompts_come_from_files_and_standard_input_too(run, sampled, trained, tmp_path):
    flags = ["--temperature", "0", "--max-new-tokens", "10"]
    said = sampled("--prompt", "äö", *flags)
    (tmp_path / "prompt.txt").write_text("äö", encoding="utf-8")
    assert sampled("--prompt-file", tmp_path / "prompt.txt", *flags) == said
    piped = run("sample.py", trained, "-", *flags, input="äö")
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, said, "")


def test_a_checkpoint_serves_by_its_own_path_and_a_run_by_its_best(sampled, trained):
    best = sampled("--temperature", 0, "--max-new-tokens", 10)
    assert sampled("--temperature", 0, "--max-new-tokens", 10, path=trained / "checkpoints" / "step-00000120") == best


def test_a_function_samples_without_a_command_line(trained):
    found = sample.find_checkpoint(trained)
    tokenizer, model = load_tokenizer(found.path / "tokenizer.json"), sample.load_model(found)
    config = sample.SampleConfig(trained, num_samples=2, max_new_tokens=5, temperature=0)
    prompt = tokenizer.encode("äöü€ ab").tolist()
    tokens = torch.stack(list(sample.sample(config, model, tokenizer, prompt)), dim=1)
    assert tokens.shape == (2, 5) and tokenizer.decode(tokens[0].tolist()) == "cdefg"


# Attention.


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_attention_maps_are_what_the_model_computes(name):
    model = randomised(VARIANTS[name])
    tokens = torch.randint(37, (10,))
    maps = sample.attention_maps(model, tokens)
    assert maps.shape == (2, 3, 10, 10)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(2, 3, 10))
    assert maps.triu(1).abs().max() == 0
    rotation, x = model.rotation(0, 10), model.embed(tokens[None])
    for block, of_block in zip(model.blocks, maps, strict=True):  # a layer's output from its maps and values
        seen = x if block.post_norm else block.attention_norm(x)
        mixed = torch.cat([of_block[i] @ head.value(seen) for i, head in enumerate(block.attention.heads)], dim=-1)
        output = block.attention(seen, rotation)
        torch.testing.assert_close(block.attention.projection(mixed), output, rtol=1e-4, atol=1e-5)
        x = block(x, rotation)


def test_attention_is_drawn_for_all_layers_or_one(sampled, tmp_path):
    sizes = {}
    for layer in (None, 2):
        flags = [] if layer is None else ["--layer", layer]
        said = sampled("--prompt", "abcdefgh", "--attention", tmp_path / "a.png", *flags)
        assert said == f"{tmp_path}/a.png: 2 heads a layer, 8 tokens\n"
        sizes[layer] = matplotlib.image.imread(tmp_path / "a.png").shape[:2]
    assert sizes[None][0] > 1.5 * sizes[2][0] and sizes[None][1] == sizes[2][1]  # two rows of heads, and one


# Mistakes.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["RUN", "--layer", "3", "--attention", "a.png", "--prompt", "x"], "--layer 3 is not there; .* layers 1 to 2"),
        (["RUN", "--layer", "0", "--attention", "a.png", "--prompt", "x"], "--layer 0 is not there; .* layers 1 to 2"),
        (["RUN", "--attention", "a.png", "--prompt", "x" * 30], "the prompt has 30 tokens; a picture shows at most 24"),
        (["nowhere"], "nowhere holds no checkpoint; give a run folder such as out/stdlib, or train one"),
        ([str(ROOT)], "holds no checkpoint"),
        (["RUN", "--temperature", "-1"], "--temperature is -1.0; it must be at least 0"),
        (["RUN", "--top-p", "0"], "--top-p is 0.0; it must be above 0, at most 1"),
        (["RUN", "--top-k", "0"], "--top-k is 0; it must be at least 1"),
        (["RUN", "--num-samples", "0"], "--num-samples is 0; it must be at least 1"),
        (["RUN", "--prompt", "a", "--prompt-file", "b"], "give one prompt"),
        (["RUN", "-", "--prompt", "a"], "give one prompt"),
        (["RUN", "--prompt-file", "latin-1.txt"], "the prompt is not UTF-8 at byte 1; convert it"),
        (["RUN", "--prompt-file", "nothing.txt"], "No such file or directory: nothing.txt"),
        (["RUN", "--tempreature", "1"], "Perhaps you meant: --temperature"),
    ],
)
def test_mistakes_end_in_one_line_that_names_them(flags, message, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin-1.txt").write_bytes("aä".encode("latin-1"))
    arguments = [str(trained) if flag == "RUN" else flag for flag in flags]
    code, errors = exit_code_of(lambda: sample.main(arguments)), capsys.readouterr().err
    assert code == (2 if "(see --help)" in errors else 1) and errors.startswith("error: ") and errors.count("\n") == 1
    assert re.search(message, errors), errors


def test_an_unknown_character_is_named(tmp_path):
    (tmp_path / "abc.txt").write_text("abc\n" * 300, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(tmp_path / "abc.txt"),), tokenizer="char", out=tmp_path / "data"))
    assert train.main(["--data", f"{tmp_path}/data", "--out", f"{tmp_path}/run", "--steps", "1", *SHAPE.split()]) == 0
    with pytest.raises(ValueError, match=r"'ß' \(U\+00DF\)"):
        sample.main([str(tmp_path / "run"), "--prompt", "abß"])


def test_weights_that_do_not_fit_their_settings_are_refused(trained):
    found = sample.find_checkpoint(trained)
    for name, value in (("num_layers", 3), ("num_layers", 10**9), ("d_ff", 7), ("bias", True)):
        found.state["model"][name] = value
        with pytest.raises(ValueError, match=r"step-00000120.*(weights don't fit its state.json|num_layers is 10000)"):
            sample.load_model(found)
        found = sample.find_checkpoint(trained)
    assert found.path in list_checkpoints(trained)


# When something is wrong with the run.


def test_another_checkpoint_serves_where_the_best_is_damaged(trained, tmp_path, capsys):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copytree(run / "checkpoints" / "step-00000120", run / "checkpoints" / "step-00000119")
    first, second = checkpoints_by_loss(run)
    (first / "model.safetensors").write_bytes(b"")
    flags = ["--max-new-tokens", "3", "--device", "cpu"]
    sample.main([str(run), *flags])
    printed = capsys.readouterr()
    assert printed.out and re.fullmatch(
        rf"warning: {first} is damaged: .*; {second.name} serves instead\n", printed.err
    )
    (second / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{first} is damaged"):
        sample.main([str(run), *flags])


def test_a_diverged_model_is_one_line(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = list_checkpoints(run)[-1] / "model.safetensors"
    weights = {name: tensor * torch.nan for name, tensor in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(weights, path)
    seal(path.parent)
    with pytest.raises(ValueError, match="the model's logits are not finite: it diverged"):
        sample.main([str(path.parent), "--device", "cpu"])


def test_a_prompt_may_begin_with_a_hyphen(trained, capsys):
    sample.main([str(trained), "--prompt", "-a", "--max-new-tokens", "3", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("-a")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop", ""], "--stop '' would end every sample before it begins"),
        (["--temperature", "nan"], "--temperature is nan; it must be a finite number"),
        (["--attention", "."], r"--attention \. is to be a PNG"),
        (["--layer", "1"], "--layer 1 chooses what --attention FILE.png draws"),
    ],
)
def test_what_can_not_be_meant_is_refused_before_anything_is_read(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        sample.main(["nowhere", *flags])
    printed = capsys.readouterr().err
    assert re.match(f"error: {message}", printed) and printed.count("\n") == 1


def test_a_closed_standard_input_is_named(trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed; give the prompt with --prompt"):
        sample.main([str(trained), "-", "--device", "cpu"])
