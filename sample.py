"""Generate text with a trained model: out/<run>/ → text.

    python sample.py [out/NAME] [TEXT | --prompt-file FILE | -] [--num-samples N | --beams N]
    python sample.py out/NAME --prompts-file in.jsonl --out out.jsonl    {"prompt": TEXT} per line
    python sample.py out/NAME --chat [--system TEXT]                     talk to a chat model
    python sample.py out/NAME --chat --prompts-file in.jsonl --out out.jsonl    {"messages": […]}
    python sample.py out/NAME --serve                    an OpenAI-compatible API, and the page
    python sample.py out/NAME --page                     a page of the model, in a browser
    python sample.py out/NAME --save-page FILE.html      that page as a file, to send

In Python: ``model = load("out/NAME"); print(model.generate("ROMEO:", max_new_tokens=100))``
"""

from engine.core import cli

if __name__ == "__main__":
    cli.tune_openmp_spinning("decode")  # before torch is imported

import contextlib
import io
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Unpack, cast

import tyro
from annotated_types import Ge, Gt, Le, Lt

from engine.core.device import (
    MIN_BFLOAT16_DECODING_WIDTH,
    choose_device,
    choose_dtype,
    keep_freed_memory,
)
from engine.core.errors import UserError
from engine.core.files import read_input
from engine.core.settings import check_flags, parse, unescape
from engine.data.chats.chat import chat_format, with_variables
from engine.data.records.text import find_mark, unify_line_ends
from engine.generation.prompt_file import complete_file
from engine.generation.sampling import DEFAULT_OPTIONS, TextOptions
from engine.generation.text_generator import DECODING_BATCH_SIZE, DEFAULT_NEW_TOKENS, TextGenerator
from engine.runs.checkpoint import ModifyModel, load_model
from engine.runs.run_files import find_checkpoint, find_newest_run, make_generator

COMMON_SETTINGS = {"path", "base", "device", "dtype"}  # of all modes
CHAT_SETTINGS = {"template_variable"}
PROMPT_SETTINGS = {"text", "prompt", "prompt_file", "parse_special"}
API_KEY_VARIABLE = "GPT_API_KEY"
WeightDtype = Literal["auto", "float32", "bfloat16"]
DEFAULT_API_PORT = 8000
PAGE_SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
TEXT_SETTINGS = {"max_new_tokens", "stop", "quantize", *DEFAULT_OPTIONS}
UNUSED_BY_BEAMS = {"num_samples", "batch_size", *DEFAULT_OPTIONS}
# Mode → the settings that it uses. A mode is named for the setting that selects it; "" is the
# default. If several are selected, the first is used.
SETTINGS_BY_MODE = {
    "prompts_file": {"out", "chat", "beams", "batch_size", "parse_special", *TEXT_SETTINGS},
    "chat": {"system", *CHAT_SETTINGS, *TEXT_SETTINGS},
    "serve": {"port", "host", "quantize", "parse_special", *CHAT_SETTINGS},
    "page": {*PROMPT_SETTINGS, *CHAT_SETTINGS, *PAGE_SETTINGS},
    "save_page": {*PROMPT_SETTINGS, *CHAT_SETTINGS, *PAGE_SETTINGS},
    "": {"beams", "num_samples", "batch_size", *PROMPT_SETTINGS, *TEXT_SETTINGS},
}


