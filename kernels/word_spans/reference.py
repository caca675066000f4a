"""Word spans, n-gram look-ups and alignment in plain NumPy: their definition."""

import numpy as np

from sabia.kernels.text.folding import LETTER, MARK, SKIP, SPACE
from sabia.kernels.text.reference import decode, folded, mix
from sabia.kernels.word_spans.definitions import ALONE, NGRAM_BASE, WORD_BASE, Words, trace


def word_spans(data: np.ndarray, offsets: np.ndarray) -> Words:
    """See sabia.kernels.word_spans.interface.word_spans."""
    code, document, first = decode(data, offsets)  # [c] each
    past = np.append(first[1:], offsets[-1] - offsets[0])
    code, kind = folded(code)
    keep = kind != SKIP
    code, kind, document, first, past = (x[keep] for x in (code, kind, document, first, past))
    fresh = np.ones(len(code), bool)
    # [c]: a word begins or a token alone
    fresh[1:] = (kind[1:] != LETTER) | (kind[:-1] != LETTER) | (document[1:] != document[:-1])
    start = np.flatnonzero(fresh)
    end = np.append(start[1:], len(code))
    word = (kind[start] != SPACE) & (kind[start] != MARK)
    start, end = start[word], end[word]
    counts = np.bincount(document[start], minlength=len(offsets) - 1)  # [documents]: words of each
    return Words(
        mix(_polynomials(code, start, end)),
        first[start] + offsets[0],
        past[end - 1] + offsets[0],
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
    )


def ngram_hashes(words: Words, ngram: int) -> np.ndarray:
    """See sabia.kernels.word_spans.interface.ngram_hashes."""
    total = np.zeros(len(words.hash), np.uint64)
    for step in range(ngram):
        shifted = np.zeros(len(total), np.uint64)
        shifted[: max(len(total) - step, 0)] = words.hash[step:]
        total = total * np.uint64(NGRAM_BASE) + shifted  # sum of w_(j+i) * M**(n-1-i)
    # [w]: words to the end of the document
    left = np.repeat(words.starts[1:], np.diff(words.starts)) - np.arange(len(total))
    return np.where(left >= ngram, mix(total), np.uint64(0))


def table(wanted: np.ndarray) -> None:
    """None: `find` searches the sorted hashes themselves."""


def find(hashes: np.ndarray, wanted: np.ndarray, _table: None) -> np.ndarray:
    """See sabia.kernels.word_spans.interface.Lookup."""
    if not len(wanted):
        return np.full(len(hashes), ALONE)
    index = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
    return np.where((wanted[index] == hashes) & (hashes != 0), index, ALONE)


def align(part: np.ndarray, weight: np.ndarray, window: np.ndarray) -> np.ndarray:
    """See sabia.kernels.word_spans.interface.align."""
    best = np.zeros((len(part) + 1, len(window) + 1))
    for i in range(len(part) - 1, -1, -1):
        for j in range(len(window) - 1, -1, -1):
            took = weight[i] + best[i + 1, j + 1] if part[i] == window[j] else -1.0
            best[i, j] = max(took, best[i + 1, j], best[i, j + 1])
    return trace(part, weight, window, best)


def _polynomials(code: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """uint64[w]: sum of (code + 1) * P**(length-1-i) over code[start:end], not empty."""
    length = end - start
    first = np.cumsum(length) - length
    inside = np.arange(length.sum()) - np.repeat(first, length)
    powers = np.full(length.max(initial=1), WORD_BASE, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    terms = code[np.repeat(start, length) + inside].astype(np.uint64) + np.uint64(1)
    terms *= powers[np.repeat(length, length) - 1 - inside]  # (code + 1) * P**(length-1-i)
    return np.add.reduceat(terms, first) if len(first) else np.empty(0, np.uint64)
