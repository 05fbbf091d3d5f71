"""Changes to a model for training, and functions that a GPU repeats without waiting for the host.

Activation checkpointing and compilation replace methods on the instance. That keeps the names in a
state_dict, can be undone, and composes with FSDP, which replaces a block's class.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.core.errors import UserError, describe_briefly

MAX_COMPILATIONS = 64  # of a method, for shapes, modes and windows; Dynamo's limit is 8
MAX_GRAPHS = 16  # of a function; other shapes run plainly


class CaptureError(RuntimeError):
    """A step differs from the captured one, so that it cannot be replayed."""


def checkpoint_activations(model: nn.Module, keeps_generator: bool = True) -> None:
    """Store only the input of each block, and recompute its activations: Chen et al. 2016.

    Without ``keeps_generator``, random numbers of the second pass differ.
    """

    def recompute(block: nn.Module, *inputs: object) -> Tensor:  # Dynamo 2.14 takes no partial
        forward = type(block).forward
        return checkpoint(
            forward, block, *inputs, use_reentrant=False, preserve_rng_state=keeps_generator
        )

    for block in model.get_submodule("blocks").children():
        block.forward = MethodType(recompute, block)


def compile_methods(
    methods: Sequence[tuple[nn.Module, str]], dynamic: bool | None = None
) -> Callable[[], None]:
    """Compile methods of modules, given by their names, in place; return a function to undo it.

    ``dynamic`` is that of torch.compile: whether shapes vary.
    """
    originals = [getattr(module, name) for module, name in methods]
    torch.compiler.config.recompile_limit = MAX_COMPILATIONS
    for (module, name), original in zip(methods, originals, strict=True):
        setattr(module, name, torch.compile(original, dynamic=dynamic))

    def undo() -> None:
        for (module, name), original in zip(methods, originals, strict=True):
            setattr(module, name, original)

    return undo


class GraphPool:
    """Records CUDA graphs, of which one is replayed at a time."""

    def __init__(self, device: torch.device, on_failure: Callable[[str], object]):
        """Call ``on_failure`` with the reason when a capture fails; then all calls are plain."""
        self.on_failure = on_failure
        self.is_enabled = True
        self.device = device

    def new_memory(self) -> Any:
        """Return a handle of memory for graphs: one whose graphs are all gone is not reused."""
        return torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function on the stream of the captures, as libraries prepare for a stream."""
        stream = capture_stream(self.device, threading.get_ident())
        current_stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(current_stream)
        with torch.cuda.stream(stream):
            result = function()
        current_stream.wait_stream(stream)
        return result

    def capture(self, function: Callable[[], Any], memory: Any) -> Callable[[], Any] | None:
        """Record what a function does on the GPU, without doing it; return what replays it.

        None, if that fails, and nothing is captured any more. Graphs of one memory overwrite each
        other's results.
        """
        causes: list[str] = []

        def record() -> Any:
            try:
                return function()
            except Exception as error:
                causes.append(describe_briefly(error))
                raise

        try:
            return self._capture(record, memory)
        except CaptureError:
            raise
        except Exception as error:  # of CUDA, a compiler or a hook
            causes.append(describe_briefly(error))
        # The error is gone, and with it what the capture held in memory.
        self.fail(f"their capture failed: {causes[0]}")
        return None

    def _capture(self, function: Callable[[], Any], memory: Any) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # threads that load data may use the GPU meanwhile
        stream = capture_stream(self.device, threading.get_ident())
        current_stream = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, memory, stream, capture_error_mode=mode):
                result = function()
        except Exception:
            torch.cuda.set_stream(current_stream)  # torch 2.13 leaves that of the capture
            with contextlib.suppress(Exception):  # torch 2.12 leaves allocations in the capture
                torch._C._cuda_endAllocateToPool(self.device.index, memory)
            raise

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def fail(self, reason: str) -> None:
        """Capture nothing from now on."""
        self.is_enabled = False
        self.on_failure(reason)


@functools.cache
def capture_stream(device: torch.device, thread_id: int) -> torch.cuda.Stream:
    """Return the stream of all captures of a thread: libraries keep a workspace for each one."""
    return torch.cuda.Stream(device)


# By type of device. Tests add an imitation for a CPU.
GRAPH_POOLS: dict[str, type[GraphPool]] = {"cuda": GraphPool}


def can_capture_graphs(device: torch.device) -> bool:
    """Return whether functions can be captured on a device; on ROCm, training got worse."""
    return device.type in GRAPH_POOLS and torch.version.hip is None


class CapturedCalls:
    """Calls of a function of tensors, replayed as a CUDA graph for each key and shapes of inputs.

    The first call of a key runs plainly, the second is captured and replayed, later ones replay.
    So whatever changes between two calls must be an input or part of the key.
    """

    def __init__(self, pool: GraphPool | None):
        """Start without graphs; without a pool, all calls are plain."""
        self.pool = pool
        self.num_captures = 0
        # What replays a key, and the memory of its inputs; None: it was called once.
        self.graphs: dict[Hashable, tuple[Callable[[], Any], list[Tensor]] | None] = {}
        self.drop_graphs()

    def drop_graphs(self) -> bool:
        """Free the memory of all graphs, and return whether there were any; keys stay known."""
        has_graphs = any(self.graphs.values())
        self.graphs = dict.fromkeys(self.graphs)
        self.memory = self.pool and self.pool.new_memory()
        return has_graphs

    def __call__(
        self, function: Callable[..., Any], *inputs: Tensor, key: tuple[Hashable, ...] = ()
    ) -> Any:
        """Return function(*inputs, *key). The function must be the same in all calls.

        It is not stored: a cycle through its object would keep memory until a garbage collection.
        """
        pool = self.pool
        call = partial(function, *inputs, *key)
        if pool is None or not pool.is_enabled:
            self.graphs.clear()
            return call()
        graph_key = (key, *(tensor.shape for tensor in inputs))
        if graph_key not in self.graphs:
            if len(self.graphs) == MAX_GRAPHS:
                return call()
            self.drop_graphs()  # the plain call needs the memory of their activations
            result = pool.run(call)
            self.graphs[graph_key] = None
            return result
        graph = self.graphs[graph_key]
        if graph is None:
            static_inputs = [tensor.clone() for tensor in inputs]
            replay = pool.capture(partial(function, *static_inputs, *key), self.memory)
            if replay is None:
                self.graphs.clear()
                return call()
            self.num_captures += 1
            graph = self.graphs[graph_key] = (replay, static_inputs)
        replay, static_inputs = graph
        for static_input, tensor in zip(static_inputs, inputs, strict=True):
            static_input.copy_(tensor)
        return replay()


