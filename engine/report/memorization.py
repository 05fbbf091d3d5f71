"""Which runs of a text stand word for word in the training data, and where: what a model has memorised."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from engine.data.dataset import Dataset, Examples, Tokens
from engine.data.tokenizer import Tokenizer

WORD = 8  # bytes that are compared at once
ANCHOR = 2 * WORD  # bytes of a run that are looked up
SHORTEST = ANCHOR + WORD  # bytes of a run that counts: any so many hold an anchor that begins at a multiple of WORD
CHUNK = 2**21  # bytes of the training data that are looked at together
FEW = 8  # places of an anchor in the texts that are looked at one by one
SLICE = 2**16  # anchors that are followed together
SLOTS = 20  # bits of a hash
BREAK, END = b"\xff", b"\xfe"  # no UTF-8 has them: a special token in the data, the end of a text
OFFSET = 2**40  # more bytes than any data; a run is one number, length · OFFSET + OFFSET - 1 - where it begins
ODD = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)))  # multipliers of hashes
INVERSE = np.uint64(pow(int(ODD[0]), -1, 2**64))


class Place(NamedTuple):
    """Where a run begins in the training data."""

    shard: Path
    token: int  # of the shard; the run may begin in its middle
    document: int | None  # or example, from 0; None where the tokenizer has no end of text
    byte: int  # of the split's text, of special tokens none


class Copy(NamedTuple):
    """A run of a text's characters that stands in the training data."""

    start: int
    length: int
    place: Place  # the first such one


def copied(texts: Sequence[str], datasets: Sequence[Dataset]) -> list[list[Copy]]:
    """For each text the longest runs that stand in the training splits, longest first; they don't overlap.

    A run counts from SHORTEST bytes of UTF-8 on, ends where a document does, and is of whole characters. The longest
    is taken first, then the longest of what is left. Reads all training data once, in bounded memory; texts: a few MB.
    """
    encoded = [text.encode() for text in texts]
    if max(map(len, encoded), default=0) < SHORTEST:
        return [[] for _ in texts]
    source, scan = Source(datasets), Scan(Texts(encoded))
    for buffer, offset in tqdm(source.buffers(scan.ahead), "looking for copies", disable=None, leave=False):
        scan.read(buffer, offset)
    lengths, offsets = scan.longest()
    found = [
        [(start, length, int(offsets[first + at])) for start, at, length in apart(text, lengths[first:])]
        for text, first in zip(encoded, scan.texts.firsts, strict=True)
    ]
    places = source.places({offset for runs in found for *_, offset in runs})
    return [[Copy(start, length, places[offset]) for start, length, offset in runs] for runs in found]


def validation_texts(datasets: Sequence[Dataset], like: Sequence[str]) -> list[str]:
    """As many pieces of validation text, as long as these texts where there is so much, spread evenly.

    How long their copies are tells what is merely common. :func:`copied` of both at once reads the data once.
    """
    pieces = []
    for number, text in enumerate(like):
        dataset, size = datasets[number % len(datasets)], len(text.encode())  # as many tokens are enough
        start = max(0, len(dataset.val) - size) * number // max(1, len(like) - 1)
        ids = ids_of(dataset.val, start, size)
        ids = ids[~np.isin(ids, special_ids(dataset.tokenizer))]
        pieces.append(dataset.tokenizer.decode_bytes(ids.tolist()).decode(errors="ignore")[: len(text)])
    return pieces


