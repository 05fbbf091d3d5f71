"""Write text with a trained model: out/<run>/ → text.

python sample.py out/NAME [--prompt TEXT | --prompt-file FILE | -] [--num-samples N] [--temperature T] …
python sample.py out/NAME --prompt TEXT --beams 4                         the best text that a beam search finds
python sample.py out/NAME --prompts-file in.jsonl --out out.jsonl         many prompts, {"prompt": TEXT} in each line
python sample.py out/NAME --page                                          the same and what is behind it, in a browser
python sample.py out/NAME --chat [--system TEXT]                          talk with a model that was trained on chats
python sample.py out/NAME --chat --prompts-file in.jsonl --out out.jsonl  answer {"messages": […]} in each line
"""

from engine.core.cli import run_command, wait_briefly

if __name__ == "__main__":
    wait_briefly("decode")  # before torch is loaded

import contextlib
import itertools
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from engine.core.device import choose_device
from engine.core.errors import UserError
from engine.core.files import parse_json, to_json, write_whole
from engine.core.settings import parse
from engine.data.chat import Turn, around, chat_of, encode_chat, end_of_turn
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.generation.attention_maps import attention_maps, visible
from engine.generation.generate import complete, generate_text, opening, search_text, texts
from engine.generation.pictures import draw_attention
from engine.nn.inference import for_decoding
from engine.report.inspector import Inside
from engine.report.server import serve
from engine.training.checkpoint import load_model
from engine.training.run_dir import find_checkpoint
from model import GPT, ModelConfig

SHOWN = 40  # characters of a turn that a message names
# A setting, and those that would have no effect, or no sense, beside it.
APART = {
    "chat": ("stdin", "prompt", "prompt_file", "num_samples", "attention"),
    "prompts_file": ("stdin", "prompt", "prompt_file", "num_samples", "attention", "system"),
    "page": ("chat", "prompts_file", "beams", "num_samples", "stop", "compile", "attention"),
    "beams": ("num_samples", "temperature", "top_k", "top_p", "seed", "batch_size", "attention"),
}
# A setting, and the other that it has an effect with.
TOGETHER = {
    "layer": ("attention", "chooses what --attention FILE.png draws"),
    "port": ("page", "is where a --page is served"),
    "system": ("chat", "is what a --chat begins with"),
    "out": ("prompts_file", "is for the lines of --prompts-file FILE.jsonl"),
    "prompts_file": ("out", "needs --out FILE.jsonl to write to"),
    "batch_size": ("prompts_file", "is of the lines of --prompts-file FILE.jsonl"),
}


