"""The command sample.py: its modes, its mistakes, and load() for a library."""

import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from helpers import ROOT, exit_code_of, read_lines, save_run, write_lines

import sample
from engine.core.errors import UserError
from engine.data.ids import encode_examples
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, from_document
from engine.data.tokenizer_json import SPECIAL_TOKENS, with_extension
from model import GPT, ModelConfig

ANSWERS = {"hello": "Good day!", "bye": "So long."}
CHAT = ByteTokenizer().with_special(SPECIAL_TOKENS)


def learn_by_heart(config: ModelConfig, ids: torch.Tensor) -> GPT:
    """Train a model on rows of ids, of which negative ones, ~id, are no targets."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 150)
        targets = ids.clamp(min=-1)[:, 1:]
        loss = model(torch.where(ids < 0, ~ids, ids)[:, :-1], targets) / (ids >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that knows one line of bytes by heart, whose characters have several."""
    text = "äöü€ abcdefgh.\n".encode() * 4
    ids = torch.tensor([[*text[start:][:25]] for start in range(24)])
    config = ModelConfig(vocab_size=257, context_length=24, num_layers=2, num_heads=2, d_model=32)
    return save_run(learn_by_heart(config, ids), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """A run of a model that knows two answers by heart, anywhere in a chat."""
    chats = []
    for three in itertools.product(ANSWERS.items(), repeat=3):
        turns = [[("user", question), ("assistant", answer)] for question, answer in three]
        chats.append([*itertools.chain(*turns)])
    examples = [torch.from_numpy(encode_examples(CHAT, turns)[0]).long() for turns in chats]
    padding = ~CHAT.end_of_text_id
    ids = torch.nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=padding)
    config = ModelConfig(vocab_size=CHAT.vocab_size, context_length=96, d_model=32)
    return save_run(learn_by_heart(config, ids), tmp_path_factory.mktemp("chat"), CHAT, "chats")


@pytest.fixture
def output_of(trained, capsys):
    """What sample.py prints on stdout, run in this process."""

    def output_of(*flags: object, path: Path = trained) -> str:
        capsys.readouterr()
        sample.main([str(path), "--device", "cpu", *map(str, flags)])
        return capsys.readouterr().out

    return output_of


# Text.


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--temperature", 1.5], {"temperature": 1.5}),
        (["--min-p", 0.2, "--repetition-penalty", 3], {"min_p": 0.2, "repetition_penalty": 3.0}),
        (["--temperature", 0, "--stop", "\\n"], {"temperature": 0, "stop": ["\n"]}),
    ],
)
def test_the_command_prints_the_texts_that_load_generates(flags, options, output_of, trained):
    model = sample.load(trained, device="cpu")
    flags = [*flags, "--max-new-tokens", 20, "--seed", 7]
    options = {**options, "max_new_tokens": 20, "seed": 7}
    for prompt in ("äö", "-a"):
        text = model.generate(prompt, **options)
        assert output_of(f"--prompt={prompt}", *flags) == f"{prompt}{text}\n"
    first, second = model.generate_samples(2, "äö", **options)
    expected = f"--- sample 1 ---\näö{first}\n--- sample 2 ---\näö{second}\n"
    assert output_of("äö", *flags, "--num-samples", 2) == expected


