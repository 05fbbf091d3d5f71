"""Write text with a trained model: out/<run>/ → text.

python sample.py out/NAME [--prompt TEXT | --prompt-file FILE | -] [--num-samples N] [--temperature T] …
"""

from engine.command import run_command, wait_briefly

if __name__ == "__main__":
    wait_briefly()  # before torch is loaded

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.device import choose_device
from engine.generate import TextStream, generate_text, opening, stream
from engine.kernels import for_decoding
from engine.pictures import draw_attention
from engine.run_folder import best_checkpoint
from engine.settings import override, parse
from engine.tokenizer import Tokenizer, load_tokenizer
from model import GPT, ModelConfig


@dataclass(frozen=True)
class SampleConfig:
    """Write text with a trained model."""

    path: tyro.conf.Positional[Path]  # A run folder, for its best checkpoint, or a checkpoint's own folder.
    stdin: tyro.conf.Positional[Literal["-", ""]] = ""  # - reads the prompt from standard input.
    prompt: str = ""  # The text to continue; none: begin as a document does.
    prompt_file: Path | None = None  # A file with the text to continue.
    num_samples: int = 1  # How many texts to write.
    max_new_tokens: int = 500  # Tokens to write in each, at most.
    temperature: float = 0.8  # Below 1 is safer, above 1 is wilder; 0 is always the most likely token.
    top_k: int | None = None  # Choose among the k most likely tokens; None: all.
    top_p: float = 0.95  # Choose among the fewest tokens that together have this probability.
    stop: tuple[str, ...] = ()  # Texts that end a sample; they are not written.
    seed: int = 1  # The same seed gives the same text.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    compile: bool = False  # Compile the model first: worth its wait for long texts.
    attention: Path | None = None  # Instead of writing on, draw who attends to whom in the prompt, as a PNG.
    layer: int | None = None  # Which layer to draw, from 1; None: a grid of all.

    def __post_init__(self):
        if min(self.num_samples, self.max_new_tokens) < 1:
            raise ValueError("--num-samples and --max-new-tokens must be at least 1")
        if self.temperature < 0 or (self.top_k is not None and self.top_k < 1) or not 0 < self.top_p <= 1:
            found = f"--temperature {self.temperature} --top-k {self.top_k} --top-p {self.top_p}"
            raise ValueError(f"{found}: they must be at least 0, at least 1, and above 0 and at most 1")
        if bool(self.stdin) + bool(self.prompt) + (self.prompt_file is not None) > 1:
            raise ValueError("give one prompt: --prompt, --prompt-file or -")


def main(arguments: list[str] | None = None) -> None:
    """Write, or draw attention, as the command line says."""
    config = parse(SampleConfig, arguments)
    device = choose_device(config.device)
    found = find_checkpoint(config.path)
    tokenizer = load_tokenizer(found.path / "tokenizer.json")
    model = load_model(found).to(device)
    text = read_prompt(config)
    prompt = tokenizer.encode(text).tolist() or opening(tokenizer, found.state["documents"])
    if config.attention:
        return draw(config, model, tokenizer, torch.tensor(prompt, device=device))
    write(sample(config, model, tokenizer, prompt), text, tokenizer, config)


def sample(config: SampleConfig, model: GPT, tokenizer: Tokenizer, prompt: list[int]) -> Iterator[Tensor]:
    """Continue a prompt's token ids as often as the config says: yields (num_samples,) ids, one for each text."""
    model = for_decoding(model, pack=not config.compile)
    if config.compile:
        model.compile(dynamic=True)
    choice = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "seed": config.seed}
    return generate_text(model, tokenizer, [prompt] * config.num_samples, config.max_new_tokens, **choice)


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at path, or the best of the run at path. Raises ValueError if there is none, or it is damaged."""
    if (path / "manifest.json").is_file():
        return open_checkpoint(path)
    if best := best_checkpoint(path):
        return open_checkpoint(best)
    raise ValueError(f"{path} holds no checkpoint; give a run folder such as out/stdlib, or train one: python train.py")


def load_model(found: Checkpoint) -> GPT:
    """The model as it was at the checkpoint, ready to predict. Raises ValueError if its files don't fit each other."""
    weights, shape = dict(found.model()), found.state["model"]
    try:
        config = override(ModelConfig(), shape, str(found.path / "state.json"))
        if config.num_layers * config.num_heads > len(weights):
            raise RuntimeError(f"{len(weights)} tensors can't be {config.num_layers} layers")
        with torch.device("meta"):  # nothing is made before it is known that the weights fit
            model = GPT(config)
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{found.path} is damaged: its weights don't fit its state.json ({reason})") from None
    return model.eval()


def read_prompt(config: SampleConfig) -> str:
    """The text to continue. Raises ValueError for a file that is not UTF-8."""
    if not config.stdin and not config.prompt_file:
        return config.prompt
    raw = config.prompt_file.read_bytes() if config.prompt_file else sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 at byte {error.start}; convert it") from None


def write(tokens: Iterator[Tensor], prompt: str, tokenizer: Tokenizer, config: SampleConfig) -> None:
    """Print the samples: one alone as it comes; of several the first as it comes, the others after it."""
    if config.num_samples == 1:
        sys.stdout.write(prompt)
        stream(tokens, tokenizer, sys.stdout, config.stop)
        print()
        return
    streams = [TextStream(tokenizer, config.stop) for _ in range(config.num_samples)]
    texts = [prompt] * config.num_samples
    for row_tokens in tokens:
        for row, token in enumerate(row_tokens.tolist()):
            texts[row] += streams[row].push(token)
        if all(text.ended for text in streams):
            break
    for number, (text, rest) in enumerate(zip(texts, streams, strict=True), 1):
        print(f"--- sample {number} ---\n{text}{rest.end()}")


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """Every head's attention over one sequence, computed by the heads themselves: (T,) ids → (L, H, T, T)."""
    x, rotation, maps = model.embed(tokens[None]), model.rotation(0, len(tokens)), []
    for block in model.blocks:
        seen = x if block.post_norm else block.attention_norm(x)
        maps.append(torch.stack([head.attention(seen, rotation)[0] for head in block.attention.heads]))
        x = block(x, rotation)
    return torch.stack(maps)


def draw(config: SampleConfig, model: GPT, tokenizer: Tokenizer, tokens: Tensor) -> None:
    """Draw the prompt's attention maps. Raises ValueError for a layer that is not there, or too long a prompt."""
    if config.layer is not None and not 1 <= config.layer <= model.config.num_layers:
        raise ValueError(f"--layer {config.layer} is not there; the model has layers 1 to {model.config.num_layers}")
    if len(tokens) > model.config.context_length:
        raise ValueError(f"the prompt has {len(tokens)} tokens; a picture shows at most {model.config.context_length}")
    maps = attention_maps(model, tokens).float().cpu().numpy()
    labels = [tokenizer.decode([token]) for token in tokens.tolist()]
    draw_attention(maps, labels, config.attention, config.layer - 1 if config.layer else None)
    print(f"{config.attention}: {model.config.num_heads} heads a layer, {len(tokens)} tokens")


if __name__ == "__main__":
    run_command(main)