def apart(text: bytes, lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs that don't overlap, the longest first: the first character, the first byte and the characters of each.

    lengths (≥ N,) are those of the longest run from each byte of a text (N,), in bytes.
    """
    starts = np.flatnonzero((np.frombuffer(text, np.uint8) & 0xC0) != 0x80)  # of characters
    edges = np.append(starts, len(text))
    ends = np.searchsorted(edges, starts + lengths[starts], "right") - 1  # the last whole character's
    number, runs = np.arange(len(starts)), []
    while True:
        ends[edges[ends] - starts < SHORTEST] = 0
        if not len(ends) or (length := int((ends - number).max())) <= 0:
            return runs
        start = int((ends - number).argmax())
        runs.append((start, int(starts[start]), length))
        ends[start : start + length] = 0
        ends[:start] = np.minimum(ends[:start], start)


def ids_of(split: Tokens | Examples, start: int, count: int) -> np.ndarray:
    """Token ids of a split from start on, those of examples that don't count as the others: (count,) or to its end."""
    ids = getattr(split, "tokens", split)[start : start + count]
    return np.where(ids < 0, ~ids, ids) if isinstance(split, Examples) else ids


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that no text has."""
    return sorted({*tokenizer.unused_ids(), *tokenizer.special_tokens.values()})


class Source:
    """The bytes of datasets' training splits, end to end, a special token being one BREAK."""

    def __init__(self, datasets: Sequence[Dataset]):
        self.datasets, self.number = datasets, -1
        self.blocks: list[tuple[int, ...]] = []  # of each its first byte and dataset; tokens, bytes, specials before it

    def spell(self, number: int, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A dataset's next bytes (M,), CHUNK at most, where each token (N,) ends in them, and which are special."""
        if number != self.number:  # the table of this one's tokens
            self.number, tokenizer = number, self.datasets[number].tokenizer
            self.special = np.isin(np.arange(tokenizer.vocab_size), special_ids(tokenizer))
            known = [BREAK if no else tokenizer.decode_bytes([i]) for i, no in enumerate(self.special.tolist())]
            self.bytes = np.frombuffer(b"".join(known), np.uint8)
            self.lengths = np.array([*map(len, known)], np.int32)
            self.starts = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        ids = ids_of(self.datasets[number].train, token, max(1, CHUNK // int(self.lengths.max())))
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths, dtype=np.int32)
        sources = np.repeat(self.starts[ids] - ends + lengths, lengths)
        sources += np.arange(len(sources), dtype=np.int32)
        return self.bytes[sources], ends, self.special[ids]

    def __iter__(self) -> Iterator[np.ndarray]:
        first = 0
        for number, dataset in enumerate(self.datasets):
            token = before = specials = 0
            while token < len(dataset.train):
                self.blocks.append((first, number, token, before, specials))
                spelled, ends, special = self.spell(number, token)
                yield spelled
                token, first, before = token + len(ends), first + len(spelled), before + len(spelled)
                specials += int(special.sum())
            yield np.frombuffer(BREAK, np.uint8)  # no run goes on in the next dataset
            first += 1

    def buffers(self, ahead: int) -> Iterator[tuple[np.ndarray, int]]:
        """Bytes to look at, with the WORD before and so many ahead of them; and where the first of all these stands."""
        parts, size, offset = [np.full(WORD, BREAK[0], np.uint8)], WORD, -WORD
        end = np.full(ahead + 2 * WORD, BREAK[0], np.uint8)
        for part in itertools.chain(self, [end]):
            parts.append(part)
            size += len(part)
            if part is end or size > CHUNK + ahead:
                joined = np.concatenate(parts)
                seen = (size - WORD - ahead) // WORD * WORD
                yield joined, offset
                parts, size, offset = [joined[seen:]], size - seen, offset + seen

    def places(self, offsets: Iterable[int]) -> dict[int, Place]:
        """Where these bytes stand."""
        found, block_of = {}, lambda offset: bisect_right(self.blocks, offset, key=lambda block: block[0]) - 1
        for block, some in itertools.groupby(sorted(offsets), block_of):
            first, number, token, before, specials = self.blocks[block]
            _, ends, special = self.spell(number, token)
            for offset in some:
                index = int(np.searchsorted(ends, offset - first, "right"))
                passed = specials + int(special[:index].sum())
                found[offset] = self._place(number, token + index, before + offset - first - passed, passed)
        return found

    def _place(self, number: int, token: int, byte: int, document: int | None) -> Place:
        dataset = self.datasets[number]
        split, shards = dataset.train, dataset.manifest["splits"]["train"]["shards"]
        starts = getattr(split, "tokens", split).starts
        shard = bisect_right(starts, token) - 1
        if isinstance(split, Examples):
            document = int(np.searchsorted(split.starts, token, "right")) - 1
        elif dataset.tokenizer.end_of_text is None:
            document = None
        return Place(dataset.path / shards[shard]["file"], token - starts[shard], document, byte)


def equal_bytes(x: np.ndarray) -> np.ndarray:
    """How many of the first bytes are equal in two big-endian words, given what differs, uint64 (N,): int64 (N,)."""
    return sum(((x >> np.uint64(64 - 8 * count)) == 0).astype(np.int64) for count in range(1, WORD + 1))


def word_at(words: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The big-endian words that begin at bytes (N,), uint64 (N,), of bytes given as little-endian words."""
    index, shift = at >> 3, ((at & 7) << 3).astype(np.uint64)
    low, high = words[index] >> shift, words[index + 1] << np.uint64(1) << (np.uint64(63) - shift)
    return (low | high).byteswap()


class Texts:
    """Texts, sorted: every place in them by what follows it, and a hash table of what stands there."""

    def __init__(self, texts: Sequence[bytes]):
        self.longest, joined = max(map(len, texts)), END * WORD + END.join([*texts, b""])
        self.size = size = len(joined)
        self.firsts = np.cumsum([WORD] + [len(text) + 1 for text in texts[:-1]]).tolist()
        padded = np.frombuffer(joined + bytes(-size % WORD + (self.longest // WORD + 8) * WORD), np.uint64)
        self.words = word_at(padded, np.arange(len(padded) * WORD - 2 * WORD))  # big-endian, at each byte
        rank, depth = np.unique(self.words[:size], return_inverse=True)[1], WORD
        while depth < ANCHOR or (depth <= self.longest and rank.max() + 1 < size):  # Manber and Myers 1990
            after = np.append(rank[depth:] + 1, np.zeros(min(depth, size), rank.dtype))
            rank, depth = np.unique(rank * (size + 1) + after, return_inverse=True)[1], 2 * depth
            if depth == ANCHOR:
                anchors = rank
        self.order = np.argsort(rank, kind="stable")  # the suffix array
        self.counts = np.bincount(anchors)  # places of each anchor, which stand together in the order
        self.lows = np.cumsum(self.counts) - self.counts
        self.anchors = [self.words[self.order[self.lows] + skipped].byteswap() for skipped in (0, WORD)]
        slots = self._slots(*self.anchors)
        by_slot = np.argsort(slots, kind="stable")
        repeats = np.append(False, np.diff(slots[by_slot]) == 0)
        self.table, self.others = np.full(2**SLOTS, -1, np.int32), np.full(len(slots), -1, np.int32)
        self.table[slots[by_slot[~repeats]]] = by_slot[~repeats]  # the first anchor of each slot
        self.others[by_slot[:-1][repeats[1:]]] = by_slot[repeats]  # after each, the next of its slot

    @staticmethod
    def _slots(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return ((first * ODD[0] ^ second * ODD[1]) * ODD[2] >> np.uint64(64 - SLOTS)).astype(np.int64)

    def find(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The numbers of anchors given as little-endian words, uint64 (N,) each; -1 for one that no text has."""
        found = self.table[self._slots(first, second)]
        left = np.flatnonzero(found >= 0)
        while len(left):
            one = found[left]
            left = left[(self.anchors[0][one] != first[left]) | (self.anchors[1][one] != second[left])]
            found[left] = self.others[found[left]]
            left = left[found[left] >= 0]
        return found

    def common(self) -> list[int]:
        """How many bytes each place in the order has in common with the one before, or a few more: (size,)."""
        one, other, length = self.order[1:], self.order[:-1], np.zeros(self.size - 1, np.int64)
        left = np.arange(self.size - 1)
        while len(left):
            more = equal_bytes(self.words[one[left] + length[left]] ^ self.words[other[left] + length[left]])
            length[left] += more
            left = left[(more == WORD) & (length[left] < self.longest)]
        return [0, *length.tolist()]


class Scan:
    """What is known of texts' runs while the training data is read.

    A run of SHORTEST bytes holds an anchor, ANCHOR bytes that begin at a multiple of WORD in the data. For each of the
    WORD bytes where a run with this as its first anchor may begin, one place in the texts with the longest run is found
    by binary search; :meth:`longest` gives the other places their due. Most anchors are spared that: one with a single
    place where no longer run can be gained, one with several where the data is as it was before, by a hash of 64 bits.
    """

    def __init__(self, texts: Texts):
        self.texts, self.ahead = texts, texts.longest + 6 * WORD
        self.best = np.zeros(texts.size, np.int64)  # the longest run found from each byte of the texts
        self.seen = np.zeros(2**SLOTS, np.uint64)  # hashes of data lately seen
        powers = (np.full(2 * (CHUNK + self.ahead) // WORD, base, np.uint64) for base in (ODD[0], INVERSE))
        self.powers, self.inverses = map(np.cumprod, powers)

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Take in bytes as :meth:`Source.buffers` gives them."""
        self.offset, end = offset, (len(buffer) - self.ahead) // WORD  # the first word that is not to be looked at
        self.data = buffer[: len(buffer) // WORD * WORD].view("<u8")
        found = self.texts.find(self.data[1:end], self.data[2 : end + 1])
        at = np.flatnonzero(found >= 0) + 1
        found = found[at - 1]
        chosen = self.texts.counts[found] == 1
        if len(several := np.flatnonzero(~chosen)):
            chosen[self._new(at, several, end)] = True
        at, found = at[chosen], found[chosen]
        for some in (slice(first, first + SLICE) for first in range(0, len(at), SLICE)):
            self._search(self._may_gain(at[some], found[some]))

    def _may_gain(self, at: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Which anchors, at words (N,) of the data, may begin a run that is longer than is known: words (≤ N,)."""
        texts, many = self.texts, self.texts.counts[found] > FEW
        counts, low = np.where(many, 0, texts.counts[found]), texts.lows[found]
        place = texts.order[np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)]
        one = np.repeat(np.arange(len(at)), counts)
        differs = texts.words[place - WORD] ^ self.data[at[one] - 1].byteswap()
        begins = np.flatnonzero(differs)  # elsewhere the anchor before is of the run too
        place, one, left = place[begins], one[begins], equal_bytes(differs[begins].byteswap())
        reach = np.maximum.accumulate((self.best // OFFSET) + np.arange(texts.size))
        last = np.maximum(reach[place - left] - place, ANCHOR) - WORD + 1  # a longer run has this word too
        same = texts.words[place + last] == word_at(self.data, at[one] * WORD + last)
        many[one[same]] = True
        return at[many]

    def _new(self, at: np.ndarray, several: np.ndarray, end: int) -> np.ndarray:
        """Those of several anchors, of all at words (N,), from which on the data has not been seen: indices."""
        lasts = at[np.append(np.diff(at) != 1, True)]  # no run goes far beyond the last of anchors in a row
        first, last = at[several] - 1, lasts[np.searchsorted(lasts, at[several])]
        stop = np.minimum(np.where(last < end - 1, last, len(self.data)), first + self.texts.longest // WORD) + 3
        mixed = (self.data ^ (self.data >> np.uint64(29))) * ODD[1]
        sums = np.append(np.uint64(0), np.cumsum((mixed ^ (mixed >> np.uint64(32))) * self.powers[: len(mixed)]))
        hashes, which = np.unique((sums[stop] - sums[first]) * self.inverses[first], return_index=True)
        slots = (hashes * ODD[2] >> np.uint64(64 - SLOTS)).astype(np.int64)
        new = self.seen[slots] != hashes
        self.seen[slots] = hashes
        return several[which[new]]

    def _search(self, at: np.ndarray) -> None:
        """Find a longest run from each byte after the word before anchors, at words (N,) of the data."""
        data = (at[:, None] * WORD - np.arange(WORD)).reshape(-1)
        found = self.texts.find(*(word_at(self.data, data + skipped).byteswap() for skipped in (0, WORD)))
        data, found = data[found >= 0], found[found >= 0]
        low, length = self.texts.lows[found], ANCHOR
        high = low + self.texts.counts[found]
        while len(data):
            word = word_at(self.data, data + length)
            start = self._bound(low, high, length, word)
            end = self._bound(start, high, length, word + np.uint64(1))
            ended = end == start
            for near in (start - 1, start):  # those before and after have most in common
                fits = np.flatnonzero(ended & (near >= low) & (near < high))
                place = self.texts.order[near[fits]]
                run = length + equal_bytes(self.texts.words[place + length] ^ word[fits])
                code = (run + 1) * OFFSET - 1 - self.offset - data[fits]
                np.maximum.at(self.best, place, np.where(run >= SHORTEST, code, 0))
            data, low, high, length = data[~ended], start[~ended], end[~ended], length + WORD

    def _bound(self, low: np.ndarray, high: np.ndarray, skipped: int, word: np.ndarray) -> np.ndarray:
        """In stretches of the order, the first place where a word not below this follows so many bytes: (N,)."""
        low, high = low.copy(), high.copy()
        left = np.flatnonzero(low < high)
        while len(left):
            middle = (low[left] + high[left]) // 2
            below = self.texts.words[self.texts.order[middle] + skipped] < word[left]
            low[left[below]], high[left[~below]] = middle[below] + 1, middle[~below]
            left = left[low[left] < high[left]]
        return low

    def longest(self) -> tuple[np.ndarray, np.ndarray]:
        """The length of the longest run from each byte of the texts, 0 if none, and where it begins in the data."""
        order, common = self.texts.order, self.texts.common()
        runs = self.best[order].tolist()
        for way in (range(1, len(runs)), range(len(runs) - 2, -1, -1)):  # what places have in common they share
            for at in way:
                near, shared = runs[at - way.step], common[max(at, at - way.step)]
                runs[at] = max(runs[at], min(near, shared * OFFSET + near % OFFSET))
        best, place = np.zeros_like(self.best), np.arange(len(runs))
        best[order] = runs
        reach = (best // OFFSET + place) * OFFSET + best % OFFSET + place - len(runs)
        reach = np.maximum.accumulate(np.where(best // OFFSET, reach, 0))  # a run's rest is a run
        length = np.maximum(reach // OFFSET - place, 0)
        return length, OFFSET - 1 - reach % OFFSET + place - len(runs)
