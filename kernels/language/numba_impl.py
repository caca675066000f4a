"""The compiled engine of sabia.kernels.language, and the features of a text for its fit."""

import functools

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
from sabia.kernels.runtime.numba_jit import njit, read_only
from sabia.kernels.text.character_flags import lower_table
from sabia.kernels.text.folding import SOLO_END, TABLE_SIZE
from sabia.kernels.text.memory_numba import byte_at, trailing_zeros, word_at
from sabia.kernels.text.utf8_numba import mix
from sabia.kernels.text.words_numba import wide

U = np.uint64
_jit = njit(nogil=True, boundscheck=False, _nrt=False)
_inline = njit(nogil=True, boundscheck=False, _nrt=False, forceinline=True)
_WIDTH = 64  # languages of a table, with empty ones: loops of this length become vector code
# An entry for a word in words of 64 bits: 64 sums int16, the hash of its letters, how many features
# the table has, the languages that list it.
_ENTRY, _KEY, _USED, _LISTED = 24, 16, 17, 18
_ENTRIES = 1 << 14  # words whose sums of rows are kept while a batch is scored
LATIN = 1
_ONES = U(0x0101010101010101)
_HIGH, _CASE = _ONES << U(7), _ONES << U(5)
_FROM_A, _BEYOND_Z = _ONES * U(0x80 - ord("a")), _ONES * U(0x7F - ord("z"))


@_jit
def _key(word, start, end):
    total = U(0)
    for i in range(start, end):
        total = total * POWER + U(word[i] + 1)
    return mix(total)


@_jit
def _features(word, low, high, keys):
    """Fill keys uint32 with the features of word[low:high], marks included; the whole word
    first."""
    keys[0] = np.uint32(mix(_key(word, low, high) + WHOLE) >> U(32))
    most = max(high - low - FIRST_GRAM + 1, 0)
    for i in range(most):
        start = low + i
        # a boundary mark is -1, so it counts as 0
        total = (U(word[start] + 1) * POWER + U(word[start + 1] + 1)) * POWER + U(
            word[start + 2] + 1
        )
        keys[1 + i] = np.uint32(mix(total) >> U(32))  # upper half of the hash
        if i + 1 < most:
            longer = total * POWER + U(word[start + 3] + 1)
            keys[1 + most + i] = np.uint32(mix(longer) >> U(32))
    return 1 + most + max(most - 1, 0)


@_inline
def _count_letters(data, i, end, kinds, counts, d):
    """Count the letters of each script among the first 4 * MOST code points; counts[d, scripts]."""
    latin, position = 0, 0
    while i < end and position < 4 * MOST:
        if i + 8 <= end and position + 8 <= 4 * MOST:
            eight = word_at(data, i)
            if eight & _HIGH == U(0):  # eight ASCII characters: those from a to z, in either case
                small = eight | _CASE
                in_range = (small + _FROM_A) & ~(small + _BEYOND_Z) & _HIGH
                latin += np.int64(((in_range >> U(7)) * _ONES) >> U(56))
                i, position = i + 8, position + 8
                continue
        code, used = byte_at(data, i), 1
        if code >= 0x80:
            code, used = wide(data, i)
        kind = _kind(code, kinds)
        if kind:
            counts[d, (kind & SCRIPT) - 1] += 1
        i, position = i + used, position + 1
    counts[d, LATIN] += latin


@_inline
def _kind(code, kinds):
    """1 + the script of a letter, and ALONE where it is of a script without spaces; else 0."""
    if code < kinds.shape[0] - 1:
        return kinds[code]
    return kinds[kinds.shape[0] - 1] if code < SOLO_END else np.uint8(0)


@_inline
def _row(key, slots):
    """The row of a feature in the table, or -1."""
    slot = np.int64(key) & (slots.shape[0] - 1)
    while slots[slot] and slots[slot] >> U(32) != U(key):
        slot = (slot + 1) & (slots.shape[0] - 1)
    return np.int64(slots[slot] & U(0xFFFFFFFF)) - 1


@_jit
def _remember(word, start, end, keys, rows, slots, table, known, entry, entries, sums):
    """Fill a cache entry but its key, for word[start:end] with marks: the sum of the rows of its
    features, how many of them the table has, the languages that list the word."""
    count = _features(word, start, end, keys)
    row = _row(keys[0], slots)  # of the whole word
    entries[entry, _LISTED] = known[row] if row >= 0 else U(0)
    used = 0
    for k in range(count):
        rows[used] = _row(keys[k], slots)
        used += rows[used] >= 0
    entries[entry, _USED] = U(used)
    for c in range(_WIDTH):
        sums[entry, c] = 0
    for r in range(used):
        row = np.int64(rows[r])
        for c in range(_WIDTH):
            sums[entry, c] += table[row, c]  # naive Bayes: sum of log ratios


@_jit
def _first_words(data, i, end, kinds, lower_table, word, starts, totals, most):
    """Fill `word` with the words of the first `most` letters, marks before, between and behind
    them, starts with the places of the marks before them, totals with their hashes; return how
    many."""
    n, count, seen, total, size = 1, 0, 0, U(0), 0
    word[0], starts[0] = -1, 0
    while seen < most:
        kind, code = np.uint8(0), 0
        if i < end:
            code, used = byte_at(data, i), 1
            if code >= 0x80:
                code, used = wide(data, i)
            i += used
            kind = _kind(code, kinds)
        elif not size:
            break
        if kind and kind < ALONE:
            if size < LONGEST:
                word[n] = lower_table[code]
                total = total * POWER + U(word[n])
                n += 1
                size += 1
        elif size:
            word[n] = -1
            totals[count] = mix(total)
            seen, count, total, size = seen + size, count + 1, U(0), 0
            starts[count] = n
            n += 1
    return count


