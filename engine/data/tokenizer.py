"""tokenizer.json ↔ token ids.

Every tokenizer is a file in Hugging Face's format. NumPy runs characters and bytes, splintr a
byte-level BPE, and ``tokenizers`` every other file.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

from engine.core.cli import warn
from engine.core.errors import UserError, wrap_library_errors
from engine.core.files import check_pointer
from engine.data import tokenizer_json
from engine.data.runners import EncodeBatch, encode_by_tokenizers, load_splintr, load_tokenizers
from engine.data.tokenizer_config import convert_sampling, text_start_of, with_model_files
from engine.data.tokenizer_json import END_OF_TEXT, EXTENSION_KEY, Document, with_extension

MAX_SLOW_CHARACTERS = 2**16  # of texts that a BPE encodes before splintr is loaded
TokenIds = Sequence[int] | np.ndarray


class Tokenizer:
    """A tokenizer.json of any kind, run by ``tokenizers``; subclasses run three kinds faster.

    ``special_tokens`` maps names to ids; text never becomes one of them, except an ``unk_token``.
    """

    # Whether the pieces of a text cut between words encode to the ids of the uncut text.
    can_encode_pieces = False
    folder: Path | None = None  # of the file that it was loaded from

    def __init__(self, document: Document):
        model = document["model"]
        extension = model.get(EXTENSION_KEY, {})
        self.document = document
        self.kind: str = extension.get("name", model.get("type", "BPE").lower())
        self.special_tokens = tokenizer_json.special_tokens_of(document)
        flagged = tokenizer_json.special_tokens_of(document, "special")
        self.markup = self.special_tokens.keys() - flagged  # such as <think>: text in an answer
        # Special tokens that absorb white space before or after them.
        self.left_strippers = tuple(tokenizer_json.special_tokens_of(document, "lstrip"))
        self.right_strippers = tuple(tokenizer_json.special_tokens_of(document, "rstrip"))
        ids = tokenizer_json.token_ids_of(document).values()
        self.text_ids = {*ids} - {*self.special_tokens.values()}
        self.vocab_size = tokenizer_json.vocab_size_of(document)
        self.end_of_text_name: str = extension.get("end_of_text", END_OF_TEXT)
        self.end_of_text_id = self.special_tokens.get(self.end_of_text_name)
        self.chat_template: str | None = extension.get("chat_template")
        # Ends each prompt of the pairs that a model was trained on.
        self.prompt_suffix: str = extension.get("prompt_suffix", "")
        self.bytes_of_id = {number: name.encode() for name, number in self.special_tokens.items()}
        # The sampling that an imported model recommends, such as {"temperature": 0.6}.
        with wrap_library_errors("sampling is not JSON", ValueError, RecursionError):
            sampling = json.loads(extension.get("sampling", "{}"))
        self.sampling = convert_sampling(sampling, "sampling")
        self.text_start = text_start_of(document)  # the ids that begin a text
        start_names = [self.bytes_of_id[number].decode() for number in self.text_start]
        self.bos_token: str = extension.get("bos_token", [*start_names, self.end_of_text_name][0])
        ends = [self.end_of_text_id, *map(int, extension.get("stop_token_ids", "").split())]
        self.stop_token_ids = [number for number in ends if number is not None]  # of any text
        # Whether a space is added at the start only, not after a special token, too.
        words = json.dumps(document.get("pre_tokenizer"))
        self.is_space_first_only = '"prepend_scheme": "first"' in words

    @functools.cached_property
    def content(self) -> bytes:
        """The file that :meth:`save` writes."""
        return (json.dumps(self.document, ensure_ascii=False, allow_nan=False) + "\n").encode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file that :meth:`save` writes."""
        return hashlib.sha256(self.content).hexdigest()

    def save(self, path: Path) -> None:
        """Write the tokenizer.json."""
        path.write_bytes(self.content)

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, uint32 (N,). Raises UserError for text that cannot be encoded."""
        return self.encode_batch([text])[0]

    def load_runner(self) -> None:
        """Load the library that encodes many texts, before threads do; ids stay the same."""
        self.encode_batch([])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text: see :meth:`encode`."""
        # Half of a character, or words that a regex engine cannot find.
        problem = f"the {self.kind} tokenizer cannot encode the text"
        with wrap_library_errors(problem, ValueError, advice=". Fix it or use another tokenizer."):
            return self._encode_batch(texts)

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return encode_by_tokenizers(self.runner, texts)

    @functools.cached_property
    def runner(self) -> tokenizers.Tokenizer:
        """See :func:`load_tokenizers`."""
        return load_tokenizers(self.document)

    @functools.cached_property
    def letter_ids(self) -> list[int]:
        """The ids of the letter a; none if the vocabulary lacks it."""
        with contextlib.suppress(UserError):
            return self.encode("a").tolist()
        return []

    @functools.cached_property
    def adds_leading_space(self) -> bool:
        """Whether encode puts a space before the text, which decode removes (SentencePiece)."""
        return not self.can_encode_pieces and self.decode_bytes(self.letter_ids).startswith(b" ")

    @functools.cached_property
    def without_space(self) -> "Tokenizer":
        """The tokenizer that puts no space before a text, for one that follows other text."""
        changed = tokenizer_json.without_leading_space(self.document)
        return Tokenizer(changed) if self.adds_leading_space else self

    def adds_space_after(self, before: int | None) -> bool:
        """Return whether a text after this id begins with an added space; None: at the start."""
        is_start = before is None or before in (self.end_of_text_id, *self.text_start)
        is_special = before in self.special_tokens.values() and not self.is_space_first_only
        return self.adds_leading_space and (is_start or is_special)

    def decode_bytes(self, ids: TokenIds) -> bytes:
        """Return the UTF-8 bytes of ids inside a text, where SentencePiece keeps leading spaces.

        A single id may be a fraction of a character.
        """
        new = [number for number in map(int, ids) if number not in self.bytes_of_id]
        self.bytes_of_id.update((number, self._bytes_of(number)) for number in new)
        return b"".join([self.bytes_of_id[number] for number in ids])

    def _bytes_of(self, number: int) -> bytes:
        text = self.runner.id_to_token(number)
        if text is None:
            raise KeyError(number)
        decoder = json.dumps(self.document.get("decoder"))
        if '"ByteLevel"' in decoder and tokenizer_json.BYTE_OF_CHARACTER.keys() >= {*text}:
            return tokenizer_json.from_byte_level(text)
        if '"ByteFallback"' in decoder and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes.fromhex(text[3:5])
        # Decoders remove the space before the first token, so decode it as the second one.
        first = self.letter_ids[-1:]
        before = self.runner.decode(first, skip_special_tokens=False)
        both = self.runner.decode([*first, number], skip_special_tokens=False)
        return both[len(before) :].encode()

    def decode(self, ids: TokenIds) -> str:
        """Return the text of the ids, where invalid UTF-8 becomes U+FFFD, without its start."""
        start = len(self.text_start)
        ids = ids[start:] if [*ids[:start]] == self.text_start else ids
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.adds_leading_space else text

    def unused_ids(self) -> list[int]:
        """List the ids that neither occur in text nor end it; they must not be sampled."""
        used = self.text_ids | {*self.stop_token_ids, *map(self.special_tokens.get, self.markup)}
        return [number for number in range(self.vocab_size) if number not in used]

    def with_special(self, names: Sequence[str]) -> "Tokenizer":
        """Return the tokenizer with additional special tokens; missing names get the next ids."""
        document = tokenizer_json.with_special_tokens(self.document, names)
        return self if document is self.document else from_document(document)

    def with_chat_template(self, template: str | None) -> "Tokenizer":
        """Return the same tokenizer with another chat template."""
        tokenizer = from_document(with_extension(self.document, chat_template=template))
        tokenizer.folder = self.folder
        return tokenizer

    def with_prompt_suffix(self, suffix: str) -> "Tokenizer":
        """Return the same tokenizer with another suffix of prompts; "": without one."""
        if suffix == self.prompt_suffix:
            return self
        return from_document(with_extension(self.document, prompt_suffix=suffix or None))

    def is_extension_of(self, base: "Tokenizer") -> bool:
        """Return whether this is the base with more special tokens; names, templates may differ."""
        larger = tokenizer_json.with_special_tokens(base.document, [*self.special_tokens])
        ignored = dict.fromkeys(tokenizer_json.KEYS_WITHOUT_IDS)
        return with_extension(self.document, **ignored) == with_extension(larger, **ignored)


