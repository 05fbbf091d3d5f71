"""A tokenizer ↔ Hugging Face's tokenizer.json, and what llama.cpp calls its way of cutting text."""

import json
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import Split

from engine.core.errors import UserError
from engine.data.tokenizer import (
    BYTE_OF,
    END_OF_TEXT,
    LARGEST,
    MOST_SHOWN,
    PATTERNS,
    TO_BYTES,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    cut_by,
    from_ranks,
    unrepeated,
)

_LLAMA_CPP_NAMES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2", "smollm": "smollm"}
LLAMA_CPP = {PATTERNS[name]: known for name, known in _LLAMA_CPP_NAMES.items()} | {  # and tiktoken's ways, the same
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt-2",  # gpt2
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s": "llama-bpe",  # cl100k_base, whose tokens make up for a difference at the end of text
}
STAND_INS = {byte: c for c, byte in BYTE_OF.items()}
BYTES = {bytes((byte,)): byte for byte in range(256)}
PROBE = "".join(f"a{c} {c}1{c}{c}\n{c}" for c in map(chr, range(0x500))) + "12345678 I'LL it's\n \n  x\t\t1  2  "


def pre_tokenizer_name(tokenizer: Tokenizer) -> str | None:
    """llama.cpp's name for the way that a tokenizer cuts text into words; None if it knows no such way."""
    return LLAMA_CPP.get(tokenizer.encoding._pat_str) if isinstance(tokenizer, BPETokenizer) else None


