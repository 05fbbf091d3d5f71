"""Tokenizers that are made from the text: its characters, or a byte-pair encoding trained on a sample of it."""

import json
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import filelock

from engine.core.cli import progress
from engine.core.files import to_json, write_whole
from engine.data.splits import Corpus
from engine.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, train_bpe

FED = 2**16  # characters that the BPE trainer is given at a time: more cost it memory, and time


def char_tokenizer(corpus: Corpus, separator: str) -> Tokenizer:
    """A tokenizer of all characters of a corpus, and of what separates its documents."""
    return CharTokenizer("".join(sorted(reduce(set.union, training_texts(corpus, None), {*separator}))))


def bpe_tokenizer(corpus: Corpus, size: int, vocab_size: int | None, pattern: str) -> Tokenizer:
    """A BPE trained on about so many bytes of a corpus: see :func:`engine.data.tokenizer.train_bpe`."""
    return train_bpe(training_texts(corpus, size), vocab_size, pattern)


def shared_tokenizer(path: Path, train: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer saved at path; whoever comes first trains it, the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            write_whole(path, to_json(train().state(), indent=1).encode())
    return load_tokenizer(path)


def training_texts(corpus: Corpus, size: int | None) -> Iterator[str]:
    """What a tokenizer is made from, a little at a time: all text, or about so many bytes of it."""
    texts = (text.text for text in corpus.texts()) if size is None else corpus.sample(size)
    with progress("training tokenizer", min(size or corpus.bytes, corpus.bytes) if corpus.counted else None) as bar:
        for found in texts:
            bar.update(len(found))
            for text in (text for _, text in json.loads(found)) if corpus.examples else (found,):
                yield from (text[i : i + FED] for i in range(0, len(text), FED))
