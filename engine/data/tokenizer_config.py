"""Files of a model beside its tokenizer.json: the tokens that begin and end its texts."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

from engine.core.files import read_json
from engine.data.chats.chat_template import read_tokenizer_config
from engine.data.tokenizer_json import END_OF_TEXT, Document, special_tokens_of, with_extension

MODEL_FILES = ("config.json", "generation_config.json")  # the second has the last word


def with_model_files(document: Document, directory: Path) -> Document:
    """Return a tokenizer.json with what the other files of its model say about its tokens.

    Raises UserError if a file is corrupted.
    """
    values = read_tokenizer_config(directory)
    model: dict[str, Any] = {}
    for name in MODEL_FILES:
        model |= {
            key: ids for key, ids in _read_object(directory / name).items() if ids is not None
        }
    special = special_tokens_of(document)
    end = values.get("end_of_text", END_OF_TEXT)
    token = _read_object(directory / "tokenizer_config.json").get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    names = [name for name, number in special.items() if number == model.get("bos_token_id")]
    starts = [token] if isinstance(token, str) else names
    if starts and starts[0] != end:
        values["bos_token"] = starts[0]
    ends = model.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    numbers = {*special.values()} - {special.get(end)}
    if stops := [str(i) for i in ends if type(i) is int and i in numbers]:
        values["stop_token_ids"] = " ".join(stops)
    return with_extension(document, **values)


def text_start_of(document: Document) -> list[int]:
    """Return the special ids that transformers puts before a text, by the post-processor."""
    if not document.get("post_processor"):
        return []
    runner = json.loads(tokenizers.Tokenizer(WordLevel({"a": 0}, "a")).to_str())
    runner["post_processor"] = document["post_processor"]
    encoding = tokenizers.Tokenizer.from_str(json.dumps(runner)).encode("a")
    ids = encoding.ids[: [*encoding.special_tokens_mask, 0].index(0)]
    return ids if {*ids} <= {*special_tokens_of(document).values()} else []


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing or has another value."""
    value = read_json(path) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