def test_prompts_come_from_files_and_standard_input_too(output_of, trained, tmp_path):
    flags = ["--temperature", "0", "--max-new-tokens", "10"]
    expected = output_of("--prompt", "äö", *flags)
    (tmp_path / "prompt.txt").write_text("äö", encoding="utf-8-sig")
    assert output_of("äö", *flags) == output_of(*flags, "äö") == expected
    assert output_of("--prompt-file", tmp_path / "prompt.txt", *flags) == expected
    (tmp_path / "windows.txt").write_bytes("ab\r\ncd\r".encode("utf-8-sig"))
    config = sample.SampleConfig(trained, prompt_file=tmp_path / "windows.txt")
    assert sample.read_prompt(config) == "ab\ncd\n"
    # Without a web server, and with standard error closed.
    program = f"import sys, sample; sample.main({[str(trained), '-', *flags]}); "
    program += "sys.exit(bool({'starlette', 'uvicorn'} & sys.modules.keys()))"
    command = f"{shlex.join([sys.executable, '-c', program])} 2>&-"
    options = {"cwd": ROOT, "input": "äö", "encoding": "utf-8"}
    assert subprocess.check_output(["sh", "-c", command], **options) == expected


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
        assert re.fullmatch(f"{speed}\n", printed.err)
        completions = read_lines(target)
        for record in records:
            text = output_of("--prompt", record["prompt"], *flags, *mode)
            record["completion"] = text[len(record["prompt"]) : -1]
        assert completions == records and len({each["completion"] for each in records}) > 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ("\n3\n", "line 2"),
        ('{"text": "a", "id": 1}', "'text', 'id'"),
        ('{"prompt": "a", "completion": "b"}', "completion"),
        ('{"prompt": "a", "x": "\\ud800"}', "line 1"),
        ("", ""),
        ('{"text": "a", "is chat": true}', "line 1"),
        ('{"messages": []}', "line 1"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}', "line 1"),
    ],
)
def test_an_unsuitable_line_is_an_error_and_nothing_is_written(
    content, message, output_of, chat_model, tmp_path
):
    source = tmp_path / "in.jsonl"
    source.write_text(content, encoding="utf-8", errors="surrogateescape")
    chat = ["--chat"] if "messages" in content or "chat" in content else []
    with pytest.raises(UserError, match=rf"in\.jsonl.*{message}"):
        files = ["--prompts-file", source, "--out", tmp_path / "out.jsonl"]
        output_of(*files, *chat, path=chat_model)
    assert not (tmp_path / "out.jsonl").exists()


# Chats.


