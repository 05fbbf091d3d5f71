"""Captures of CUDA graphs: what a failed one leaves, and the memory of keys. No GPU is needed."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine.core.device import release_memory
from engine.nn.acceleration import CapturedCalls, GraphPool, can_capture_graphs

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """The state that torch.cuda has as of torch 2.11 to 2.13: a failed capture does not restore it.

    Its graphs compute when they are captured, and when they are replayed.
    """
    state = SimpleNamespace(stream="default", is_recording=False, events=[])

    class FakeStream:
        def wait_stream(self, stream):
            state.events.append((stream, "before", self))

    class FakeGraph:
        def replay(self):
            state.events.append("replay")

    class FakeCapture:
        def __init__(self, graph, memory, stream, capture_error_mode):
            self.stream = stream

        def __enter__(self):
            assert not state.is_recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
            self.outer = state.stream
            state.stream = self.stream
            state.is_recording = True

        def __exit__(self, error_type, error, _):
            if error is not None:
                raise RuntimeError("operation failed due to a previous error during capture")
            state.stream = self.outer
            state.is_recording = False

    @contextlib.contextmanager
    def use_stream(stream):
        outer = state.stream
        state.stream = stream
        yield
        state.stream = outer

    def empty_cache():
        if state.is_recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    stream = FakeStream()
    default = FakeStream()
    state.stream = default
    state.default = default
    replacements = {
        "Stream": lambda device: stream,
        "CUDAGraph": FakeGraph,
        "graph": FakeCapture,
        "stream": use_stream,
        "current_stream": lambda device: state.stream,
        "set_stream": lambda new: setattr(state, "stream", new),
        "graph_pool_handle": object,
        "empty_cache": empty_cache,
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
    end = lambda index, memory: setattr(state, "is_recording", False)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    return state


def test_a_failed_capture_leaves_neither_a_stream_nor_memory(cuda):
    reasons = []
    pool = GraphPool(DEVICE, reasons.append)
    calls = CapturedCalls(pool)
    held = []

    def compute(x):
        activations = torch.ones(3)
        if cuda.is_recording:
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("the first cause")
        held.append([ref() is None for ref in held if isinstance(ref, weakref.ref)])
        return x + activations

    gc.disable()
    try:
        results = [calls(compute, torch.zeros(3)).tolist() for _ in range(3)]
    finally:
        gc.enable()
    assert results == [[1.0] * 3] * 3
    assert held[2:] == [[True], [True]]  # in the plain call after it, its activations are gone
    assert len(reasons) == 1 and "the first cause" in reasons[0]
    assert cuda.stream is cuda.default and not cuda.is_recording
    release_memory(DEVICE)
    later_calls = CapturedCalls(GraphPool(DEVICE, reasons.append))
    for _ in range(3):
        later_calls(lambda x: x, torch.zeros(3))
    assert later_calls.num_captures == 1 and len(reasons) == 1


def test_a_new_key_gets_the_memory_of_the_graphs_before_it(cuda):
    calls = CapturedCalls(GraphPool(DEVICE, pytest.fail))
    graphs = []
    memories = []

    def compute(x, key):
        if cuda.is_recording:
            memories.append(calls.memory)
        else:
            graphs.append([ref() is None for ref in refs])
        return x

    refs = []
    for key in (1, 1, 2, 2, 1, 2, 1):
        calls(compute, torch.zeros(1), key=(key,))
        refs = [weakref.ref(graph[0]) for graph in calls.graphs.values() if graph] or refs
    assert graphs == [[], [True]]  # no graph is alive when the second key runs plainly
    assert calls.num_captures == 3 and memories[0] is not memories[1] is memories[2]


def test_nothing_is_captured_on_rocm(monkeypatch):
    assert can_capture_graphs(DEVICE)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not can_capture_graphs(DEVICE)
