"""Generate text with a trained model: out/<run>/ → text.

    python sample.py out/NAME [--prompt TEXT | --prompt-file FILE | -] [--num-samples N | --beams N]
    python sample.py out/NAME --prompts-file in.jsonl --out out.jsonl    {"prompt": TEXT} per line
    python sample.py out/NAME --chat [--system TEXT]                     talk to a chat model
    python sample.py out/NAME --chat --prompts-file in.jsonl --out out.jsonl    {"messages": […]}
    python sample.py out/NAME --page                     what is inside the model, in a browser
    python sample.py out/NAME --prompt TEXT --attention map.png          a picture of attention

In Python: ``model = load("out/NAME"); print(model.generate("ROMEO:", max_new_tokens=100))``
"""

from engine.core.cli import run_command, shell_command, tune_openmp_spinning

if __name__ == "__main__":
    tune_openmp_spinning("decode")  # before torch is imported

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

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
from engine.generation.sampling import DEFAULT_OPTIONS, TextOptions
from engine.generation.text_generator import DEFAULT_NEW_TOKENS, TextGenerator
from engine.generation.text_stream import TextStream
from engine.training.checkpoint import load_model
from engine.training.run_dir import find_checkpoint

PROMPT_SETTINGS = {"stdin", "prompt", "prompt_file"}
TEXT_SETTINGS = {"max_new_tokens", "stop", "compile", *DEFAULT_OPTIONS}
UNUSED_BY_BEAMS = {"num_samples", "batch_size", *DEFAULT_OPTIONS}
# Mode → the settings that it uses. A mode has the name of the setting that chooses it, "" is the
# default; of several, the first counts.
SETTINGS_BY_MODE = {
    "prompts_file": {"out", "chat", "beams", "batch_size", *TEXT_SETTINGS},
    "chat": {"system", *TEXT_SETTINGS},
    "page": {"port", "max_new_tokens", *PROMPT_SETTINGS, *DEFAULT_OPTIONS},
    "attention": {"layer", *PROMPT_SETTINGS},
    "": {"beams", "num_samples", *PROMPT_SETTINGS, *TEXT_SETTINGS},
}


@dataclass(frozen=True)
class SampleConfig:
    """Generate text with a trained model."""

    path: tyro.conf.Positional[Path]  # A run (its best checkpoint is used) or a checkpoint.
    stdin: tyro.conf.Positional[Literal["-", ""]] = ""  # - reads the prompt from standard input.
    # The text to continue; empty: start a new document. If it begins with -, write --prompt=TEXT.
    prompt: str = ""
    prompt_file: Path | None = None  # A file with the text to continue.
    prompts_file: Path | None = None  # A .jsonl file, {"prompt": TEXT} in each line.
    out: Path | None = None  # File to write: those lines with a "completion" each.
    batch_size: Annotated[int, Ge(1)] = 32  # Lines of --prompts-file to continue at once.
    # Chat in the terminal; with --prompts-file, answer {"messages": […]} in each line.
    chat: bool = False
    system: str = ""  # The system message at the start of a chat.
    num_samples: Annotated[int, Ge(1), Le(10**6)] = 1  # Texts to generate.
    max_new_tokens: Annotated[int, Ge(1)] = DEFAULT_NEW_TOKENS  # Limit of tokens for each text.
    # Randomness: 0 always takes the most likely token; above 1 is more random than the model.
    temperature: Annotated[float, Ge(0)] = DEFAULT_OPTIONS["temperature"]
    top_k: Annotated[int | None, Ge(1)] = None  # Sample from the k most likely tokens; None: all.
    # Sample from the fewest tokens whose probabilities reach this sum.
    top_p: Annotated[float, Gt(0), Le(1)] = DEFAULT_OPTIONS["top_p"]
    beams: Annotated[int | None, Ge(1)] = None  # Beam search of this width, instead of sampling.
    # End a sample before this text; the flag may be repeated.
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    seed: Annotated[int, Ge(0), Lt(9 * 10**18)] = DEFAULT_OPTIONS["seed"]  # Seed of sampling.
    device: str = "auto"  # cpu, cuda, mps, or auto.
    compile: bool = False  # Compile the model first; pays off for long texts.
    attention: Path | None = None  # Draw the prompt's attention to this PNG file.
    layer: int | None = None  # The layer to draw, from 1; None: a grid of all.
    # Serve a page in the browser: probabilities, attention, and heads to switch off.
    page: bool = False
    # Port of the page; 0: any free one. Through an SSH tunnel both ends need the same number.
    port: Annotated[int, Ge(0), Le(65535)] = 0

    @property
    def options(self) -> TextOptions:
        """The keywords of TextGenerator."""
        return TextOptions(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
        )

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UserError("--stop: must not be empty. Give the text that ends a sample.")
        if self.attention and self.attention.suffix.lower() != ".png":
            raise UserError(f"--attention: must end in .png (got {self.attention}). Rename it.")
        if self.prompts_file and not self.out:
            raise UserError("--prompts-file: needs a file to write. Add --out FILE.jsonl.")
        if bool(self.stdin) + bool(self.prompt) + bool(self.prompt_file) > 1:
            raise UserError("--prompt, --prompt-file and -: must be one prompt. Keep one of them.")
        mode = next(name for name in SETTINGS_BY_MODE if not name or getattr(self, name))
        used = SETTINGS_BY_MODE[mode] | {"path", "device", mode}
        if self.beams and "beams" in used:
            mode = "beams"
            used -= UNUSED_BY_BEAMS
        for field in fields(self):
            if field.name not in used and getattr(self, field.name) != field.default:
                users = [user for user, names in SETTINGS_BY_MODE.items() if field.name in names]
                cause = f"with {flag_of(mode)}" if mode else f"without {flag_of(users[0])}"
                raise UserError(f"{flag_of(field.name)}: has no effect {cause}. Leave it out.")


