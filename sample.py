"""Generate text with a trained model: out/<run>/ → text.

    python sample.py out/NAME [--prompt TEXT | --prompt-file FILE | -] [--num-samples N | --beams N]
    python sample.py out/NAME --prompts-file in.jsonl --out out.jsonl    {"prompt": TEXT} per line
    python sample.py out/NAME --chat [--system TEXT]                     talk to a chat model
    python sample.py out/NAME --chat --prompts-file in.jsonl --out out.jsonl    {"messages": […]}
    python sample.py out/NAME --page                     what is inside the model, in a browser
    python sample.py out/NAME --prompt TEXT --attention map.png          a picture of attention

In Python: ``model = load("out/NAME"); print(model.generate("ROMEO:", max_new_tokens=100))``
"""

from engine.core.cli import run_command, tune_openmp_spinning

if __name__ == "__main__":
    tune_openmp_spinning("decode")  # before torch is imported

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro
from annotated_types import Ge, Gt, Le, Lt

from engine.core.device import choose_device
from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.tokenizer import load_tokenizer
from engine.generation.attention_maps import attention_maps, draw_attention, token_label
from engine.generation.beam_search import search_text
from engine.generation.chat import converse
from engine.generation.generate import initial_tokens
from engine.generation.prompt_file import complete_file
from engine.generation.sampling import DEFAULT_OPTIONS, SamplingOptions
from engine.generation.text_generator import TextGenerator
from engine.training.checkpoint import load_model
from engine.training.run_dir import find_checkpoint