@njit(nogil=True)
def _score(data, offsets, kinds, lower_table, slots, table, known, entries, sums, out):
    scores, used, hits, words, letters = out
    word = np.empty(2 * (MOST + LONGEST), np.int32)
    starts, totals = np.empty(MOST + 2, np.int32), np.empty(MOST + 1, np.uint64)
    keys, rows = np.empty(3 * LONGEST, np.uint32), np.empty(3 * LONGEST + 1, np.int32)
    order, missed = np.empty(MOST + 1, np.int32), np.empty(MOST + 1, np.int32)
    last = U(entries.shape[0] - 1)
    for d in range(offsets.shape[0] - 1):
        i, end = offsets[d], offsets[d + 1]
        if end - i > 8 * MOST:
            end = i + 8 * MOST
            # cut before a code point, not inside one
            while end < offsets[d + 1] and data[end] & 0xC0 == 0x80:
                end -= 1
        _count_letters(data, i, end, kinds, letters, d)
        count = _first_words(data, i, end, kinds, lower_table, word, starts, totals, MOST)
        words[d] = count
        kept, missing = 0, 0
        for w in range(count):  # apart, so that the loads of entries do not wait for each other
            there = entries[np.int64(totals[w] & last), _KEY] == totals[w]
            order[kept], missed[missing] = w, w
            kept, missing = kept + there, missing + (not there)
        for j in range(count):
            w = order[j] if j < kept else missed[j - kept]
            entry = np.int64(totals[w] & last)
            if j >= kept and entries[entry, _KEY] != totals[w]:
                entries[entry, _KEY] = totals[w]
                _remember(
                    word, starts[w], starts[w + 1] + 1, keys, rows, slots, table, known, entry,
                    entries, sums,
                )  # fmt: skip
            for c in range(_WIDTH):
                scores[d, c] += sums[entry, c]
            used[d] += np.int64(entries[entry, _USED])
            listed = entries[entry, _LISTED]
            while listed:
                hits[d, trailing_zeros(listed)] += 1
                listed &= listed - U(1)


def score(data: np.ndarray, offsets: np.ndarray, model: Table) -> tuple[np.ndarray, ...]:
    """See sabia.kernels.language.interface.score."""
    n, languages = len(offsets) - 1, model.languages
    slots, table = _look_up(model)
    out = (
        np.zeros((n, _WIDTH), np.int32), np.zeros(n, np.int32),
        np.zeros((n, languages), np.int32), np.zeros(n, np.int32),
        np.zeros((n, int(model.scripts.max()) + 1), np.int32),  # the last is Han's
    )  # fmt: skip
    size = min(_ENTRIES, 1 << int(offsets[-1] - offsets[0]).bit_length())
    entries = np.zeros((size, _ENTRY), np.uint64)
    _score(
        read_only(data), offsets, model.kinds, lower_table(), slots, table, model.known,
        entries, entries.view(np.int16), out,
    )  # fmt: skip
    return out[0][:, :languages], *out[1:]


@functools.lru_cache(maxsize=4)
def _look_up(model: Table) -> tuple[np.ndarray, np.ndarray]:
    """(slots uint64, rows int8[f, _WIDTH]) of a table."""
    slots = np.zeros(1 << (4 * len(model.keys) - 1).bit_length(), np.uint64)
    _fill(model.keys, slots)
    return slots, np.pad(model.values, ((0, 0), (0, _WIDTH - model.languages)))


@njit()
def _fill(keys, slots):
    """Slots with the key above, the number of the row and 1 below; 0 where there is none."""
    last = slots.shape[0] - 1
    for row in range(keys.shape[0]):
        slot = np.int64(keys[row]) & last
        while slots[slot]:
            slot = (slot + 1) & last
        slots[slot] = U(keys[row]) << U(32) | U(row + 1)


@functools.cache
def _kinds() -> np.ndarray:
    """`Table.kinds` of all letters, as if they were of one script."""
    none = np.zeros((0, 1), np.int8)
    return Table(none, none, none, np.zeros(TABLE_SIZE, np.uint8)).kinds


@njit(nogil=True)
def _all(data, kinds, lower_table, keys, whole):
    size = data.shape[0]
    word, starts = np.empty(2 * size + 2, np.int32), np.empty(size + 2, np.int32)
    totals, own = np.empty(size + 1, np.uint64), np.empty(3 * LONGEST, np.uint32)
    words = _first_words(data, 0, size, kinds, lower_table, word, starts, totals, size + 1)
    count = 0
    for w in range(words):
        for k in range(_features(word, starts[w], starts[w + 1] + 1, own)):
            keys[count], whole[count] = own[k], k == 0
            count += 1
    return count


def features(text: str) -> tuple[np.ndarray, np.ndarray]:
    """(keys uint32[k] of all features of a text in order, which are words bool[k])."""
    raw = np.frombuffer(text.encode(), np.uint8)
    keys, whole = np.empty(5 * len(raw) + 8, np.uint32), np.empty(5 * len(raw) + 8, np.bool_)
    count = _all(raw, _kinds(), lower_table(), keys, whole)
    return keys[:count].copy(), whole[:count].copy()