@dataclass(frozen=True)
class SampleConfig:
    """Generate text with a trained model."""

    # A run (its best checkpoint is used) or a checkpoint. None: the newest run in out/.
    path: tyro.conf.Positional[Path | None] = None
    # The text to continue; - reads it from standard input. Without it a new document starts.
    text: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[TEXT]")] = ""
    prompt: str = ""  # The same as TEXT. If it begins with -, write --prompt=TEXT.
    prompt_file: Path | None = None  # A file with the text to continue.
    prompts_file: Path | None = None  # A .jsonl file, {"prompt": TEXT} in each line.
    out: Path | None = None  # File to write: the lines of --prompts-file, each with a "completion".
    # Lines of --prompts-file, or samples, to process at once.
    batch_size: Annotated[int, Ge(1)] = DECODING_BATCH_SIZE
    # Chat in the terminal; with --prompts-file, answer {"messages": […]} in each line.
    chat: bool = False
    system: str = ""  # The system message at the start of a chat.
    # NAME=VALUE of the chat template, such as enable_thinking=false; the flag may be repeated.
    template_variable: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    num_samples: Annotated[int, Ge(1), Le(10**6)] = 1  # Texts to generate.
    max_new_tokens: Annotated[int, Ge(1)] = DEFAULT_NEW_TOKENS  # Limit of tokens for each text.
    # Randomness: 0 always takes the most likely token; above 1 is more random than the model. None,
    # here and below: the value that an imported model recommends, otherwise 0.8.
    temperature: Annotated[float | None, Ge(0), Le(1e6)] = None
    # Sample from the k most likely tokens; 0, and None without a recommendation: all.
    top_k: Annotated[int | None, Ge(0)] = None
    # Sample from the fewest tokens whose probabilities reach this sum; None: 0.95.
    top_p: Annotated[float | None, Gt(0), Le(1)] = None
    # Smallest probability of a token to sample, relative to that of the most likely token.
    min_p: Annotated[float, Ge(0), Le(1)] = DEFAULT_OPTIONS["min_p"]
    # Above 1, tokens of the context become less likely: positive logits are divided by it. None: 1.
    repetition_penalty: Annotated[float | None, Ge(0.01), Le(100)] = None
    # Read the names of special tokens in prompts as these tokens; by default they are plain text.
    parse_special: bool = False
    beams: Annotated[int | None, Ge(1)] = None  # Beam search of this width, instead of sampling.
    # End a sample before this text; the flag may be repeated.
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # Random seed of sampling. The text for a prompt does not depend on the rest of the batch.
    seed: Annotated[int, Ge(0), Lt(9 * 10**18)] = DEFAULT_OPTIONS["seed"]
    base: Path | None = None  # The base model of a LoRA run, if it was moved.
    device: str = "auto"  # cpu, cuda, mps, or auto.
    # Dtype of the weights; auto: bfloat16 where it is faster.
    dtype: WeightDtype = "auto"
    quantize: Literal["int8"] | None = None  # 8-bit weights: faster on a CPU, and less exact.
    # Open a page with the model in it: probabilities, attention, and heads to switch off.
    page: bool = False
    save_page: Path | None = None  # An HTML file to write that page to.
    serve: bool = False  # Serve an OpenAI-compatible API, and the page.
    # Port to serve on; 0: any free one; None: 8000. Through an SSH tunnel both ends need the same
    # number.
    port: Annotated[int | None, Ge(0), Le(65535)] = None
    # Address to serve the API on. Another than this needs a key in the variable GPT_API_KEY, which
    # every request must carry, as OpenAI's clients send it.
    host: str = cli.LOCAL_HOST

    @property
    def api_key(self) -> str:
        """The key of the server; "": none."""
        return os.environ.get(API_KEY_VARIABLE, "").strip()

    @property
    def options(self) -> TextOptions:
        """The keywords of TextGenerator, without those that are None."""
        names = ("max_new_tokens", "batch_size", *DEFAULT_OPTIONS)
        values = {name: getattr(self, name) for name in names}
        values |= {"stop": tuple(map(unescape, self.stop)), "num_beams": self.beams}
        options = {name: value for name, value in values.items() if value is not None}
        return cast(TextOptions, options)

    def __post_init__(self) -> None:
        if "" in map(unescape, self.stop):
            raise UserError("--stop: must not be empty. Give the text that ends a sample.")
        check_flags([("--prompts-file", self.prompts_file, self.out, "--out FILE.jsonl")])
        if self.save_page and self.save_page.suffix != ".html":
            raise UserError(f"--save-page: must end in .html (got {self.save_page}).")
        if self.save_page and not self.save_page.parent.is_dir():
            folder = self.save_page.parent
            raise UserError(f"--save-page: the folder {folder} was not found. Create it first.")
        if sum(map(bool, (self.text, self.prompt, self.prompt_file))) > 1:
            raise UserError("TEXT or -, --prompt and --prompt-file: got several. Keep one of them.")
        if self.serve and self.api_key[:1] in ("'", '"'):
            raise UserError(f"{API_KEY_VARIABLE}: must not be in quotes. Set it without them.")
        if self.host not in cli.LOCAL_HOSTS and not self.api_key:
            problem = f"lets other machines use the model (got {self.host})"
            raise UserError(f"--host: {problem}. Set {API_KEY_VARIABLE} to a key of your choice.")
        mode = next(name for name in SETTINGS_BY_MODE if not name or getattr(self, name))
        used_names = SETTINGS_BY_MODE[mode] | COMMON_SETTINGS | {mode}
        used_names |= CHAT_SETTINGS if self.chat else set()
        if self.beams and "beams" in used_names:
            mode = "beams"
            used_names -= UNUSED_BY_BEAMS
        for field in fields(self):
            is_set = getattr(self, field.name) != field.default
            modes = [name for name, names in SETTINGS_BY_MODE.items() if field.name in names]
            need = f"no {flag_of(mode)}" if mode else " or ".join(map(flag_of, modes))
            check_flags([(flag_of(field.name), is_set, field.name in used_names, need)])


