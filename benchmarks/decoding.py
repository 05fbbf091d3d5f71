"""Measure decoding in each dtype next to Hugging Face and llama.cpp, in turn, in one process.

    python -m benchmarks.decoding [--rounds N] [--batches 1 8 32]

The models have GPT-2 124M's shape and the same random weights. llama.cpp takes part where the
package llama-cpp-python is installed.
"""

from engine.core.cli import run_command, tune_openmp_spinning

if __name__ == "__main__":
    tune_openmp_spinning("decode")  # before torch is imported

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from annotated_types import Ge

from benchmarks import peers
from benchmarks.speed import GPT2_SETTINGS, NUM_NEW_TOKENS, decode_rows
from engine.core.settings import parse
from engine.data.tokenizer import named_tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import TextOptions
from engine.huggingface import convert, directory, gguf
from engine.huggingface.families import MODEL_FAMILIES
from engine.nn.inference import build_decoder
from model import GPT, ModelConfig

GPT2_CONFIG = ModelConfig(
    vocab_size=50257,
    context_length=1024,
    num_layers=12,
    num_heads=12,
    d_model=768,
    d_ff=3072,
    norm_epsilon=1e-5,
    **GPT2_SETTINGS,
)
NUM_FIRST_TOKENS = 8  # of the prompt that is continued
NUM_PROMPT_TOKENS = 512  # of the prompt that is only read
COPY_BYTES = 2**28
MAX_BATCH_TEXTS = 32
MAX_CACHED_TOKENS = MAX_BATCH_TEXTS * (NUM_FIRST_TOKENS + NUM_NEW_TOKENS)
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "f32": 4, "bf16": 2, "q8_0": 34 / 32}
WEIGHT_BYTES["q4_0"] = 18 / 32


@dataclass(frozen=True)
class DecodingConfig:
    """Measure decoding in each dtype next to Hugging Face and llama.cpp."""

    rounds: Annotated[int, Ge(1)] = 5  # Turns of each contestant.
    batches: tuple[int, ...] = (1, 8, 32)  # Texts that are decoded at once.


class Contestant(Protocol):
    """A model that decodes greedily."""

    def decode(self, num_rows: int) -> None:
        """Continue num_rows prompts by NUM_NEW_TOKENS."""
        ...

    def read(self) -> None:
        """Compute the logits after a prompt of NUM_PROMPT_TOKENS."""
        ...


def prompt(num_tokens: int, num_rows: int = 1) -> torch.Tensor:
    """Return the ids of a prompt, repeated: (num_rows, num_tokens)."""
    ids = torch.arange(num_tokens) * 7919 % (GPT2_CONFIG.vocab_size or 0)
    return ids.expand(num_rows, -1)


class Ours:
    """This project, in a dtype or with 8-bit weights."""

    def __init__(self, model: GPT, dtype: str):
        if dtype == "bfloat16":
            converted = GPT(model.config).bfloat16().eval()
            converted.load_state_dict(model.state_dict())
            model = converted
        self.model = build_decoder(model, quantize=dtype == "int8")

    def decode(self, num_rows: int) -> None:
        ids = prompt(NUM_FIRST_TOKENS)[0].tolist()
        list(decode_rows(self.model, ids, NUM_NEW_TOKENS, num_rows, temperature=0))

    def read(self) -> None:
        engine = DecodingEngine(self.model)
        engine.add(prompt(NUM_PROMPT_TOKENS)[0].tolist())
        engine.read(0)


class HuggingFace:
    """GPT2LMHeadModel of transformers."""

    def __init__(self, dtype: torch.dtype):
        self.model = peers.make_hf_gpt2(GPT2_CONFIG).to(dtype).eval()

    def decode(self, num_rows: int) -> None:
        tokens = prompt(NUM_FIRST_TOKENS, num_rows)
        length = dict.fromkeys(("max_new_tokens", "min_new_tokens"), NUM_NEW_TOKENS)
        mask = torch.ones_like(tokens)
        self.model.generate(tokens, attention_mask=mask, do_sample=False, **length)

    @torch.inference_mode()
    def read(self) -> None:
        self.model(prompt(NUM_PROMPT_TOKENS), use_cache=True, logits_to_keep=1)


