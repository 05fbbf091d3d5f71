"""On an imitated CUDA device, steps and tokens can be captured, in the dtype of the run."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, VARIANTS, make_dataset

NO_FINDINGS = {"failures": [], "findings": [], "events": []}
ADAMW = {"optimizer": {"optimizer": "adamw"}}
LONG = {"windows": (70,), "context_length": 300, "num_layers": 2}
# The variant of the model, changes of it, and options of the run.
RUNS = {
    "micro-batches": ("default", {"dropout": 0.1}, {"micro_batch_size": 2}),
    "gpt2": ("gpt2", {}, {"dtype": "float16", **ADAMW}),
    "2017": ("2017", {}, {}),
    "relu2": ("relu2", {}, {"dtype": "float16"}),
    "qwen3": ("qwen3", {"num_layers": 2}, ADAMW),
    "windows": ("qwen3", LONG, {"optimizer": {"window_warmup": 0.5}}),
    "documents": ("qwen3", {"windows": (5,)}, {"document_mask": True, "dtype": "float16"}),
    "float32": ("default", {"rope_scaling": (8.0, 1.0, 4.0, 8192.0)}, {"dtype": "float32"}),
    "checkpointed": ("default", {}, {"checkpoint_activations": True}),
    "loop": ("default", {"attention": "loop"}, {}),
    "lora": ("default", {}, {"lora_rank": 4}),
    "compiled": ("default", {}, {"compile": True, "change": "keep losses"}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train and decode on the imitated device, in a process of its own; return its reports."""
    compiler = shutil.which("c++")
    if not compiler or sys.platform != "linux" or torch.version.cuda:
        pytest.skip("needs Linux, a C++ compiler, and a torch for CPUs")
    folder = tmp_path_factory.mktemp("fake_cuda")
    torch_folder = Path(torch.__file__).parent
    options = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include"]
    files = [ROOT / "tests/fake_cuda.cpp", "-o", folder / "fake_cuda.so"]
    subprocess.run([compiler, *options, *files], check=True, timeout=120)
    data = make_dataset(folder, [{"text": "abc " * (n % 9)} for n in range(500)])
    command = [sys.executable, ROOT / "tests/fake_cuda.py", folder / "fake_cuda.so", data]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(variant="default", changes=(), **options):
        config = dataclasses.replace(VARIANTS[variant], **{"num_layers": 1, **dict(changes)})
        settings = {"change": "", "optimizer": {}, "dtype": "bfloat16", **options}
        line = json.dumps({**settings, "architecture": dataclasses.asdict(config)})
        print(line, file=process.stdin, flush=True)
        reports = json.loads(process.stdout.readline())
        assert "error" not in reports, reports["error"]
        return reports

    with subprocess.Popen(command, env=env, **pipes) as process:
        yield run


@pytest.mark.parametrize("name", RUNS)
def test_steps_and_tokens_can_be_captured_and_attention_has_the_dtype_of_the_run(run, name):
    variant, changes, options = RUNS[name]
    reports = run(variant, changes, **options)
    dtype = options.get("dtype", "bfloat16")
    # Without autocast, a decoder has weights in float32.
    expected = {"training": dtype, "decoding": "float32", "decoding with autocast": dtype}
    dtypes = {phase: [] if name == "loop" else [dtype] for phase, dtype in expected.items()}
    num_captures = [reports[phase].pop("captures") for phase in expected]
    assert reports == {phase: {**NO_FINDINGS, "dtypes": dtypes[phase]} for phase in expected}
    assert num_captures[0] >= 3 + (name == "micro-batches")  # the pass, the norm and the update
    assert num_captures[1] >= 2 * (name != "loop")  # one row, and two


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        ("item", "findings", "_local_scalar_dense"),
        ("comparison", "findings", "equal"),
        ("list", "findings", "lift_fresh"),
        ("CPU tensor", "findings", "mul"),
        ("copy", "findings", "_to_copy"),
        ("stream", "events", "waits for stream"),
        ("norm", "dtypes", "float32"),
    ],
)
def test_what_a_gpu_refuses_to_capture_is_reported(run, change, key, text):
    assert any(text in line for line in run(change=change)["training"][key])
