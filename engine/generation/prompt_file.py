"""Complete a file of prompts, or answer a file of chats or questions: records → JSON Lines."""

import string
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from engine.core.cli import count_noun, progress_bar
from engine.core.errors import UserError
from engine.core.files import atomic_write, to_json
from engine.data.chats.chat import encode_chat, own_template
from engine.data.chats.chat_template import parse_value
from engine.data.chats.examples import Record, parse_messages, read_record
from engine.data.inputs.finder import find_file
from engine.data.inputs.readers import read_records
from engine.data.inputs.sources import Reader, Source
from engine.data.inputs.text import to_text
from engine.generation.sampling import DecodingOptions
from engine.generation.scores import Question, answer_questions, describe_score, score_record
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream


def complete_file(
    model: TextGenerator,
    source: Path,
    target: Path,
    is_chat: bool,
    max_new_tokens: int,
    stop: Sequence[str],
    **options: Unpack[DecodingOptions],
) -> None:
    """Write the objects of a file, each with its completion, and print the speed.

    Until all are finished, those that are stand in ``target``.partial. Raises UserError for an
    unsuitable line, before any text is generated.
    """
    if target.exists():
        raise UserError(f"--out: already exists (got {target}). Remove it, or choose another.")
    if not target.parent.is_dir():
        raise UserError(f"--out: its folder does not exist (got {target}). Create it first.")
    lines = read_lines(source)
    questions = [*encode_lines(lines, model, is_chat, max_new_tokens)]
    streams = [
        TextStream(model.tokenizer, each.prompt, each.max_new_tokens, stop, model.ends)
        for each in questions
    ]
    start_time = time.perf_counter()
    pieces = model.complete(streams, **options)
    answers = answer_questions(model.decoder, questions, streams, pieces)
    pairs = zip(lines, questions, strict=True)
    results = [{**line, "completion": "", **each.grade("")} for (_, line), each in pairs]
    partial = target.with_name(f"{target.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        for index, text in progress_bar(answers, total=len(questions)):
            results[index] |= {"completion": text, **questions[index].grade(text)}
            file.write(f"{to_json(results[index])}\n")
            file.flush()
    atomic_write(target, "".join(f"{to_json(result)}\n" for result in results).encode())
    partial.unlink()
    seconds = time.perf_counter() - start_time
    num_tokens = sum(len(stream.new_ids) for stream in streams)
    counts = f"{count_noun(len(lines), 'prompt')}, {num_tokens:,} tokens"
    speed = f"{seconds:,.1f} s, {num_tokens / seconds:,.0f} tokens/s"
    print(f"{target}: {counts} in {speed}", file=sys.stderr)
    if grades := [result["is_right"] for result in results if "is_right" in result]:
        score = describe_score(score_record(sum(grades), len(grades)))
        print(f"{score}: {sum(grades):,} of {count_noun(len(grades), 'answer')}")


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
    prompt = to_text(line.get("prompt"))
    choices, answer = parse_answer(line)
    rows = {}
    if is_chat:
        template = own_template(model.tokenizer)
        chat = {"messages": [{"role": "user", "content": prompt}]} if prompt else line
        messages, tools, _ = read_record(chat, template=template)
        turns, _ = parse_messages(messages, template, tools)
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
        prompt = model.end_prompt(prompt)
        encode = partial(model.encode_prompt, add_suffix=False)
        for text in choices:  # spaces before a choice may be encoded with it
            ids = encode(prompt.rstrip())
            touches = prompt and not prompt[-1].isspace() and not text[0].isspace()
            choice = f"{prompt} {text}" if touches else prompt + text
            rows[text] = encode(choice)
            if not prompt.strip():
                rows[text] = ids + model.tokenizer.without_space.encode(choice).tolist()
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
    value = line.get("answer")
    choices = parse_value(line.get("choices"))
    if not choices:
        return [], str(value) if isinstance(value, str | int) else None
    if not isinstance(choices, list) or not all(isinstance(text, str) and text for text in choices):
        raise UserError(f"'choices' must be a list of texts (got {to_json(choices)[:40]}).")
    texts: dict[Any, str] = dict(enumerate(choices))  # whatever number a choice spells
    texts |= {str(index): text for index, text in enumerate(choices)}
    texts |= dict(zip(string.ascii_uppercase, choices, strict=False))
    texts |= {text: text for text in choices}
    if value is not None and (type(value) not in (int, str) or value not in texts):
        names = "a choice, its index from 0, or its letter"
        raise UserError(f"'answer' must be {names} (got {value!r}).")
    return choices, texts.get(value)
