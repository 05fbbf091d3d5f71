"""Sampling, through the real command: prompts, streams, batches, files, beams, chats, pictures, mistakes."""

import contextlib
import dataclasses
import fcntl
import io
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import matplotlib.image
import pytest
import safetensors.torch
import torch
from helpers import ROOT, VARIANTS, exit_code_of, randomised, seal

import sample
import train
from engine.data.chat import encode_chat, encode_example
from engine.data.tokenizer import RESERVED, ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer
from engine.training.checkpoint import load_model, open_checkpoint, write_checkpoint
from engine.training.run_dir import checkpoints_by_loss, list_checkpoints
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

SHAPE = "--num-layers 2 --num-heads 2 --d-model 32 --context-length 24 --batch-size 8 --device cpu"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on bytes, so that characters come in parts."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("äöü€ abcdefgh.\n" * 500, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    flags = f"--data {folder}/data --out {folder}/run --steps 160 --warmup-steps 2 --learning-rate 0.02"
    assert train.main([*flags.split(), *SHAPE.split()]) == 0
    return folder / "run"


SAYINGS = {"hello": "Good day!", "bye": "So long."}
CHAT = ByteTokenizer().with_special(RESERVED)


def chat_checkpoint(path: Path, trained: Path, model: GPT, tokenizer: Tokenizer = CHAT) -> Path:
    """A checkpoint of a model for chats, made from one of a run."""
    state = open_checkpoint(list_checkpoints(trained)[-1]).state
    state |= {"model": dataclasses.asdict(model.config), "examples": "chats"}
    write_checkpoint(path, state, model.state_dict(), {}, tokenizer.save)
    return path


@pytest.fixture(scope="module")
def talker(trained, tmp_path_factory) -> Path:
    """A checkpoint of a model that knows two answers by heart, whatever was said before."""
    sayings = itertools.product(SAYINGS.items(), repeat=3)
    chats = [[turn for asked, said in three for turn in (("user", asked), ("assistant", said))] for three in sayings]
    examples = [torch.from_numpy(encode_example(CHAT, turns)).long() for turns in chats]
    ids = torch.nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=~CHAT.end_of_text)
    torch.manual_seed(0)
    model = GPT(ModelConfig(CHAT.vocab_size, context_length=96, num_layers=2, num_heads=2, d_model=32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 150)
        loss = model(torch.where(ids < 0, ~ids, ids)[:, :-1], ids.clamp(min=-1)[:, 1:]) / (ids >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    return chat_checkpoint(tmp_path_factory.mktemp("talker") / "step-00000001", trained, model)


@pytest.fixture(scope="module")
def endless(trained, tmp_path_factory) -> Path:
    """A checkpoint of a model that says x for ever, or for as long as its context is."""
    model = GPT(ModelConfig(CHAT.vocab_size, context_length=10**5, num_layers=1, num_heads=1, d_model=8))
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, float(name == "token_embedding.weight"))
    torch.nn.init.ones_(model.head.weight[ord("x")])
    return chat_checkpoint(tmp_path_factory.mktemp("endless") / "step-00000001", trained, model)


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
    assert sampled("--temperature", 0, "--max-new-tokens", 10, path=trained / "checkpoints" / "step-00000160") == best


def test_a_function_samples_without_a_command_line(trained):
    found = sample.find_checkpoint(trained)
    tokenizer, model = load_tokenizer(found.path / "tokenizer.json"), load_model(found, ModelConfig, GPT)
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
    assert maps.shape == (2, model.config.num_heads, 10, 10)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(maps.shape[:3]))
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
        with pytest.raises(ValueError, match=r"step-00000160.*(weights don't fit its state.json|num_layers is 10000)"):
            load_model(found, ModelConfig, GPT)
        found = sample.find_checkpoint(trained)
    assert found.path in list_checkpoints(trained)


# When something is wrong with the run.


def test_another_checkpoint_serves_where_the_best_is_damaged(trained, tmp_path, capsys):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copytree(run / "checkpoints" / "step-00000160", run / "checkpoints" / "step-00000159")
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


