"""Words of documents with the bytes that they stand in, n-grams looked up, and texts aligned.

Words are those of text.folding. A word's hash is w = mix(sum of (code + 1) * P**(length-1-i)) over
its folded code points, an n-gram's mix(sum of w_(j+i) * M**(n-1-i)) over its n words, modulo 2**64;
these are frozen, because indices of benchmarks keep them. `numpy` is the reference, `numba` the
fast engine; both give the same integers.

`align` finds the common subsequence of greatest weight of two word sequences, the weighted form of
Wagner and Fischer 1974: what of a known text stands in another, in order, whatever was put between,
left out or replaced.
"""

from typing import NamedTuple

import numpy as np

from sabia.kernels.text.folding import LETTER, MARK, SKIP, SPACE

ALONE = -1
WORD_BASE = 0x9E3779B97F4A7C15  # P
NGRAM_BASE = 0xD6E8FEB86659FD93  # M


class Words(NamedTuple):
    """Words of n documents in order: hash uint64[w], the bytes [begin, end) int64[w] in the
    buffer, and starts int64[n + 1]: words of document i are starts[i] to starts[i + 1]."""

    hash: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    starts: np.ndarray


def word_spans(data: np.ndarray, offsets: np.ndarray, engine: str = "numpy") -> Words:
    """Words of documents whose UTF-8 bytes are data[offsets[i]:offsets[i + 1]]."""
    return _engine(engine).word_spans(data, offsets)


def ngram_hashes(words: Words, ngram: int, engine: str = "numpy") -> np.ndarray:
    """uint64[w]: the hash of the n-gram that begins at each word; 0 where its document ends
    before the n-gram does."""
    return _engine(engine).ngram_hashes(words, ngram)


class Lookup:
    """Hashes wanted, uint64[k], ascending and distinct, made ready for `find`."""

    def __init__(self, wanted: np.ndarray, engine: str = "numpy") -> None:
        self.wanted, self.engine = np.ascontiguousarray(wanted, np.uint64), engine
        self.table = _engine(engine).table(self.wanted)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """int64[w]: the place of each hash among those wanted, or ALONE; 0 is never found."""
        return _engine(self.engine).find(hashes, self.wanted, self.table)


def align(
    part: np.ndarray, weight: np.ndarray, window: np.ndarray, engine: str = "numpy"
) -> np.ndarray:
    """int64[p]: where in `window` (uint64[w]) each word of `part` (uint64[p], weights float64[p],
    none negative) stands in their common subsequence of greatest weight, or ALONE.

    Takes p * w steps and bytes. Of equal subsequences it takes the one that stands first.
    """
    return _engine(engine).align(part, weight, window)


def _engine(name: str):
    if name == "numba":
        from sabia.kernels.word_spans import numba_impl as room

        return room
    return _Reference


class _Reference:
    """The definitions in plain NumPy."""

    @staticmethod
    def word_spans(data: np.ndarray, offsets: np.ndarray) -> Words:
        from sabia.kernels.minhash import reference as text

        code, document, first = text.decode(data, offsets)
        past = np.append(first[1:], offsets[-1] - offsets[0])
        code, kind = text.folded(code)
        keep = kind != SKIP
        code, kind, document, first, past = (x[keep] for x in (code, kind, document, first, past))
        fresh = np.ones(len(code), bool)
        fresh[1:] = (kind[1:] != LETTER) | (kind[:-1] != LETTER) | (document[1:] != document[:-1])
        start = np.flatnonzero(fresh)
        end = np.append(start[1:], len(code))
        word = (kind[start] != SPACE) & (kind[start] != MARK)
        start, end = start[word], end[word]
        counts = np.bincount(document[start], minlength=len(offsets) - 1)
        return Words(
            text.mix(_polynomials(code, start, end)),
            first[start] + offsets[0],
            past[end - 1] + offsets[0],
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        )

    @staticmethod
    def ngram_hashes(words: Words, ngram: int) -> np.ndarray:
        from sabia.kernels.minhash.reference import mix

        total = np.zeros(len(words.hash), np.uint64)
        for step in range(ngram):
            shifted = np.zeros(len(total), np.uint64)
            shifted[: max(len(total) - step, 0)] = words.hash[step:]
            total = total * np.uint64(NGRAM_BASE) + shifted
        left = np.repeat(words.starts[1:], np.diff(words.starts)) - np.arange(len(total))
        return np.where(left >= ngram, mix(total), np.uint64(0))

    @staticmethod
    def table(wanted: np.ndarray) -> None:
        return None

    @staticmethod
    def find(hashes: np.ndarray, wanted: np.ndarray, _table: None) -> np.ndarray:
        if not len(wanted):
            return np.full(len(hashes), ALONE)
        place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        return np.where((wanted[place] == hashes) & (hashes != 0), place, ALONE)

    @staticmethod
    def align(part: np.ndarray, weight: np.ndarray, window: np.ndarray) -> np.ndarray:
        best = np.zeros((len(part) + 1, len(window) + 1))
        for i in range(len(part) - 1, -1, -1):
            for j in range(len(window) - 1, -1, -1):
                took = weight[i] + best[i + 1, j + 1] if part[i] == window[j] else -1.0
                best[i, j] = max(took, best[i + 1, j], best[i, j + 1])
        return trace(part, weight, window, best)


def _polynomials(code: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """uint64[w]: the sum above of code[start:end], one or more code points each."""
    length = end - start
    first = np.cumsum(length) - length
    inside = np.arange(length.sum()) - np.repeat(first, length)
    powers = np.full(length.max(initial=1), WORD_BASE, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    terms = code[np.repeat(start, length) + inside].astype(np.uint64) + np.uint64(1)
    terms *= powers[np.repeat(length, length) - 1 - inside]
    return np.add.reduceat(terms, first) if len(first) else np.empty(0, np.uint64)


def trace(part: np.ndarray, weight: np.ndarray, window: np.ndarray, best: np.ndarray) -> np.ndarray:
    """int64[p]: the matches that lead to best[0, 0]; best[i, j] is of part[i:] and window[j:]."""
    result = np.full(len(part), ALONE, np.int64)
    i = j = 0
    while i < len(part) and j < len(window) and best[i, j] > 0:
        if part[i] == window[j] and best[i, j] == weight[i] + best[i + 1, j + 1]:
            result[i] = j
            i, j = i + 1, j + 1
        elif best[i, j] == best[i, j + 1]:
            j += 1
        else:
            i += 1
    return result
