"""Text ↔ token ids: characters, bytes, a byte-level BPE trained on the corpus, or one of tiktoken's encodings.

A tokenizer is saved whole in ``tokenizer.json``, tiktoken's encodings too: whoever has the file needs nothing else.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers import Regex, models
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Split

from engine.core.errors import UserError
from engine.core.files import read_json, write_json

END_OF_TEXT = "<|endoftext|>"
# Tokens of chats: who speaks, and where that ends. A BPE trained here has them; other tokenizers can be given them.
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END_OF_TURN = "<|end|>"
RESERVED = (END_OF_TEXT, *ROLES.values(), END_OF_TURN)
FORMAT = 1
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_LLAMA3 += r"|\s+(?!\S)|\s+"
PATTERNS = {  # ways of cutting text into words; all but ours are those of well-known models, and have endless words
    # GPT-4's way, but numbers in pairs of digits: a small vocabulary can't hold a thousand. And no word is endless:
    # where text has no spaces, as Chinese or DNA, training would take minutes, and a regex overflow.
    "pairs": r"'(?:[sdmtSDMT]|ll|LL|ve|VE|re|RE)|[^\r\n\p{L}\p{N}]?\p{L}{1,64}|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,64}|\s{0,64}[\r\n]{1,64}|\s{1,64}(?!\S)|\s{1,64}",
    "gpt2": _GPT2,
    "llama3": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "smollm": _GPT2.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])"),
}
# GPT-2's printable stand-in for each byte: itself where it can be seen, else the next free from U+0100 on.
_ALPHABET = ByteLevel.alphabet()
_HIDDEN = [byte for byte in range(256) if chr(byte) not in _ALPHABET]
BYTE_OF = {c: ord(c) if ord(c) < 256 else _HIDDEN[ord(c) - 256] for c in _ALPHABET}
TO_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
MOST_SHOWN = 100  # characters that a message names
CODE_POINTS = 0x110000  # of Unicode
LARGEST = 2**24  # no vocabulary is so large
SMALLEST_BPE = 256 + len(RESERVED)  # every byte, and the special tokens
FEWEST_FITTING, MOST_FITTING = 1024, 8192  # tokens of a BPE whose size the text decides


class Tokenizer:
    """What all tokenizers share.

    special_tokens are those that no text becomes, by name, with their ids. An imported model's tokenizer may call the
    end of text by another name, and has a chat_template of its own.
    """

    kind: str
    vocab_size: int
    special_tokens: dict[str, int]
    end_name: str = END_OF_TEXT
    chat_template: str | None = None
    normalizer: str | None = None  # NFC: the form of Unicode that text is brought to, and decodes to

    @property
    def end_of_text(self) -> int | None:
        """The id of the token that ends a document, or None where there is none."""
        return self.special_tokens.get(self.end_name)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, uint32 (N,), of ordinary text only: a spelled-out ``<|endoftext|>`` is so many characters.

        Raises UserError naming a character that has no ids.
        """
        try:
            return self._encode(text)  # each kind has its own
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a character, at {error.start}"
            raise UserError(f"the text has {half}; remove it") from None

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 bytes that the ids stand for; a single id may be only part of a character."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text that the ids stand for; what is not UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def unused_ids(self) -> list[int]:
        """Ids below vocab_size that no text has, the end of text aside; sampling must never choose them."""
        return [number for name, number in self.special_tokens.items() if name != self.end_name]

    def state(self) -> dict[str, Any]:
        """All that :func:`load_tokenizer` needs, as JSON can hold it; two tokenizers are the same if theirs are."""
        imported = {"end_name": self.end_name} if self.end_name != END_OF_TEXT else {}
        imported |= {"chat_template": self.chat_template} if self.chat_template else {}
        imported |= {"normalizer": self.normalizer} if self.normalizer else {}
        return {"format": FORMAT, "kind": self.kind} | imported

    def save(self, path: Path) -> None:
        """Write :meth:`state`."""
        write_json(path, self.state())

    def with_special(self, names: Sequence[str]) -> "Tokenizer":
        """This tokenizer, or if it lacks some of these special tokens another, which has them at new ids, the next."""
        new = [name for name in names if name not in self.special_tokens]
        if not new:
            return self
        special = self.special_tokens | {name: self.vocab_size + index for index, name in enumerate(new)}
        state = self.state() | {"special_tokens": special}
        if END_OF_TURN in new:  # chats are another's no more
            state.pop("chat_template", None)
        return from_state(state)

    def extends(self, other: "Tokenizer") -> bool:
        """Whether this is the other tokenizer, or that one given more special tokens; whatever is said of chats."""
        other = other.with_special(list(self.special_tokens))
        return other.state() | {"chat_template": None} == self.state() | {"chat_template": None}


