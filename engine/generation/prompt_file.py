"""Complete a file of prompts, or answer a file of chats: records → JSON Lines."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

from engine.core.cli import count_noun, progress_bar
from engine.core.errors import UserError
from engine.core.files import atomic_write, to_json
from engine.data.chats.chat import Turn, own_template
from engine.data.chats.examples import Record, parse_chat
from engine.data.records.reader import read_records
from engine.data.records.text import Reader, to_text
from engine.data.sources.finder import find_file
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source
from engine.generation.sampling import TextOptions
from engine.generation.text_generator import DEFAULT_NEW_TOKENS, TextGenerator
from engine.generation.text_stream import TextStream


def complete_file(
    model: TextGenerator, source: Path, target: Path, is_chat: bool, **options: Unpack[TextOptions]
) -> None:
    """Write the objects of a file, each with its completion, and print the speed.

    Until all are finished, those that are stand in ``target``.partial. Raises UserError for an
    unsuitable line, before any text is generated.
    """
    if target.exists():
        raise UserError(f"--out: already exists (got {target}). Remove it, or choose another.")
    if not target.parent.is_dir():
        raise UserError(f"--out: its folder does not exist (got {target}). Create it first.")
    max_new_tokens = options.pop("max_new_tokens", DEFAULT_NEW_TOKENS)
    stop = options.pop("stop", ())
    streams = []
    results = []
    for location, line in read_lines(source):
        with locate_errors(location):
            ids, limit = encode_line(line, model, is_chat, max_new_tokens)
        streams.append(TextStream(model.tokenizer, ids, limit, stop, model.ends))
        results.append({**line, "completion": ""})
    start_time = time.perf_counter()
    pieces = model.complete(streams, **options)
    ended = (index for index, _ in pieces if streams[index].is_finished)
    partial = target.with_name(f"{target.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        for index in progress_bar(ended, total=len(streams)):
            results[index]["completion"] = streams[index].text
            file.write(f"{to_json(results[index])}\n")
            file.flush()
    atomic_write(target, "".join(f"{to_json(result)}\n" for result in results).encode())
    partial.unlink()
    seconds = time.perf_counter() - start_time
    num_tokens = sum(len(stream.new_ids) for stream in streams)
    counts = f"{count_noun(len(streams), 'prompt')}, {num_tokens:,} tokens"
    speed = f"{seconds:,.1f} s, {num_tokens / seconds:,.0f} tokens/s"
    print(f"{target}: {counts} in {speed}", file=sys.stderr)


def read_lines(path: Path) -> list[tuple[str, Any]]:
    """Return the location and the fields of each record of a local file, read as prepare.py does.

    Raises UserError for an unreadable record, and for a file without records.
    """
    source = Source(find_file(path), str(path))
    lines = []
    for location, value, *_ in read_records(source, Reader(field=""), Notes()):
        if not isinstance(value, dict):
            problem = value if isinstance(value, UserError) else "must be JSON Lines or a table"
            raise UserError(f"{location}: {problem}. Give a file such as prompts.jsonl.")
        lines.append((location, value))
    if not lines:
        raise UserError(f'{path}: has no lines. Add lines such as {{"prompt": TEXT}}.')
    return lines


@contextlib.contextmanager
def locate_errors(location: str) -> Iterator[None]:
    """Raise UserError, which starts with a line's location, for what cannot be encoded in it."""
    try:
        yield
    except (UserError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise UserError(f"{location}: {error}") from None


def encode_line(
    line: Record, model: TextGenerator, is_chat: bool, max_new_tokens: int
) -> tuple[list[int], int]:
    """Return the ids of a line's prompt or chat, and the maximum length of the text after them.

    Raises UserError; for values that JSON does not have, TypeError or UnicodeEncodeError.
    """
    to_json(line).encode()  # JSON can spell half of a surrogate pair
    if "completion" in line:
        raise UserError("already has a 'completion'. Rename it.")
    if is_chat:
        return model.encode_turns(read_turns(line, model)[0], max_new_tokens)
    return model.encode_prompt(read_prompt(line)), max_new_tokens


def read_prompt(line: Record) -> str:
    """Return the prompt of a line. Raises UserError if it has none."""
    prompt = to_text(line.get("prompt"))
    if not isinstance(prompt, str):
        names = ", ".join(map(repr, line))
        raise UserError(f"must have a text 'prompt' (got {names}). For chats, use --chat.")
    return prompt


def read_turns(line: Record, model: TextGenerator) -> tuple[list[Turn], str | None]:
    """Return the turns of a line's chat, or of its prompt, and the answer at their end if any."""
    template = own_template(model.tokenizer)
    prompt = to_text(line.get("prompt"))
    chat = {"messages": [{"role": "user", "content": prompt}]} if prompt else line
    turns, _ = parse_chat(chat, None, template, has_targets=False)
    answer = turns.pop()[1] if turns[-1][0] == "assistant" else None
    if not turns:
        raise UserError("'messages' must have a question. Add a message of the user.")
    return turns, answer
