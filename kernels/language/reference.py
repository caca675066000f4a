"""The sums of sabia.kernels.language in NumPy."""

import numpy as np

from sabia.kernels.language.definitions import (
    ALONE,
    FIRST_GRAM,
    LONGEST,
    MOST,
    POWER,
    SCRIPT,
    WHOLE,
    Table,
)  # fmt: skip
from sabia.kernels.text.character_flags import lower_table
from sabia.kernels.text.folding import SOLO_END, TABLE_SIZE
from sabia.kernels.text.reference import decode, mix

_WORDS = 4096  # looked up at a time
_HALF = np.uint64(32)


def score(data: np.ndarray, offsets: np.ndarray, model: Table) -> tuple[np.ndarray, ...]:
    """See sabia.kernels.language.interface.score."""
    n = len(offsets) - 1
    letters = np.zeros((n, int(model.scripts.max()) + 1), np.int32)
    numbers: dict[bytes, int] = {}  # of distinct words
    texts = [
        _first_words(_codes(data, int(offsets[d]), int(offsets[d + 1])), model.kinds, letters[d])
        for d in range(n)
    ]
    sums = np.zeros((n, model.languages), np.int32)
    used, words = np.zeros(n, np.int32), np.array(list(map(len, texts)), np.int32)
    hits = np.zeros((n, model.languages), np.int32)
    indices = [[numbers.setdefault(word, len(numbers)) for word in text] for text in texts]
    word_sums, word_used, listed = _of_words(list(numbers), model)
    bits = (listed[:, None] >> np.arange(model.languages, dtype=np.uint64)) & np.uint64(1)
    for d, of_text in enumerate(indices):
        sums[d] = word_sums[of_text].sum(axis=0)
        used[d] = word_used[of_text].sum()
        hits[d] = bits[of_text].sum(axis=0)
    return sums, used, hits, words, letters


def _codes(data: np.ndarray, start: int, end: int) -> np.ndarray:
    """int64[c]: the code points that can count, of one document."""
    if end - start > 8 * MOST:
        last = start + 8 * MOST
        while last < end and data[last] & 0xC0 == 0x80:  # cut before a code point
            last -= 1
        end = last
    return decode(data, np.array([start, end]))[0]


def _first_words(codes: np.ndarray, kinds: np.ndarray, letters: np.ndarray) -> list[bytes]:
    """The words of the first MOST letters, in lower case, int32 each; counts letters by script."""
    last = len(kinds) - 1
    beyond = np.where(codes < SOLO_END, kinds[last], 0)
    kind = np.where(codes < last, kinds[np.minimum(codes, last)], beyond)
    counted = kind[: 4 * MOST]
    scripts = (counted[counted > 0] & SCRIPT).astype(np.int64) - 1
    letters += np.bincount(scripts, minlength=len(letters)).astype(np.int32)
    inside = np.concatenate(([False], (kind > 0) & (kind < ALONE), [False]))
    starts, ends = np.flatnonzero(np.diff(inside.astype(np.int8))).reshape(-1, 2).T
    lengths = np.minimum(ends - starts, LONGEST)
    count = int(np.searchsorted(np.cumsum(lengths), MOST)) + 1  # with the word that reaches MOST
    lower = lower_table()[np.minimum(codes, TABLE_SIZE - 1)].astype(np.int32)
    spans = zip(starts[:count].tolist(), lengths[:count].tolist(), strict=True)
    return [lower[start : start + length].tobytes() for start, length in spans]


def _of_words(words: list[bytes], model: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sums of the rows of their features int32[w, languages], how many features the table has
    int32[w], languages that list the word, as bits uint64[w])."""
    sums = np.zeros((len(words), model.languages), np.int32)
    used, listed = np.zeros(len(words), np.int32), np.zeros(len(words), np.uint64)
    for low in range(0, len(words), _WORDS):
        part = slice(low, min(low + _WORDS, len(words)))
        keys, valid = _features(words[part])
        rows = np.minimum(np.searchsorted(model.keys, keys), len(model.keys) - 1)
        there = valid & (model.keys[rows] == keys)
        used[part] = there.sum(axis=1)
        listed[part] = np.where(there[:, 0], model.known[rows[:, 0]], np.uint64(0))
        for column in range(keys.shape[1]):
            chosen = there[:, column]
            sums[part][chosen] += model.values[rows[chosen, column]]
    return sums, used, listed


def _features(words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(keys uint32[w, features], which of them exist bool[w, features]); the whole word first."""
    size = np.array([len(word) // 4 + 2 for word in words])  # with its marks, which count as 0
    marked = np.zeros((len(words), LONGEST + 2), np.uint64)
    for row, word in enumerate(words):
        marked[row, 1 : size[row] - 1] = np.frombuffer(word, np.int32).astype(np.uint64)
        marked[row, 1 : size[row] - 1] += np.uint64(1)
    position = np.arange(LONGEST + 2)
    whole = np.zeros(len(words), np.uint64)
    for at in position:
        whole = np.where(at < size, whole * POWER + marked[:, at], whole)
    totals, valid = [mix(mix(whole) + WHOLE)[:, None]], [np.ones((len(words), 1), bool)]
    grams = marked
    for length in range(2, FIRST_GRAM + 2):
        grams = grams[:, :-1] * POWER + marked[:, length - 1 :]
        if length >= FIRST_GRAM:
            totals.append(mix(grams))
            valid.append(position[: grams.shape[1]] + length <= size[:, None])
    keys = (np.concatenate(totals, axis=1) >> _HALF).astype(np.uint32)
    return keys, np.concatenate(valid, axis=1)
