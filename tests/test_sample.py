"""The command sample.py: its modes, its mistakes, and load() for a library."""

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
from helpers import ROOT, exit_code_of, newest_checkpoint, seal, train_tiny

import sample
import train
from engine.core.errors import UserError
from engine.data.chat import encode_example
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.training.checkpoint import open_checkpoint, write_checkpoint
from engine.training.run_dir import list_checkpoints
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

ANSWERS = {"hello": "Good day!", "bye": "So long."}
CHAT = ByteTokenizer().with_special(SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that knows one line of bytes by heart, whose characters have several."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("äöü€ abcdefgh.\n" * 500, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(text),), tokenizer="byte", out=folder / "data"))
    shape = "--num-layers 2 --num-heads 2 --d-model 32 --context-length 24 --batch-size 8"
    schedule = "--steps 160 --warmup-steps 2 --learning-rate 0.02 --device cpu"
    files = f"--data {folder}/data --out {folder}/run"
    assert train.main(f"{files} {shape} {schedule}".split()) == 0
    return folder / "run"


def chat_checkpoint(path: Path, trained: Path, model: GPT, tokenizer=CHAT) -> Path:
    """Write a checkpoint of a chat model, with the state of a run."""
    state = open_checkpoint(list_checkpoints(trained)[-1]).state
    state |= {"model": dataclasses.asdict(model.config), "examples": "chats"}
    write_checkpoint(path, state, model.state_dict(), {}, tokenizer.save)
    return path


@pytest.fixture(scope="module")
def chat_model(trained, tmp_path_factory) -> Path:
    """A checkpoint of a model that knows two answers by heart, anywhere in a chat."""
    chats = []
    for three in itertools.product(ANSWERS.items(), repeat=3):
        turns = [[("user", question), ("assistant", answer)] for question, answer in three]
        chats.append([*itertools.chain(*turns)])
    examples = [torch.from_numpy(encode_example(CHAT, turns)).long() for turns in chats]
    padding = ~CHAT.end_of_text
    ids = torch.nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=padding)
    torch.manual_seed(0)
    config = ModelConfig(CHAT.vocab_size, 96, num_layers=2, num_heads=2, d_model=32)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 150)
        targets = ids.clamp(min=-1)[:, 1:]
        loss = model(torch.where(ids < 0, ~ids, ids)[:, :-1], targets) / (ids >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    path = tmp_path_factory.mktemp("chat") / "step-00000001"
    return chat_checkpoint(path, trained, model)


@pytest.fixture
def output_of(trained, capsys):
    """What sample.py prints on stdout, run in this process."""

    def output_of(*flags: object, path: Path = trained) -> str:
        capsys.readouterr()
        sample.main([str(path), "--device", "cpu", *map(str, flags)])
        return capsys.readouterr().out

    return output_of


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


# Text.


def test_load_gives_the_text_that_the_command_prints(output_of, trained):
    model = sample.load(trained, device="cpu")
    for prompt in ("äö", "-a"):
        text = model.generate(prompt, max_new_tokens=40)
        assert output_of(f"--prompt={prompt}", "--max-new-tokens", 40) == f"{prompt}{text}\n"
    text = model.generate("äö", max_new_tokens=20, min_p=0.2, repetition_penalty=3.0)
    flags = ["--max-new-tokens", 20, "--min-p", 0.2, "--repetition-penalty", 3]
    assert output_of("äö", *flags) == f"äö{text}\n"
    best = model.generate("äö", max_new_tokens=100, temperature=0)
    assert best.startswith("ü€ abcdefgh.\näöü€ abc") and "�" not in best


def test_a_stop_text_ends_a_text_and_each_of_several(output_of):
    flags = ["--prompt", "ä", "--temperature", 0, "--stop", "def", "--max-new-tokens", 100]
    assert output_of(*flags) == "äöü€ abc\n"
    expected = "--- sample 1 ---\näöü€ abc\n--- sample 2 ---\näöü€ abc\n"
    assert output_of(*flags, "--num-samples", 2) == expected


def test_a_seed_gives_a_prompt_the_same_samples_in_any_number_and_batch(output_of):
    flags = ["äö", "--max-new-tokens", 30, "--temperature", 1.5, "--seed", 7]
    text = output_of(*flags)
    expected = output_of(*flags, "--num-samples", 5)
    assert expected.startswith(f"--- sample 1 ---\n{text}--- sample 2 ---\n")
    assert output_of(*flags, "--num-samples", 5, "--batch-size", 2) == expected
    assert expected.startswith(output_of(*flags, "--num-samples", 3)[:-1])


@pytest.mark.parametrize("mode", [[], ["--beams", 2], ["--num-samples", 2], ["--stop", "XYZ"]])
def test_a_character_that_the_limit_cuts_is_left_out(mode, output_of):
    modes = [] if "--beams" in mode else ["--temperature", 0]
    for limit in range(1, 8):
        expected = "äöü€ abc".encode()[4 : 4 + limit].decode(errors="ignore")
        text = output_of("äö", "--max-new-tokens", limit, *modes, *mode)
        assert text.splitlines()[-1] == f"äö{expected}"


def test_a_text_beyond_the_context_is_reported_once(output_of, trained, capsys):
    for flags, num_warnings in (
        (["--max-new-tokens", "23"], 0),  # the last token needs no context
        (["--max-new-tokens", "24"], 1),
        (["--max-new-tokens", "40", "--beams", "2"], 1),
        (["--max-new-tokens", "40", "--num-samples", "3"], 1),
        (["--max-new-tokens", "1", "--prompt-file", "long.txt"], 1),
    ):
        if "long.txt" in flags:
            flags[-1] = str(trained.parent / "text.txt")
        prompt = [] if "--prompt-file" in flags else ["ä"]
        sample.main([str(trained), *prompt, *flags, "--device", "cpu"])
        printed = capsys.readouterr()
        assert printed.err.count("\n") == printed.err.count("24 tokens") == num_warnings
        assert printed.out.endswith("\n")


def test_prompts_come_from_files_and_standard_input_too(run, output_of, trained, tmp_path):
    flags = ["--temperature", "0", "--max-new-tokens", "10"]
    expected = output_of("--prompt", "äö", *flags)
    (tmp_path / "prompt.txt").write_text("äö", encoding="utf-8-sig")
    assert output_of("äö", *flags) == output_of(*flags, "äö") == expected
    assert output_of("--prompt-file", tmp_path / "prompt.txt", *flags) == expected
    (tmp_path / "windows.txt").write_bytes("ab\r\ncd\r".encode("utf-8-sig"))
    assert (
        sample.read_prompt(sample.SampleConfig(trained, prompt_file=tmp_path / "windows.txt"))
        == "ab\ncd\n"
    )
    piped = run("sample.py", trained, "-", *flags, input="äö")
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, expected, "")


