"""Letters of a text against tables of n-grams: the arithmetic of language identification.

A word is a run of letters (with vowel signs) of a script with spaces, in lower case, between two
boundary marks. Its features are the n-grams of GRAMS lengths over word and marks, and the word as a
whole; the key of a feature is the upper half of mix(sum of (code + 1) * P**i), marks counting as 0,
with WHOLE added for words. A table has the sorted keys of the features it knows and, for each, one
small integer for every language: about STEP times the logarithm of how much more frequent the
feature is there than in the mean of all. The first MOST letters of words decide.
"""

import functools

import numpy as np

from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.character_flags import ALPHA, SOLO, flag_table, lower_table
from sabia.kernels.text.utf8_numba import mix
from sabia.kernels.text.words_numba import decode

MOST = 1000
STEP = 10.0
GRAMS = (3, 4)
LONGEST = 24  # letters of a word; the rest counts for nothing
_WHOLE = np.uint64(0x5851F42D4C957F2D)
_P = np.uint64(0x9E3779B97F4A7C15)
U = np.uint64
_jit = njit(nogil=True, cache=True, boundscheck=False, _nrt=False)
_FIRST, _LAST = GRAMS


@_jit
def _key(word, start, end):
    total = U(0)
    for i in range(start, end):
        total = total * _P + U(word[i] + 1)  # a boundary mark is -1, so it counts as 0
    return mix(total)


@_jit
def _features(word, n, keys):
    """Fill keys uint32 with the features of word[0:n], marks included; the whole word first."""
    keys[0] = np.uint32(mix(_key(word, 0, n) + _WHOLE) >> U(32))
    count = 1
    for size in range(_FIRST, _LAST + 1):
        for start in range(n - size + 1):
            # upper half of the hash
            keys[count] = np.uint32(_key(word, start, start + size) >> U(32))
            count += 1
    return count


@_jit
def _next(codes, flags, lower, i, size, word):
    """(length of the next word with marks, or 0 at the end; position after the word)."""
    while i < size and not (flags[i] & ALPHA and not flags[i] & SOLO):
        i += 1
    n = 1
    word[0] = -1
    while i < size and flags[i] & ALPHA and not flags[i] & SOLO:
        if n <= LONGEST:
            word[n] = lower[i]
            n += 1
        i += 1
    word[n] = -1
    return (n + 1 if n > 1 else 0), i


@njit(nogil=True, cache=True)
def _score(data, offsets, flag_table, lower_table, scripts, slots, rows, table, known, out):
    scores, used, hits, words, letters = out
    most = 0
    for d in range(offsets.shape[0] - 1):
        most = max(most, offsets[d + 1] - offsets[d])
    capacity = min(most, 8 * MOST)
    codes, lower = np.empty(capacity + 1, np.int32), np.empty(capacity + 1, np.int32)
    flags = np.empty(capacity + 1, np.uint16)
    word, keys = np.empty(LONGEST + 2, np.int32), np.empty(3 * LONGEST, np.uint32)
    last = slots.shape[0] - 1
    for d in range(offsets.shape[0] - 1):
        end = offsets[d + 1]
        if end - offsets[d] > capacity:
            end = offsets[d] + capacity
            # cut before a code point, not inside one
            while end < offsets[d + 1] and data[end] & 0xC0 == 0x80:
                end -= 1
        size = decode(data, offsets[d], end, flag_table, lower_table, codes, flags, lower)
        for i in range(min(size, 4 * MOST)):  # letters by script
            if flags[i] & ALPHA:
                code = codes[i]
                letters[d, scripts[code] if code < scripts.shape[0] else letters.shape[1] - 1] += 1
        i, seen = 0, 0
        while seen < MOST:
            n, i = _next(codes, flags, lower, i, size, word)
            if n == 0:
                break
            seen += n - 2  # letters without the two boundary marks
            words[d] += 1
            count = _features(word, n, keys)
            for k in range(count):
                slot = np.int64(keys[k]) & last
                while rows[slot] >= 0 and slots[slot] != keys[k]:
                    slot = (slot + 1) & last
                row = rows[slot]
                if row < 0:
                    continue
                used[d] += 1
                for c in range(table.shape[1]):
                    scores[d, c] += table[row, c]  # naive Bayes: sum of log ratios
                if k == 0:  # the feature of the whole word
                    for c in range(table.shape[1]):
                        hits[d, c] += (known[row] >> U(c)) & U(1)


def score(data: np.ndarray, offsets: np.ndarray, model: "Table") -> tuple[np.ndarray, ...]:
    """Of n documents in UTF-8: sums int32[n, languages], features found int32[n], words listed as
    frequent int32[n, languages], words int32[n], letters by script int32[n, scripts]."""
    n, languages = len(offsets) - 1, model.table.shape[1]
    out = (
        np.zeros((n, languages), np.int32), np.zeros(n, np.int32),
        np.zeros((n, languages), np.int32), np.zeros(n, np.int32),
        np.zeros((n, int(model.scripts.max()) + 1), np.int32),  # the last is Han's
    )  # fmt: skip
    _score(
        data, offsets, flag_table(), lower_table(), model.scripts, model.slots, model.rows,
        model.table, model.known, out,
    )  # fmt: skip
    return out


class Table:
    """A table prepared for look-ups: keys uint32[f], values int8[f, languages], which languages
    list the word as frequent (bits) uint64[f], script of each code point uint8[codes]."""

    def __init__(
        self, keys: np.ndarray, table: np.ndarray, known: np.ndarray, scripts: np.ndarray
    ) -> None:
        self.table, self.known, self.scripts = np.ascontiguousarray(table), known, scripts
        size = 1 << (2 * len(keys) - 1).bit_length()
        self.slots, self.rows = np.zeros(size, np.uint32), np.full(size, -1, np.int32)
        _fill(keys, self.slots, self.rows)


@njit(cache=True)
def _fill(keys, slots, rows):
    last = slots.shape[0] - 1
    for row in range(keys.shape[0]):
        slot = np.int64(keys[row]) & last
        while rows[slot] >= 0:
            slot = (slot + 1) & last
        slots[slot], rows[slot] = keys[row], row


@functools.lru_cache(maxsize=8)
def _buffers(size: int) -> tuple[np.ndarray, ...]:
    return (
        np.empty(size, np.int32), np.empty(size, np.uint16), np.empty(size, np.int32)
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _all(codes, flags, lower, size, keys, whole):
    word, own = np.empty(LONGEST + 2, np.int32), np.empty(3 * LONGEST, np.uint32)
    i, count = 0, 0
    while True:
        n, i = _next(codes, flags, lower, i, size, word)
        if n == 0:
            return count
        features_count = _features(word, n, own)
        for k in range(features_count):
            keys[count], whole[count] = own[k], k == 0
            count += 1


def features(text: str) -> tuple[np.ndarray, np.ndarray]:
    """(keys uint32[k] of all features of a text in order, which are words bool[k])."""
    raw = np.frombuffer(text.encode(), np.uint8)
    codes, flags, lower = _buffers(len(raw) + 1)
    size = decode(raw, 0, len(raw), flag_table(), lower_table(), codes, flags, lower)
    keys, whole = np.empty(5 * size + 8, np.uint32), np.empty(5 * size + 8, np.bool_)
    count = _all(codes, flags, lower, size, keys, whole)
    return keys[:count].copy(), whole[:count].copy()