class CharTokenizer(Tokenizer):
    """One id for each of a set of characters, in code point order."""

    kind = "char"

    def __init__(self, characters: str, special_tokens: dict[str, int] | None = None):
        self.characters, self.special_tokens = characters, special_tokens or {}
        self.vocab_size = len(characters) + len(self.special_tokens)
        self.text_of = [*characters, *sorted(self.special_tokens, key=self.special_tokens.get)]  # by id
        code_points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        self.ids = np.full(int(code_points.max(initial=0)) + 2, -1, np.int32)  # the last stays unknown
        self.ids[code_points] = np.arange(len(characters))

    def _encode(self, text: str) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        ids = self.ids[np.minimum(code_points, len(self.ids) - 1)]
        if (ids < 0).any():
            character = text[int(np.argmax(ids < 0))]
            unknown = f"does not know the character {character!r} (U+{ord(character):04X})"
            known = repr(self.characters[:MOST_SHOWN]) + " …" * (len(self.characters) > MOST_SHOWN)
            raise UserError(f"the tokenizer {unknown}; its {len(self.characters):,} are {known}")
        return ids.astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return "".join([self.text_of[i] for i in ids]).encode()

    def state(self) -> dict[str, Any]:
        special = {"special_tokens": self.special_tokens} if self.special_tokens else {}
        return super().state() | {"characters": self.characters} | special


class AnyCharacter(Tokenizer):
    """Every character by its code point: encodes a part of a text while nobody knows the characters of all parts."""

    kind = "char"

    def __init__(self, names: Sequence[str] = ()):
        self.special_tokens = {name: CODE_POINTS + index for index, name in enumerate(names)}
        self.vocab_size = CODE_POINTS + len(names)

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le"), np.uint32)

    def with_special(self, names: Sequence[str]) -> Tokenizer:
        return AnyCharacter(names)

    def seen(self, used: np.ndarray) -> CharTokenizer:
        """The tokenizer of the characters whose ids are used, bool (vocab_size,)."""
        characters = "".join(map(chr, np.flatnonzero(used[:CODE_POINTS]).tolist()))
        return CharTokenizer(characters).with_special([*self.special_tokens])


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and special tokens."""

    kind = "byte"

    def __init__(self, special_tokens: dict[str, int] | None = None):
        self.special_tokens = special_tokens or {END_OF_TEXT: 256}
        self.vocab_size = 256 + len(self.special_tokens)
        self.name_of = {number: name.encode() for name, number in self.special_tokens.items()}

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.name_of[i] if i in self.name_of else bytes((i,)) for i in ids)

    def state(self) -> dict[str, Any]:
        special = {"special_tokens": self.special_tokens} if len(self.special_tokens) > 1 else {}
        return super().state() | special


class BPETokenizer(Tokenizer):
    """Byte-pair encoding, run by tiktoken: Sennrich et al. 2016, on bytes as in GPT-2."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.kind, self.encoding = encoding.name, encoding
        self.vocab_size = encoding.n_vocab
        self.special_tokens = encoding._special_tokens
        encoding.encode_ordinary("a word")  # if two threads are the first users, all later use takes twice as long

    def _encode(self, text: str) -> np.ndarray:
        text = NFC().normalize_str(text) if self.normalizer else text
        try:  # no Python list: threads run side by side
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            raise
        except ValueError as error:  # its regex gave up
            found = f"{self.kind} can't take so many like characters in a row ({error})"
            raise UserError(f"{found}; cut them, or use --tokenizer bpe, which does") from None

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self.encoding.decode_bytes(ids)

    def unused_ids(self) -> list[int]:
        used = {*self.encoding._mergeable_ranks.values(), self.end_of_text}
        return [i for i in range(self.vocab_size) if i not in used]

    def state(self) -> dict[str, Any]:
        encoding = self.encoding
        tokens = [""] * self.vocab_size  # in order of id, empty where a special token or nothing stands
        for token, rank in encoding._mergeable_ranks.items():
            tokens[rank] = base64.b64encode(token).decode()
        ours = {"pattern": encoding._pat_str, "special_tokens": self.special_tokens, "tokens": " ".join(tokens)}
        return super().state() | ours


def train_bpe(texts: Iterable[str], vocab_size: int | None, pattern: str = "pairs") -> BPETokenizer:
    """A byte-level BPE of at most vocab_size tokens (fewer if there are no more pairs), trained on pieces of text.

    Hugging Face's library trains it; tiktoken runs it, several times faster. The last ids are special tokens. pattern
    is a name of PATTERNS; with any but pairs, 300,000 like characters in a row take most of a minute, here and encoded.
    With vocab_size None :func:`fitting_vocabulary` tells it.
    """
    assert vocab_size is None or SMALLEST_BPE <= vocab_size <= LARGEST
    sizes: list[int] = []
    counted = (sizes.append(len(text.encode())) or text for text in texts)
    trained = train_huggingface(counted, (vocab_size or MOST_FITTING) - len(RESERVED), pattern)
    most = (vocab_size or fitting_vocabulary(sum(sizes))) - len(RESERVED)  # a smaller vocabulary is another's beginning
    ranks = {bytes(map(BYTE_OF.get, token)): rank for token, rank in trained.get_vocab().items() if rank < most}
    return from_ranks("bpe", PATTERNS[pattern], ranks, {name: len(ranks) + i for i, name in enumerate(RESERVED)})


