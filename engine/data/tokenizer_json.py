"""Hugging Face's tokenizer.json as parsed JSON: build it, check it, say what can run it.

``tokenizers`` ignores unknown keys in ``model``. ``model.gpt_trainer`` holds what the format lacks:
``end_of_text`` (the special token that ends a document), ``name``, ``chat_template``,
``bos_token``, ``stop_token_ids`` (those of a model besides the end of text, with spaces between
them), ``prompt_suffix`` (of examples), and ``sampling`` (JSON of a model's defaults).
"""

import json
import re
import secrets
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import tokenizers
from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
from tokenizers.pre_tokenizers import ByteLevel

from engine.core.errors import UserError, wrap_library_errors

Document = dict[str, Any]  # a parsed tokenizer.json

END_OF_TEXT = "<|endoftext|>"
CHAT_ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, *CHAT_ROLES.values(), END_OF_TURN)  # of a BPE trained here
EXTENSION_KEY = "gpt_trainer"
# Of the extension: ids do not depend on them.
KEYS_WITHOUT_IDS = ["name", "chat_template", "bos_token", "stop_token_ids", "prompt_suffix"]
KEYS_WITHOUT_IDS += ["sampling"]
MAX_VOCAB_SIZE = 2**24
HIDDEN_PREFIX = secrets.token_hex()  # before names of special tokens: no text can have it

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# --pattern → regex whose matches are the words, of models that other programs run, too.
SPLIT_PATTERNS = {
    "gpt2": _GPT2_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "qwen2": _LLAMA3_PATTERN.replace("{1,3}", ""),
    "smollm": _GPT2_PATTERN.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])"),
}
# Encoding of tiktoken → its pattern, which tiktoken now spells for its own regex engine.
GPT2_ENCODINGS = ("gpt2", "r50k_base", "p50k_base", "p50k_edit")
TIKTOKEN_PATTERNS = {"cl100k_base": "llama3", **dict.fromkeys(GPT2_ENCODINGS, "gpt2")}
# GPT-2's character for each byte: the byte's own if it is printable, else the next from U+0100.
_ALPHABET_CHARACTERS = sorted(ByteLevel.alphabet())
_ALPHABET_BYTES = sorted(range(256), key=lambda byte: chr(byte) not in _ALPHABET_CHARACTERS)
BYTE_OF_CHARACTER = dict(zip(_ALPHABET_CHARACTERS, _ALPHABET_BYTES, strict=True))
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def from_byte_level(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet."""
    return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))


def to_byte_level(token: bytes) -> str:
    """Return a token in GPT-2's alphabet."""
    return "".join(map(CHARACTER_OF_BYTE.__getitem__, token))


def split_by(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer whose words are the matches of a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_BYTE_LEVEL_STEP = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTE_LEVEL_WORDS = _BYTE_LEVEL_STEP | {"use_regex": True}
BYTE_LEVEL = _BYTE_LEVEL_STEP | {"use_regex": False}
EACH_DIGIT = {"type": "Digits", "individual_digits": True}
# Pattern → how its models spell it, which more programs read than the regex.
KNOWN_STEPS = {
    SPLIT_PATTERNS["gpt2"]: [BYTE_LEVEL_WORDS],
    SPLIT_PATTERNS["smollm"]: [EACH_DIGIT, BYTE_LEVEL_WORDS],
}
SPLIT_MODES = (("Isolated", False), ("Removed", True))  # that keep the matches of a regex
UNICODE_FORMS = (None, "NFC", "NFD", "NFKC", "NFKD")
UNSET_STEPS = dict.fromkeys(("truncation", "padding", "post_processor"))  # to encode text alone
_BPE_OPTIONS = {
    **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
}


def char_document(characters: str, special: dict[str, int]) -> Document:
    """Build the tokenizer whose ids number the characters in order."""
    vocab = {character: index for index, character in enumerate(characters)} | special
    model: dict[str, Any] = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    return _document(model, split_by(r"[\s\S]"), {"type": "Fuse"}, special)


def byte_document(special: dict[str, int]) -> Document:
    """Build the tokenizer of the 256 bytes of UTF-8."""
    vocab = {CHARACTER_OF_BYTE[byte]: byte for byte in range(256)}
    model: dict[str, Any] = {"type": "BPE", **_BPE_OPTIONS, "vocab": vocab | special, "merges": []}
    return _document(model, BYTE_LEVEL, BYTE_LEVEL_WORDS, special)


def bpe_document(vocab: dict[str, int], pattern: str, special: dict[str, int]) -> Document:
    """Build a BPE like tiktoken's; ``vocab`` is in GPT-2's alphabet, without special tokens."""
    vocab = dict(sorted(vocab.items(), key=itemgetter(1)))
    options = {**_BPE_OPTIONS, "ignore_merges": True}
    merges = possible_merges(vocab)
    model = {"type": "BPE", **options, "vocab": vocab | special, "merges": merges}
    steps = KNOWN_STEPS.get(pattern, [split_by(pattern), BYTE_LEVEL])
    words = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
    return _document(model, words, decoder=BYTE_LEVEL_WORDS, special=special)


def tiktoken_document(name: str) -> Document:
    """Build the document of one of tiktoken's encodings, which tiktoken downloads."""
    try:
        encoding = ENCODING_CONSTRUCTORS[name]()
    except Exception as error:  # the network, its libraries or a damaged file may raise anything
        problem = f"--tokenizer {name}: download failed ({type(error).__name__})"
        advice = "set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bpe"
        raise UserError(f"{problem}. Connect to the internet, {advice}.") from None
    vocab = {to_byte_level(token): rank for token, rank in encoding["mergeable_ranks"].items()}
    pattern = SPLIT_PATTERNS.get(TIKTOKEN_PATTERNS.get(name, ""), encoding["pat_str"])
    document = bpe_document(vocab, pattern, encoding["special_tokens"])
    return with_extension(document, name=name)


def _document(
    model: dict[str, Any], words: dict[str, Any], decoder: dict[str, Any], special: dict[str, int]
) -> Document:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(special),
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def added_tokens(special: dict[str, int]) -> list[dict[str, Any]]:
    """Build the entries of special tokens, in order of their ids."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": name, **flags, "special": True}
        for name, number in sorted(special.items(), key=itemgetter(1))
    ]


def with_extension(document: Document, **values: str | None) -> Document:
    """Change values of a document's extension; None and the usual end of text remove one."""
    model = {**document["model"]}
    changed = model.pop(EXTENSION_KEY, {}) | values
    if changed.get("end_of_text") == END_OF_TEXT:
        changed["end_of_text"] = None
    extension = {name: value for name, value in changed.items() if value is not None}
    if extension:
        model[EXTENSION_KEY] = extension
    return document | {"model": model}


def with_special_tokens(document: Document, names: Sequence[str]) -> Document:
    """Return the document with additional special tokens; missing names get the next ids."""
    special = special_tokens_of(document)
    missing = [name for name in names if name not in special]
    if not missing:
        return document
    new = {name: number for number, name in enumerate(missing, vocab_size_of(document))}
    model = document["model"]
    if isinstance(model["vocab"], dict):
        model = model | {"vocab": model["vocab"] | new}
    added = [*document["added_tokens"], *added_tokens(new)]
    document = document | {"model": model, "added_tokens": added}
    # The template of an imported model does not use the tokens of our chats.
    return with_extension(document, chat_template=None) if END_OF_TURN in new else document


def is_special(token: dict[str, Any]) -> bool:
    """Return whether text never becomes an added token; markup like ``<tool_call>`` never does."""
    return token.get("special", False) or token["content"].startswith(("<", "["))


def special_tokens_of(document: Document, flag: str | None = None) -> dict[str, int]:
    """Return names and ids of the special tokens, or of those with a flag, in order of the ids."""
    tokens = sorted(filter(is_special, document["added_tokens"]), key=itemgetter("id"))
    return {token["content"]: token["id"] for token in tokens if flag is None or token.get(flag)}


def vocab_of(document: Document) -> dict[str, int]:
    """Return the model's tokens and ids."""
    vocab = document["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of a token and its score
        return {token: number for number, (token, _) in enumerate(vocab)}
    return vocab


def token_ids_of(document: Document) -> dict[str, int]:
    """Return all tokens and their ids."""
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    return vocab_of(document) | added


def text_vocab(document: Document) -> dict[str, int]:
    """Return the model's tokens and ids without the special tokens."""
    special = special_tokens_of(document)
    return {token: number for token, number in vocab_of(document).items() if token not in special}


def vocab_size_of(document: Document) -> int:
    """Return the largest id plus one."""
    return 1 + max(token_ids_of(document).values(), default=-1)


def without_leading_space(document: Document) -> Document:
    """Return the document without the space that it puts before a text."""
    unset = {"prepend_scheme": "never", "add_prefix_space": False, "prepend": ""}

    def change(step: dict[str, Any]) -> dict[str, Any]:
        return step | {key: unset[key] for key in unset.keys() & step.keys()}

    steps = {name: document.get(name) for name in ("normalizer", "pre_tokenizer")}
    return document | json.loads(json.dumps(steps), object_hook=change)


def without_special(document: Document) -> Document:
    """Rename special tokens, so that ``tokenizers`` never encodes text as one of them."""
    special = special_tokens_of(document)
    hidden = {name: HIDDEN_PREFIX + name for name in special}
    model = dict(document["model"])
    vocab = vocab_of(document)
    if isinstance(model["vocab"], list):
        model["vocab"] = [[hidden.get(token, token), score] for token, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(token, token): number for token, number in vocab.items()}
    if model.get("unk_token"):
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "special": is_special(token)}
        for token in document["added_tokens"]
        if not is_special(token) or token["content"] not in vocab
    ]
    return {**document, **UNSET_STEPS, "added_tokens": added, "model": model}


def check_document(document: Any) -> None:
    """Raise UserError for a document that is unsupported or whose ids are not unique."""
    with wrap_library_errors("tokenizers cannot read it", Exception):
        runner = tokenizers.Tokenizer.from_str(json.dumps(document))
        vocab = token_ids_of(document)
    model = document["model"]
    if runner.get_vocab() != vocab or len({*vocab.values()}) < len(vocab):
        raise UserError("two tokens have one id, or one token has two")
    if vocab_size_of(document) > MAX_VOCAB_SIZE:
        raise UserError(f"ids must be below {MAX_VOCAB_SIZE:,}")
    if model.get("dropout"):
        raise UserError(f"its token ids are random (dropout {model['dropout']})")
    extension = model.get(EXTENSION_KEY, {})
    if not isinstance(extension, dict) or {*map(type, extension.values())} - {str}:
        raise UserError(f"{EXTENSION_KEY} must be an object of strings")


def possible_merges(vocab: dict[str, int]) -> list[str]:
    """List the pairs of tokens that form a token, in order of its id: those tiktoken merges."""
    return [
        f"{token[:length]} {token[length:]}"
        for token in sorted(vocab, key=vocab.__getitem__)
        for length in range(1, len(token))
        if token[:length] in vocab and token[length:] in vocab
    ]


def is_byte_level(document: Document) -> bool:
    """Return whether text becomes bytes, in words that every regex engine finds."""
    *splits, last = _word_steps(document)
    normalizer = document.get("normalizer") or {}
    forms = [step.get("type") for step in normalizer.get("normalizers", [normalizer])]
    model = document["model"]
    suffixes = map(model.get, ("continuing_subword_prefix", "end_of_word_suffix"))
    vocab = text_vocab(document)
    return (
        (last == BYTE_LEVEL_WORDS or (last == BYTE_LEVEL and len(splits) > 0))
        and all(map(_is_split, splits))
        and {*forms} <= {*UNICODE_FORMS}
        and "merges" in model
        and not any(suffixes)
        and {*"".join(vocab)} <= BYTE_OF_CHARACTER.keys() <= vocab.keys()
        and all(map(is_special, document["added_tokens"]))
    )


def pattern_of(document: Document) -> str | None:
    """Return the regex whose matches are the words of a byte-level BPE; None for other words."""
    steps = _word_steps(document)
    if steps[1:] == [BYTE_LEVEL] and steps[0] != EACH_DIGIT:
        return steps[0]["pattern"]["Regex"]
    return next((pattern for pattern, form in KNOWN_STEPS.items() if steps == form), None)


def portable_regex(regex: str) -> str | None:
    """Spell a regex for Rust, Oniguruma and JavaScript; None if they may differ in its meaning."""
    regex = spell_cases(regex)
    outside = re.sub(r"\\[pP]\{.*?\}|\[(?:\\.|[^\]\\])*\]", "x", regex)  # of classes of characters
    escapes = {*re.findall(r"\\([A-Za-z0-9])", regex)}
    groups = {*re.findall(r"\(\?(.)", regex)}
    has_anchor = re.search(r"[\^$.]|[?*+}]\+", outside)  # or a possessive quantifier
    return regex if escapes <= {*"sSpPrn"} and groups <= {*":!"} and not has_anchor else None


def spell_cases(regex: str) -> str:
    """Write groups like ``(?i:'s|'t)`` without the flag, for which some engines omit ſ, an s."""

    def spell(group: re.Match[str]) -> str:
        cases = re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", group[1])
        return f"(?:{cases.replace('[sS]', '[sSſ]')})"

    return re.sub(r"\(\?i:([a-jl-z'|]+)\)", spell, regex)  # no k: its cases include U+212A


def _word_steps(document: Document) -> list[dict[str, Any]]:
    """Return the pre-tokenizers of a document; older files omit some of the last one's options."""
    words = document.get("pre_tokenizer") or {}
    steps = words.get("pretokenizers") or [words]
    return [*steps[:-1], {"use_regex": True} | steps[-1] | {"trim_offsets": True}]


def _is_split(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits text at each digit, or into the matches of a regex."""
    regex = step.get("pattern", {}).get("Regex")
    is_isolated = (step.get("behavior"), step.get("invert")) in SPLIT_MODES
    return step == EACH_DIGIT or (is_isolated and portable_regex(regex or "$") is not None)