def to_huggingface(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Hugging Face's tokenizer with the same ids for every text, but that one spelling a special token is that token.

    ``split_special_tokens`` turns that off there. A character that a char tokenizer doesn't know is an error there too.
    """
    if isinstance(tokenizer, CharTokenizer):
        made = tokenizers.Tokenizer(models.WordLevel({text: i for i, text in enumerate(tokenizer.text_of)}))
        made.pre_tokenizer, made.decoder = Split(Regex(r"[\s\S]"), behavior="isolated"), decoders.Fuse()
    else:
        ranks = tokenizer.encoding._mergeable_ranks if isinstance(tokenizer, BPETokenizer) else BYTES
        vocab = {_shown(token): number for token, number in ranks.items()} | tokenizer.special_tokens
        made = tokenizers.Tokenizer(models.BPE(vocab, _merges(ranks), ignore_merges=True))
        made.pre_tokenizer = TO_BYTES if ranks is BYTES else cut_by(tokenizer.encoding._pat_str)
        made.normalizer, made.decoder = NFC() if tokenizer.normalizer else None, decoders.ByteLevel()
    made.add_special_tokens(sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.get))
    return made


def _shown(token: bytes) -> str:
    return "".join(map(STAND_INS.__getitem__, token))


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """All that tiktoken merges: any two tokens that together are one, by its rank; ties may be in any order."""
    tokens = sorted(ranks, key=ranks.get)
    pairs = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
    return [(_shown(left), _shown(right)) for left, right in pairs if left in ranks and right in ranks]


def from_huggingface(
    tokenizer_json: dict[str, Any], end_of_text: str | None = None, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer with the ids of a parsed tokenizer.json: a byte-level BPE, or what :func:`to_huggingface` makes.

    Every added token becomes a special one: text never becomes it, and none is put around text. end_of_text names the
    one that ends a document. With a normalizer NFC, text decodes to that form. Raises UserError for other kinds.
    """
    try:
        added = sorted(tokenizer_json["added_tokens"], key=lambda token: token["id"])
        special = {token["content"]: token["id"] for token in added}
        tokenizer = _ours_again(tokenizer_json, special) or _imported_bpe(tokenizer_json, special)
    except Exception as error:  # whatever tiktoken and Hugging Face's library may raise
        reason = " ".join(str(error if isinstance(error, UserError) else repr(error)).split())
        advice = "choose another one with --tokenizer NAME, and train with it from the beginning"
        raise UserError(f"the model's tokenizer can't be used here: {reason}; {advice}") from None
    tokenizer.end_name, tokenizer.chat_template = end_of_text or END_OF_TEXT, chat_template
    if tokenizer.end_of_text is None and (end_of_text or tokenizer.kind != "char"):
        known = ", ".join([*special][:MOST_SHOWN]) or "none"
        raise UserError(f"{tokenizer.end_name} is no special token; name the one that ends a document, of {known}")
    return tokenizer


def _ours_again(saved: dict[str, Any], special: dict[str, int]) -> Tokenizer | None:
    """The char or byte tokenizer that :func:`to_huggingface` turns into just this; None if none does."""
    made: Tokenizer = ByteTokenizer(special)
    if saved["model"].get("type") == "WordLevel":
        vocab = saved["model"]["vocab"]
        made = CharTokenizer("".join(sorted(vocab.keys() - special.keys(), key=vocab.get)), special)
    again = json.loads(to_huggingface(made).to_str())
    return made if all(again[part] == saved[part] for part in ("model", "pre_tokenizer", "normalizer")) else None


def _imported_bpe(saved: dict[str, Any], special: dict[str, int]) -> BPETokenizer:
    model, whole_words = saved["model"], saved["model"].get("ignore_merges", False)
    _refuse_others(saved)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = {left + right for left, right in merges} | BYTE_OF.keys()
    vocab = {  # without what text never becomes
        name: number
        for name, number in model["vocab"].items()
        if name not in special and (name in made or (whole_words and {*name} <= BYTE_OF.keys()))
    }
    ranks = {bytes(map(BYTE_OF.get, name)): number for name, number in vocab.items()}
    order, numbers = [vocab[left + right] for left, right in merges], {*ranks.values(), *special.values()}
    if len(numbers) < len(ranks) + len(special) or not 0 <= min(numbers) <= max(numbers) < LARGEST:
        raise UserError(f"two tokens have one id, or one is not of 0 to {LARGEST}")
    if order != sorted(order) or b"" in ranks or not BYTES.keys() <= ranks.keys():
        raise UserError("its ids are not in the order of its merges, or a byte has none")
    if not whole_words or {*merges} != {*_merges(ranks)}:  # tiktoken makes any pair that is a token, in any word
        unlike = models.BPE(model["vocab"], merges)
        wrong = (name for name, number in vocab.items() if [token.id for token in unlike.tokenize(name)] != [number])
        if name := next(wrong, None):
            raise UserError(f"its merges do not make its token {name!r}")
    ours = from_ranks("bpe", _pattern(saved["pre_tokenizer"]), ranks, special)
    ours.normalizer = "NFC" if saved["normalizer"] else None
    plain = saved | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    probe = PROBE + b"".join(ranks).decode(errors="ignore")
    if tokenizers.Tokenizer.from_str(json.dumps(plain)).encode(probe).ids != ours.encode(probe).tolist():
        raise UserError("its regex means something else to tiktoken")
    return ours


def _refuse_others(saved: dict[str, Any]) -> None:
    """Raise UserError for what changes ids and is not done here."""
    model, normalizer = saved["model"], saved["normalizer"]
    kind = model.get("type", "BPE")
    found = [] if kind == "BPE" else [f"a {kind} model"]
    found += [] if normalizer in (None, {"type": "NFC"}) else [f"the normalizer {normalizer}"]
    unlike = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    found += [name for name in unlike if model.get(name)]
    ordinary = [t["content"] for t in saved["added_tokens"] if not t["special"] and t["content"][0] not in "<["]
    found += [f"the added token {ordinary[0]!r}, which is ordinary text"] if ordinary else []
    if found:
        raise UserError(f"it has {' and '.join(found)}")


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """The one regex that cuts text into words as one of Hugging Face's pre-tokenizers does."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    match [{"use_regex": True} | (step or {}) for step in steps]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return PATTERNS["gpt2"]
        case [{"individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return PATTERNS["smollm"]
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return next((known for known in LLAMA_CPP if unrepeated(known) == regex), regex)
    raise UserError(f"it has the pre-tokenizer {json.dumps(pre_tokenizer)}")