@dataclass(frozen=True)
class SampleConfig:
    """Write text with a trained model."""

    path: tyro.conf.Positional[Path]  # A run folder, for its best checkpoint, or a checkpoint's own folder.
    stdin: tyro.conf.Positional[Literal["-", ""]] = ""  # - reads the prompt from standard input.
    prompt: str = ""  # The text to continue; none: begin as a document does.
    prompt_file: Path | None = None  # A file with the text to continue.
    prompts_file: Path | None = None  # A .jsonl file with many texts to continue, {"prompt": TEXT} in each line.
    out: Path | None = None  # The .jsonl file to make: the lines of --prompts-file, each with its "completion".
    batch_size: Annotated[int, "at least 1"] = 32  # How many of those to continue together.
    # Talk: your turn, the model's, and so on; with --prompts-file, answer {"messages": […]} in each line.
    chat: bool = False
    system: str = ""  # What a chat begins with.
    num_samples: Annotated[int, "at least 1, at most 1e6"] = 1  # How many texts to write.
    max_new_tokens: Annotated[int, "at least 1"] = 500  # Tokens to write in each, at most.
    # Below 1 is safer, above 1 is wilder; 0 is always the most likely token.
    temperature: Annotated[float, "at least 0"] = 0.8
    top_k: Annotated[int | None, "at least 1"] = None  # Choose among the k most likely tokens; None: all.
    # Choose among the fewest tokens that together have this probability.
    top_p: Annotated[float, "above 0, at most 1"] = 0.95
    # Instead of drawing tokens, search the best text, keeping so many beginnings at a time; 1 is greedy.
    beams: Annotated[int | None, "at least 1"] = None
    # A text that ends a sample, and is not written; --stop may be given several times.
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    seed: Annotated[int, "at least 0, below 9e18"] = 1  # The same seed gives the same text.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    compile: bool = False  # Compile the model first: worth its wait for long texts.
    attention: Path | None = None  # Instead of writing on, draw who attends to whom in the prompt, as a PNG.
    layer: int | None = None  # Which layer to draw, from 1; None: a grid of all.
    # A page on this machine: write, see what was likely, what surprises, who attends to whom; switch heads off.
    page: bool = False
    # Where it is served; 0: at any port that is free. An SSH tunnel needs the same number on both ends.
    port: Annotated[int, "at least 0, at most 65535"] = 0

    choice = property(lambda self: {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "seed")})

    def __post_init__(self):
        if "" in self.stop:
            raise UserError("--stop '' would end every sample before it begins; give some text")
        if self.attention and self.attention.suffix.lower() != ".png":
            raise UserError(f"--attention {self.attention} is to be a PNG; give it a name that ends in .png")
        if bool(self.stdin) + bool(self.prompt) + (self.prompt_file is not None) > 1:
            raise UserError("give one prompt: --prompt, --prompt-file or -")
        if self.beams and self.chat and not self.prompts_file:
            raise UserError("--beams can't be used in a conversation, which is written as it comes; leave it out")
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        flag = {name: f"--{name.replace('_', '-')}" for name in changed} | {"stdin": "-"}
        for name, others in APART.items():
            if name in changed and (clash := [other for other in others if other in changed]):
                raise UserError(f"{flag[name]} and {flag[clash[0]]} can't be used together; leave one out")
        for name, (other, why) in TOGETHER.items():
            if name in changed and other not in changed:
                raise UserError(f"{flag[name]} {getattr(self, name)} {why}; give both")


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
    if config.chat and not (found.talks and end_of_turn(tokenizer) is not None):
        advice = "prepare some with prepare.py … --chat, and train on them with train.py … --init-from"
        raise UserError(f"{found.path} has not learned chats; {advice}")
    model = load_model(found, ModelConfig, GPT).to(device)
    start = opening(tokenizer, found.state["documents"])
    if config.prompts_file:
        return complete_file(config, model, tokenizer, start)
    if config.chat:
        return chat(config, model, tokenizer)
    if config.page:
        return look_inside(config, model, tokenizer, start)
    text = read_prompt(config)
    prompt = tokenizer.encode(text).tolist() or start
    if config.attention:
        return draw(config, model, tokenizer, torch.tensor(prompt, device=device))
    if config.beams:
        model = decoder_of(config, model)
        return print(text + search_text(model, tokenizer, prompt, config.max_new_tokens, config.beams, config.stop)[0])
    write(sample(config, model, tokenizer, prompt), text, tokenizer, config)


def decoder_of(config: SampleConfig, model: GPT) -> GPT:
    """The model, made ready to decode sooner."""
    model = for_decoding(model, pack=not config.compile)
    if config.compile:
        model.compile(dynamic=True)
    return model


def sample(config: SampleConfig, model: GPT, tokenizer: Tokenizer, prompt: list[int]) -> Iterator[Tensor]:
    """Continue a prompt's token ids as often as the config says: yields (num_samples,) ids, one for each text."""
    prompts = [prompt] * config.num_samples
    return generate_text(decoder_of(config, model), tokenizer, prompts, config.max_new_tokens, **config.choice)


def turns_of(record: dict[str, Any]) -> list[Turn]:
    """The turns of a record's chat. Raises UserError if it is none, or the assistant has the last word."""
    if isinstance(messages := record.get("messages"), list):
        record = record | {"messages": [*messages, {"role": "assistant", "content": "what is to come"}]}
    *turns, _ = chat_of(record)
    if not turns or turns[-1][0] == "assistant":
        raise UserError("has no question at the end of its messages; remove what the assistant is to say")
    return turns


