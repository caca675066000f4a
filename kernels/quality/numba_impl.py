"""The compiled engine of sabia.kernels.quality: one pass of decoding, then counting, a document.

Properties of characters are bits, 64 of them in a word, so that counts and searches take one step
for 64 characters.
"""

import functools

import numpy as np

from sabia.kernels.quality.definitions import FIGURES
from sabia.kernels.quality.lines_numba import line_figures
from sabia.kernels.quality.repetition_numba import (
    fed_lines,
    last_slot,
    paragraph_figures,
    repetition,
    share,
)
from sabia.kernels.runtime.numba_jit import njit, read_only
from sabia.kernels.text.character_flags import (
    ALPHA,
    BREAK,
    CODE,
    SOLO,
    SYMBOL,
    flag_table,
    lower_table,
)
from sabia.kernels.text.memory_numba import equal_bytes, flagged, set_bits, trailing_zeros
from sabia.kernels.text.words_numba import decode, mark_words, split, tables, word_hash

U = np.uint64
_DOT, _NAN = 0x2E, np.nan
_LOWERED = 1 << 14  # flag of code points that `str.lower` replaces by another one
_jit = njit(nogil=True, boundscheck=False, _nrt=False)
# one in each phrase; without k, which is also the lower case of U+212A
_PARTS = tuple(tuple(map(ord, part)) for part in ("lor", "jav", "f u", "icy", "coo"))


