"""Hugging Face's tokenizer.json as parsed JSON: build it, check it, and say whether tiktoken can run it.

What the format cannot say lies in ``model.gpt_trainer``, because ``tokenizers`` ignores unknown keys there and refuses
them at the top level: ``end_of_text`` (the special token that ends a document), ``chat_template`` and ``name``.
"""

import base64
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.core.errors import UserError

Document = dict[str, Any]  # a parsed tokenizer.json

END_OF_TEXT = "<|endoftext|>"
CHAT_ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, *CHAT_ROLES.values(), END_OF_TURN)  # of a BPE trained here
EXTENSION_KEY = "gpt_trainer"
MAX_VOCAB_SIZE = 2**24
# Before a special token's name in the vocabulary that `tokenizers` runs: no text has this noncharacter.
HIDDEN_PREFIX = "\U0010ffff"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split into words; all but the first are those of known models.
SPLIT_PATTERNS = {
    # GPT-4's with digits in pairs, as a small vocabulary cannot hold a thousand numbers. At most 64 characters
    # a word, as training on text without spaces would take minutes, and a regex overflow.
    "pairs": r"'(?:[sdmtSDMT]|ll|LL|ve|VE|re|RE)|[^\r\n\p{L}\p{N}]?\p{L}{1,64}|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,64}|\s{0,64}[\r\n]{1,64}|\s{1,64}(?!\S)|\s{1,64}",
    "gpt2": _GPT2,
    "llama3": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "smollm": _GPT2.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])"),
}
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TIKTOKEN_PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k_base": _O200K_WORD
    + "|"
    + _O200K_WORD.replace(f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# GPT-2's printable character for each byte: the byte's own if it is printable, else the next from U+0100.
_ALPHABET = ByteLevel.alphabet()
_UNPRINTABLE = [byte for byte in range(256) if chr(byte) not in _ALPHABET]
BYTE_OF_CHARACTER = {c: ord(c) if ord(c) < 256 else _UNPRINTABLE[ord(c) - 256] for c in _ALPHABET}
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def from_byte_level(token: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet."""
    return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))


def to_byte_level(token: bytes) -> str:
    """A token in GPT-2's alphabet."""
    return "".join(map(CHARACTER_OF_BYTE.__getitem__, token))


def huggingface_regex(pattern: str) -> str:
    """tiktoken's pattern for ``tokenizers``, to which the + of {1,3}+ would be a repetition."""
    return re.sub(r"(\{[0-9,]+\})\+", r"\1", pattern)


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# Those on which both regex engines agree, which the tests compare; any other regex runs in `tokenizers`.
_PATTERN_OF_REGEX = {
    huggingface_regex(pattern): pattern for pattern in (*SPLIT_PATTERNS.values(), *TIKTOKEN_PATTERNS.values())
}


def split_by(regex: str) -> dict[str, Any]:
    """The pre-tokenizer whose words are the matches of a regex."""
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def char_document(characters: str, special: dict[str, int]) -> Document:
    """One id for each character, in their order."""
    vocab = {character: index for index, character in enumerate(characters)} | special
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    return _document(model, split_by(r"[\s\S]"), {"type": "Fuse"}, special)


def byte_document(special: dict[str, int]) -> Document:
    """One id for each byte of UTF-8."""
    vocab = {to_byte_level(bytes((byte,))): byte for byte in range(256)}
    model = _bpe_model(vocab | special, merges=[], ignore_merges=False)
    return _document(model, _BYTE_LEVEL, _BYTE_LEVEL | {"use_regex": True}, special)


def bpe_document(
    vocab: dict[str, int], pattern: str, special: dict[str, int], normalizer: str | None = None
) -> Document:
    """A BPE as tiktoken runs it; ``vocab`` is in GPT-2's alphabet, without the special tokens."""
    vocab = dict(sorted(vocab.items(), key=itemgetter(1)))
    model = _bpe_model(vocab | special, merges=possible_merges(vocab), ignore_merges=True)
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split_by(huggingface_regex(pattern)), _BYTE_LEVEL]}
    document = _document(model, pre_tokenizer, _BYTE_LEVEL | {"use_regex": True}, special)
    return document | {"normalizer": {"type": normalizer} if normalizer else None}


def _bpe_model(vocab: dict[str, int], merges: list[str], ignore_merges: bool) -> dict[str, Any]:
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges}
    return {"type": "BPE", **unset, **flags, "vocab": vocab, "merges": merges}


