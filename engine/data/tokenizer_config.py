"""Files of a model beside its tokenizer.json: what begins and ends its texts, chat templates."""

import itertools
import json
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import tokenizers
from annotated_types import Ge, Le
from tokenizers.models import WordLevel

from engine.core.errors import UserError, wrap_library_errors
from engine.core.files import check_pointer, read_json
from engine.core.values import MAX_INTEGER, convert
from engine.data.tokenizer_json import END_OF_TEXT, Document, special_tokens_of, with_extension

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
# Its keys of sampling.
SAMPLING_TYPES: dict[str, Any] = {
    "temperature": Annotated[float, Ge(0), Le(1e6)],
    "top_k": Annotated[int, Ge(0), Le(MAX_INTEGER)],  # 0: all
    "top_p": Annotated[float, Ge(0), Le(1)],
    "repetition_penalty": Annotated[float, Ge(0.01), Le(100)],
}


def with_model_files(document: Document, directory: Path) -> Document:
    """Add what the files beside a tokenizer.json say of it. Raises UserError for corrupted ones."""
    config = _read_object(directory / TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in config:  # of a repository before transformers 4.34
        config |= _read_object(directory / "special_tokens_map.json")
    tokens = {key: t.get("content") if isinstance(t, dict) else t for key, t in config.items()}
    ids: dict[str, Any] = {}
    generation = _read_object(directory / GENERATION_CONFIG)
    for values in (_read_object(directory / "config.json"), generation):  # the last word
        ids |= {key: value for key, value in values.items() if value is not None}
    special = special_tokens_of(document)
    end = tokens.get("eos_token") or END_OF_TEXT
    starts = [name for name, number in special.items() if number == ids.get("bos_token_id")]
    start = tokens.get("bos_token") or (starts[0] if starts else end)
    ends = ids.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    stops = [str(number) for name, number in special.items() if name != end and number in ends]
    sampling = convert_sampling(generation, GENERATION_CONFIG)
    values = {
        "end_of_text": tokens.get("eos_token"),
        "bos_token": None if start == end else start,
        "stop_token_ids": " ".join(stops) or None,
        "chat_template": read_chat_template(directory),
        "sampling": json.dumps(sampling) if sampling else None,
    }
    known_values = {name: value for name, value in values.items() if isinstance(value, str)}
    return with_extension(document, **known_values)


def convert_sampling(values: Any, source: str) -> dict[str, Any]:
    """Return the settings of sampling in a JSON object. Raises UserError for unsuitable ones."""
    items = convert(values, dict, source)
    return {
        key: convert(items[key], hint, f"{source}: {key}")
        for key, hint in SAMPLING_TYPES.items()
        if items.get(key) is not None
    }


def read_chat_template(directory: Path) -> str | None:
    """Return a model's chat template. Raises UserError for several, or an unreadable one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        check_pointer(path.read_bytes(), path)
        with wrap_library_errors(f"{path}: is not UTF-8", UnicodeDecodeError):
            return path.read_text(encoding="utf-8")
    template = _read_object(directory / TOKENIZER_CONFIG).get("chat_template") or None
    if not isinstance(template, list):
        return convert(template, str | None, f"{TOKENIZER_CONFIG}: chat_template")
    entries = convert(template, list[dict[str, str]], f"{TOKENIZER_CONFIG}: chat_template")
    if len(entries) != 1 or "template" not in entries[0]:
        problem = f"chat_template: must be one text (got {len(entries)} entries)"
        raise UserError(f"{TOKENIZER_CONFIG}: {problem}. Write the one to use to {path}.")
    return entries[0]["template"]


def text_start_of(document: Document) -> list[int]:
    """Return the special ids that transformers puts before a text, by the post-processor."""
    if not document.get("post_processor"):
        return []
    runner = json.loads(tokenizers.Tokenizer(WordLevel({"a": 0}, "a")).to_str())
    runner["post_processor"] = document["post_processor"]
    encoding = tokenizers.Tokenizer.from_str(json.dumps(runner)).encode("a")
    pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    ids = [number for number, _ in itertools.takewhile(itemgetter(1), pairs)]
    is_special = {*special_tokens_of(document).values()}.issuperset(ids)
    return ids if is_special else []


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing."""
    return convert(read_json(path), dict, path.name) if path.is_file() else {}