class LlamaCpp:
    """llama.cpp, by the C functions that llama-cpp-python binds."""

    def __init__(self, path: Path):
        self.lib: Any = importlib.import_module("llama_cpp")
        self.log_callback = self.lib.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self.log_callback, None)
        self.lib.llama_backend_init()
        model_params = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), model_params)
        context_params = self.lib.llama_context_default_params()
        context_params.n_ctx = MAX_CACHED_TOKENS
        context_params.n_batch = NUM_PROMPT_TOKENS
        context_params.n_ubatch = NUM_PROMPT_TOKENS
        context_params.n_seq_max = MAX_BATCH_TEXTS
        context_params.kv_unified = True
        context_params.n_threads = torch.get_num_threads()
        context_params.n_threads_batch = torch.get_num_threads()
        self.context = self.lib.llama_init_from_model(self.model, context_params)
        self.batch = self.lib.llama_batch_init(NUM_PROMPT_TOKENS, 0, 1)

    def forward(self, tokens: np.ndarray, start: int) -> list[int]:
        """Decode tokens (rows, T) from a position on; return each row's most likely next id."""
        num_rows, length = tokens.shape
        batch = self.batch
        batch.n_tokens = tokens.size
        for index, token in enumerate(tokens.flatten().tolist()):
            row, offset = divmod(index, length)
            batch.token[index] = token
            batch.pos[index] = start + offset
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = offset == length - 1
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        ids = []
        for row in range(num_rows):
            pointer = self.lib.llama_get_logits_ith(self.context, (row + 1) * length - 1)
            logits = np.ctypeslib.as_array(pointer, (GPT2_CONFIG.vocab_size or 0,))
            ids.append(int(logits.argmax()))
        return ids

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def decode(self, num_rows: int) -> None:
        self.clear()
        ids = self.forward(prompt(NUM_FIRST_TOKENS, num_rows).numpy(), 0)
        for position in range(NUM_FIRST_TOKENS, NUM_FIRST_TOKENS + NUM_NEW_TOKENS - 1):
            ids = self.forward(np.array(ids)[:, None], position)

    def read(self) -> None:
        self.clear()
        self.forward(prompt(NUM_PROMPT_TOKENS).numpy(), 0)


def make_contestants(folder: Path) -> dict[str, Contestant]:
    """Make all models; those of llama.cpp from files in a folder, with our weights."""
    model = GPT(GPT2_CONFIG).eval()
    names = ("float32", "bfloat16", "int8")
    contestants: dict[str, Contestant] = {f"ours, {name}": Ours(model, name) for name in names}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        contestants[f"Hugging Face, {name}"] = HuggingFace(dtype)
    if not importlib.util.find_spec("llama_cpp"):
        print("llama.cpp is left out: pip install llama-cpp-python")
        return contestants
    tokenizer = named_tokenizer("gpt2")
    family = MODEL_FAMILIES["gpt2"]
    tensors = convert.to_hf(dict(model.named_parameters()), family)
    hf_config = convert.to_hf_config(GPT2_CONFIG, family) | directory.special_token_ids(tokenizer)
    for dtype_name in ("f32", "bf16", "q8_0", "q4_0"):
        path = folder / f"{dtype_name}.gguf"
        gguf.write(path, hf_config, tensors, tokenizer, None, dtype_name)
        contestants[f"llama.cpp, {dtype_name}"] = LlamaCpp(path)
    return contestants


def default_model_milliseconds(num_rounds: int) -> dict[str, float]:
    """Return the milliseconds for a token of the default run's model, most likely or sampled."""
    model = GPT(ModelConfig(vocab_size=2048)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    decoder = build_decoder(model)
    ids = list(range(NUM_FIRST_TOKENS))
    most_likely: TextOptions = {"temperature": 0}
    sampled: TextOptions = {"temperature": 0.8, "top_p": 0.95}
    calls = {
        "most likely": lambda: list(decode_rows(decoder, ids, NUM_NEW_TOKENS, **most_likely)),
        "sampled": lambda: list(decode_rows(decoder, ids, NUM_NEW_TOKENS, **sampled)),
    }
    seconds = take_turns(calls, 5 * num_rounds)
    return {name: 1000 * time / NUM_NEW_TOKENS for name, time in seconds.items()}


def take_turns(calls: Mapping[str, Callable[[], Any]], num_rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, after one warmup call of each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(num_rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def copy_speed() -> float:
    """Return the bytes that this machine reads and writes in a second, copying memory."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = take_turns({"copy": partial(target.copy_, source)}, 5)
    return 2 * COPY_BYTES / seconds["copy"]


def main(arguments: list[str] | None = None) -> None:
    """Print tokens per second of each contestant, and the bytes of weights that one text reads."""
    config = parse(DecodingConfig, arguments)
    num_weights = GPT(GPT2_CONFIG).num_parameters
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; ", end="")
    print(f"memory is copied at {copy_speed() / 1e9:.1f} GB/s")
    milliseconds = default_model_milliseconds(config.rounds)
    texts = ", ".join(f"{name} {value:.2f} ms" for name, value in milliseconds.items())
    print(f"a token of the default run's model: {texts}")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        contestants = make_contestants(Path(folder))
        columns = {}
        for num_rows in config.batches:
            calls = {name: partial(each.decode, num_rows) for name, each in contestants.items()}
            seconds = take_turns(calls, config.rounds)
            columns[f"{num_rows} at once"] = {
                name: num_rows * NUM_NEW_TOKENS / time for name, time in seconds.items()
            }
        seconds = take_turns({name: each.read for name, each in contestants.items()}, config.rounds)
        columns["prompt"] = {name: NUM_PROMPT_TOKENS / time for name, time in seconds.items()}
    print(f"\n{'tokens/s':<24}" + "".join(f"{column:>14}" for column in columns) + "  GB/s")
    for name in contestants:
        cells = "".join(f"{rates[name]:>14,.1f}" for rates in columns.values())
        weight_bytes = WEIGHT_BYTES[name.split(", ")[1]] * num_weights
        one_text = next(iter(columns.values()))[name] / config.batches[0]
        print(f"{name:<24}{cells}{weight_bytes * one_text / 1e9:>6.1f}")
    print(json.dumps(columns))


if __name__ == "__main__":
    run_command(main)