def _document(
    model: dict[str, Any], pre_tokenizer: dict[str, Any], decoder: dict[str, Any], special: dict[str, int]
) -> Document:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(special),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def added_tokens(special: dict[str, int]) -> list[dict[str, Any]]:
    """The entries of special tokens, in order of their ids."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": name} | flags for name, i in sorted(special.items(), key=itemgetter(1))]


def extended(document: Document, **values: str | None) -> Document:
    """The document with these values in its extension; None and the usual end of text remove one."""
    model = document["model"]
    extension = model.get(EXTENSION_KEY, {}) | values
    extension = {name: value for name, value in extension.items() if value not in (None, END_OF_TEXT)}
    model = {name: value for name, value in model.items() if name != EXTENSION_KEY}
    return document | {"model": model | ({EXTENSION_KEY: extension} if extension else {})}


def vocab_size_of(document: Document) -> int:
    """One more than the largest id."""
    ids = [token["id"] for token in document["added_tokens"]]
    return 1 + max([*ids, *_vocab_of(document).values()], default=-1)


def with_special_tokens(document: Document, names: Sequence[str]) -> Document:
    """The document with these special tokens too; the missing ones get the next ids."""
    special = special_tokens_of(document)
    missing = [name for name in names if name not in special]
    if not missing:
        return document
    first = vocab_size_of(document)
    new = {name: first + index for index, name in enumerate(missing)}
    model = document["model"]
    if isinstance(model["vocab"], dict):
        model = model | {"vocab": model["vocab"] | new}
    document = document | {"model": model, "added_tokens": [*document["added_tokens"], *added_tokens(new)]}
    # The template of an imported model does not use the tokens of our chats.
    return extended(document, chat_template=None) if END_OF_TURN in new else document


def is_special(token: dict[str, Any]) -> bool:
    """Whether an added token is one that text never becomes: markup such as ``<tool_call>`` too."""
    return token.get("special", False) or token["content"][0] in "<["


def special_tokens_of(document: Document) -> dict[str, int]:
    """Names and ids of the special tokens, in order of the ids."""
    special = [(token["content"], token["id"]) for token in document["added_tokens"] if is_special(token)]
    return dict(sorted(special, key=itemgetter(1)))


def text_vocab(document: Document) -> dict[str, int]:
    """The model's tokens and ids without the special tokens."""
    special = special_tokens_of(document)
    return {token: i for token, i in _vocab_of(document).items() if token not in special}


def _vocab_of(document: Document) -> dict[str, int]:
    vocab = document["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of a token and its score
        return {token: index for index, (token, _) in enumerate(vocab)}
    return vocab


def without_special(document: Document) -> Document:
    """The document for ``tokenizers``, changed so that the model makes no special token from text."""
    special = special_tokens_of(document)
    model = document["model"]
    vocab = _vocab_of(document)

    def hide(name: str) -> str:
        return HIDDEN_PREFIX + name if name in special else name

    hidden: Any = {hide(token): i for token, i in vocab.items()}
    if isinstance(model["vocab"], list):
        hidden = [[hide(token), score] for token, score in model["vocab"]]
    added = [
        token | {"special": is_special(token)}
        for token in document["added_tokens"]
        if not is_special(token) or token["content"] not in vocab
    ]
    unknown = {"unk_token": hide(model["unk_token"])} if model.get("unk_token") else {}
    unset = dict.fromkeys(("truncation", "padding", "post_processor"))
    return document | unset | {"added_tokens": added, "model": model | {"vocab": hidden} | unknown}


def check_document(document: Any) -> None:
    """Raise UserError for JSON that is not a tokenizer.json, or that gives two tokens one id."""
    parts = document if isinstance(document, dict) else {}
    model = parts.get("model")
    added = parts.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(added, list):
        raise UserError("it has no model or no added_tokens")
    vocab = model.get("vocab")
    if isinstance(vocab, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in vocab):
        tokens = [(token, index) for index, (token, _) in enumerate(vocab)]
    elif isinstance(vocab, dict):
        tokens = [*vocab.items()]
    else:
        raise UserError("its vocab is neither an object nor a list of pairs")
    if not all(isinstance(token, dict) and token.get("content") for token in added):
        raise UserError("an added token has no content")
    tokens += [(token["content"], token.get("id")) for token in added]
    if not all(isinstance(name, str) and type(number) is int for name, number in tokens):
        raise UserError("a token is not a string with a number")
    try:
        "".join(name for name, _ in tokens).encode()
    except UnicodeEncodeError:
        raise UserError("a token has half of a character") from None
    if not all(0 <= number < MAX_VOCAB_SIZE for _, number in tokens):
        raise UserError(f"an id is not in 0 to {MAX_VOCAB_SIZE:,}")
    names = {name for name, _ in tokens}
    if not len(names) == len({number for _, number in tokens}) == len({*tokens}):
        raise UserError("two tokens have one id, or one token has two")
    merges = model.get("merges", [])
    if not isinstance(merges, list) or not all(map(_is_merge, merges)):
        raise UserError("its merges are not pairs of tokens")
    extension = model.get(EXTENSION_KEY, {})
    if not isinstance(extension, dict) or not all(isinstance(value, str) for value in extension.values()):
        raise UserError(f"its {EXTENSION_KEY} is not an object of strings")


def _is_merge(merge: Any) -> bool:
    if isinstance(merge, str):
        return merge.count(" ") == 1
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(name, str) for name in merge)


