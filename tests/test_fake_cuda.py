"""On an imitated CUDA device, steps and tokens can be captured, in the dtype of the run."""

import pytest
from helpers import imitate_cuda

NO_FINDINGS = {"warnings": [], "findings": [], "events": [], "breaks": 0, "kernels": 0}
ADAMW = {"optimizer": {"optimizer": "adamw"}}
LONG = {"windows": (70,), "context_length": 300}  # more than a window, and several blocks of it
# The variant of the model, changes of it, and options of the run.
RUNS = {
    "micro-batches": ("default", {"dropout": 0.1}, {"micro_batch_size": 2}),
    "gpt2": ("gpt2", {}, {"dtype": "float16", **ADAMW}),
    "2017": ("2017", {}, {"checkpoint_activations": True}),
    "relu2": ("relu2", {}, {"dtype": "float16"}),
    "windows": ("qwen3", LONG, {"optimizer": {"window_warmup": 0.5}}),
    "documents": ("qwen3", {"windows": (5,)}, {"document_mask": True, **ADAMW}),
    "float32": ("qwen3", LONG | {"rope_scaling": (8.0, 1.0, 4.0, 8192.0)}, {"dtype": "float32"}),
    "loop": ("default", {"attention": "loop"}, {}),
    "lora": ("default", {}, {"lora_rank": 4}),
}
COMPILED_RUNS = ("relu2", "float32", "documents")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train and decode on the imitated device; return reports."""
    with imitate_cuda(tmp_path_factory.mktemp("fake_cuda")) as run:
        yield run


@pytest.mark.parametrize("name", RUNS)
def test_steps_and_tokens_can_be_captured_and_attention_has_the_dtype_of_the_run(run, name):
    variant, changes, options = RUNS[name]
    reports = run(variant, changes, **options)
    dtype = options.get("dtype", "bfloat16")
    # Without autocast, a decoder has weights in float32.
    decoder_dtype = dtype if name == "lora" else "float32"
    expected = {"training": dtype, "decoding": decoder_dtype, "decoding with autocast": dtype}
    dtypes = {phase: [] if name == "loop" else [dtype] for phase, dtype in expected.items()}
    num_captures = [reports[phase].pop("captures") for phase in expected]
    clean = NO_FINDINGS | {"graphs": 0}
    assert reports == {phase: {**clean, "dtypes": dtypes[phase]} for phase in expected}
    assert num_captures[0] >= 3 + (name == "micro-batches")  # the pass, the norm and the update
    assert num_captures[1] >= 2 * (name not in ("loop", "lora"))  # one row, and two


@pytest.mark.parametrize("name", COMPILED_RUNS)
def test_a_block_compiles_into_one_graph_on_the_stream_of_the_captures(run, name):
    variant, changes, options = RUNS[name]
    report = run(variant, changes, compile=True, change="keep losses", **options)["training"]
    assert report.pop("captures") >= 3
    # The block in training and in evaluation, and the loss.
    assert report == NO_FINDINGS | {"graphs": 3, "dtypes": []}


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        ("item", "findings", "_local_scalar_dense"),
        ("list", "findings", "lift_fresh"),
        ("CPU tensor", "findings", "mul"),
        ("copy", "findings", "_to_copy"),
        ("keep a loss of another stream", "events", "waits for stream"),
        ("norm", "dtypes", "float32"),
    ],
)
def test_what_a_gpu_refuses_to_capture_is_reported(run, change, key, text):
    assert any(text in line for line in run(change=change)["training"][key])