# Many prompts.


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_of_prompts_is_completed_line_by_line_as_each_alone(sampled, trained, tmp_path, capsys):
    prompts = ["ä", "abcdefgh.\näöü€ ab", "", "fgh.\n" * 20, "ö", "c", "äöü€ abcdefgh.\n" * 3]
    records = [{"prompt": prompt, "id": at, "nested": {"of": [at, None, "ß"]}} for at, prompt in enumerate(prompts)]
    written = "\n\n".join(json.dumps(record) for record in records)  # blank lines between
    (tmp_path / "in.jsonl").write_text(f"\ufeff{written}\n", encoding="utf-8")
    flags = ["--temperature", "0", "--max-new-tokens", "40", "--stop", "h", "--stop", "€ a", "--device", "cpu"]
    files = ["--prompts-file", f"{tmp_path}/in.jsonl", "--out", f"{tmp_path}/out.jsonl"]
    sample.main([str(trained), *files, "--batch-size", "3", *flags])
    told = capsys.readouterr()
    speed = r"7 prompts, \d+ tokens in \d+\.\d s, [\d,]+ tokens/s\n"
    assert told.out == "" and re.fullmatch(f"{tmp_path}/out.jsonl: {speed}", told.err), told
    alone = [sampled("--prompt", prompt, *flags).removesuffix("\n")[len(prompt) :] for prompt in prompts]
    expected = [record | {"completion": text} for record, text in zip(records, alone, strict=True)]
    assert lines(tmp_path / "out.jsonl") == expected and len(set(alone)) > 2
    assert not any(stop in text for text in alone for stop in ("h", "€ a"))
    assert not list(tmp_path.glob(".*partial"))