def possible_merges(vocab: dict[str, int]) -> list[str]:
    """All pairs of tokens that form a token, in order of its id: what tiktoken merges."""
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        for cut in range(1, len(token)):
            if token[:cut] in vocab and token[cut:] in vocab:
                merges.append(f"{token[:cut]} {token[cut:]}")
    return merges


def tiktoken_form(document: Document) -> tuple[dict[str, int], str] | None:
    """The vocabulary and pattern with which tiktoken gives the document's ids, or None.

    tiktoken takes a word that is a token as it is. Else it merges the neighbors that form the token of lowest id. The
    merges of the file do the same if they are all possible ones, in order of the ids. They also do, in order, if each
    token is what they make of its characters: then no other pair that forms it can come about.
    """
    model = document["model"]
    pattern = _pattern_of(document.get("pre_tokenizer"))
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    is_plain = model.get("type", "BPE") == "BPE" and not any(map(model.get, options))
    has_normalizer = document.get("normalizer") not in (None, {"type": "NFC"})
    if pattern is None or not is_plain or has_normalizer or not all(map(is_special, document["added_tokens"])):
        return None
    takes_words = model.get("ignore_merges", False)
    merges = model.get("merges", [])
    vocab = {name: i for name, i in text_vocab(document).items() if BYTE_OF_CHARACTER.keys() >= {*name}}
    if not vocab.keys() >= BYTE_OF_CHARACTER.keys() or "" in vocab:
        return None
    if takes_words and merges == possible_merges(vocab):
        return vocab, pattern
    pairs: list[Any] = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
    if not takes_words:  # tokens that no merge makes are unused
        made = {*map("".join, pairs)} | BYTE_OF_CHARACTER.keys()
        vocab = {name: i for name, i in vocab.items() if name in made}
    ids = [vocab.get("".join(pair), -1) for pair in pairs]
    if ids != sorted(ids) or not all(vocab.keys() >= {*pair, "".join(pair)} for pair in pairs):
        return None
    bpe = BPE(vocab, pairs)
    is_made = all([token.id for token in bpe.tokenize(name)] == [i] for name, i in vocab.items())
    return (vocab, pattern) if is_made else None


def _pattern_of(pre_tokenizer: Any) -> str | None:
    """tiktoken's pattern for the same words, or None if it has none."""
    steps = [pre_tokenizer]
    if isinstance(pre_tokenizer, dict) and isinstance(pre_tokenizer.get("pretokenizers"), list):
        steps = pre_tokenizer["pretokenizers"]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, **rest}] if rest.get("use_regex", True):
            return SPLIT_PATTERNS["gpt2"]
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, **rest},
        ] if rest.get("use_regex", True):
            return SPLIT_PATTERNS["smollm"]
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return _PATTERN_OF_REGEX.get(regex)
    return None


def convert_format_1(saved: Document) -> Document:
    """The document of a file in the format that this project had before. Raises UserError if it is damaged."""
    if saved.get("format") != 1:
        raise UserError(f"it has the unknown format {saved.get('format')!r}")
    try:
        kind = saved["kind"]
        special = dict(saved.get("special_tokens", {}))
        if kind == "char":
            document = char_document(saved["characters"], special)
        elif kind == "byte":
            document = byte_document(special or {END_OF_TEXT: 256})
        else:
            tokens = [base64.b64decode(token, validate=True) for token in saved["tokens"].split(" ")]
            vocab = {to_byte_level(token): index for index, token in enumerate(tokens) if token}
            document = bpe_document(vocab, saved["pattern"], special, saved.get("normalizer"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{type(error).__name__}: {error}") from None
    name = None if kind in ("char", "byte", "bpe") else kind
    template = saved.get("chat_template")
    return extended(document, name=name, end_of_text=saved.get("end_name"), chat_template=template)