def flag_of(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "TEXT or -" if name == "text" else f"--{name.replace('_', '-')}"


def load(
    path: str | Path,
    device: str = "auto",
    dtype: WeightDtype = "auto",
    quantize: Literal["int8"] | None = None,
    base: Path | None = None,
    modify_model: ModifyModel | None = None,
) -> TextGenerator:
    """Load the best checkpoint of a run, or a checkpoint. Raises UserError if there is none.

    ``base`` is where the base model of a LoRA run is, if it was moved; ``modify_model`` is the
    function that changed the model in train().
    """
    torch_device = choose_device(device)
    checkpoint = find_checkpoint(Path(path), base)
    check_flags([("--quantize", quantize, torch_device.type == "cpu", "--device cpu")])
    width = checkpoint.state.model.d_model
    weight_dtype = choose_dtype(dtype, torch_device, width, MIN_BFLOAT16_DECODING_WIDTH)
    model = load_model(checkpoint, weight_dtype, modify_model).to(torch_device)
    return make_generator(checkpoint, model, should_quantize=quantize is not None)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    keep_freed_memory()
    sample(parse(SampleConfig, arguments))


def sample(config: SampleConfig, modify_model: ModifyModel | None = None) -> None:
    """Generate text, or show the model, in the mode that the settings choose.

    ``modify_model`` is as for :func:`load`.
    """
    path = config.path or find_newest_run()
    model = load(path, config.device, config.dtype, config.quantize, config.base, modify_model)
    model.parses_special = config.parse_special
    model.tokenizer = with_variables(model.tokenizer, config.template_variable)
    if config.chat and not model.is_chat_model:
        raise UserError(
            f"{path}: not trained on chats. Prepare some with prepare.py … --chat, and "
            f"train on them with train.py … {cli.shell_command('--init-from', path)}."
        )
    if config.chat:
        chat_format(model.tokenizer)  # raises UserError if the template fails
    has_page = config.serve or config.page or config.save_page
    is_of_text = not (config.chat or has_page)
    if model.is_chat_model and is_of_text and not config.parse_special:
        problem = "--chat gives it a turn, and a plain prompt does not"
        cli.warn(f"the model was trained on chats: {problem}")
    if config.prompts_file and config.out:
        complete_file(model, config.prompts_file, config.out, config.chat, **config.options)
    elif config.chat:
        converse(model, config.system, **config.options)
    elif has_page:
        show_model(config, path, model)
    else:
        print_text(config, model)


def print_text(config: SampleConfig, model: TextGenerator) -> None:
    """Print a text piece by piece, or several texts."""
    prompt = model.end_prompt(read_prompt(config))
    if config.num_samples == 1:
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
        with open(config.prompt_file, "rb") as file:
            content = read_input(file, config.prompt_file)
    elif config.text != "-":
        return unify_line_ends(config.text or config.prompt)
    elif sys.stdin:
        content = read_input(sys.stdin.buffer, "-")
    else:
        raise UserError("-: standard input is closed. Use --prompt or --prompt-file.")
    try:
        encoding = find_mark(content) or "utf-8"
        return unify_line_ends(content.decode(encoding).removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        path = config.prompt_file or "-"
        raise UserError(f"{path}: not UTF-8 at byte {error.start}. Convert it.") from None


def converse(model: TextGenerator, system: str, **options: Unpack[TextOptions]) -> None:
    """Answer each line of standard input until it ends, in a terminal until Ctrl-C or Ctrl-D."""
    if not sys.stdin:
        raise UserError("--chat: standard input is closed. Use --prompts-file FILE.jsonl.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, adds editing and a history to input()
        print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    # Ctrl-C in a terminal ends an answer, or at the prompt the chat; in a pipe, the command.
    interrupts = [KeyboardInterrupt] if is_terminal else []
    turns = [("system", system)] if system else []
    with contextlib.suppress(EOFError, *interrupts):
        while True:
            question = input("> " if is_terminal else "")
            if not question:
                continue
            chat = [*turns, ("user", question)]
            answer = ""
            try:
                pieces = model.stream_answer(chat, **options)
                with contextlib.suppress(*interrupts):
                    for piece in pieces:
                        answer += piece
                        print(piece, end="", flush=True)
                print()
                turns = [*chat, ("assistant", answer)]
            except UserError as error:  # such as a character that the tokenizer lacks
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
    if is_terminal:
        print()


def show_model(config: SampleConfig, path: Path, model: TextGenerator) -> None:
    """Write the page of a model, with the config's prompt and settings, or serve it."""
    # Imported here: a text needs neither the page nor what trains.
    from engine.report.model_page import make_page, open_page, read_prompts, save_page

    name = path.resolve().name
    options = {**DEFAULT_OPTIONS, **model.sampling, **config.options}
    settings = {setting: options[setting] for setting in PAGE_SETTINGS}
    settings |= {"top_k": options["top_k"] or None, "text": read_prompt(config), "name": name}
    if model.is_chat_model and config.max_new_tokens == DEFAULT_NEW_TOKENS:
        half = model.model.config.context_length // 2  # the other half is for questions
        settings["max_new_tokens"] = min(DEFAULT_NEW_TOKENS, half)
    try:
        page = make_page(model, settings, read_prompts(path))
    except UserError as error:
        if not config.serve:
            raise
        cli.warn(f"no page is served. {error}")
        page = ""
    if config.serve:
        from engine.serving.api import serve

        port = DEFAULT_API_PORT if config.port is None else config.port
        serve(model, name, port, config.host, config.api_key, page)
    elif config.save_page:
        save_page(page, config.save_page)
        print(config.save_page)
    else:
        open_page(page, path / "page.html")


if __name__ == "__main__":
    cli.run_command(main)