@_jit
def _breaks(codes, flags, size, breaks):
    """Fill breaks with the places of line boundaries; return how many."""
    count = 0
    for block in range(size // 64 + 1):
        rest = flagged(flags, 64 * block, BREAK)
        while rest:
            breaks[count] = 64 * block + trailing_zeros(rest)
            count += 1
            rest &= rest - U(1)
    return count


@_jit
def _words(codes, flags, raw, first_bytes, starts, ends, n, hashes, lengths, stops, out):
    """Hash and measure the words; fill out[0:2] and out[6:8]."""
    plain, spelled, letters, alphabetic, stop_bits, filtered = 0, 0, 0, 0, U(0), U(0)
    for s in range(stops.shape[0]):
        filtered |= U(1) << (stops[s] & U(63))
    for w in range(n):
        start, end = starts[w], ends[w]
        hashes[w] = word_hash(raw, first_bytes[start], first_bytes[end])
        lengths[w] = end - start
        symbols, alpha = flags[start] & SYMBOL != 0, flags[start] & ALPHA != 0
        if not alpha:
            for i in range(start + 1, end):
                symbols &= flags[i] & SYMBOL != 0
                alpha |= flags[i] & ALPHA != 0
        alphabetic += alpha
        if not symbols:
            plain += 1
            if not flags[start] & SOLO:
                spelled += 1
                letters += end - start
        if (filtered >> (hashes[w] & U(63))) & U(1):
            for s in range(stops.shape[0]):
                if stops[s] == hashes[w]:
                    stop_bits |= U(1) << U(s)  # bit s: stop word s occurs
    there = set_bits(stop_bits)
    out[0], out[1] = plain, share(letters, spelled)  # word_count, mean_word_length
    # gopher_alpha_words, gopher_stop_words
    out[6], out[7] = share(alphabetic, n), there if stops.shape[0] else _NAN


@_jit
def _marks(raw, length, suspects, brackets, curlies):
    """Fill the bits of the bytes where a phrase may be, of [ and of {; return the number of #, of …
    and of ://, and whether two dots follow each other."""
    marks, dots, links, double = 0, 0, 0, U(0)
    for block in range(length // 64 + 1):
        i = 64 * block
        suspects[block] = U(0)
        for a, b, c in _PARTS:
            suspects[block] |= (
                equal_bytes(raw, i, a, 0x20)
                & equal_bytes(raw, i + 1, b, 0x20)
                & equal_bytes(raw, i + 2, c, 0x20)
            )
        brackets[block] = equal_bytes(raw, i, 0x5B, 0)
        curlies[block] = equal_bytes(raw, i, 0x7B, 0)
        marks += set_bits(equal_bytes(raw, i, 0x23, 0))
        slashes = equal_bytes(raw, i + 1, 0x2F, 0) & equal_bytes(raw, i + 2, 0x2F, 0)
        links += set_bits(equal_bytes(raw, i, 0x3A, 0) & slashes)
        tail = equal_bytes(raw, i + 1, 0x80, 0) & equal_bytes(raw, i + 2, 0xA6, 0)
        dots += set_bits(equal_bytes(raw, i, 0xE2, 0) & tail)
        double |= equal_bytes(raw, i, _DOT, 0) & equal_bytes(raw, i + 1, _DOT, 0)
    return marks, dots, links, double != U(0)


@_jit
def _characters(codes, raw, length, flags, size, spaces, suspects, brackets, curlies, n, out):
    """The statistics of characters: out[2:4] and out[29:32]; see `_marks`."""
    marks, dots, links, double = _marks(raw, length, suspects, brackets, curlies)
    i = 0 if double else size
    while i < size:
        if codes[i] == _DOT and codes[i + 1] == _DOT and codes[i + 2] == _DOT:
            dots += 1
            i += 2
        i += 1
    blank, capitals, alphabetic, code, blocks = 0, 0, 0, 0, size // 64 + 1
    for block in range(blocks):
        blank += set_bits(spaces[block])
        capitals += set_bits(flagged(flags, 64 * block, _LOWERED))
        alphabetic += set_bits(flagged(flags, 64 * block, ALPHA))
        code += set_bits(flagged(flags, 64 * block, CODE))
    out[2], out[3] = share(marks, n), share(dots, n)  # gopher_hash_ratio, gopher_ellipsis_ratio
    # upper_ratio, links, code_marks
    out[29], out[30] = share(capitals, alphabetic), share(links, n)
    out[31] = share(code, 64 * blocks - blank)


@njit(nogil=True)
def _measure(
    data, offsets, flag_table, lower, slots, points, pairs, units, stops, bounds, which, out
):
    most = 0
    for d in range(offsets.shape[0] - 1):
        most = max(most, offsets[d + 1] - offsets[d])
    raw, blocks = np.zeros(most + 192, np.uint8), most // 64 + 4
    suspects, brackets = np.empty(blocks, np.uint64), np.empty(blocks, np.uint64)
    curlies = np.empty(blocks, np.uint64)
    codes, flags = np.empty(2 * most + 256, np.int32), np.empty(2 * most + 256, np.uint16)
    letters, spaces = np.empty(2 * blocks, np.uint64), np.empty(2 * blocks, np.uint64)
    first_bytes, breaks = np.empty(most + 8, np.int32), np.empty(most + 1, np.int32)
    starts, ends = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    firsts, lasts = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    grams, where = np.empty(most + 1, np.uint64), np.empty(most + 1, np.int32)
    places = np.empty(most + 1, np.int32)
    hashes, lengths = np.empty(most + 1, np.uint64), np.empty(most + 1, np.int32)
    once = np.empty((last_slot(most) + 1) // 8, np.uint64)
    twice = np.empty((last_slot(most) + 1) // 8, np.uint64)
    stamp = U(0)
    table = np.zeros(
        (last_slot(most + 1) + 1, 4), np.uint64
    )  # key, stamp of its set, count, first index
    for d in range(offsets.shape[0] - 1):
        length = offsets[d + 1] - offsets[d]
        raw[:length] = data[offsets[d] : offsets[d + 1]]
        raw[length : length + 128] = 0
        size = decode(raw, 0, length, flag_table, codes, flags, first_bytes)
        mark_words(codes, flags, 0, size, letters, spaces)
        n = split(
            codes, flags, letters, spaces, 0, size, slots, points, pairs, units, starts, ends, 0
        )
        words = stops[bounds[which[d]] : bounds[which[d] + 1]] if which[d] >= 0 else stops[:0]
        _words(codes, flags, raw, first_bytes, starts, ends, n, hashes, lengths, words, out[d])
        count = _breaks(codes, flags, size, breaks)
        stamp += U(1)
        paragraph_figures(
            codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, out[d]
        )
        stamp += U(1)
        fed_lines(
            codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, n, out[d]
        )
        stamp = repetition(
            hashes, lengths, n, size, grams, where, places, once, twice, table, stamp, out[d]
        )
        _characters(codes, raw, length, flags, size, spaces, suspects, brackets, curlies, n, out[d])
        line_figures(
            codes, flags, lower, first_bytes, size, letters, spaces, suspects, brackets, curlies,
            breaks, count, starts, ends, n, slots, points, pairs, units, firsts, lasts, out[d],
        )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _flags() -> np.ndarray:
    """The table of flags with _LOWERED."""
    lower = lower_table()
    return flag_table() | np.where(lower != np.arange(len(lower)), _LOWERED, 0).astype(np.uint16)


def measure(
    data: np.ndarray, offsets: np.ndarray, stop_hashes: np.ndarray, stop_bounds: np.ndarray,
    which: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """float64[n, figures]; see sabia.kernels.quality.interface.measure."""
    out = np.empty((len(offsets) - 1, len(FIGURES)))
    tabled = _flags(), lower_table()
    _measure(read_only(data), offsets, *tabled, *tables(), stop_hashes, stop_bounds, which, out)
    return out