def test_a_picture_shows_all_layers_or_one(output_of, tmp_path):
    shapes = []
    for layer in ([], ["--layer", 2]):
        flags = ["--prompt", "abcdefgh", "--attention", tmp_path / "a.png", *layer]
        assert output_of(*flags) == f"{tmp_path}/a.png: 2 heads a layer, 8 tokens\n"
        shapes.append(matplotlib.image.imread(tmp_path / "a.png").shape)
    assert shapes[0][0] > 1.5 * shapes[1][0] and shapes[0][1] == shapes[1][1]


# Files of prompts.


def test_a_file_is_completed_line_by_line_as_each_prompt_alone(
    output_of, trained, tmp_path, capsys
):
    prompts = ["ä", "abcdefgh.\näöü€ ab", "", "fgh.\n" * 20, "ö", "c", "äöü€ abcdefgh.\n" * 3]
    records = [{"prompt": p, "id": i, "nested": [i, None, "ß"]} for i, p in enumerate(prompts)]
    content = "\n\n".join(map(json.dumps, records))  # blank lines between
    (tmp_path / "in.jsonl").write_text(f"\ufeff{content}\n", encoding="utf-8")
    flags = ["--max-new-tokens", "40", "--stop", "h", "--stop", "€ a", "--device", "cpu"]
    modes = [(["--temperature", "0"], ["--batch-size", "3"]), (["--beams", "3"], [])]
    modes += [(["--seed", "3"], ["--batch-size", size]) for size in ("2", "7")]
    for mode, batch in modes:
        target = tmp_path / f"{mode + batch}.jsonl"
        files = ["--prompts-file", f"{tmp_path}/in.jsonl", "--out", str(target)]
        sample.main([str(trained), *files, *flags, *mode, *batch])
        printed = capsys.readouterr()
        assert printed.out == ""
        speed = f"{re.escape(str(target))}: 7 prompts, .*tokens/s"
        assert re.fullmatch(f"{speed}\nwarning: .*context.* 24 tokens.*\n", printed.err)
        completions = read_lines(target)
        for record in records:
            text = output_of("--prompt", record["prompt"], *flags, *mode)
            record["completion"] = text[len(record["prompt"]) : -1]
        assert completions == records and len({each["completion"] for each in records}) > 2


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b'{"prompt": "a"}', ["a"]),
        (b'{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}\r\n', ["a", "b"]),
        (b'\n\n{"prompt": "\\u2028a\xe2\x80\xa8"}\n\n', ["\u2028a\u2028"]),
        (b'{"prompt": "' + b"ab " * 10**6 + b'"}\n{"prompt": "c"}', ["ab " * 10**6, "c"]),
        (b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "a"}', ["a", "a"]),
    ],
    ids=["no newline", "CRLF", "line separators", "huge", "BOM"],
)
def test_any_layout_of_lines_is_read(content, prompts, trained, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(content)
    flags = ["--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    sample.main([*map(str, [trained, *flags]), "--max-new-tokens", "1", "--device", "cpu"])
    assert [record["prompt"] for record in read_lines(tmp_path / "out.jsonl")] == prompts
    number = len(prompts)
    counts = "1 prompt, 1 token in" if number == 1 else f"{number} prompts, {number} tokens in"
    assert counts in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ("\n3\n", "line 2"),
        ('{"text": "a", "id": 1}', "'text', 'id'"),
        ('{"prompt": ["a"]}', "line 1"),
        ('{"prompt": "a", "completion": "b"}', "completion"),
        ('{"prompt": "a", "x": "\\ud800"}', "line 1"),
        ('{"prompt": "\udce4"}', "line 1"),
        ("", ""),
    ],
)
def test_an_unsuitable_line_is_an_error_and_nothing_is_written(
    content, message, output_of, tmp_path
):
    source = tmp_path / "in.jsonl"
    source.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=rf"in\.jsonl.*{message}"):
        output_of("--prompts-file", source, "--out", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("target", ["in.jsonl", "missing/out.jsonl"])
def test_an_out_that_exists_or_has_no_folder_is_an_error(target, output_of, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=f"--out.*{target}"):
        output_of("--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / target)
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "a"}\n'


# Chats.


@pytest.mark.parametrize("mode", [["--temperature", 0], ["--beams", 2]], ids=str)
def test_a_text_of_a_chat_model_ends_with_its_turn_too(mode, output_of, chat_model, tmp_path):
    """A typed <|user|> is text, so a chat is spelled with the answer's own beginning."""
    prompts = ["Good", "Good d", "<|user|>hello<|assistant|>Good"]
    texts = [output_of(prompt, *mode, path=chat_model) for prompt in prompts]
    assert texts[0].endswith("day!\n") and all(len(text) < 100 for text in texts)
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    files = ["--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    output_of(*files, *mode, path=chat_model)
    records = read_lines(tmp_path / "out.jsonl")
    assert [f"{record['prompt']}{record['completion']}\n" for record in records] == texts


def test_a_chat_in_a_pipe_answers_each_line(run, chat_model):
    flags = ["--chat", "--temperature", 0, "--device", "cpu"]
    result = run("sample.py", chat_model, *flags, input="hello\n\nbye\nhello")
    answers = [ANSWERS["hello"], ANSWERS["bye"], ANSWERS["hello"]]
    assert (result.returncode, result.stdout.splitlines(), result.stderr) == (0, answers, "")


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (["--temperature", 0], "Good day!"),
        (["--beams", 3], "Good day!"),
        (["--temperature", 0, "--max-new-tokens", 4], "Good"),
        (["--temperature", 0, "--stop", "day"], "Good "),
    ],
)
def test_a_file_of_chats_is_answered(flags, first, output_of, chat_model, tmp_path):
    chats = [[{"role": "user", "content": question}] for question in ("hello", "bye")]
    history = [{"role": "system", "content": "s"}, *chats[1], {"role": "assistant", "content": "?"}]
    chats.append([*history, *chats[0]])
    write_lines(tmp_path / "in.jsonl", [{"messages": chat, "n": 1} for chat in chats])
    files = ["--chat", "--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    output_of(*files, *flags, path=chat_model)
    records = read_lines(tmp_path / "out.jsonl")
    assert records[0]["completion"] == first
    assert [record["messages"] for record in records] == chats and records[2]["n"] == 1


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a"},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "judge", "content": "a"}]},
        {"messages": [{"role": "user"}]},
    ],
)
def test_a_chat_without_a_question_is_an_error(line, chat_model, output_of, tmp_path):
    write_lines(tmp_path / "in.jsonl", [line])
    files = ["--prompts-file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"]
    with pytest.raises(UserError, match="line 1"):
        output_of("--chat", *files, path=chat_model)


