"""Measure how fast each stage is, next to other projects, in one process.

    python -m benchmarks.speed [STAGE] [--device cpu] [--nanogpt DIR]

Contestants take turns and medians are compared, because a machine's load varies. The last line
printed is JSON.
"""

from engine.core.cli import run_command, tune_openmp_spinning

if __name__ == "__main__":
    tune_openmp_spinning("decode")  # before torch is loaded

import dataclasses
import itertools
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack, get_args

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
import tyro
from annotated_types import Ge, Le
from torch import Tensor, nn

from benchmarks import peers
from engine.core.device import choose_device, choose_dtype, keep_freed_memory, mixed_precision
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.batches import Batches
from engine.data.split import BatchSpec, Split
from engine.data.tokenizer import Tokenizer
from engine.data.tokenizer_json import SPLIT_PATTERNS
from engine.data.tokenizer_training import DEFAULT_PATTERN, train_bpe_tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import TextOptions, draw_ids, noise_states
from engine.nn.inference import build_decoder
from engine.report.callback import processor_name
from engine.training.optimizer import Optimizer, OptimizerConfig, default_rates
from model import GPT, ModelConfig

SMALL_CONFIG = ModelConfig(
    vocab_size=65, context_length=256, num_layers=6, num_heads=6, d_model=384, dropout=0.0
)
GPT2_SETTINGS: dict[str, Any] = {
    **{"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False},
    **{"tie_embeddings": True, "bias": True},
}
NUM_LOADED_BATCHES = 10_000
NUM_NEW_TOKENS = 64
MAX_PIECE_CHARACTERS = 2**19  # encoded by a thread at a time
Stage = Literal["train", "attention", "decode", "prepare", "data"]
Call = Callable[[], Any]
Batch = tuple[Tensor, Tensor]  # inputs and targets
Rates = dict[str, float]


@dataclass(frozen=True)
class BenchConfig:
    """Measure each stage next to other projects, in one process."""

    stage: tyro.conf.Positional[Stage | Literal["all"]] = "all"  # The stage to measure.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best available.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Of the matrix products in training.
    batch_size: Annotated[int, Ge(1), Le(10**6)] = 16  # Sequences in a training step.
    rounds: Annotated[int, Ge(1)] = 10  # Turns of each contestant.
    nanogpt: Path | None = None  # A clone of nanoGPT, to measure it too.

    def __post_init__(self) -> None:
        if self.nanogpt and not (self.nanogpt / "model.py").is_file():
            raise UserError(f"--nanogpt: model.py not found in {self.nanogpt}. Give a clone of it.")


def main(arguments: list[str] | None = None) -> None:
    """Measure the stages that the command line names."""
    config = parse(BenchConfig, arguments)
    bench = Bench(config, choose_device(config.device))
    keep_freed_memory()
    versions = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{bench.device} ({bench.device_name}), {versions}")
    stages = get_args(Stage) if config.stage == "all" else [config.stage]
    print(json.dumps({stage: getattr(bench, stage)() for stage in stages}))


def print_rates(title: str, unit: str, rates: Rates, baseline: str) -> None:
    """Print a table of rates, and each as a multiple of the baseline's."""
    print(f"\n{title}")
    for name, rate in rates.items():
        print(f"  {name:<44} {rate:>12,.1f} {unit}  {rate / rates[baseline]:>6.2f} ×")


def decode_rows(
    model: GPT,
    prompt: Sequence[int],
    num_tokens: int,
    num_rows: int = 1,
    **filters: Unpack[TextOptions],
) -> Iterator[list[int]]:
    """Continue a prompt in num_rows rows: yield their next ids, num_tokens times."""
    engine = DecodingEngine(model)
    engine.add(prompt)
    logits = engine.read(0).expand(num_rows, -1)
    engine.keep([0] * num_rows)
    for index in range(num_tokens):
        draws = [(row, index) for row in range(num_rows)]
        ids = draw_ids(logits, noise_states(draws, logits.device), **filters)
        yield ids
        if index < num_tokens - 1:
            logits = engine.step(ids)


def decode_greedily(model: Any, prompt: Sequence[int], num_rows: int = 1) -> None:
    list(decode_rows(model, prompt, NUM_NEW_TOKENS, num_rows, temperature=0))


class Bench:
    """The stages: each prints a table and returns its figures."""

    def __init__(self, config: BenchConfig, device: torch.device):
        self.config = config
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if self.is_cuda else processor_name()
        self.dtype = choose_dtype(config.dtype, device, SMALL_CONFIG.d_model)

    def take_turns(self, contestants: dict[str, Call], num_rounds: int | None = None) -> Rates:
        """Return the median seconds of each contestant, after one warmup call of each."""
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for round_number in range((num_rounds or self.config.rounds) + 1):
            for name, call in contestants.items():
                start = time.perf_counter()
                call()
                if self.is_cuda:
                    torch.cuda.synchronize(self.device)
                if round_number:
                    seconds[name].append(time.perf_counter() - start)
        return {name: statistics.median(times) for name, times in seconds.items()}

    def random_batch(self, config: ModelConfig) -> Batch:
        """Draw inputs and targets."""
        shape = (self.config.batch_size, config.context_length + 1)
        tokens = torch.randint(config.vocab_size or 0, shape, device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def make_optimizer(self, model: GPT, name: Literal["muon", "adamw"]) -> Optimizer:
        """Make the trainer's optimizer."""
        dist_ctx = DistributedContext(device=self.device)
        rates = default_rates(name, model.config.d_model, 2048)
        config = OptimizerConfig(optimizer=name, **rates)
        return Optimizer(model, config, dist_ctx, self.dtype)

    def make_step(self, loss: Call, optimizer: Any, dtype: torch.dtype | None = None) -> Call:
        """Make a training step: forward in mixed precision, backward, clip, update."""

        def step() -> None:
            with mixed_precision(dtype or self.dtype, self.device):
                value = loss()
            value.backward()
            if isinstance(optimizer, Optimizer):
                optimizer.step(0, 1000)
                return
            params = [param for group in optimizer.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def make_model_step(self, model: GPT, batch: Batch, optimizer: Any) -> Call:
        """Make a training step of a model of this project."""
        if self.is_cuda:
            model.compile()
        return self.make_step(lambda: model(*batch) / batch[1].numel(), optimizer)

    def train(self) -> Rates:
        """Compare training steps of one architecture, and the default recipe."""
        config = dataclasses.replace(SMALL_CONFIG, **GPT2_SETTINGS)
        batch = self.random_batch(config)
        inputs, targets = batch

        def hf_loss() -> Tensor:
            logits = hf_model(inputs, use_cache=False).logits.float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        hf_model = peers.make_hf_gpt2(config).to(self.device)
        gpt2 = GPT(config).to(self.device)
        recipe = GPT(SMALL_CONFIG).to(self.device)
        adamw = self.make_optimizer(gpt2, "adamw")
        hf_adamw = peers.make_adamw(hf_model)
        muon = self.make_optimizer(recipe, "muon")
        contestants = {
            "ours, GPT-2's architecture, AdamW": self.make_model_step(gpt2, batch, adamw),
            "Hugging Face GPT2LMHeadModel, AdamW": self.make_step(hf_loss, hf_adamw),
            "ours, default recipe, Muon": self.make_model_step(recipe, batch, muon),
        }
        if self.config.nanogpt:
            nanogpt, optimizer = peers.make_nanogpt(self.config.nanogpt, config, self.device)
            dtype = torch.bfloat16 if self.is_cuda else torch.float32  # as its train.py
            nanogpt_step = self.make_step(lambda: nanogpt(*batch)[1], optimizer, dtype)
            contestants["nanoGPT as it ships"] = nanogpt_step
        seconds = self.take_turns(contestants)
        rates = {name: inputs.numel() / time for name, time in seconds.items()}
        title = f"Training step of {tuple(inputs.shape)} tokens, {self.dtype}"
        print_rates(title, "tokens/s", rates, "Hugging Face GPT2LMHeadModel, AdamW")
        return rates

    def attention(self) -> Rates:
        """Compare the list of heads with one joined matrix, in training and in decoding."""
        batch = self.random_batch(SMALL_CONFIG)
        steps: dict[str, Call] = {}
        decoders: dict[str, Call] = {}
        for name in ("list of heads", "one joined matrix"):
            model = GPT(SMALL_CONFIG).to(self.device)
            if name == "one joined matrix":
                for block in model.blocks:
                    block.attention = peers.JoinedAttention(SMALL_CONFIG).to(self.device)
            decoder = build_decoder(model)
            decoders[f"{name}, decoding"] = partial(decode_greedily, decoder, [1])
            steps[f"{name}, training"] = self.make_model_step(model, batch, peers.make_adamw(model))
        num_tokens = batch[0].numel()
        training = {name: num_tokens / time for name, time in self.take_turns(steps).items()}
        turns = self.take_turns(decoders)
        decoding = {name: NUM_NEW_TOKENS / time for name, time in turns.items()}
        title = f"Heads, {SMALL_CONFIG.d_model} wide, {self.dtype}"
        print_rates(title, "tokens/s", training, "one joined matrix, training")
        print_rates(title, "tokens/s", decoding, "one joined matrix, decoding")
        return training | decoding

    def decode(self) -> Rates:
        """Compare greedy decoding with GPT-2 124M's shape, also late in a text and in a batch."""
        size: dict[str, Any] = {"context_length": 1024, "num_layers": 12, "num_heads": 12}
        config = ModelConfig(vocab_size=50257, d_model=768, **size, **GPT2_SETTINGS)
        hf_model = peers.make_hf_gpt2(config).to(self.device).eval()
        model: Any = build_decoder(GPT(config).to(self.device))
        prompt = torch.randint(config.vocab_size or 0, (1, 8), device=self.device)
        length = dict.fromkeys(("max_new_tokens", "min_new_tokens"), NUM_NEW_TOKENS)
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, **length}
        contestants: dict[str, Call] = {
            "ours": partial(decode_greedily, model, prompt[0].tolist()),
            "Hugging Face generate": partial(hf_model.generate, prompt, **options),
            "ours, batch of 8": partial(decode_greedily, model, prompt[0].tolist(), 8),
        }
        seconds = self.take_turns(contestants, max(3, self.config.rounds // 2))
        rates = {name: NUM_NEW_TOKENS / time for name, time in seconds.items()}
        rates["ours, batch of 8"] *= 8
        title = f"Decoding {NUM_NEW_TOKENS} tokens, GPT-2 124M's shape, float32"
        print_rates(title, "tokens/s", rates, "Hugging Face generate")
        steps = decode_rows(model, prompt[0].tolist(), 1010, temperature=0)
        times = [time.perf_counter() for _ in steps]
        milliseconds = 1e3 * np.diff(times)
        early = float(np.median(milliseconds[24:88]))
        late = float(np.median(milliseconds[-64:]))
        print(f"  a token takes {early:.1f} ms near token 64 and {late:.1f} ms near token 1,000")
        return rates | {"ms near token 64": early, "ms near token 1,000": late}

    def prepare(self) -> Rates:
        """Compare encoding of Python's standard library with other libraries."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        starts = range(0, len(text), MAX_PIECE_CHARACTERS)
        pieces = [text[start : start + MAX_PIECE_CHARACTERS] for start in starts]
        tokenizer = train_bpe_tokenizer(pieces, 4096)
        ranks = {tokenizer.decode_bytes([number]): number for number in tokenizer.text_ids}
        options: dict[str, Any] = {"mergeable_ranks": ranks, "special_tokens": {}}
        encoding = tiktoken.Encoding("bpe", pat_str=SPLIT_PATTERNS[DEFAULT_PATTERN], **options)
        runners: dict[str, Callable[[str], Any]] = {
            "ours": tokenizer.encode,
            "tiktoken": encoding.encode_to_numpy,
            "tokenizers": Tokenizer(tokenizer.document).encode,
        }

        def encode(run: Callable[[str], Any], num_threads: int) -> None:
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(run, pieces))

        contestants: dict[str, Call] = {}
        for name, run in runners.items():
            contestants[f"{name}, 1 thread"] = partial(encode, run, 1)
            contestants[f"{name}, all cores"] = partial(encode, run, torch.get_num_threads())
        seconds = self.take_turns(contestants, max(3, self.config.rounds // 2))
        rates = {name: len(text.encode()) / 1e6 / time for name, time in seconds.items()}
        print_rates("Encoding with a BPE of 4,096 tokens", "MB/s", rates, "tiktoken, 1 thread")
        return rates

    def data(self) -> Rates:
        """Measure the assembly of batches, in a training step and alone."""
        tokens = np.random.default_rng(0).integers(0, 65, 10_000_000, dtype=np.uint16)
        spec = BatchSpec(SMALL_CONFIG.context_length, 1, self.config.batch_size, slice(None))
        batches = Batches(Split(tokens), spec, self.device)
        fixed_batch = batches.get(0)
        numbers = itertools.count()
        model = GPT(SMALL_CONFIG).to(self.device)
        optimizer = peers.make_adamw(model)

        def loaded_loss() -> Tensor:
            inputs, targets = batches.get(next(numbers))
            return model(inputs, targets) / targets.numel()

        steps = {
            "with loading": self.make_step(loaded_loss, optimizer),
            "without": self.make_model_step(model, fixed_batch, optimizer),
        }
        seconds = self.take_turns(steps)
        rates = {name: fixed_batch[0].numel() / time for name, time in seconds.items()}
        print_rates("Training steps with and without loading", "tokens/s", rates, "without")
        start = time.perf_counter()
        for step in range(NUM_LOADED_BATCHES):
            batches.get(step)
        milliseconds = 1e3 * (time.perf_counter() - start) / NUM_LOADED_BATCHES
        print(f"  a batch takes {milliseconds:.3f} ms")
        return rates | {"ms a batch": milliseconds}


if __name__ == "__main__":
    run_command(main)