class CharTokenizer(Tokenizer):
    """One id for each character, numbered in order."""

    can_encode_pieces = True

    def __init__(self, characters: str, document: Document | None = None):
        super().__init__(document or tokenizer_json.char_document(characters, {}))
        self.kind = "char"
        self.characters = characters
        self.bytes_of_id |= {number: char.encode() for number, char in enumerate(characters)}
        code_points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        # The last entry stands for all larger code points.
        self.ids = np.full(int(code_points.max(initial=0)) + 2, -1, np.int32)
        self.ids[code_points] = np.arange(len(characters))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [*map(self._encode, texts)]

    def _encode(self, text: str) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = self.ids[np.minimum(code_points, len(self.ids) - 1)]
        if (ids < 0).any():
            character = text[int(np.argmax(ids < 0))]
            name = f"{character!r} (U+{ord(character):04X})"
            raise UserError(f"the vocabulary lacks {name}. Use another tokenizer.")
        return ids.astype(np.uint32)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and special tokens."""

    can_encode_pieces = True

    def __init__(self, document: Document | None = None):
        super().__init__(document or tokenizer_json.byte_document({END_OF_TEXT: 256}))
        self.kind = "byte"
        self.bytes_of_id |= {byte: bytes((byte,)) for byte in range(256)}

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016).

    ``tokenizers`` encodes a few texts, then splintr, which takes longer to load.
    """

    num_characters = 0  # encoded so far

    def __init__(self, document: Document):
        super().__init__(document)
        is_known = tokenizer_json.pattern_of(document) in tokenizer_json.SPLIT_PATTERNS.values()
        self.can_encode_pieces = is_known or self.kind in ENCODING_CONSTRUCTORS
        vocab = tokenizer_json.text_vocab(document)
        for token, number in vocab.items():
            self.bytes_of_id[number] = tokenizer_json.from_byte_level(token)
        merges = map("".join, document["model"]["merges"])
        tokens = dict.fromkeys(merge.replace(" ", "") for merge in merges)
        self.merged_ids = [vocab[token] for token in tokens]  # in order of the merges
        if not document["model"].get("ignore_merges"):  # then no merge makes the other tokens
            byte_ids = map(vocab.__getitem__, tokenizer_json.BYTE_OF_CHARACTER)
            self.text_ids = {*byte_ids, *self.merged_ids}

    @functools.cached_property
    def pattern(self) -> str | None:
        """The regex that finds words; None for other words, or merges unlike splintr's."""
        return tokenizer_json.pattern_of(self.document) if self.encode_fast else None

    @functools.cached_property
    def encode_fast(self) -> EncodeBatch | None:
        """See :func:`load_splintr`."""
        return load_splintr(self.document)

    def load_runner(self) -> None:
        self.num_characters = MAX_SLOW_CHARACTERS
        self.encode("a")

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        self.num_characters += sum(map(len, texts))
        encode = self.encode_fast if self.num_characters > MAX_SLOW_CHARACTERS else None
        return encode(texts) if encode else super()._encode_batch(texts)