def test_a_long_conversation_continues_whatever_is_typed(chat_model, monkeypatch, capsys):
    typed = b"hello\nbye\n" * 5 + b"hello" * 30 + b"\nh\xe4llo\n"  # the last is not UTF-8
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    flags = ["--temperature", "0", "--device", "cpu", "--system", "0", "--max-new-tokens", "20"]
    sample.main([str(chat_model), "--chat", *flags])
    printed = capsys.readouterr()
    answers = printed.out.splitlines()
    assert len(answers) >= 12 and sum(answer in ANSWERS.values() for answer in answers) > 5
    assert len(re.findall("^warning: ", printed.err, re.M)) == printed.err.count("\n") == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_unknown_character_ends_a_pipe_but_not_a_conversation(
    is_terminal, trained, tmp_path, monkeypatch, capsys
):
    letters = CharTokenizer("abc").with_special(SPECIAL_TOKENS)
    model = GPT(ModelConfig(letters.vocab_size, 20, num_layers=1, num_heads=1, d_model=8))
    path = chat_checkpoint(tmp_path / "step-00000001", trained, model, letters)
    stream = io.TextIOWrapper(io.BytesIO("aß\nab\n".encode()), "utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stream)
    arguments = [str(path), "--chat", "--device", "cpu", "--max-new-tokens", "3", "--seed", "1"]
    code = exit_code_of(lambda: sample.main(arguments))
    printed = capsys.readouterr()
    assert "'ß'" in printed.err and printed.err.count("\n") == 1
    expected = (0, 2, "> > ") if is_terminal else (1, 0, "")
    assert (code, printed.out.count("\n"), printed.out[:4]) == expected


def hear_ctrl_c() -> None:
    """Let Ctrl-C reach the process even if this one ignores it, as in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("leave", ["\x03", "\x04"])  # Ctrl-C, Ctrl-D
def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat(leave, trained, tmp_path):
    model = GPT(ModelConfig(CHAT.vocab_size, 10**5, num_layers=1, num_heads=1, d_model=8))
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, float(name == "token_embedding.weight"))
    torch.nn.init.ones_(model.head.weight[ord("x")])  # it always answers xxxx…
    path = chat_checkpoint(tmp_path / "step-00000001", trained, model)
    terminal, child = pty.openpty()
    flags = ["--chat", "--device", "cpu", "--max-new-tokens", str(10**6)]
    command = [sys.executable, ROOT / "sample.py", path, *flags]
    streams = {"stdin": child, "stdout": child, "stderr": child, "start_new_session": True}
    process = subprocess.Popen(command, preexec_fn=hear_ctrl_c, **streams)
    os.close(child)
    shown = ""

    def read_until(text: str) -> str:
        """Return what the terminal showed before a text, which must come."""
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            seconds = max(0, end - time.monotonic())
            assert select.select([terminal], [], [], seconds)[0], shown
            shown += os.read(terminal, 4096).decode()
        before, _, shown = shown.partition(text)
        return before

    read_until("> ")
    for _ in range(2):
        os.write(terminal, b"hello\n")
        read_until("xxxx")
        os.write(terminal, b"\x03")
        assert "^C" in read_until("\r\n") and read_until("> ").count("x") < 1000
    while process.poll() is None:  # a key just before input() waits is seen with the next one
        os.write(terminal, leave.encode())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(4)
    assert process.returncode == 0 and "rror" not in read_until("\n")
    os.close(terminal)


# Mistakes.

FILES = ["--prompts-file", "a", "--out", "b"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--stop", ""], ["--stop"]),
        (["--attention", "."], ["--attention"]),
        (["--layer", "1"], ["--layer", "--attention"]),
        (["--prompt", "a", "--prompt-file", "b"], ["--prompt-file"]),
        (["a", "--prompt", "b"], ["--prompt"]),
        (["a", "--chat"], ["TEXT", "--chat"]),
        (["a", *FILES], ["TEXT", "--prompts-file"]),
        (["--min-p", "0.1", "--beams", "2"], ["--min-p", "--beams"]),
        (["--repetition-penalty", "2", "--page"], ["--repetition-penalty", "--page"]),
        (["--min-p", "1.1"], ["--min-p", "1"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty", "0"]),
        (["-", "--prompt", "a"], ["--prompt"]),
        (["--chat", "--prompt", "a"], ["--prompt", "--chat"]),
        (["--chat", "--num-samples", "2"], ["--num-samples", "--chat"]),
        (["-", "--chat"], ["-", "--chat"]),
        (["--chat", "--beams", "2"], ["--beams", "--chat"]),
        ([*FILES, "--prompt", "a"], ["--prompt", "--prompts-file"]),
        ([*FILES, "--chat", "--system", "a"], ["--system", "--prompts-file"]),
        ([*FILES, "--beams", "2", "--batch-size", "2"], ["--batch-size", "--beams"]),
        (["--beams", "2", "--temperature", "0.5"], ["--temperature", "--beams"]),
        (["--beams", "2", "--num-samples", "2"], ["--num-samples", "--beams"]),
        (["--system", "a"], ["--system", "--chat"]),
        (["--out", "b"], ["--out", "--prompts-file"]),
        (["--prompts-file", "a"], ["--prompts-file", "--out"]),
        (["--batch-size", "8", "--chat"], ["--batch-size", "--chat"]),
        (["--page", "--chat"], ["--page", "--chat"]),
        (["--page", "--attention", "a.png"], ["--page", "--attention"]),
        (["--port", "8000"], ["--port", "--serve"]),
        (["--quantize", "int8", "--page"], ["--quantize", "--page"]),
        (["--quantize", "int8", "--compile"], ["--quantize", "--compile"]),
        (["--temperature", "nan"], ["--temperature"]),
        (["--tempreature", "1"], ["--temperature"]),
    ],
    ids=str,
)
def test_flags_without_effect_are_an_error_before_anything_is_read(flags, names, capsys):
    with pytest.raises(SystemExit, match="2"):
        sample.main(["nowhere", *flags])
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert all(name in printed for name in names), printed


@pytest.mark.parametrize("flags", [["--dtype", "bfloat16"], ["--quantize", "int8"]], ids=str)
def test_a_model_of_fewer_bits_still_knows_its_text(flags, output_of):
    assert output_of("äöü€ abc", *flags, "--temperature", 0, "--max-new-tokens", 9) == (
        "äöü€ abcdefgh.\nä\n"
    )


def test_weights_are_loaded_in_the_dtype_that_is_faster(trained, monkeypatch):
    monkeypatch.setattr("engine.core.device.fast_dtype", lambda device: torch.bfloat16)
    dtypes = []
    for dtype, min_width in (("auto", 33), ("auto", 32), ("float32", 32), ("bfloat16", 33)):
        monkeypatch.setattr(sample, "MIN_BFLOAT16_DECODING_WIDTH", min_width)
        dtypes.append(sample.load(trained, "cpu", dtype=dtype).model.head_weight().dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    monkeypatch.setattr(sample, "choose_device", torch.device)
    with pytest.raises(UserError, match=r"--quantize: .* CPU .*meta"):
        sample.load(trained, "meta", quantize="int8")


def test_every_setting_has_an_effect_in_some_mode():
    names = {field.name for field in dataclasses.fields(sample.SampleConfig)}
    used = set().union(*(names | {mode} for mode, names in sample.SETTINGS_BY_MODE.items()))
    assert names == used - {""} | sample.COMMON_SETTINGS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["RUN", "--layer", "3", "--attention", "a.png", "--prompt", "x"], "--layer.*2"),
        (["RUN", "--attention", "a.png", "--prompt", "x" * 30], "30 tokens"),
        (["RUN", "--prompt-file", "latin-1.txt"], "latin-1.txt.*UTF-8 at byte 1"),
        (["RUN", "--prompt-file", "/dev/zero"], "/dev/zero.*4,194,304 bytes"),
        (["RUN", "--prompts-file", "/dev/urandom", "--out", "x"], "/dev/urandom.*4,194,304 bytes"),
        (["RUN", "--chat"], "RUN.*not trained on chats"),
        (["DATA"], "DATA.*is a dataset.*train.py --data DATA"),
        (["nowhere"], "nowhere"),
        (["empty", "a"], "empty.*no checkpoint"),
        (["latin-1.txt", "a"], "latin-1.txt.*file"),
        (["RUN/config.toml"], "config.toml.*file"),
        (["RUN/..", "a"], "RUN/..: .* RUN"),
        (["RUN/checkpoints", "a"], "checkpoints: .* RUN/checkpoints/step-00000160"),
        (["hf model"], "huggingface.py import 'hf model' 'out/hf model'"),
        ([str(ROOT)], str(ROOT)),
    ],
)
def test_a_mistake_is_a_user_error(flags, message, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.core.files.MAX_INPUT_BYTES", 2**22)
    (tmp_path / "latin-1.txt").write_bytes("aä".encode("latin-1"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf model").mkdir()
    (tmp_path / "hf model" / "config.json").write_text("{}")
    paths = {"RUN": str(trained), "DATA": str(trained.parent / "data")}
    for name, path in paths.items():
        message = message.replace(name, re.escape(path))
        flags = [flag.replace(name, path) for flag in flags]
    with pytest.raises(UserError, match=message) as error:
        sample.main([*flags, "--device", "cpu"])
    assert "\n" not in str(error.value)


def test_a_closed_standard_input_is_an_error(trained, chat_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for path, flag in ((trained, "-"), (chat_model, "--chat")):
        with pytest.raises(UserError, match="standard input is closed"):
            sample.main([str(path), flag, "--device", "cpu"])


def test_a_diverged_model_is_an_error(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = list_checkpoints(run)[-1] / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: t * torch.nan for name, t in tensors.items()}, path)
    seal(path.parent)
    with pytest.raises(UserError, match="not finite"):
        sample.main([str(path.parent), "--device", "cpu"])


def test_the_page_of_a_checkpoint_has_the_name_of_its_run(trained, monkeypatch):
    names = []

    def serve(answers, port):
        (about,) = answers["about"]({})
        names.append(about["settings"]["name"])

    monkeypatch.setattr("engine.report.server.serve", serve)
    checkpoint = list_checkpoints(trained)[-1]
    for path in (trained, checkpoint):
        sample.sample(sample.SampleConfig(path, page=True, device="cpu"))
    assert names == [trained.name, f"{trained.name}/{checkpoint.name}"]


@pytest.mark.parametrize("template", [None, "{{ 'system' }}"])
@pytest.mark.parametrize("state", [{}, {"has_system_turns": True}, {"has_system_turns": False}])
def test_a_system_turn_that_the_model_never_saw_is_warned_of_once(
    state, template, trained, tmp_path, monkeypatch, capsys
):
    tokenizer = CHAT.with_chat_template(template)
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    model = GPT(ModelConfig(CHAT.vocab_size, 64, num_layers=1, num_heads=1, d_model=8))
    old = open_checkpoint(list_checkpoints(trained)[-1]).state
    old = {key: value for key, value in old.items() if key != "has_system_turns"}
    old |= {"model": dataclasses.asdict(model.config), "examples": "chats"}
    write_checkpoint(path, old | state, model.state_dict(), {}, tokenizer.save)
    question = {"role": "user", "content": "Hi"}
    system = {"role": "developer", "content": "Be kind."}
    for name, messages in (("without", [question]), ("with", [system, question])):
        write_lines(tmp_path / f"{name}.jsonl", [{"messages": messages}] * 2)
    for flags in ([], ["--system", "Be kind."], ["without"], ["with"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nHi\n"))
        has_system = flags[-1:] not in ([], ["without"])
        if len(flags) == 1:
            flags = ["--prompts-file", tmp_path / f"{flags[0]}.jsonl", "--out", tmp_path / flags[0]]
        flags = [str(path), "--chat", "--device", "cpu", "--max-new-tokens", "2", *map(str, flags)]
        sample.main(flags)
        is_warned = has_system and template is None and state.get("has_system_turns") is False
        assert capsys.readouterr().err.count("system turn") == is_warned


def test_a_chat_beyond_the_context_is_reported_once(chat_model, monkeypatch, capsys):
    for num_questions, is_reported in ((1, False), (12, True)):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n" * num_questions))
        sample.main([str(chat_model), "--chat", "--device", "cpu"])
        assert capsys.readouterr().err.count("context of 96 tokens") == is_reported


TWO_TURNS = [{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_a_checkpoint_knows_whether_chats_had_system_turns(system: list, tmp_path: Path):
    chats = [
        {"messages": [*system, {"role": "user", "content": f"{n}"}, *TWO_TURNS]} for n in range(30)
    ]
    chats += [{"messages": TWO_TURNS[::-1]}] * 60
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    options = {"chat": True, "deduplicate": True}
    prepare(PrepareConfig((str(path),), tokenizer="byte", out=tmp_path / "data", **options))
    train_tiny(tmp_path / "data", tmp_path / "run", "--steps", 1, "--context-length", 64)
    assert newest_checkpoint(tmp_path / "run").state["has_system_turns"] == bool(system)
    assert sample.load(tmp_path / "run", "cpu").has_system_turns == bool(system)
