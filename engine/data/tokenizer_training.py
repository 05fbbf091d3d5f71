"""Tokenizers trained on text: its characters, or a byte-level BPE."""

import json
import math
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from engine.core.cli import progress_bar
from engine.data.documents.corpus import Corpus
from engine.data.tokenizer import CharTokenizer, Tokenizer, from_document
from engine.data.tokenizer_json import SPECIAL_TOKENS, SPLIT_PATTERNS, bpe_document

DEFAULT_PATTERN = "qwen2"
MIN_BPE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MIN_CHOSEN_VOCAB_SIZE = 1024
MAX_CHOSEN_VOCAB_SIZE = 8192
MAX_TRAINER_CHARACTERS = 2**16  # of one string for the BPE trainer, to limit its memory


def train_char_tokenizer(texts: Iterable[str], separator: str) -> Tokenizer:
    """Return a tokenizer of the characters of the texts and the separator, in code point order."""
    characters = set(separator)
    for text in texts:
        characters.update(text)
    return CharTokenizer("".join(sorted(characters)))


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int | None, pattern: str = DEFAULT_PATTERN
) -> Tokenizer:
    """Return a byte-level BPE of at most vocab_size tokens; the last are the special tokens.

    ``pattern`` is a name in SPLIT_PATTERNS. Without vocab_size, choose_vocab_size decides. Texts of
    at most 65,536 characters need the least memory and time.
    """
    num_bytes = 0

    def count_bytes() -> Iterator[str]:
        nonlocal num_bytes
        for text in texts:
            num_bytes += len(text.encode())
            yield text

    # Without the bounds, text without spaces is one word, and takes minutes to train on.
    bounded = SPLIT_PATTERNS[pattern].replace("+", "{1,64}").replace("*", "{0,64}")
    untrained = bpe_document({}, bounded, {})
    runner = tokenizers.Tokenizer.from_str(json.dumps(untrained))
    trainer = BpeTrainer(
        vocab_size=(vocab_size or MAX_CHOSEN_VOCAB_SIZE) - len(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    runner.train_from_iterator(count_bytes(), trainer)
    # A smaller BPE has the first tokens of a larger one.
    num_tokens = (vocab_size or choose_vocab_size(num_bytes)) - len(SPECIAL_TOKENS)
    vocab = {token: rank for token, rank in runner.get_vocab().items() if rank < num_tokens}
    special = {name: number for number, name in enumerate(SPECIAL_TOKENS, len(vocab))}
    return from_document(bpe_document(vocab, SPLIT_PATTERNS[pattern], special))


def choose_vocab_size(num_bytes: int) -> int:
    """Return the power of two up to the square root of a text's bytes, from 1,024 to 8,192."""
    power_of_two = 1 << max(0, num_bytes.bit_length() - 1) // 2
    return max(MIN_CHOSEN_VOCAB_SIZE, min(MAX_CHOSEN_VOCAB_SIZE, power_of_two))


def tokenizer_texts(corpus: Corpus, max_bytes: float = math.inf) -> Iterator[str]:
    """Yield a sample of about ``max_bytes`` of the text, in short strings; by default all of it."""
    total = min(max_bytes, corpus.bytes) if corpus.is_plain else None
    has_examples = corpus.rule.has_examples
    with progress_bar(desc="training tokenizer", total=total, unit="B", unit_scale=True) as bar:
        for document in sample_texts(corpus, max_bytes):
            bar.update(len(document))
            texts = [turn[1] for turn in json.loads(document)] if has_examples else [document]
            for text in texts:
                for start in range(0, len(text), MAX_TRAINER_CHARACTERS):
                    yield text[start : start + MAX_TRAINER_CHARACTERS]


def sample_texts(corpus: Corpus, max_bytes: float) -> Iterator[str]:
    """Yield the beginning of each unit in proportion to its size.

    A unit contributes more if earlier units were too short. The result depends on the sources
    alone, and has about ``max_bytes``. All text is yielded if it is known to fit.
    """
    if corpus.is_plain and corpus.bytes <= max_bytes:
        max_bytes = math.inf
    budget = 0.0
    sizes = [max(1, unit.size) for unit in corpus.units]
    for unit, size in zip(corpus.units, sizes, strict=True):
        budget += max_bytes * size / sum(sizes)
        for document in unit.documents():
            if budget <= 0:
                break
            yield document.text
            budget -= len(document.text.encode())
