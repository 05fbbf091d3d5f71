"""Complete a file of prompts, or answer a file of chats: JSON Lines → JSON Lines."""

import json
import os
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from engine.core.cli import count_noun, progress_bar
from engine.core.errors import UserError
from engine.core.files import atomic_write, exclusive_lock, parse_json, read_input, sha256, to_json
from engine.data.chats.chat import own_template
from engine.data.chats.examples import parse_messages, read_record
from engine.generation.sampling import DecodingOptions
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream


def complete_file(
    model: TextGenerator,
    source: Path,
    target: Path,
    is_chat: bool,
    settings: dict[str, Any],
    max_new_tokens: int,
    stop: Sequence[str],
    **options: Unpack[DecodingOptions],
) -> None:
    """Write the objects of a file, each with its completion, and print the speed.

    Finished completions are kept in ``target``.partial until all are. An interrupted command
    continues from there, if the file and the settings are the same. Raises UserError for an
    unsuitable line, before any text is generated or written.
    """
    check_target(target)
    lines = []
    streams = []
    for line, prompt, limit in encode_lines(source, model, is_chat, max_new_tokens):
        streams.append(TextStream(model.tokenizer, prompt, limit, stop, model.stop_token_ids))
        lines.append(line)
    start_time = time.perf_counter()
    partial = target.with_name(f"{target.name}.partial")
    with exclusive_lock(target):
        finished = open_partial(partial, {"file": sha256(source), **settings})
        for index in finished:
            streams[index].end()
        texts = [finished.get(index, "") for index, _ in enumerate(lines)]
        with (
            open(partial, "a", encoding="utf-8") as file,
            progress_bar(total=len(lines), initial=len(finished)) as bar,
        ):
            for index, text in model.complete(streams, **options):
                texts[index] += text
                if streams[index].is_finished:
                    file.write(f"{to_json([index, texts[index]])}\n")
                    file.flush()
                    bar.update()
        pairs = zip(lines, texts, strict=True)
        content = "".join(f"{to_json({**line, 'completion': text})}\n" for line, text in pairs)
        atomic_write(target, content.encode())
        partial.unlink()
    seconds = time.perf_counter() - start_time
    num_tokens = sum(stream.num_tokens for stream in streams)
    counts = f"{count_noun(len(lines) - len(finished), 'prompt')}, {num_tokens:,} tokens"
    speed = f"{seconds:,.1f} s, {num_tokens / seconds:,.0f} tokens/s"
    print(f"{target}: {counts} in {speed}", file=sys.stderr)


def check_target(path: Path) -> None:
    """Raise UserError unless a new file can be made at a path."""
    if path.exists():
        raise UserError(f"--out: already exists (got {path}). Remove it, or choose another.")
    if not path.parent.is_dir():
        raise UserError(f"--out: its folder does not exist (got {path}). Create it first.")


def open_partial(path: Path, origin: dict[str, Any]) -> dict[int, str]:
    """Return the finished completions by index, from a file that starts with their origin.

    Makes the file, or removes an incomplete last line. Raises UserError for another origin.
    """
    if not path.exists():
        atomic_write(path, f"{to_json(origin)}\n".encode())
    first, *lines = path.read_bytes().split(b"\n")
    recorded = parse_json(first, path)
    if not lines or not isinstance(recorded, dict):
        raise UserError(f"{path}: is not of this command. Remove it.")
    for name, value in json.loads(to_json(origin)).items():
        if recorded.get(name) != value:
            problem = f"is of another {name} (got {value}, not {recorded.get(name)})"
            raise UserError(f"{path}: {problem}. Repeat that command, or remove the file.")
    os.truncate(path, path.stat().st_size - len(lines.pop()))
    return dict(parse_json(line, path) for line in lines)


def encode_lines(
    path: Path, model: TextGenerator, is_chat: bool, max_new_tokens: int
) -> Iterator[tuple[dict[str, Any], list[int], int]]:
    """Yield each line's object, the ids to continue, and the maximum number of new tokens.

    Raises UserError for an unsuitable line, and for a file without lines.
    """
    with open(path, "rb") as file:
        content = read_input(file, path).removeprefix(BOM_UTF8)
    if not content.strip():
        raise UserError(f'{path}: has no lines. Add lines such as {{"prompt": TEXT}}.')
    for number, text in enumerate(content.split(b"\n"), 1):
        if not text.strip():
            continue
        location = Path(f"{path}, line {number}")
        line = parse_json(text, location)
        try:
            yield line, *encode_line(line, model, is_chat, max_new_tokens)
        except (UserError, UnicodeEncodeError, RecursionError) as error:
            raise UserError(f"{location}: {error}") from None


def encode_line(
    line: Any, model: TextGenerator, is_chat: bool, max_new_tokens: int
) -> tuple[list[int], int]:
    """Return the ids of a line's prompt or chat, and the maximum number of new tokens.

    Raises UserError or UnicodeEncodeError.
    """
    to_json(line).encode()  # JSON can spell half of a surrogate pair
    if not isinstance(line, dict):
        raise UserError(f"must be a JSON object (got {to_json(line)[:40]}).")
    if "completion" in line:
        raise UserError("already has a 'completion'. Rename it.")
    if is_chat:
        template = own_template(model.tokenizer)
        messages, tools, _ = read_record(line, template=template)
        turns = parse_messages(messages, template, tools)
        if turns[-1][0] == "assistant":
            raise UserError("'messages' must end with a question. Remove the last message.")
        return model.encode_turns(turns, max_new_tokens)
    if not isinstance(line.get("prompt"), str):
        names = ", ".join(map(repr, line))
        raise UserError(f"must have a text 'prompt' (got {names}). For chats, use --chat.")
    return model.encode_prompt(line["prompt"]), max_new_tokens
