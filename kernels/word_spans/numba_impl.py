"""The compiled engine of sabia.kernels.word_spans; bit for bit equal to its reference."""

import numpy as np

from sabia.kernels.runtime.numba_jit import njit, read_only
from sabia.kernels.text.folding import (
    LETTER,
    MARK,
    SKIP,
    SOLO,
    SOLO_END,
    SPACE,
    TABLE_SIZE,
    folding_tables,
)
from sabia.kernels.text.utf8_numba import decode, mix
from sabia.kernels.word_spans.definitions import ALONE, NGRAM_BASE, WORD_BASE, Words, trace

U = np.uint64
_M = U(NGRAM_BASE)
_P = U(WORD_BASE)
_jit = njit(nogil=True, boundscheck=False)


@_jit
def _spans(data, offsets, folds, kinds, hashes, begin, end, starts):
    count = 0
    starts[0] = 0
    for d in range(offsets.shape[0] - 1):
        i, stop = offsets[d], offsets[d + 1]
        word, inside, first, last = U(0), False, i, i
        while i <= stop:
            code, kind, used = np.int64(0x20), SPACE, 1
            if i < stop:
                code = np.int64(data[i])
                if code >= 0x80:
                    code, used = decode(data, i, stop)
                if code < TABLE_SIZE:
                    kind = np.int64(kinds[code])
                    code = np.int64(folds[code])
                else:
                    kind = SOLO if code < SOLO_END else MARK
            at = i
            i += used
            if kind == SKIP:
                continue
            if kind == LETTER:
                if not inside:
                    inside, first = True, at
                word = word * _P + U(code + 1)  # sum of (code + 1) * P**(length-1-i)
                last = i
                continue
            if inside:
                hashes[count], begin[count], end[count] = mix(word), first, last
                count += 1
                inside, word = False, U(0)
            if kind == SOLO:
                hashes[count], begin[count], end[count] = mix(U(code + 1)), at, i
                count += 1
        starts[d + 1] = count
    return count


@_jit
def _ngrams(hashes, starts, ngram, result):
    for d in range(starts.shape[0] - 1):
        for j in range(starts[d], starts[d + 1]):
            total = U(0)
            if j + ngram <= starts[d + 1]:
                for step in range(ngram):
                    total = total * _M + hashes[j + step]  # sum of w_(j+i) * M**(n-1-i)
                total = mix(total)
            result[j] = total


@_jit
def _fill(wanted, slots, bits):
    low = U(slots.shape[0] - 1)
    few = U(bits.shape[0] * 8 - 1)
    for k in range(wanted.shape[0]):
        at = wanted[k] & low
        while slots[at] >= 0:
            at = (at + U(1)) & low
        slots[at] = k
        mark = (wanted[k] >> U(32)) & few  # a bit filter in front of the table
        bits[mark >> U(3)] |= np.uint8(1 << (mark & U(7)))


@_jit
def _find(hashes, wanted, slots, bits, result):
    low = U(slots.shape[0] - 1)
    few = U(bits.shape[0] * 8 - 1)
    for j in range(hashes.shape[0]):
        result[j] = ALONE
        mark = (hashes[j] >> U(32)) & few
        if hashes[j] == 0 or not bits[mark >> U(3)] & np.uint8(1 << (mark & U(7))):
            continue
        at = hashes[j] & low
        while slots[at] >= 0:
            if wanted[slots[at]] == hashes[j]:
                result[j] = slots[at]
                break
            at = (at + U(1)) & low


@_jit
def _best(part, weight, window, best):
    for i in range(part.shape[0] - 1, -1, -1):
        for j in range(window.shape[0] - 1, -1, -1):
            value = max(best[i + 1, j], best[i, j + 1])  # skip a word of either text
            if part[i] == window[j]:
                value = max(value, weight[i] + best[i + 1, j + 1])  # a match
            best[i, j] = value


_trace = _jit(trace)


def word_spans(data: np.ndarray, offsets: np.ndarray) -> Words:
    """See sabia.kernels.word_spans.interface.word_spans."""
    folds, kinds = folding_tables()
    capacity = int(offsets[-1] - offsets[0]) + 1
    hashes, starts = np.empty(capacity, U), np.empty(len(offsets), np.int64)
    begin, end = np.empty((2, capacity), np.int64)
    count = _spans(read_only(data), offsets, folds, kinds, hashes, begin, end, starts)
    return Words(hashes[:count].copy(), begin[:count].copy(), end[:count].copy(), starts)


def ngram_hashes(words: Words, ngram: int) -> np.ndarray:
    """See sabia.kernels.word_spans.interface.ngram_hashes."""
    result = np.empty(len(words.hash), U)
    _ngrams(words.hash, words.starts, ngram, result)
    return result


def table(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(open-addressing slots, a bit filter in front of them) of hashes wanted."""
    slots = np.full(max(16, 1 << (3 * len(wanted)).bit_length()), -1, np.int64)
    bits = np.zeros(max(64, 1 << (2 * len(wanted)).bit_length()), np.uint8)
    _fill(wanted, slots, bits)
    return slots, bits


def find(hashes: np.ndarray, wanted: np.ndarray, made: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """See sabia.kernels.word_spans.interface.Lookup."""
    result = np.empty(len(hashes), np.int64)
    _find(hashes, wanted, *made, result)
    return result


def align(part: np.ndarray, weight: np.ndarray, window: np.ndarray) -> np.ndarray:
    """See sabia.kernels.word_spans.interface.align."""
    best = np.zeros((len(part) + 1, len(window) + 1))
    _best(part, weight, window, best)
    return _trace(part, weight, window, best)
