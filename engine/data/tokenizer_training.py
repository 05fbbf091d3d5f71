"""Tokenizers made from text: its characters, or a byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2)."""

from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import Regex
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from engine.data.tokenizer import CharTokenizer, Tokenizer, from_document
from engine.data.tokenizer_json import MAX_VOCAB_SIZE, SPECIAL_TOKENS, SPLIT_PATTERNS, bpe_document, huggingface_regex

MIN_BPE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MIN_CHOSEN_VOCAB_SIZE = 1024
MAX_CHOSEN_VOCAB_SIZE = 8192


def train_char_tokenizer(texts: Iterable[str], separator: str) -> Tokenizer:
    """A tokenizer of all characters of the texts and of the separator, in code point order."""
    characters = {*separator}
    for text in texts:
        characters.update(text)
    return CharTokenizer("".join(sorted(characters)))


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int | None, pattern: str = "pairs") -> Tokenizer:
    """A byte-level BPE of at most vocab_size tokens; the last are the special tokens.

    ``pattern`` is a name in SPLIT_PATTERNS. With vocab_size None :func:`choose_vocab_size` decides. Texts of at most
    65,536 characters cost the least memory and time.
    """
    assert vocab_size is None or MIN_BPE_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE
    num_bytes = 0

    def counted_texts() -> Iterator[str]:
        nonlocal num_bytes
        for text in texts:
            num_bytes += len(text.encode())
            yield text

    vocab = train_merges(counted_texts(), (vocab_size or MAX_CHOSEN_VOCAB_SIZE) - len(SPECIAL_TOKENS), pattern)
    # The vocabulary of a smaller BPE is the beginning of a larger one's.
    num_tokens = (vocab_size or choose_vocab_size(num_bytes)) - len(SPECIAL_TOKENS)
    vocab = {token: rank for token, rank in vocab.items() if rank < num_tokens}
    special = {name: len(vocab) + index for index, name in enumerate(SPECIAL_TOKENS)}
    return from_document(bpe_document(vocab, SPLIT_PATTERNS[pattern], special))


def choose_vocab_size(num_bytes: int) -> int:
    """The vocabulary size for a text: 1,024 to 8,192, the power of two up to the square root of its bytes."""
    power_of_two = 1 << max(0, num_bytes.bit_length() - 1) // 2
    return max(MIN_CHOSEN_VOCAB_SIZE, min(MAX_CHOSEN_VOCAB_SIZE, power_of_two))


def train_merges(texts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    """Train Hugging Face's BPE; returns its tokens in GPT-2's alphabet, with their ids."""
    tokenizer = tokenizers.Tokenizer(BPE())
    words = Split(Regex(huggingface_regex(SPLIT_PATTERNS[pattern])), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()
