"""tokenizer.json ↔ token ids.

Every tokenizer is a file in Hugging Face's format. NumPy runs characters and bytes, tiktoken runs a byte-level BPE that
it gives the same ids, and ``tokenizers`` runs every other file. The file alone decides.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS
from tokenizers.normalizers import NFC

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.data import tokenizer_json
from engine.data.tokenizer_json import END_OF_TEXT, EXTENSION_KEY, Document, extended, is_special

MAX_LISTED_CHARACTERS = 100


class Tokenizer:
    """A tokenizer.json and a way to run it.

    ``special_tokens`` maps names to ids; text never becomes one of them, except an ``unk_token``.
    """

    kind: str
    # Whether text cut between two words encodes piece by piece to the ids of the whole text.
    can_encode_pieces = True
    # Whether encode puts a space before the text, which decode removes again (SentencePiece).
    adds_leading_space = False

    def __init__(self, document: Document):
        extension = document["model"].get(EXTENSION_KEY, {})
        ordinary = [token["id"] for token in document["added_tokens"] if not is_special(token)]
        self.document = document
        self.special_tokens = tokenizer_json.special_tokens_of(document)
        self.text_ids = {*tokenizer_json.text_vocab(document).values(), *ordinary}
        self.vocab_size = tokenizer_json.vocab_size_of(document)
        self.end_name: str = extension.get("end_of_text", END_OF_TEXT)
        self.chat_template: str | None = extension.get("chat_template")

    @property
    def end_of_text(self) -> int | None:
        """The id of the token that ends a document, or None."""
        return self.special_tokens.get(self.end_name)

    @functools.cached_property
    def content(self) -> bytes:
        """The file that :meth:`save` writes."""
        return (json.dumps(self.document, ensure_ascii=False, allow_nan=False) + "\n").encode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer as :meth:`save` writes it, whichever format it was loaded from."""
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Token ids, uint32 (N,); a spelled-out ``<|endoftext|>`` is ordinary text.

        Raises UserError for text that has no ids.
        """
        try:
            return self._encode(text)
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a character, at {error.start}"
            raise UserError(f"the text has {half}. Remove it.") from None

    def _encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Concatenate the UTF-8 bytes that each id contributes inside a text.

        One id may be part of a character. A SentencePiece-like token contributes its leading space.
        """
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids, where invalid UTF-8 becomes U+FFFD."""
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.adds_leading_space else text

    def unused_ids(self) -> list[int]:
        """The ids below vocab_size that text never has and that do not end it; never sample them."""
        used = self.text_ids | {self.end_of_text}
        return [number for number in range(self.vocab_size) if number not in used]

    def save(self, path: Path) -> None:
        """Write the tokenizer.json."""
        path.write_bytes(self.content)

    def with_special(self, names: Sequence[str]) -> "Tokenizer":
        """A tokenizer with these special tokens too; the missing ones get the next ids."""
        document = tokenizer_json.with_special_tokens(self.document, names)
        return self if document is self.document else from_document(document)

    def with_chat_template(self, template: str | None) -> "Tokenizer":
        """The same tokenizer with another template of chats."""
        return from_document(extended(self.document, chat_template=template))

    def is_extension_of(self, base: "Tokenizer") -> bool:
        """Whether this is the base tokenizer, perhaps with more special tokens; chat templates may differ."""
        larger = tokenizer_json.with_special_tokens(base.document, [*self.special_tokens])
        ignored = {"chat_template": None, "name": None}
        return extended(self.document, **ignored) == extended(larger, **ignored)


class CharTokenizer(Tokenizer):
    """One id for each character of a set; characters are numbered in the given order."""

    kind = "char"

    def __init__(self, characters: str, special_tokens: dict[str, int] | None = None, document: Document | None = None):
        super().__init__(document or tokenizer_json.char_document(characters, special_tokens or {}))
        self.characters = characters
        self.text_of_id = dict(enumerate(characters)) | {i: name for name, i in self.special_tokens.items()}
        code_points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        self.ids = np.full(int(code_points.max(initial=0)) + 2, -1, np.int32)  # the last is for all above
        self.ids[code_points] = np.arange(len(characters))

    def _encode(self, text: str) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        ids = self.ids[np.minimum(code_points, len(self.ids) - 1)]
        if (ids < 0).any():
            character = text[int(np.argmax(ids < 0))]
            listed = self.characters[:MAX_LISTED_CHARACTERS]
            more = " …" if len(self.characters) > len(listed) else ""
            raise UserError(
                f"the tokenizer does not know the character {character!r} (U+{ord(character):04X}). "
                f"Use its {len(self.characters):,} characters only: {listed!r}{more}."
            )
        return ids.astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return "".join([self.text_of_id[i] for i in ids]).encode()


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and special tokens."""

    kind = "byte"

    def __init__(self, special_tokens: dict[str, int] | None = None, document: Document | None = None):
        super().__init__(document or tokenizer_json.byte_document(special_tokens or {END_OF_TEXT: 256}))
        self.bytes_of_id = {byte: bytes((byte,)) for byte in range(256)}
        self.bytes_of_id |= {i: name.encode() for name, i in self.special_tokens.items()}

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return b"".join([self.bytes_of_id[i] for i in ids])


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, run by tiktoken (Sennrich et al. 2016; on bytes as in GPT-2)."""

    def __init__(self, document: Document, vocab: dict[str, int], pattern: str):
        """``vocab`` holds the tokens that merges make, in GPT-2's alphabet; pattern is tiktoken's."""
        super().__init__(document)
        self.kind = document["model"].get(EXTENSION_KEY, {}).get("name", "bpe")
        self.pattern = pattern
        self.text_ids = {*vocab.values()}
        ranks = {tokenizer_json.from_byte_level(token): i for token, i in vocab.items()}
        self.encoding = tiktoken.Encoding(
            self.kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.normalize = NFC().normalize_str if document.get("normalizer") else str
        # If two threads are the first users, every later call takes twice as long.
        self.encoding.encode_ordinary("a word")

    def _encode(self, text: str) -> np.ndarray:
        try:  # no Python list, so that threads run in parallel
            return self.encoding.encode_to_numpy(self.normalize(text), disallowed_special=())
        except UnicodeEncodeError:
            raise
        except ValueError as error:
            problem = f"{self.kind} cannot encode so long a run of similar characters ({error})"
            raise UserError(f"{problem}. Cut the run, or use --tokenizer bpe, which has no limit.") from None

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return self.encoding.decode_bytes(ids)  # type: ignore[arg-type]


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer.json, run by ``tokenizers``: SentencePiece-like BPE and Unigram, WordPiece."""

    can_encode_pieces = False

    def __init__(self, document: Document):
        super().__init__(document)
        self.kind = document["model"].get(EXTENSION_KEY, {}).get("name", document["model"].get("type", "BPE").lower())
        with library_errors("`tokenizers` cannot read it"):
            self.runner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json.without_special(document)))
        self.runner.encode_special_tokens = True  # special tokens in text are ordinary text
        for token in document["added_tokens"]:
            if not is_special(token) and self.runner.token_to_id(token["content"]) != token["id"]:
                raise UserError(f"its added token {token['content']!r} does not follow the vocabulary")
        decoder = json.dumps(document.get("decoder"))
        self.is_byte_level = '"type": "ByteLevel"' in decoder
        self.has_byte_fallback = '"type": "ByteFallback"' in decoder
        self.bytes_of_id = {i: name.encode() for name, i in self.special_tokens.items()}
        self.context: list[int] = []
        try:
            letter = self.encode("a").tolist()
        except UserError:
            return
        self.context = letter[-1:]
        self.adds_leading_space = self.decode_bytes(letter).startswith(b" ")

    def _encode(self, text: str) -> np.ndarray:
        text.encode()
        with library_errors("the tokenizer cannot encode the text"):
            ids = self.runner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if tokenizer_json.HIDDEN_PREFIX in text and not {*ids} <= self.text_ids:
            raise UserError("the text has U+10FFFF before the name of a special token. Remove it.")
        return np.array(ids, np.uint32)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return b"".join([self._bytes_of(int(i)) for i in ids])

    def _bytes_of(self, token: int) -> bytes:
        if token not in self.bytes_of_id:
            text = self.runner.id_to_token(token)
            if text is None:
                raise KeyError(token)
            if self.is_byte_level and {*text} <= tokenizer_json.BYTE_OF_CHARACTER.keys():
                content = tokenizer_json.from_byte_level(text)
            elif self.has_byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", text):
                content = bytes((int(text[3:5], 16),))
            else:  # as after another token, because decoders remove the space before the first one
                before = self.runner.decode(self.context, skip_special_tokens=False)
                both = self.runner.decode([*self.context, token], skip_special_tokens=False)
                content = both[len(before) :].encode()
            self.bytes_of_id[token] = content
        return self.bytes_of_id[token]


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Raise UserError for what ``tokenizers`` raises: bare exceptions, and panics, which are no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{problem} ({' '.join(str(error).split())})") from None