@pytest.mark.parametrize(
    ("flags", "first"),
    [(["--beams", 3], "Good day!"), (["--temperature", 0, "--stop", "day"], "Good ")],
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


def test_a_long_conversation_continues_whatever_is_typed(chat_model, monkeypatch, capsys):
    typed = b"hello\n\nbye\n" * 5 + b"h\xe4llo\n"  # the last is not UTF-8
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    flags = ["--temperature", "0", "--device", "cpu", "--system", "0", "--max-new-tokens", "20"]
    sample.main([str(chat_model), "--chat", *flags])
    printed = capsys.readouterr()
    answers = printed.out.splitlines()
    assert answers[:2] == [*ANSWERS.values()] and len(answers) == 11
    assert sum(answer in ANSWERS.values() for answer in answers) > 5
    assert len(re.findall("^warning: ", printed.err, re.M)) == printed.err.count("\n") == 1


def test_a_chat_model_without_chat_is_warned_of(chat_model, trained, capsys):
    for path, is_chat in ((chat_model, True), (trained, False)):
        sample.main([str(path), "--prompt", "1", "--max-new-tokens", "1", "--device", "cpu"])
        assert ("--chat" in capsys.readouterr().err) == is_chat


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_unknown_character_ends_a_pipe_but_not_a_conversation(
    is_terminal, tmp_path, monkeypatch, capsys
):
    letters = CharTokenizer("abc").with_special(SPECIAL_TOKENS)
    model = GPT(ModelConfig(vocab_size=letters.vocab_size, context_length=20, d_model=8))
    path = save_run(model, tmp_path / "run", letters, "chats")
    stream = io.TextIOWrapper(io.BytesIO("aß\nab\n".encode()), "utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stream)
    arguments = [str(path), "--chat", "--device", "cpu", "--max-new-tokens", "3", "--seed", "1"]
    code = exit_code_of(lambda: sample.main(arguments))
    printed = capsys.readouterr()
    assert "'ß'" in printed.err and printed.err.count("\n") == 1 + is_terminal
    assert ("Ctrl-D ends" in printed.err) == is_terminal
    expected = (0, 2, "> > ") if is_terminal else (1, 0, "")
    assert (code, printed.out.count("\n"), printed.out[:4]) == expected


def hear_ctrl_c() -> None:
    """Let Ctrl-C reach the process even if this one ignores it, as in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat(tmp_path):
    model = GPT(ModelConfig(vocab_size=CHAT.vocab_size, context_length=10**5, d_model=8))
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, float(name == "token_embedding.weight"))
    torch.nn.init.ones_(model.head.weight[ord("x")])  # it always answers xxxx…
    path = save_run(model, tmp_path / "run", CHAT, "chats")
    terminal, child = pty.openpty()
    flags = ["--chat", "--device", "cpu", "--max-new-tokens", str(10**6)]
    command = [sys.executable, ROOT / "sample.py", path, *flags]
    streams = {"stdin": child, "stdout": child, "stderr": child, "start_new_session": True}
    process = subprocess.Popen(command, preexec_fn=hear_ctrl_c, **streams)
    os.close(child)

    def read_until(text: str) -> None:
        shown = ""
        while text not in shown:
            assert select.select([terminal], [], [], 60)[0], shown
            shown += os.read(terminal, 4096).decode()

    read_until("> ")
    os.write(terminal, b"hello\n")
    read_until("xxxx")
    os.write(terminal, b"\x03")
    read_until("> ")
    while process.poll() is None:  # a key just before input() waits is seen with the next one
        os.write(terminal, b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(4)
    assert process.returncode == 0
    os.close(terminal)


# Weights, settings and templates.


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
    with pytest.raises(UserError, match=r"--quantize: .*--device cpu"):
        sample.load(trained, "meta", quantize="int8")


def test_a_closed_standard_input_is_an_error(trained, chat_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for path, flag in ((trained, "-"), (chat_model, "--chat")):
        with pytest.raises(UserError, match="standard input is closed"):
            sample.main([str(path), flag, "--device", "cpu"])


def test_a_flag_sets_a_variable_and_a_failing_chat_template_stops_chats_only(tmp_path, capsys):
    model = GPT(ModelConfig(vocab_size=CHAT.vocab_size, context_length=64, d_model=8))
    strict = "{{ messages[0].content }}<|end|>{{ raise_exception('no') if style is undefined }}"
    document = with_extension(CHAT.document, chat_template=strict)
    run = save_run(model, tmp_path / "run", from_document(document), "chats")
    path = run / "checkpoints" / "step-00000001"
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    files = ["--prompts-file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    arguments = [str(path), "--device", "cpu", "--max-new-tokens", "2"]
    style = ["--template-variable", "style=1"]
    sample.main([*arguments, "--chat", *files, *style])
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}: .*no"):
        sample.main([*arguments, "--chat", *files])
    with pytest.raises(SystemExit):  # not a chat
        sample.main([*arguments, *files, *style])
    assert "--template-variable" in capsys.readouterr().err
    sample.main([str(path), "a", *arguments[1:]])
    assert capsys.readouterr().out.startswith("a")


def test_a_chat_in_the_page_has_room_for_the_next_question(trained, chat_model, monkeypatch):
    lengths = []
    page = "engine.report.model_page"
    keep = lambda model, settings, prompts: lengths.append(settings["max_new_tokens"])  # noqa: E731
    monkeypatch.setattr(f"{page}.make_page", keep)
    monkeypatch.setattr(f"{page}.open_page", lambda *_: None)
    for path in (trained, chat_model):
        for flags in ([], ["--max-new-tokens", "400"]):
            sample.main([str(path), "--page", *flags])
    assert lengths == [500, 400, 48, 400]


def test_a_model_recommends_its_sampling_and_flags_have_the_last_word(output_of, tmp_path, trained):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for checkpoint in run.glob("checkpoints/*"):
        recommended = {"temperature": 1e6, "top_k": 1, "top_p": None, "eos_token_id": 3}
        (checkpoint / "generation_config.json").write_text(json.dumps(recommended))
    expected = output_of("äö", "--temperature", 0, "--max-new-tokens", 20)
    assert output_of("äö", "--max-new-tokens", 20, path=run) == expected
    assert sample.load(run, "cpu").generate("äö", max_new_tokens=20) == expected[2:-1]
    flags = ["--top-k", 0, "--max-new-tokens", 20]
    assert output_of("äö", *flags, path=run) == output_of("äö", "--temperature", 1e6, *flags)
    (checkpoint / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(UserError, match=r"generation_config\.json: temperature"):
        output_of("a", path=checkpoint)


@pytest.mark.parametrize("key", ['"key"', "'key'", "  "])
def test_a_key_has_neither_quotes_nor_only_spaces(key, monkeypatch):
    monkeypatch.setenv("GPT_API_KEY", key)
    with pytest.raises(UserError, match="GPT_API_KEY"):
        sample.SampleConfig(serve=True, host="0.0.0.0")
    monkeypatch.setenv("GPT_API_KEY", " key\n")
    assert sample.SampleConfig(serve=True, host="0.0.0.0").api_key == "key"
