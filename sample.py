"""Write text with a trained model: out/<run>/ → text.

python sample.py out/NAME [--prompt TEXT | --prompt-file FILE | -] [--num-samples N] [--temperature T] …
"""

from engine.command import run_command, wait_briefly

if __name__ == "__main__":
    wait_briefly("decode")  # before torch is loaded

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.device import choose_device
from engine.generate import generate_text, opening, texts
from engine.kernels import for_decoding
from engine.pictures import draw_attention
from engine.run_folder import checkpoints_by_loss
from engine.settings import from_values, parse
from engine.tokenizer import Tokenizer, load_tokenizer
from model import GPT, ModelConfig


@dataclass(frozen=True)
class SampleConfig:
    """Write text with a trained model."""

    path: tyro.conf.Positional[Path]  # A run folder, for its best checkpoint, or a checkpoint's own folder.
    stdin: tyro.conf.Positional[Literal["-", ""]] = ""  # - reads the prompt from standard input.
    prompt: str = ""  # The text to continue; none: begin as a document does.
    prompt_file: Path | None = None  # A file with the text to continue.
    num_samples: Annotated[int, "at least 1, at most 1e6"] = 1  # How many texts to write.
    max_new_tokens: Annotated[int, "at least 1"] = 500  # Tokens to write in each, at most.
    # Below 1 is safer, above 1 is wilder; 0 is always the most likely token.
    temperature: Annotated[float, "at least 0"] = 0.8
    top_k: Annotated[int | None, "at least 1"] = None  # Choose among the k most likely tokens; None: all.
    # Choose among the fewest tokens that together have this probability.
    top_p: Annotated[float, "above 0, at most 1"] = 0.95
    stop: tuple[str, ...] = ()  # Texts that end a sample; they are not written.
    seed: Annotated[int, "at least 0, below 9e18"] = 1  # The same seed gives the same text.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    compile: bool = False  # Compile the model first: worth its wait for long texts.
    attention: Path | None = None  # Instead of writing on, draw who attends to whom in the prompt, as a PNG.
    layer: int | None = None  # Which layer to draw, from 1; None: a grid of all.

    def __post_init__(self):
        if "" in self.stop:
            raise ValueError("--stop '' would end every sample before it begins; give some text")
        if self.attention and self.attention.suffix.lower() != ".png":
            raise ValueError(f"--attention {self.attention} is to be a PNG; give it a name that ends in .png")
        if self.layer is not None and not self.attention:
            raise ValueError(f"--layer {self.layer} chooses what --attention FILE.png draws; give both")
        if bool(self.stdin) + bool(self.prompt) + (self.prompt_file is not None) > 1:
            raise ValueError("give one prompt: --prompt, --prompt-file or -")


def main(arguments: list[str] | None = None) -> None:
    """Write, or draw attention, as the command line says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    while "--prompt" in given[:-1]:  # so that what begins with a hyphen is no flag
        at = given.index("--prompt")
        given[at : at + 2] = [f"--prompt={given[at + 1]}"]
    config = parse(SampleConfig, given)
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
    """The checkpoint at path, or the best whole one of the run at path. Raises ValueError if there is none."""
    if (path / "manifest.json").is_file():
        return open_checkpoint(path)
    damage = None
    for candidate in checkpoints_by_loss(path):
        try:
            found = open_checkpoint(candidate)
        except ValueError as error:
            damage = damage or error
        else:
            if damage:
                print(f"warning: {damage}; {found.path.name} serves instead", file=sys.stderr)
            return found
    if damage:
        raise damage
    raise ValueError(f"{path} holds no checkpoint; give a run folder such as out/stdlib, or train one: python train.py")


def load_model(found: Checkpoint) -> GPT:
    """The model as it was at the checkpoint, ready to predict. Raises ValueError if its files don't fit each other."""
    weights, shape = dict(found.model()), found.state["model"]
    try:
        config = from_values(ModelConfig, shape, str(found.path / "state.json"))
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
    if not config.prompt_file and not sys.stdin:
        raise ValueError("standard input is closed; give the prompt with --prompt or --prompt-file")
    raw = config.prompt_file.read_bytes() if config.prompt_file else sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 at byte {error.start}; convert it") from None


def write(tokens: Iterator[Tensor], prompt: str, tokenizer: Tokenizer, config: SampleConfig) -> None:
    """Print one sample as it comes, or several when they are done."""
    gained = texts(tokens, tokenizer, config.num_samples, config.stop)
    if config.num_samples == 1:
        for (text,) in itertools.chain([[prompt]], gained, [["\n"]]):
            print(text, end="", flush=True)
        return
    for number, parts in enumerate(zip(*gained, strict=True), 1):
        print(f"--- sample {number} ---\n{prompt}{''.join(parts)}")


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