def from_document(document: Document) -> Tokenizer:
    """The tokenizer of a checked document. Raises UserError if it cannot be used."""
    tokenizer = _numpy_tokenizer(document)
    if tokenizer is None:
        form = tokenizer_json.tiktoken_form(document)
        tokenizer = BPETokenizer(document, *form) if form else HuggingFaceTokenizer(document)
    is_named = "end_of_text" in document["model"].get(EXTENSION_KEY, {})
    if tokenizer.end_of_text is None and (is_named or tokenizer.kind != "char"):
        known = ", ".join([*tokenizer.special_tokens][:MAX_LISTED_CHARACTERS]) or "none"
        raise UserError(f"the token {tokenizer.end_name!r}, which should end a document, is not special ({known} are)")
    return tokenizer


def _numpy_tokenizer(document: Document) -> Tokenizer | None:
    """The tokenizer of characters or bytes that is written as this document, or None."""
    special = tokenizer_json.special_tokens_of(document)
    tokenizer: Tokenizer = ByteTokenizer(special, document)
    expected = tokenizer_json.byte_document(special)
    if document["model"].get("type") == "WordLevel" and document["model"].get("unk_token") not in special:
        vocab = tokenizer_json.text_vocab(document)
        characters = "".join(sorted(vocab, key=vocab.__getitem__))
        tokenizer = CharTokenizer(characters, special, document)
        expected = tokenizer_json.char_document(characters, special)
    ignored = {EXTENSION_KEY: None, "ignore_merges": None}  # it has no merges
    is_same = expected["model"] | ignored == document["model"] | ignored and all(
        expected[part] == document.get(part) for part in ("pre_tokenizer", "normalizer")
    )
    return tokenizer if is_same and all(map(is_special, document["added_tokens"])) else None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, ours or anybody's. Raises UserError if it cannot be used.

    A ``tokenizer_config.json`` beside it decides which token ends a document, and the chat template.
    """
    document = read_json(path)
    try:
        if isinstance(document, dict) and "kind" in document:
            document = tokenizer_json.convert_format_1(document)
        tokenizer_json.check_document(document)
        return from_document(extended(document, **read_companion(path.parent)))
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}. Choose another tokenizer, or prepare again.") from None


def read_companion(directory: Path) -> dict[str, str]:
    """The end of text and the chat template that a model's directory names. Raises UserError if they are damaged."""
    config_path = directory / "tokenizer_config.json"
    template_path = directory / "chat_template.jinja"
    config = read_json(config_path) if config_path.is_file() else {}
    if not isinstance(config, dict):
        raise UserError(f"{config_path.name} is not a JSON object")
    end = config.get("eos_token")
    values = {
        "end_of_text": end.get("content") if isinstance(end, dict) else end,
        "chat_template": config.get("chat_template"),
    }
    if template_path.is_file():
        values["chat_template"] = template_path.read_text(encoding="utf-8")
    return {name: value for name, value in values.items() if isinstance(value, str)}