class StaticGradients:
    """Gradients of parameters, in memory that captured steps know."""

    def __init__(self, params: Sequence[nn.Parameter]):
        self.params = params
        self.buffers: list[Tensor | None] = []  # of each parameter; None: it has no gradient

    def compute(self, loss: Tensor, adds: bool) -> None:
        """Set the gradients to those of a loss, or add them.

        Raises CaptureError if others have a gradient than in the first pass, before any change.
        """
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        if not self.buffers:
            self.buffers = [None if grad is None else torch.empty_like(grad) for grad in grads]
        for buffer, grad in zip(self.buffers, grads, strict=True):
            if (buffer is None) != (grad is None):
                raise CaptureError("which parameters have a gradient has changed")
        targets = [buffer for buffer in self.buffers if buffer is not None]
        sources = [grad for grad in grads if grad is not None]
        if adds:
            torch._foreach_add_(targets, sources)
        else:
            torch._foreach_copy_(targets, sources)
        for param, buffer in zip(self.params, self.buffers, strict=True):
            param.grad = buffer


class Acceleration:
    """Compilation of a model, and captured steps; without what fails, training continues."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        warn: Callable[[str], object],
        warm_up: Callable[[], object],
        captures: bool,
        compiles_blocks: bool,
        is_dynamic: bool,
    ):
        """Let steps be captured; then, or if ``compiles_blocks``, compile blocks, not the model.

        To compile is to call ``warm_up``, which must run the model. Shapes vary if ``is_dynamic``.
        """
        self.model = model
        self.warn = warn
        self.warm_up = warm_up
        self.is_dynamic = is_dynamic
        self.compiles_blocks = compiles_blocks
        self.pool: GraphPool | None = None
        if captures:
            self.pool = GRAPH_POOLS[device.type](device, self._stop_capturing)
        self.undo_compilation: Callable[[], None] | None = None
        # Called after torch.OutOfMemoryError; returns whether less memory is needed from now on.
        self.make_room: Callable[[], bool] = lambda: False

    @property
    def captures(self) -> bool:
        """Whether steps are captured."""
        return self.pool is not None and self.pool.is_enabled

    def compile(self) -> None:
        """Compile the model in place, and call it.

        Captured blocks are as fast as a compiled model, and take a fifth of the time to compile.
        """
        methods = [(self.model, "forward")]
        if self.captures or self.compiles_blocks:
            blocks = self.model.get_submodule("blocks").children()
            methods = [(block, "forward") for block in blocks]
        if self.captures:
            methods.append((self.model, "training_loss"))
        self.undo_compilation = compile_methods(methods, self.is_dynamic if self.captures else None)
        if self.pool and self.captures:  # a capture must not wait for what another stream has made
            self.run_with_fallback(self.pool.run, self.warm_up)
        else:
            self.run_with_fallback(self.warm_up)

    def run_with_fallback(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments); call it again after an error of compilation or capture."""
        while True:
            try:
                return function(*arguments)
            except Exception as error:  # compilers and the programs that they call raise any class
                if not self._fall_back(error):
                    raise

    def _fall_back(self, error: Exception) -> bool:
        """Stop what may have caused an error, with a warning; return whether there was anything."""
        if isinstance(error, CaptureError) and self.pool and self.captures:
            self.pool.fail(str(error))
        elif isinstance(error, torch.OutOfMemoryError):
            if not self.make_room():
                return False
        elif self.undo_compilation and not isinstance(error, UserError):
            self._undo()
            reason = describe_briefly(error)
            self.warn(f"training continues without compilation, which failed: {reason}")
        else:
            return False
        if not self.captures:
            self.model.zero_grad()  # of an unfinished pass
        return True

    def uncompiled(self) -> contextlib.AbstractContextManager:
        """Return a context in which the model computes as if it were not compiled."""
        if self.undo_compilation is None:  # a stance imports the compiler
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    def step_back(self, problem: str) -> None:
        """Stop capturing, or else compiling, whose results differ from plain ones."""
        if self.pool and self.captures:
            self.pool.fail(f"captured {problem}")
        elif self.undo_compilation:  # None where a capture failed during the comparison
            self._undo()
            self.warn(f"training continues without compilation (--no-compile): compiled {problem}")

    def _stop_capturing(self, reason: str) -> None:
        """Compile the model as a whole, which is faster without captured steps."""
        self.warn(f"training continues without CUDA graphs (--no-capture): {reason}")
        if self.undo_compilation:
            self._undo()
            self.compile()

    def _undo(self) -> None:
        assert self.undo_compilation
        self.undo_compilation()
        self.undo_compilation = None