def test_sampled_completions_are_the_same_again(sampled, tmp_path):
    text = "".join(json.dumps({"prompt": "ä" * (at % 3 + 1)}) + "\n" for at in range(9))
    (tmp_path / "in.jsonl").write_text(text, encoding="utf-8")
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = ["--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / name, "--batch-size", 4, "--seed", seed]
        assert sampled(*flags, "--temperature", 2, "--max-new-tokens", 20) == ""
        found.append([record["completion"] for record in lines(tmp_path / name)])
    assert found[0] == found[1] != found[2] and len(set(found[0])) == 9


BAD_LINES = {
    "not.jsonl": ('{"prompt": "a"}\n{"prompt": \n', r"not.jsonl, line 2 is damaged: not valid JSON"),
    "number.jsonl": ("\n3\n", r"number.jsonl, line 2: is no JSON object"),
    "none.jsonl": (
        '{"text": "a", "id": 1}',
        r"none.jsonl, line 1: should have a text 'prompt' .* has 'text', 'id'",
    ),
    "wrong.jsonl": ('{"prompt": ["a"]}', r"wrong.jsonl, line 1: should have a text 'prompt'"),
    "done.jsonl": ('{"prompt": "a", "completion": "b"}', r"line 1: has a 'completion' already; rename it"),
    "half.jsonl": ('{"prompt": "a", "x": "\\ud800"}', r"half.jsonl, line 1: .*surrogates not allowed"),
    "latin.jsonl": ('{"prompt": "\udce4"}', r"latin.jsonl, line 1 is damaged: .*can't decode byte 0xe4"),
    "empty.jsonl": ("", r'empty.jsonl has no lines; give one for each prompt, \{"prompt": TEXT\}'),
    "missing.jsonl": (None, r"No such file or directory: .*missing.jsonl"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_what_is_no_file_of_prompts_is_one_line_and_nothing_is_written(name, trained, tmp_path, capsys):
    content, message = BAD_LINES[name]
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    files = ["--prompts-file", str(tmp_path / name), "--out", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    code, errors = exit_code_of(lambda: sample.main([str(trained), *files])), capsys.readouterr().err
    assert code == 1 and errors.startswith("error: ") and errors.count("\n") == 1 and re.search(message, errors), errors
    assert not (tmp_path / "out.jsonl").exists()


def test_an_out_that_exists_or_is_in_no_folder_is_refused(trained, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "kept").write_text("kept")
    for out, message in (("kept", "kept exists; remove it, or choose another"), ("no/out", "no/out is in no folder")):
        files = ["--prompts-file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / out), "--device", "cpu"]
        code, errors = exit_code_of(lambda: sample.main([str(trained), *files])), capsys.readouterr().err  # noqa: B023
        assert code == 1 and errors.count("\n") == 1 and message in errors
    assert (tmp_path / "kept").read_text() == "kept" and not (tmp_path / "no").exists()


# Beams.


def test_beams_write_the_best_text_alone_or_for_each_line(sampled, tmp_path):
    flags = ["--max-new-tokens", 20, "--stop", "gh"]
    greedy = sampled("--prompt", "äö", "--temperature", 0, *flags)
    assert greedy == "äöü€ abcdef\n" == sampled("--prompt", "äö", "--beams", 1, *flags)
    prompts = ["äö", "", "b", "h.\n" * 20]
    alone = [sampled("--prompt", text, "--beams", 3, *flags).removesuffix("\n")[len(text) :] for text in prompts]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    sampled("--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--beams", 3, *flags)
    assert [record["completion"] for record in lines(tmp_path / "out.jsonl")] == alone


# Chats.


def test_a_chat_in_a_pipe_answers_each_line(run, talker):
    told = run("sample.py", talker, "--chat", "--temperature", 0, "--device", "cpu", input="hello\n\nbye\nhello")
    said = [SAYINGS["hello"], SAYINGS["bye"], SAYINGS["hello"]]
    assert (told.returncode, told.stdout.splitlines(), told.stderr) == (0, said, "")


def test_chats_of_a_file_are_answered_in_one_batch(sampled, talker, tmp_path):
    asked = ["hello", "bye", "hello"]
    chats = [[{"role": "user", "content": question}] for question in asked]
    chats[2] = [{"role": "system", "content": "s"}, *chats[1], {"role": "assistant", "content": "?"}, *chats[2]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": chat, "n": 1}) + "\n" for chat in chats))
    files = ["--chat", "--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    for choice in (["--temperature", 0], ["--beams", 3]):
        sampled(*files, *choice, path=talker)
        records = lines(tmp_path / "out.jsonl")
        assert [record["completion"] for record in records[:2]] == [SAYINGS[question] for question in asked[:2]]
        assert [record["messages"] for record in records] == chats and records[2]["n"] == 1
        (tmp_path / "out.jsonl").unlink()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', "line 1: .*should have 'messages'"),
        ('{"messages": []}', "line 1: has no question at the end of its messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: has no question at the end"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 1: has a message.* of the role 'judge'"),
        ('{"messages": [{"role": "user"}]}', "line 1: has a message 1 that is not of the form"),
    ],
)
def test_what_is_no_chat_to_answer_is_named(line, message, talker, tmp_path):
    (tmp_path / "in.jsonl").write_text(line)
    files = ["--chat", "--prompts-file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    with pytest.raises(ValueError, match=message):
        sample.main([str(talker), *files, "--device", "cpu"])
    assert not (tmp_path / "out.jsonl").exists()


def test_an_answer_ends_with_its_turn_or_the_tokens_or_a_stop_text_or_the_context(sampled, talker, endless, tmp_path):
    for path, flags, expected in (
        (talker, ["--max-new-tokens", 4], "Good"),
        (talker, ["--stop", "day"], "Good "),
        (endless, ["--max-new-tokens", 7], "xxxxxxx"),
    ):
        (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}')
        files = ["--chat", "--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
        sampled(*files, "--temperature", 0, *flags, path=path)
        assert lines(tmp_path / "out.jsonl")[0]["completion"] == expected
        (tmp_path / "out.jsonl").unlink()
    with_context = sample.fit_chat(CHAT, [("user", "hello")], 96, 500)
    assert with_context == ([257 + 1, *b"hello", 257 + 3, 257 + 2], 96 - 8)


def says(*turns: tuple[str, str]) -> list[int]:
    """The token ids of a chat up to where the assistant's answer begins."""
    return [*itertools.chain(*encode_chat(CHAT, turns))]


def test_the_oldest_turns_are_forgotten_first_and_the_system_s_never(capsys):
    system, first, answer = ("system", "be kind"), ("user", "one"), ("assistant", "two")
    second, reply, last = ("user", "three"), ("assistant", "four"), ("user", "five")
    whole = [system, first, answer, second, reply, last]
    length = len(says(*whole))
    for most in (1, 20):  # tokens of the answer
        assert sample.fit_chat(CHAT, whole, length + most, most) == (says(*whole), most)
        for room in (length - 1, length - 5):  # no answer stays without its question
            ids, limit = sample.fit_chat(CHAT, whole, room + most, most)
            assert ids == says(system, second, reply, last) and limit == most
        assert sample.fit_chat(CHAT, whole, len(says(system, last)) + most, most)[0] == says(system, last)
        assert sample.fit_chat(CHAT, whole[1:], len(says(last)) + most, most)[0] == says(last)
    assert sample.fit_chat(CHAT, [last], 20, 500) == (says(last), 20 - len(says(last)))  # half of it, at least
    assert capsys.readouterr().err == ""


def test_a_turn_that_alone_is_too_long_loses_its_beginning(capsys):
    turns = [("user", "forgotten"), ("assistant", "too"), ("user", "0123456789")]
    assert sample.fit_chat(CHAT, turns, 16, 500) == (says(("user", "56789")), 8)
    told = "warning: the turn '0123456789' is too long; its first 5 tokens are cut off\n"
    assert capsys.readouterr().err == told
    turns = [("system", "kind"), *turns]
    assert sample.fit_chat(CHAT, turns, 16, 2)[0] == says(turns[0], ("user", "56789"))
    with pytest.raises(
        ValueError, match="no question fits in the model's context: of its 16 tokens 6 are the system's"
    ):
        sample.fit_chat(CHAT, turns, 16, 7)


def test_a_long_conversation_goes_on_whatever_is_said(talker, monkeypatch, capsys):
    said = b"hello\nbye\n" * 5 + b"hello" * 30 + b"\nh\xe4llo\n"  # the last is not UTF-8
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), "utf-8"))
    flags = ["--temperature", "0", "--device", "cpu", "--system", "0", "--max-new-tokens", "20"]
    assert sample.main([str(talker), "--chat", *flags]) is None
    told = capsys.readouterr()
    answers = told.out.splitlines()
    assert len(answers) >= 12 and sum(text in SAYINGS.values() for text in answers) > 5
    assert re.fullmatch(r"warning: the turn '(hello)+…' is too long; its first \d+ tokens are cut off\n", told.err)


def test_a_turn_that_can_not_be_read_ends_a_pipe_but_no_conversation(trained, tmp_path, monkeypatch, capsys):
    letters = CharTokenizer("abc").with_special(RESERVED)
    model = GPT(ModelConfig(letters.vocab_size, context_length=20, num_layers=1, num_heads=1, d_model=8))
    path = chat_checkpoint(tmp_path / "step-00000001", trained, model, letters)
    for talking in (True, False):
        stream = io.TextIOWrapper(io.BytesIO("aß\nab\n".encode()), "utf-8")
        for name in ("stdin", "stdout"):
            monkeypatch.setattr(getattr(sys, name) if name == "stdout" else stream, "isatty", lambda: talking)  # noqa: B023
        monkeypatch.setattr(sys, "stdin", stream)
        arguments = [str(path), "--chat", "--device", "cpu", "--max-new-tokens", "3", "--seed", "1"]
        code, told = exit_code_of(lambda: sample.main(arguments)), capsys.readouterr()  # noqa: B023
        assert re.match(r"error: the tokenizer does not know the character 'ß'", told.err) and told.err.count("\n") == 1
        assert (code, told.out.count("\n"), told.out[:4]) == ((0, 2, "> > ") if talking else (1, 0, ""))


def test_what_was_said_before_an_interrupt_is_the_turn(endless, capsys):
    model, calls = load_model(open_checkpoint(endless), ModelConfig, GPT), itertools.count()

    def interrupt(*arguments: object) -> None:
        if next(calls) % 5 == 4:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    config = sample.SampleConfig(endless, chat=True, temperature=0)
    said = sample.answer(config, model, CHAT, [("user", "hello")], [KeyboardInterrupt])
    assert said == "xxxx" and capsys.readouterr().out == "xxxx\n"
    with pytest.raises(KeyboardInterrupt):  # in a pipe
        sample.answer(config, model, CHAT, [("user", "hello")], [])


def hear_ctrl_c() -> None:
    """Have Ctrl-C reach the process, also if this one was started to ignore it, as in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a pseudo-terminal of its own, and what it has shown."""

    def __init__(self, *command: object):
        self.shown, (self.master, slave) = "", pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        os.close(slave)

    def read_until(self, text: str, seconds: float = 60) -> str:
        """What it showed before this text, which must come."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert select.select([self.master], [], [], max(0, end - time.monotonic()))[0], self.shown
            self.shown += os.read(self.master, 4096).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())


@pytest.mark.parametrize("leave", ["\x03", "\x04"])  # Ctrl-C, Ctrl-D
def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat(leave, endless):
    terminal = Terminal(ROOT / "sample.py", endless, "--chat", "--device", "cpu", "--max-new-tokens", 10**6)
    terminal.read_until("> ")
    for _ in range(2):
        terminal.type("hello\n")
        terminal.read_until("xxxx")
        terminal.type("\x03")
        assert "^C" in terminal.read_until("\r\n") and terminal.read_until("> ").count("x") < 1000
    while terminal.process.poll() is None:  # one that comes just before input() waits for keys is seen at the next only
        terminal.type(leave)
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(4)
    assert terminal.process.returncode == 0 and "rror" not in terminal.read_until("\n")
    os.close(terminal.master)


def test_a_model_without_tokens_for_chats_is_refused(trained):
    told = "has not learned chats; prepare some with prepare.py .* --chat, and train"
    with pytest.raises(ValueError, match=told):
        sample.main([str(trained), "--chat", "--device", "cpu"])


FILES = ["--prompts-file", "a", "--out", "b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat", "--prompt", "a"], "--chat and --prompt can't be used together; leave one out"),
        (["--chat", "--num-samples", "2"], "--chat and --num-samples can't be used together"),
        (["-", "--chat"], "--chat and - can't be used together"),
        (["--chat", "--beams", "2"], "--beams can't be used in a conversation"),
        ([*FILES, "--prompt", "a"], "--prompts-file and --prompt can't be used together"),
        ([*FILES, "--chat", "--system", "a"], "--prompts-file and --system can't be used together"),
        ([*FILES, "--beams", "2", "--batch-size", "2"], "--beams and --batch-size can't be used together"),
        (["--beams", "2", "--temperature", "0.5"], "--beams and --temperature can't be used together"),
        (["--beams", "2", "--num-samples", "2"], "--beams and --num-samples can't be used together"),
        (["--beams", "0"], "--beams is 0; it must be at least 1"),
        (["--system", "a"], "--system a is what a --chat begins with; give both"),
        (["--out", "b"], "--out b is for the lines of --prompts-file FILE.jsonl; give both"),
        (["--prompts-file", "a"], "--prompts-file a needs --out FILE.jsonl to write to; give both"),
        (["--batch-size", "8"], "--batch-size 8 is of the lines of --prompts-file FILE.jsonl; give both"),
    ],
)
def test_flags_that_make_no_sense_together_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        sample.main(["nowhere", *flags])
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1