def named_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer, one of tiktoken's by name, or the one at a path.

    A path is a tokenizer.json, or the folder of a dataset, a checkpoint or a run, which stands for its newest
    checkpoint. Raises UserError for an unknown name, a path without a tokenizer, or a failed download.
    """
    if name == "byte":
        return ByteTokenizer()
    if name in ENCODING_CONSTRUCTORS:
        return from_document(_tiktoken_document(name))
    path = Path(name)
    checkpoints = sorted(path.glob(f"checkpoints/step-{'[0-9]' * 8}/tokenizer.json"))
    files = [file for file in (path, *checkpoints, path / "tokenizer.json") if file.is_file()]
    if files:
        return load_tokenizer(files[-1])
    known = ", ".join(("char", "byte", "bpe", *ENCODING_CONSTRUCTORS))
    paths = "a tokenizer.json, or a dataset's, checkpoint's or run's folder that has one"
    raise UserError(f"--tokenizer {name} is unknown. Choose one of {known}, or the path of {paths}.")


def _tiktoken_document(name: str) -> Document:
    try:
        encoding = ENCODING_CONSTRUCTORS[name]()
    except Exception as error:  # whatever the network, its libraries or a damaged file may raise
        problem = f"tiktoken's encoding {name} could not be downloaded ({type(error).__name__})"
        advice = "set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bpe"
        raise UserError(f"{problem}. Connect to the internet once, or {advice}.") from None
    vocab = {tokenizer_json.to_byte_level(token): rank for token, rank in encoding["mergeable_ranks"].items()}
    return extended(tokenizer_json.bpe_document(vocab, encoding["pat_str"], encoding["special_tokens"]), name=name)
