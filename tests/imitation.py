"""An imitation of CUDA graphs on a CPU: it replays a function, and checks that a graph could.

A replay calls the function, and compares its operations with those of the capture: a graph repeats
these, with the same numbers, in the same memory. Its results are always the same tensors.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.nn import inference
from engine.nn.acceleration import GRAPH_POOLS, GraphPool

# They wait for the device.
WAITING = ("item.", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal.")
REFUSED = (*WAITING, "lift_fresh")  # which copies from the host


class TracedOperations(TorchDispatchMode):
    """Records operations with their numbers, and the memory that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.internal: dict[int, torch.UntypedStorage] = {}  # kept, so that no address returns

    def describe(self, value: Any) -> Any:
        if isinstance(value, torch.ScriptObject):
            return type(value)
        if not isinstance(value, Tensor):
            return value
        if value.is_mkldnn:
            return ("packed tensor", tuple(value.shape))
        storage = value.untyped_storage()
        address = None if storage.data_ptr() in self.internal else value.data_ptr()
        return ("tensor", tuple(value.shape), value.stride(), value.dtype, address)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        name = str(function)
        if any(refused in name for refused in REFUSED):
            raise RuntimeError(f"{name} waits for the device, or copies from the host")
        values = tree_leaves((arguments, keywords))
        tensors = [value for value in values if isinstance(value, Tensor) and not value.is_mkldnn]
        before = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.operations.append((name, *map(self.describe, values)))
        result = function(*arguments, **keywords)
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in before:
                storage = value.untyped_storage()
                self.internal[storage.data_ptr()] = storage
        return result


class ImitatedPool(GraphPool):
    """Replays functions on a CPU; a replay overwrites the results of all graphs of the pool."""

    captures = 0  # of all pools
    replays = 0

    def __init__(self, device: torch.device, on_failure: Callable[[str], object]):
        super().__init__(device, on_failure)
        self.results: list[Any] = []

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def new_memory(self) -> object:
        return object()

    def _capture(self, function: Callable[[], Any], memory: object) -> Callable[[], Any]:
        """Record the operations of a function; as it computes, the first replay does not."""
        ImitatedPool.captures += 1
        self._poison_results()
        generator_state = torch.get_rng_state()
        try:
            with TracedOperations() as trace:
                results = function()
        except Exception:
            torch.set_rng_state(generator_state)  # a capture draws nothing
            raise
        results = tree_map(copy_tensor, results)
        self.results.append(results)
        operations = trace.operations
        is_computed = [True]

        def replay() -> Any:
            ImitatedPool.replays += 1
            if is_computed:
                is_computed.clear()
                return results
            self._poison_results()
            with TracedOperations() as trace:
                new_results = function()
            for old, new in zip_longest(operations, trace.operations):
                assert old == new, f"a graph repeats {old}, and not {new}"
            for old, new in zip(tree_leaves(results), tree_leaves(new_results), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
            return results

        return replay

    def _poison_results(self) -> None:
        for value in tree_leaves(self.results):
            if isinstance(value, Tensor):
                value.fill_(torch.nan if value.is_floating_point() else -(2**30))


def copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def imitate_graphs(monkeypatch: Any) -> type[ImitatedPool]:
    """Let a CPU take the path of a GPU that replays graphs; return the class that counts."""
    monkeypatch.setitem(GRAPH_POOLS, "cpu", ImitatedPool)
    monkeypatch.setattr(inference, "RotationTable", lambda rotations: rotations)  # of CPUs only
    monkeypatch.setattr(ImitatedPool, "captures", 0)
    monkeypatch.setattr(ImitatedPool, "replays", 0)
    return ImitatedPool