def fit_chat(tokenizer: Tokenizer, turns: list[Turn], length: int, most: int) -> tuple[list[int], int]:
    """The ids that the assistant's answer follows in a context of so many tokens, and the most that it may have.

    Half of the context, or ``most`` tokens if that is less, is kept free for the answer, which ends where the context
    does. To that end the oldest turns are forgotten, but for a system's first, and no answer is kept without its
    question; a last turn that alone is too long loses its beginning. Raises UserError if even that is not enough.
    """
    *said, begin = encode_chat(tokenizer, turns)
    room = length - min(most, length // 2) - len(begin)
    first = int(turns[0][0] == "system" and len(turns) > 1)
    for at in [at for at in range(first, len(turns)) if turns[at][0] == "user" or at == len(turns) - 1]:
        parts = [*said[:first], *said[at:]]
        if (excess := sum(map(len, parts)) - room) <= 0:
            break
    else:
        role, text = turns[-1]
        if excess >= len(tokenizer.encode(text)):
            taken = f"of its {length} tokens {sum(map(len, said[:first]))} are the system's turn"
            raise UserError(f"no question fits in the model's context: {taken}; shorten that")
        before = len(around(tokenizer, role)[0])
        parts[-1] = parts[-1][:before] + parts[-1][before + excess :]
        shown = repr(text if len(text) < SHOWN else text[:SHOWN] + "…")
        print(f"warning: the turn {shown} is too long; its first {excess:,} tokens are cut off", file=sys.stderr)
    ids = [*itertools.chain(*parts), *begin]
    return ids, min(most, length - len(ids))


def encode_record(record: Any, config: SampleConfig, tokenizer: Tokenizer, length: int) -> tuple[list[int], int]:
    """A line's prompt, or chat as :func:`fit_chat` has it, and the most tokens that may follow. Raises UserError."""
    to_json(record).encode()  # JSON can spell half a character
    if not isinstance(record, dict) or "completion" in record:
        raise UserError("has a 'completion' already; rename it" if isinstance(record, dict) else "is no JSON object")
    if config.chat:
        return fit_chat(tokenizer, turns_of(record), length, config.max_new_tokens)
    if not isinstance(record.get("prompt"), str):
        raise UserError(f"should have a text 'prompt' (for chats see --chat), but has {', '.join(map(repr, record))}")
    return tokenizer.encode(record["prompt"]).tolist(), config.max_new_tokens


def complete_file(config: SampleConfig, model: GPT, tokenizer: Tokenizer, start: list[int]) -> None:
    """Write --out: the lines of --prompts-file, each with its completion; and on stderr how fast that was.

    An empty prompt is start. Raises UserError naming a line that is not fit, or an --out that can't be made.
    """
    if config.out.exists() or not config.out.parent.is_dir():
        wrong = "exists; remove it, or choose another" if config.out.exists() else "is in no folder; make that first"
        raise UserError(f"--out {config.out} {wrong}")
    records, prompts, ends = [], [], [end_of_turn(tokenizer)] * config.chat
    for number, line in enumerate(config.prompts_file.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            records.append(parse_json(line, where := f"{config.prompts_file}, line {number}"))
            try:
                ids, most = encode_record(records[-1], config, tokenizer, model.config.context_length)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
            prompts.append((ids or start, most))
    if not records:
        raise UserError(f'{config.prompts_file} has no lines; give one for each prompt, {{"prompt": TEXT}}')
    model, total, began = decoder_of(config, model), 0, time.perf_counter()
    if config.beams:
        search = partial(search_text, model, tokenizer, beams=config.beams, stops=config.stop, ends=ends)
        found = ((index, *search(*prompt)) for index, prompt in enumerate(prompts))
    else:
        found = complete(model, tokenizer, prompts, config.batch_size, config.stop, ends, **config.choice)
    for index, text, count in tqdm(found, None, len(records), disable=None, dynamic_ncols=True, leave=False):
        records[index]["completion"] = text
        total += count
    write_whole(config.out, "".join(f"{to_json(record)}\n" for record in records).encode())
    speed = f"{total:,} tokens in {(took := time.perf_counter() - began):,.1f} s, {total / took:,.0f} tokens/s"
    print(f"{config.out}: {len(records):,} prompts, {speed}", file=sys.stderr)


def chat(config: SampleConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Talk: each line of standard input is the user's turn, until Ctrl-C or Ctrl-D, or its end."""
    if not sys.stdin:
        raise UserError("standard input is closed; a chat reads it, or give --prompts-file FILE.jsonl")
    sys.stdin.reconfigure(errors="replace")
    talking = sys.stdin.isatty() and sys.stdout.isatty()
    if talking:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, with it input() has a line edited, and remembers it
    interrupts = [KeyboardInterrupt] * talking  # they end an answer, or the chat; in a pipe, the command
    model, turns = decoder_of(config, model), [("system", config.system)] * bool(config.system)
    with contextlib.suppress(EOFError, *interrupts):
        while True:
            if said := input("> " if talking else ""):
                asked = [*turns, ("user", said)]
                try:
                    turns = [*asked, ("assistant", answer(config, model, tokenizer, asked, interrupts))]
                except ValueError as error:  # a character that the tokenizer does not know, say
                    if not talking:
                        raise
                    print(f"error: {error}", file=sys.stderr)
    print(end="\n" * talking)


def answer(config: SampleConfig, model: GPT, tokenizer: Tokenizer, turns: list[Turn], interrupts: Sequence) -> str:
    """What the assistant says next, printed as it comes; an interrupt, one of those exceptions, ends it."""
    ids, limit = fit_chat(tokenizer, turns, model.config.context_length, config.max_new_tokens)
    ends, said = [end_of_turn(tokenizer)], ""
    tokens = generate_text(model, tokenizer, [ids], limit, ends, **config.choice)
    with contextlib.suppress(*interrupts):
        for (text,) in texts(tokens, tokenizer, 1, config.stop, ends):
            said += text
            print(text, end="", flush=True)
    print()
    return said


def read_prompt(config: SampleConfig) -> str:
    """The text to continue. Raises UserError for a file that is not UTF-8."""
    if not config.stdin and not config.prompt_file:
        return config.prompt
    if not config.prompt_file and not sys.stdin:
        raise UserError("standard input is closed; give the prompt with --prompt or --prompt-file")
    raw = config.prompt_file.read_bytes() if config.prompt_file else sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not UTF-8 at byte {error.start}; convert it") from None


def write(tokens: Iterator[Tensor], prompt: str, tokenizer: Tokenizer, config: SampleConfig) -> None:
    """Print one sample as it comes, or several when they are done."""
    gained = texts(tokens, tokenizer, config.num_samples, config.stop)
    if config.num_samples == 1:
        for (text,) in itertools.chain([[prompt]], gained, [["\n"]]):
            print(text, end="", flush=True)
        return
    for number, parts in enumerate(zip(*gained, strict=True), 1):
        print(f"--- sample {number} ---\n{prompt}{''.join(parts)}")


def draw(config: SampleConfig, model: GPT, tokenizer: Tokenizer, tokens: Tensor) -> None:
    """Draw the prompt's attention maps. Raises UserError for a layer that is not there, or too long a prompt."""
    if config.layer is not None and not 1 <= config.layer <= model.config.num_layers:
        raise UserError(f"--layer {config.layer} is not there; the model has layers 1 to {model.config.num_layers}")
    if len(tokens) > model.config.context_length:
        raise UserError(f"the prompt has {len(tokens)} tokens; a picture shows at most {model.config.context_length}")
    maps = attention_maps(model, tokens).float().cpu().numpy()
    labels = [visible(tokenizer, token) for token in tokens.tolist()]
    draw_attention(maps, labels, config.attention, config.layer - 1 if config.layer else None)
    print(f"{config.attention}: {model.config.num_heads} heads a layer, {len(tokens)} tokens")


def look_inside(config: SampleConfig, model: GPT, tokenizer: Tokenizer, start: list[int]) -> None:
    """Serve the page until Ctrl-C; it begins with the prompt and the settings given."""
    settings = config.choice | {"text": read_prompt(config), "max_new_tokens": config.max_new_tokens}
    about = settings | {"name": config.path.resolve().name}
    with contextlib.closing(Inside(model, tokenizer, start, about)) as inside:
        serve(inside.answers, config.port)


if __name__ == "__main__":
    run_command(main)
