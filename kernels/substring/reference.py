"""The plain engine of sabia.kernels.substring: the definitions in NumPy, windows as rows."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from sabia.kernels.substring.definitions import BASE, RECORD, Repeats, gram_length
from sabia.kernels.text.reference import mix

_CHUNK_BYTES = 64 << 20  # of windows that lie side by side in memory


def gram_hashes(units: np.ndarray, k: int) -> np.ndarray:
    """uint64[n - k + 1]: h of each run of k units, from prefix sums of u * B**-position."""
    n = len(units)
    terms = (units.astype(np.uint64) + np.uint64(1)) * _powers(pow(BASE, -1, 1 << 64), n)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms)))
    return mix((sums[k:] - sums[: n - k + 1]) * _powers(BASE, n)[k - 1 :])


def _powers(base: int, n: int) -> np.ndarray:
    """uint64[n]: 1, base, base**2, …"""
    factors = np.full(n, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def least_of_runs(values: np.ndarray, width: int) -> np.ndarray:
    """The least of each run of `width` values, by doubling."""
    done = 1
    while 2 * done <= width:
        values = np.minimum(values[:-done], values[done:])
        done *= 2
    rest = width - done
    return np.minimum(values[: len(values) - rest], values[rest:]) if rest else values


def file_windows(units: np.ndarray, offsets: np.ndarray, span: int) -> np.ndarray:
    """See sabia.kernels.substring.interface.file_windows."""
    k, parts = gram_length(span), [np.empty(0, RECORD)]
    for low, high in pairwise(offsets):
        if high - low < span:
            continue
        # [high - low - span + 1]: least k-gram hash of each window
        least = least_of_runs(gram_hashes(units[low:high], k), span - k + 1)
        # where the least hash changes
        heads = np.flatnonzero(np.concatenate(([True], least[1:] != least[:-1])))
        records = np.empty(len(heads), RECORD)
        records["value"] = least[heads]
        records["start"] = heads + (low - offsets[0])
        records["count"] = np.diff(np.append(heads, len(least)))
        parts.append(records)
    return np.concatenate(parts)


def find_repeats(
    units: np.ndarray, records: np.ndarray, starts: np.ndarray, span: int, passes: int
) -> Repeats:
    """See interface.find_repeats; `passes` is chosen here by the size of a file."""
    del passes
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for low, high in pairwise(starts):
        file = records[low:high]
        if len(file) > 1 or file["count"].max(initial=0) > span:
            parts += _repeats_of_file(np.asarray(units), file, span)
    at, first = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _as_runs(at, first)


def _repeats_of_file(
    units: np.ndarray, file: np.ndarray, span: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(windows that are repeats, their first occurrences), some distinct windows at a time."""
    at = np.repeat(file["start"], file["count"])
    at += np.arange(len(at)) - np.repeat(np.cumsum(file["count"]) - file["count"], file["count"])
    shares = -(-len(at) * span * units.itemsize // _CHUNK_BYTES)
    rolled = _rolled(units, at, span) % np.uint64(shares) if shares > 1 else np.zeros(len(at))
    for share in range(shares):
        windows = at[rolled == share]
        rows = np.ascontiguousarray(units[windows[:, None] + np.arange(span)])
        whole = rows.view(np.dtype((np.void, rows.itemsize * span)))[:, 0]
        _, head, number = np.unique(whole, return_index=True, return_inverse=True)
        first = windows[head][number]
        repeat = first + span <= windows
        yield windows[repeat], first[repeat]


def _rolled(units: np.ndarray, at: np.ndarray, span: int) -> np.ndarray:
    value = np.zeros(len(at), np.uint64)
    for step in range(span):
        value = value * np.uint64(BASE) + units[at + step].astype(np.uint64)
    return mix(value)


def _as_runs(at: np.ndarray, first: np.ndarray) -> Repeats:
    """Neighbouring windows whose first occurrences are neighbours, as runs by rising start."""
    order = np.argsort(at)
    at, first = at[order], first[order]
    fresh = np.ones(len(at), bool)
    fresh[1:] = (np.diff(at) != 1) | (np.diff(first) != 1)
    heads = np.flatnonzero(fresh)
    return Repeats(at[heads], np.diff(np.append(heads, len(at))), first[heads])
