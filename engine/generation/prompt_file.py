"""Complete a file of prompts, or answer a file of chats or questions: records → JSON Lines."""

import hashlib
import os
import string
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from engine.core.cli import count_noun, progress_bar
from engine.core.errors import UserError
from engine.core.files import atomic_write, exclusive_lock, parse_json, sha256, to_json
from engine.data.chats.chat import encode_chat, own_template
from engine.data.chats.chat_template import parse_value
from engine.data.chats.examples import Record, parse_messages, read_record
from engine.data.inputs.finder import find_file
from engine.data.inputs.readers import read_records
from engine.data.inputs.sources import Reader, Source
from engine.generation.sampling import DecodingOptions
from engine.generation.scores import Question, choose, describe_score, score_record
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream

PARTIAL_NAME_DIGITS = 12  # of the file name of unfinished work


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

    Finished completions are kept in a file until all are: an interrupted command continues from
    there. Its name depends on the prompts and settings. Raises UserError for an unsuitable line,
    before any text is generated or written.
    """
    check_target(target)
    lines = read_lines(source)
    questions = [*encode_lines(lines, model, is_chat, max_new_tokens)]
    streams = [
        TextStream(model.tokenizer, each.prompt, each.max_new_tokens, stop, model.stop_token_ids)
        for each in questions
    ]
    start_time = time.perf_counter()
    origin = f"{sha256(source)} {to_json(settings)}"
    digest = hashlib.sha256(origin.encode()).hexdigest()[:PARTIAL_NAME_DIGITS]
    partial = target.with_name(f"{target.name}.{digest}.partial")
    with exclusive_lock(target):
        finished = read_finished(partial)
        texts = complete_questions(model, questions, streams, partial, finished, **options)
        results = [
            {**line, "completion": text, **question.grade(text)}
            for (_, line), question, text in zip(lines, questions, texts, strict=True)
        ]
        content = "".join(f"{to_json(result)}\n" for result in results)
        atomic_write(target, content.encode())
        partial.unlink()
    seconds = time.perf_counter() - start_time
    num_tokens = sum(len(stream.new_ids) for stream in streams)
    counts = f"{count_noun(len(lines) - len(finished), 'prompt')}, {num_tokens:,} tokens"
    speed = f"{seconds:,.1f} s, {num_tokens / seconds:,.0f} tokens/s"
    print(f"{target}: {counts} in {speed}", file=sys.stderr)
    if grades := [result["is_right"] for result in results if "is_right" in result]:
        score = describe_score(score_record(sum(grades), len(grades)))
        print(f"{score}: {sum(grades):,} of {count_noun(len(grades), 'answer')}")


def complete_questions(
    model: TextGenerator,
    questions: Sequence[Question],
    streams: Sequence[TextStream],
    partial: Path,
    finished: dict[int, str],
    **options: Unpack[DecodingOptions],
) -> list[str]:
    """Return the text or the choice of each question; append texts to a file of finished ones."""
    texts = [finished.get(index, "") for index, _ in enumerate(questions)]
    for index, question in enumerate(questions):
        if question.choices:
            texts[index] = choose(model.decoder, question)
        if question.choices or index in finished:
            streams[index].end()
    with (
        open(partial, "a", encoding="utf-8") as file,
        progress_bar(total=len(questions), initial=len(finished)) as bar,
    ):
        for index, text in model.complete(streams, **options):
            texts[index] += text
            if streams[index].is_finished:
                file.write(f"{to_json([index, texts[index]])}\n")
                file.flush()
                bar.update()
    return texts


def check_target(path: Path) -> None:
    """Raise UserError unless a new file can be made at a path."""
    if path.exists():
        raise UserError(f"--out: already exists (got {path}). Remove it, or choose another.")
    if not path.parent.is_dir():
        raise UserError(f"--out: its folder does not exist (got {path}). Create it first.")


def read_finished(path: Path) -> dict[int, str]:
    """Return the finished completions by index; remove an incomplete last line."""
    if not path.exists():
        return {}
    *lines, incomplete = path.read_bytes().split(b"\n")
    os.truncate(path, path.stat().st_size - len(incomplete))
    return dict(parse_json(line, path) for line in lines)


def read_lines(path: Path) -> list[tuple[str, Any]]:
    """Return the location and the fields of each record of a local file, read as prepare.py does.

    Raises UserError for an unreadable record, and for a file without records.
    """
    source = Source(find_file(path), str(path))
    lines = []
    for location, record in read_records(source, Reader(field=""), 0, 1, Counter()):
        if isinstance(record, UserError):
            raise UserError(f"{location}: {record}")
        lines.append((location, record))
    if not lines:
        raise UserError(f'{path}: has no lines. Add lines such as {{"prompt": TEXT}}.')
    return lines


def encode_lines(
    lines: Iterable[tuple[str, Any]], model: TextGenerator, is_chat: bool, max_new_tokens: int
) -> Iterator[Question]:
    """Yield the question of each line. Raises UserError for an unsuitable one."""
    for location, line in lines:
        try:
            yield encode_line(line, model, is_chat, max_new_tokens)
        except (UserError, TypeError, UnicodeEncodeError, RecursionError) as error:
            raise UserError(f"{location}: {error}") from None


def encode_line(line: Record, model: TextGenerator, is_chat: bool, max_new_tokens: int) -> Question:
    """Return the question of a line, with the answer in its field, or in the chat's last message.

    Raises UserError; for values that JSON does not have, TypeError or UnicodeEncodeError.
    """
    to_json(line).encode()  # JSON can spell half of a surrogate pair
    if "completion" in line:
        raise UserError("already has a 'completion'. Rename it.")
    prompt = line.get("prompt")
    choices, answer = parse_answer(line)
    rows = {}
    if is_chat:
        template = own_template(model.tokenizer)
        chat = {"messages": [{"role": "user", "content": prompt}]} if prompt else line
        messages, tools, _ = read_record(chat, template=template)
        turns = parse_messages(messages, template, tools)
        if turns[-1][0] == "assistant":
            answer = turns.pop()[1]
        if not turns:
            raise UserError("'messages' must have a question. Add a message of the user.")
        ids, limit = model.encode_turns(turns, max_new_tokens)
        for text in choices:
            ids = encode_chat(model.tokenizer, turns)
            rows[text] = encode_chat(model.tokenizer, [*turns, ("assistant", text)], None, True)
    elif isinstance(prompt, str):
        ids = model.encode_prompt(prompt)
        limit = max_new_tokens
        for text in choices:  # spaces before a choice may be encoded with it
            ids = model.encode_prompt(prompt.rstrip())
            touches = prompt and not prompt[-1].isspace() and not text[0].isspace()
            choice = f"{prompt} {text}" if touches else prompt + text
            rows[text] = model.encode_prompt(choice)
            if not prompt.strip():
                rows[text] = ids + model.tokenizer.encode_continuation(choice).tolist()
    else:
        names = ", ".join(map(repr, line))
        raise UserError(f"must have a text 'prompt' (got {names}). For chats, use --chat.")
    longest = max(map(len, rows.values()), default=0) - len(ids)
    if longest > model.model.config.context_length:
        raise UserError(f"'choices' must fit in the context (got {longest} tokens).")
    return Question(ids, limit, answer, rows)


def parse_answer(line: Record) -> tuple[list[str], str | None]:
    """Return the choices of a line, and its answer: of choices the text, the index or A, B, ….

    Raises UserError for choices that are not texts, and for an answer that is none of them.
    """
    answer = str(line["answer"]) if isinstance(line.get("answer"), str | int) else None
    choices = parse_value(line.get("choices"))
    if not choices:
        return [], answer
    if not isinstance(choices, list) or not all(isinstance(text, str) and text for text in choices):
        raise UserError(f"'choices' must be a list of texts (got {to_json(choices)[:40]}).")
    texts = {str(index): text for index, text in enumerate(choices)}
    texts |= dict(zip(string.ascii_uppercase, choices, strict=False))
    texts |= {text: text for text in choices}
    if answer not in (None, *texts):
        names = "a choice, its index from 0, or its letter"
        raise UserError(f"'answer' must be {names} (got {answer!r}).")
    return choices, texts.get(answer or "")