def from_document(document: Document) -> Tokenizer:
    """Return the tokenizer of a checked document. Raises UserError if it cannot be used."""
    special = tokenizer_json.special_tokens_of(document)
    characters = "".join(tokenizer_json.text_vocab(document))
    unset = dict.fromkeys(tokenizer_json.KEYS_WITHOUT_IDS)
    plain = with_extension(document, end_of_text=None, **unset)
    is_char = document["model"].get("type") == "WordLevel"
    tokenizer: Tokenizer
    if is_char and plain == tokenizer_json.char_document(characters, special):
        tokenizer = CharTokenizer(characters, document)
    elif plain == tokenizer_json.byte_document(special):
        tokenizer = ByteTokenizer(document)
    elif tokenizer_json.is_byte_level(document):
        tokenizer = BPETokenizer(document)
    else:
        tokenizer = Tokenizer(document)
        tokenizer.load_runner()  # raises an error here rather than when it encodes
    can_lack_end = tokenizer.kind == "char" and tokenizer.end_of_text_name == END_OF_TEXT
    if tokenizer.end_of_text_id is None and not can_lack_end:
        raise UserError(f"the end of text, {tokenizer.end_of_text_name!r}, is not a special token")
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json, with what the files beside it say of a model's texts and chats.

    Raises UserError if a file is corrupted or unsupported.
    """
    content = path.read_bytes()
    check_pointer(content, path)
    problem = f"{path}: is not a usable tokenizer.json"
    with wrap_library_errors(problem, UserError, advice=". Choose another, or prepare again."):
        with wrap_library_errors("it is not JSON", ValueError, RecursionError):
            document = json.loads(content)
        tokenizer_json.check_document(document)
        tokenizer = from_document(with_model_files(document, path.parent))
    tokenizer.folder = path.parent
    templates = path.parent / "additional_chat_templates"
    if templates.is_dir():
        warn(f"{templates}: ignored; only the default chat template is used")
    return tokenizer


def named_tokenizer(name: str) -> Tokenizer:
    """Return the byte tokenizer, one of tiktoken's by name, or the tokenizer at a path.

    A path is a tokenizer.json, or the folder of a dataset, a checkpoint or a run, for its newest
    checkpoint. Raises UserError for an unknown name, a wrong path, or a failed download.
    """
    if name == "byte":
        return ByteTokenizer()
    if name in ENCODING_CONSTRUCTORS:
        return from_document(tokenizer_json.tiktoken_document(name))
    path = Path(name)
    checkpoints = sorted(path.glob(f"checkpoints/step-{'[0-9]' * 8}/tokenizer.json"))
    files = [file for file in (path, *checkpoints, path / "tokenizer.json") if file.is_file()]
    if files:
        return load_tokenizer(files[-1])
    names = ", ".join(("char", "byte", "bpe", *ENCODING_CONSTRUCTORS))
    paths = "the path of a tokenizer.json, a dataset, a checkpoint or a run"
    raise UserError(f"--tokenizer: must be one of {names}, or {paths} (got {name}).")