def fitting_vocabulary(size: int) -> int:
    """How many tokens suit so many bytes of text: 1,024 to 8,192, the power of two up to their square root."""
    return max(FEWEST_FITTING, min(MOST_FITTING, 1 << max(0, size.bit_length() - 1) // 2))


def train_huggingface(texts: Iterable[str], vocab_size: int, pattern: str = "pairs") -> tokenizers.Tokenizer:
    """Hugging Face's byte-level BPE of at most vocab_size tokens, trained, with a pattern's way of cutting text."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = cut_by(PATTERNS[pattern])
    options = {"initial_alphabet": ByteLevel.alphabet(), "show_progress": False}
    trained.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return trained


def cut_by(pattern: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    words = Split(Regex(unrepeated(pattern)), behavior="isolated")
    return tokenizers.pre_tokenizers.Sequence([words, TO_BYTES])


def unrepeated(pattern: str) -> str:
    # Hugging Face's regexes take the + of {1,3}+ for a repetition; tiktoken's mean the same without it.
    return re.sub(r"(\{[0-9,]+\})\+", r"\1", pattern)


def from_ranks(kind: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> BPETokenizer:
    return BPETokenizer(tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))


def named_tokenizer(kind: str) -> Tokenizer:
    """The byte tokenizer; one of tiktoken's by its name, downloaded once if need be; or the one saved at a path.

    A path is a tokenizer.json of ours, or the folder of a dataset, a checkpoint or a run, whose newest checkpoint's it
    is. Raises UserError for an unknown name, for a path without a tokenizer, or if the download fails.
    """
    if kind == "byte":
        return ByteTokenizer()
    encodings, path = tiktoken.list_encoding_names(), Path(kind)
    if kind not in encodings:
        files = [path, *sorted(path.glob(f"checkpoints/step-{'[0-9]' * 8}/tokenizer.json")), path / "tokenizer.json"]
        if found := [file for file in files if file.is_file()]:
            return load_tokenizer(found[-1])
        known = ", ".join(("char", "byte", "bpe", *encodings))
        paths = "a tokenizer.json, or a dataset's, checkpoint's or run's folder that has one"
        raise UserError(f"--tokenizer {kind} is unknown; the known ones are {known}, and the path of {paths}")
    try:
        return BPETokenizer(tiktoken.get_encoding(kind))
    except Exception as error:  # whatever the network, its libraries or a damaged file may raise
        failed = f"tiktoken's encoding {kind} could not be downloaded ({type(error).__name__})"
        advice = "set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bpe"
        raise UserError(f"{failed}; connect to the internet once, or {advice}") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer saved at path. Raises UserError if the file is no tokenizer of ours."""
    saved = read_json(path)
    if isinstance(saved, dict) and saved.get("format") != FORMAT:
        raise UserError(f"{path} has format {saved.get('format')!r}, but this version reads {FORMAT}; prepare again")
    try:
        return from_state(saved)
    except BaseException as error:  # a panic of tiktoken's Rust is no Exception
        known = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
        if not isinstance(error, known) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is damaged ({reason}); prepare the data again") from None


def from_state(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose :meth:`Tokenizer.state` this is. Raises all sorts of errors if it is none."""
    special = dict(saved.get("special_tokens", {}))
    if not all(isinstance(name, str) and name and 0 <= number < LARGEST for name, number in special.items()):
        raise UserError(f"its special tokens are not names with numbers below {LARGEST}")
    if saved["kind"] in ("char", "byte"):
        first = len(saved["characters"]) if saved["kind"] == "char" else 256
        if sorted(special.values()) != list(range(first, first + len(special))):
            raise UserError(f"its special tokens' numbers do not follow on {first - 1}")
        given = [saved["characters"]] if saved["kind"] == "char" else []
        tokenizer = {"char": CharTokenizer, "byte": ByteTokenizer}[saved["kind"]](*given, special)
    else:
        ranks = {base64.b64decode(t, validate=True): i for i, t in enumerate(saved["tokens"].split(" ")) if t}
        if b"" in ranks or not all(bytes((byte,)) in ranks for byte in range(256)):  # tiktoken would panic
            raise UserError("a token is empty, or a byte has none")
        tokenizer = from_ranks(saved["kind"], saved["pattern"], ranks, dict(saved["special_tokens"]))
    tokenizer.end_name, tokenizer.chat_template = saved.get("end_name", END_OF_TEXT), saved.get("chat_template")
    tokenizer.normalizer = saved.get("normalizer")
    if tokenizer.end_of_text is None and saved["kind"] != "char":
        raise UserError("it has no end of text")
    return tokenizer
