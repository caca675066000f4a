"""Types and constants of word spans, and the last step of an alignment."""

from typing import NamedTuple

import numpy as np

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