def flag_of(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "-" if name == "stdin" else f"--{name.replace('_', '-')}"


def load(path: str | Path, device: str = "auto", compile: bool = False) -> TextGenerator:
    """Load the best checkpoint of a run, or a checkpoint. Raises UserError if there is none."""
    path = Path(path)
    if any(path.glob("*.npy")):
        command = shell_command("python", "train.py", "--data", path)
        raise UserError(f"{path}: is a dataset. Train on it: {command}")
    torch_device = choose_device(device)
    checkpoint = find_checkpoint(path)
    model = load_model(checkpoint).to(torch_device)
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    start = initial_tokens(tokenizer, checkpoint.state["documents"])
    return TextGenerator(model, tokenizer, start, checkpoint.is_chat_model, compile)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    sample(parse(SampleConfig, arguments))


def sample(config: SampleConfig) -> None:
    """Generate text, or show the model, in the mode that the settings choose."""
    model = load(config.path, config.device, config.compile)
    if config.chat and not model.is_chat_model:
        raise UserError(
            f"{config.path}: not trained on chats. Prepare some with prepare.py … --chat, and "
            f"train on them with train.py … {shell_command('--init-from', config.path)}."
        )
    if config.prompts_file and config.out:
        files = (config.prompts_file, config.out, config.chat)
        complete_file(model, *files, config.batch_size, config.beams, **config.options)
    elif config.chat:
        converse(model, config.system, **config.options)
    elif config.page:
        serve_page(config, model)
    elif config.attention:
        draw_prompt(config, config.attention, model)
    else:
        print_text(config, model)


def print_text(config: SampleConfig, model: TextGenerator) -> None:
    """Print a text piece by piece, or several texts, or the best one."""
    prompt = read_prompt(config)
    if config.beams:
        ids = model.encode_prompt(prompt)
        stream = TextStream(model.tokenizer, ids, config.max_new_tokens, config.stop)
        print(prompt + search_text(model.decoder, stream, config.beams))
    elif config.num_samples == 1:
        print(prompt, end="", flush=True)
        for piece in model.stream(prompt, **config.options):
            print(piece, end="", flush=True)
        print()
    else:
        texts = model.generate_samples(config.num_samples, prompt, **config.options)
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


def draw_prompt(config: SampleConfig, path: Path, model: TextGenerator) -> None:
    """Draw the prompt's attention maps. Raises UserError for a wrong layer or a long prompt."""
    shape = model.model.config
    if config.layer is not None and not 1 <= config.layer <= shape.num_layers:
        raise UserError(f"--layer: must be from 1 to {shape.num_layers} (got {config.layer}).")
    ids = model.encode_prompt(read_prompt(config))
    if len(ids) > shape.context_length:
        raise UserError(f"--prompt: too long to draw (got {len(ids)} tokens). Shorten it.")
    maps = attention_maps(model.model, torch.tensor(ids, device=model.device))
    labels = [token_label(model.tokenizer, token) for token in ids]
    layer = None if config.layer is None else config.layer - 1
    draw_attention(maps.float().cpu().numpy(), labels, path, layer)
    print(f"{path}: {shape.num_heads} heads a layer, {len(ids)} tokens")


def serve_page(config: SampleConfig, model: TextGenerator) -> None:
    """Serve the live page, with the config's prompt and settings, until Ctrl-C."""
    # Imported here because a web server takes half a second to import.
    from engine.report.inspector import ModelInspector
    from engine.report.server import serve

    settings = {name: getattr(config, name) for name in ("max_new_tokens", *DEFAULT_OPTIONS)}
    settings |= {"text": read_prompt(config), "name": config.path.resolve().name}
    serve(ModelInspector(model, settings).answers, config.port)


if __name__ == "__main__":
    run_command(main)