@dataclass(frozen=True)
class SampleConfig:
    """Generate text with a trained model."""

    path: tyro.conf.Positional[Path]  # A run's folder, for its best checkpoint, or a checkpoint's.
    stdin: tyro.conf.Positional[Literal["-", ""]] = ""  # - reads the prompt from standard input.
    # The text to continue; by default, the start of a document. If it begins with -: --prompt=TEXT.
    prompt: str = ""
    prompt_file: Path | None = None  # A file with the text to continue.
    prompts_file: Path | None = None  # A .jsonl file, {"prompt": TEXT} in each line.
    out: Path | None = None  # The .jsonl file to write: those lines, each with its "completion".
    batch_size: Annotated[int, Ge(1)] = 32  # Lines of --prompts-file to continue together.
    # A conversation; with --prompts-file, answers to {"messages": […]} in each line.
    chat: bool = False
    system: str = ""  # The system's turn at the start of a chat.
    num_samples: Annotated[int, Ge(1), Le(10**6)] = 1  # Texts to generate.
    max_new_tokens: Annotated[int, Ge(1)] = 500  # Largest number of tokens in each text.
    # Randomness: 0 always takes the most likely token; above 1 is more random than the model.
    temperature: Annotated[float, Ge(0)] = DEFAULT_OPTIONS["temperature"]
    top_k: Annotated[int | None, Ge(1)] = None  # Sample from the k most likely tokens; None: all.
    # Sample from the fewest tokens that have this probability together.
    top_p: Annotated[float, Gt(0), Le(1)] = DEFAULT_OPTIONS["top_p"]
    beams: Annotated[int | None, Ge(1)] = None  # Beams of a search for the best text.
    # A text that ends a sample and is not written; may be repeated.
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    seed: Annotated[int, Ge(0), Lt(9 * 10**18)] = DEFAULT_OPTIONS["seed"]  # Of sampling.
    device: str = "auto"  # cpu, cuda, mps, or auto.
    compile: bool = False  # Compile the model first; pays off for long texts.
    attention: Path | None = None  # Draw the attention of the prompt to this PNG file instead.
    layer: int | None = None  # The layer to draw, from 1; None: a grid of all.
    # A page on this machine: probabilities, attention, and heads to switch off.
    page: bool = False
    # Port of the page; 0: any free one. Through an SSH tunnel both ends need the same number.
    port: Annotated[int, Ge(0), Le(65535)] = 0

    @property
    def options(self) -> SamplingOptions:
        return SamplingOptions(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    @property
    def mode(self) -> str:
        """The setting that chooses the mode: a key of SAMPLE_MODES."""
        return next(name for name in SAMPLE_MODES if not name or getattr(self, name))

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UserError("--stop: must not be empty. Give the text that ends a sample.")
        if self.attention and self.attention.suffix.lower() != ".png":
            raise UserError(f"--attention: must end in .png (got {self.attention}). Rename it.")
        if self.prompts_file and not self.out:
            raise UserError("--prompts-file: needs a file to write. Add --out FILE.jsonl.")
        if bool(self.stdin) + bool(self.prompt) + bool(self.prompt_file) > 1:
            raise UserError("--prompt, --prompt-file and -: must be one prompt. Keep one of them.")
        used = SAMPLE_MODES[self.mode].settings | {"path", "device", self.mode}
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        for name in changed:
            if name not in used:
                users = [flag_of(mode) for mode in SAMPLE_MODES if name in SAMPLE_MODES[mode].settings]
                cause = f"with {flag_of(self.mode)}" if self.mode else f"without {users[0]}"
                raise UserError(f"{flag_of(name)}: has no effect {cause}. Leave it out.")
            if self.beams and name in UNUSED_BY_BEAMS:
                raise UserError(f"{flag_of(name)}: has no effect with --beams. Leave it out.")


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "-" if name == "stdin" else f"--{name.replace('_', '-')}"


def load(path: str | Path, device: str = "auto", compile: bool = False) -> TextGenerator:
    """Load a run's best checkpoint, or a checkpoint. Raises UserError if the path has none."""
    path = Path(path)
    if any(path.glob("*.npy")):
        raise UserError(f"{path}: is a dataset. Train on it: python train.py --data {path}")
    torch_device = choose_device(device)
    checkpoint = find_checkpoint(path)
    model = load_model(checkpoint)
    is_chat_model = checkpoint.is_chat_model
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    start = initial_tokens(tokenizer, checkpoint.state["documents"])
    return TextGenerator(model.to(torch_device), tokenizer, start, is_chat_model, compile)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    sample(parse(SampleConfig, arguments))


def sample(config: SampleConfig) -> None:
    """Generate, or show, what the settings ask for."""
    model = load(config.path, config.device, config.compile)
    if config.chat and not model.is_chat_model:
        raise UserError(
            f"{config.path}: not trained on chats. Prepare some with prepare.py … --chat, and "
            f"train on them with train.py … --init-from {config.path}."
        )
    SAMPLE_MODES[config.mode].run(config, model)


def write(config: SampleConfig, model: TextGenerator) -> None:
    """Print a text piece by piece, or several texts, or the best one."""
    prompt = read_prompt(config)
    if config.beams:
        ids = model.encode_prompt(prompt)
        limits = (config.max_new_tokens, config.beams, config.stop)
        text, _ = search_text(model.decoder, model.tokenizer, ids, *limits)
        print(prompt + text)
    elif config.num_samples == 1:
        pieces = model.stream(prompt, config.max_new_tokens, config.stop, **config.options)
        for piece in itertools.chain([prompt], pieces, ["\n"]):
            print(piece, end="", flush=True)
    else:
        texts = model.generate_samples(config.num_samples, prompt, config.max_new_tokens, config.stop, **config.options)
        for number, text in enumerate(texts, 1):
            print(f"--- sample {number} ---\n{prompt}{text}")


def read_prompt(config: SampleConfig) -> str:
    """Return the text to continue. Raises UserError for a file that is not UTF-8."""
    if config.prompt_file:
        content = config.prompt_file.read_bytes()
    elif not config.stdin:
        return config.prompt
    elif sys.stdin:
        content = sys.stdin.buffer.read()
    else:
        raise UserError("-: standard input is closed. Use --prompt or --prompt-file.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        path = config.prompt_file or "-"
        raise UserError(f"{path}: not UTF-8 at byte {error.start}. Convert it.") from None


def answer_file(config: SampleConfig, model: TextGenerator) -> None:
    """Complete, or answer, each line of --prompts-file in --out."""
    assert config.prompts_file and config.out
    files = (config.prompts_file, config.out, config.chat)
    tokens = (config.max_new_tokens, config.batch_size)
    complete_file(model, *files, *tokens, config.stop, config.beams, **config.options)


def talk(config: SampleConfig, model: TextGenerator) -> None:
    """Hold a conversation."""
    converse(model, config.system, config.max_new_tokens, config.stop, **config.options)


def draw(config: SampleConfig, model: TextGenerator) -> None:
    """Draw the attention maps of the prompt. Raises UserError for a wrong layer or length."""
    assert config.attention
    shape = model.model.config
    if config.layer is not None and not 1 <= config.layer <= shape.num_layers:
        raise UserError(f"--layer: must be from 1 to {shape.num_layers} (got {config.layer}).")
    ids = model.encode_prompt(read_prompt(config))
    if len(ids) > shape.context_length:
        raise UserError(f"--prompt: too long to draw (got {len(ids)} tokens). Shorten it.")
    maps = attention_maps(model.model, torch.tensor(ids, device=model.device))
    labels = [token_label(model.tokenizer, token) for token in ids]
    layer = None if config.layer is None else config.layer - 1
    draw_attention(maps.float().cpu().numpy(), labels, config.attention, layer)
    print(f"{config.attention}: {shape.num_heads} heads a layer, {len(ids)} tokens")


def serve_page(config: SampleConfig, model: TextGenerator) -> None:
    """Serve the live page until Ctrl-C; it starts with the prompt and settings given."""
    # Imported here because a web server takes half a second to import.
    from engine.report.inspector import ModelInspector
    from engine.report.server import serve

    settings: dict[str, object] = {**config.options, "max_new_tokens": config.max_new_tokens}
    settings |= {"text": read_prompt(config), "name": config.path.resolve().name}
    serve(ModelInspector(model, settings).answers, config.port)


class Mode(NamedTuple):
    """A way to run the command, and the settings that have an effect in it."""

    run: Callable[[SampleConfig, TextGenerator], None]
    settings: set[str]


PROMPT_SETTINGS = {"stdin", "prompt", "prompt_file"}
TEXT_SETTINGS = {"max_new_tokens", "stop", "compile", *DEFAULT_OPTIONS}
UNUSED_BY_BEAMS = {"num_samples", "batch_size", *DEFAULT_OPTIONS}
# By the setting that chooses the mode; the first one that is set counts, "" is the default.
SAMPLE_MODES = {
    "prompts_file": Mode(answer_file, {"out", "chat", "beams", "batch_size", *TEXT_SETTINGS}),
    "chat": Mode(talk, {"system", *TEXT_SETTINGS}),
    "page": Mode(serve_page, {"port", "max_new_tokens", *PROMPT_SETTINGS, *DEFAULT_OPTIONS}),
    "attention": Mode(draw, {"layer", *PROMPT_SETTINGS}),
    "": Mode(write, {"beams", "num_samples", *PROMPT_SETTINGS, *TEXT_SETTINGS}),
}


if __name__ == "__main__":
    run_command(main)
