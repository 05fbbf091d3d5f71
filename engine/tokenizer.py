"""Text ↔ token ids: characters, bytes, a byte-level BPE trained on the corpus, or one of tiktoken's encodings.

A tokenizer is saved whole in ``tokenizer.json``, tiktoken's encodings too: whoever has the file needs nothing else.
"""

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers

from engine.files import read_json, write_json

END_OF_TEXT = "<|endoftext|>"
FORMAT = 1
KINDS = ("char", "byte", "bpe", *tiktoken.list_encoding_names())
# GPT-4's way of cutting text into words, but numbers in pairs of digits: a small vocabulary can't hold a thousand.
BPE_PATTERN = (
    r"'(?:[sdmtSDMT]|ll|LL|ve|VE|re|RE)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LARGEST = 2**24  # no vocabulary is so large
SMALLEST_BPE = 256 + 1  # every byte, and the end of text


class Tokenizer:
    """What all tokenizers share. ``end_of_text`` is the id of ``<|endoftext|>``, or None where there is none."""

    kind: str
    vocab_size: int
    end_of_text: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """Token ids (N,), of ordinary text only: a spelled-out ``<|endoftext|>`` is so many characters."""
        raise NotImplementedError

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 bytes that the ids stand for; a single id may be only part of a character."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text that the ids stand for; what is not UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def unused_ids(self) -> list[int]:
        """Ids below vocab_size that no text has, the end of text aside; sampling must never choose them."""
        return []

    def state(self) -> dict:
        """What :func:`load_tokenizer` needs besides the kind, as JSON values."""
        return {}

    def save(self, path: Path) -> None:
        write_json(path, {"format": FORMAT, "kind": self.kind, **self.state()})


class CharTokenizer(Tokenizer):
    """One id for each of a set of characters, in code point order."""

    kind = "char"

    def __init__(self, characters: str):
        self.characters = characters
        self.vocab_size = len(characters)
        code_points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        self.ids = np.full(int(code_points.max()) + 2, -1, np.int32)  # the last stays unknown
        self.ids[code_points] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """Raises ValueError naming the first character that is not in the set."""
        code_points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        ids = self.ids[np.minimum(code_points, len(self.ids) - 1)]
        if (ids < 0).any():
            character = text[int(np.argmax(ids < 0))]
            raise ValueError(
                f"the tokenizer does not know the character {character!r} (U+{ord(character):04X}); "
                f"its {self.vocab_size} are {self.characters!r}"
            )
        return ids.astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return "".join([self.characters[i] for i in ids]).encode()

    def state(self) -> dict:
        return {"characters": self.characters}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and the end of text."""

    kind = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(END_OF_TEXT.encode() if i == self.end_of_text else bytes((i,)) for i in ids)


class BPETokenizer(Tokenizer):
    """Byte-pair encoding, run by tiktoken: Sennrich et al. 2016, on bytes as in GPT-2."""

    def __init__(self, kind: str, encoding: tiktoken.Encoding):
        self.kind = kind
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.end_of_text = encoding._special_tokens[END_OF_TEXT]
        encoding.encode_ordinary("a word")  # if two threads are the first users, all later use takes twice as long

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        return self.encoding.encode_to_numpy(text, disallowed_special=())  # no Python list: threads run side by side

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.encoding.decode_bytes(ids)

    def unused_ids(self) -> list[int]:
        used = {*self.encoding._mergeable_ranks.values(), self.end_of_text}
        return [i for i in range(self.vocab_size) if i not in used]

    def state(self) -> dict:
        tokens = [""] * self.vocab_size  # in order of id, empty where a special token or nothing stands
        for token, rank in self.encoding._mergeable_ranks.items():
            tokens[rank] = base64.b64encode(token).decode()
        return {
            "pattern": self.encoding._pat_str,
            "special_tokens": self.encoding._special_tokens,
            "tokens": " ".join(tokens),
        }


def _utf8(text: str) -> bytes:
    """UTF-8, or a ValueError naming the lone surrogate that it can't carry."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!r}, half of a character, at {error.start}; remove it"
        ) from None


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE of at most vocab_size tokens (fewer if the corpus has no more pairs) on pieces of text.

    Raises ValueError for a vocab_size that can't hold the bytes and the end of text.
    """
    if vocab_size < SMALLEST_BPE:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small for BPE: 256 bytes and {END_OF_TEXT} need {SMALLEST_BPE}; "
            f"raise it, or use --tokenizer byte"
        )
    trained = untrained_bpe()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return from_huggingface(trained)


def untrained_bpe() -> tokenizers.Tokenizer:
    """Hugging Face's byte-level BPE with our way of cutting text into words, before training."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(BPE_PATTERN), behavior="isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def from_huggingface(trained: tokenizers.Tokenizer) -> BPETokenizer:
    """The same BPE for tiktoken to run, several times faster, with ``<|endoftext|>`` as its last id."""
    byte_of = _bytes_of_characters()
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in trained.get_vocab().items()}
    return BPETokenizer("bpe", _encoding("bpe", BPE_PATTERN, ranks, {END_OF_TEXT: len(ranks)}))


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it can be seen, else the next free from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _encoding(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def named_tokenizer(kind: str) -> Tokenizer:
    """The byte tokenizer, or one of tiktoken's by its name, downloaded once if need be.

    Raises ValueError for an unknown name, or if the download fails.
    """
    if kind not in KINDS:
        raise ValueError(f"--tokenizer {kind} is unknown; the known ones are {', '.join(KINDS)}")
    if kind == "byte":
        return ByteTokenizer()
    try:
        return BPETokenizer(kind, tiktoken.get_encoding(kind))
    except Exception as error:  # whatever the network, its libraries or a damaged file may raise
        raise ValueError(
            f"tiktoken's encoding {kind} could not be downloaded ({type(error).__name__}); connect to the internet "
            f"once, or set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bpe"
        ) from None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer saved at path. Raises ValueError if the file is no tokenizer of ours."""
    saved = read_json(path)
    if isinstance(saved, dict) and saved.get("format") != FORMAT:
        raise ValueError(f"{path} has format {saved.get('format')!r}, but this version reads {FORMAT}; prepare again")
    try:
        if saved["kind"] == "char":
            return CharTokenizer(saved["characters"])
        if saved["kind"] == "byte":
            return ByteTokenizer()
        tokens = saved["tokens"].split(" ")
        ranks = {base64.b64decode(token, validate=True): rank for rank, token in enumerate(tokens) if token}
        special = dict(saved["special_tokens"])
        if b"" in ranks or not all(bytes((byte,)) in ranks for byte in range(256)):  # tiktoken would panic
            raise ValueError("a token is empty, or a byte has none")
        if not all(0 <= number < LARGEST for number in special.values()):
            raise ValueError(f"its special tokens are not numbers below {LARGEST}")
        return BPETokenizer(saved["kind"], _encoding(saved["kind"], saved["pattern"], ranks, special))
    except BaseException as error:  # a panic of tiktoken's Rust is no Exception
        known = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
        if not isinstance(error, known) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} is damaged ({reason}); prepare the data again") from None
