"""Inductor compiles a training step for GPUs, without one; without Triton, tests skip themselves.

pip install triton, beside a torch for CPUs, lets them run.
"""

from functools import partial

import pytest
from helpers import VARIANTS, imitate_cuda

LONG = {"windows": (70,), "context_length": 300}


@pytest.fixture(scope="module", params=["75", "90"], ids="sm_{}".format)
def run(request, tmp_path_factory):
    """Train for a GPU of a capability on the imitated device; return reports."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        with imitate_cuda(folder, request.param) as run:  # an old one has no bfloat16
            yield partial(run, dtype="float16" if request.param == "75" else "bfloat16")


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_of_a_block_and_the_loss_compile(run, name):
    changes = LONG if name == "qwen3" else {}
    report = run(name, changes, compile=True, change="keep losses")["training"]
    assert not report["warnings"] and not report["breaks"] and report["graphs"] == 3
    assert report["kernels"] > 40
