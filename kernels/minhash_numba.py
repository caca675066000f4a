"""The compiled engine of sabia.kernels.minhash: a few tight loops over the bytes of each document.

Folding, words and their hashes (minhash_words_numba), the rolling shingle hash, the slots of the
signature, band digests and the exact hash work in buffers that are reused, so a document costs no
Python object and no memory beyond its shingles. Compiled code is cached on disk, and runs without
the GIL: threads scale. Bit for bit equal to sabia.kernels.minhash_reference.
"""

import numpy as np

from sabia.kernels.minhash import SHINGLE_BASE, SketchConfig, Sketches, mix_int
from sabia.kernels.minhash_words_numba import (
    BLOCK,
    PADDING,
    U,
    find_tokens,
    hash_tokens,
    jit,
    mix,
    normalised,
)
from sabia.kernels.text_table import folding_tables

_M = U(SHINGLE_BASE)
_TOP = np.uint32(0xFFFFFFFF)


@jit
def _shingles(words, count, ngram, leave, shingles, place):  # type: ignore[no-untyped-def]
    """Write the shingles from `place` on; returns their number."""
    rolling = U(0)
    for j in range(count):
        rolling = rolling * _M + words[j]
        if j >= ngram:
            rolling -= words[j - ngram] * leave
        if j >= ngram - 1:
            shingles[place + j - ngram + 1] = np.uint32(mix(rolling) >> U(32))
    if 0 < count < ngram:
        shingles[place] = np.uint32(mix(rolling) >> U(32))
        return 1
    return max(count - ngram + 1, 0)


@jit
def _slots(shingles, a, b, slots):  # type: ignore[no-untyped-def]
    for k in range(a.shape[0]):
        least, p, q = _TOP, a[k], b[k]
        for j in range(shingles.shape[0]):
            least = min(least, np.uint32(shingles[j] * p + q))
        slots[k] = least


@jit
def _digests(slots, first, digests):  # type: ignore[no-untyped-def]
    rows = slots.shape[0] // digests.shape[0]
    for band in range(digests.shape[0]):
        digest = first[band]
        for row in range(rows):
            digest = mix(digest * _M + U(slots[band * rows + row]) + U(1))
        digests[band] = digest


@jit
def _sketch(data, offsets, folds, kinds, ngram, leave, a, b, first, digests, exact, words, counts,
            shingles):  # fmt: skip  # type: ignore[no-untyped-def]
    """Fill the outputs of all documents; returns the number of shingles."""
    longest = 0
    for d in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[d + 1] - offsets[d])
    room = 2 * longest + PADDING
    text, marks = np.empty(room + BLOCK, np.uint8), np.empty(room // BLOCK + 2, np.uint64)
    starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    hashes, slots = np.empty(room, np.uint64), np.empty(a.shape[0], np.uint32)
    total = 0
    for d in range(offsets.shape[0] - 1):
        n = normalised(data, offsets[d], offsets[d + 1], folds, kinds, text, marks)
        tokens = find_tokens(text, n, marks, starts, ends)
        words[d] = hash_tokens(text, tokens, starts, ends, hashes, exact[d])
        counts[d] = _shingles(hashes, words[d], ngram, leave, shingles, total)
        if a.shape[0]:
            _slots(shingles[total : total + counts[d]], a, b, slots)
            _digests(slots, first, digests[d])
        total += counts[d]
    return total


def sketch(data: np.ndarray, offsets: np.ndarray, config: SketchConfig) -> Sketches:
    """See sabia.kernels.minhash.sketch."""
    n = len(offsets) - 1
    digests, exact = np.empty((n, config.bands), np.uint64), np.empty((n, 2), np.uint64)
    words, counts = np.empty(n, np.int64), np.empty(n, np.int64)
    # a word has a byte at least, and all but the last of a document a byte after it
    shingles = np.empty(int(offsets[-1] - offsets[0] + n), np.uint32)
    folds, kinds = folding_tables()
    a, b = config.slots()
    first = np.array([mix_int(band) for band in range(config.bands)], np.uint64)
    leave = U(pow(SHINGLE_BASE, config.ngram, 1 << 64))
    total = _sketch(
        data, offsets, folds, kinds, config.ngram, leave, a, b, first, digests, exact, words,
        counts, shingles,
    )  # fmt: skip
    return Sketches(digests, exact, words, shingles[:total], counts)


@jit
def _enter(shingles, first, last, keys, seen):  # type: ignore[no-untyped-def]
    """Enter a set into an emptied hash table; returns (number of distinct, shift of the table)."""
    bits = 4
    while (1 << bits) < 2 * (last - first):
        bits += 1
    keys[: 1 << bits] = U(0)
    seen[: 1 << bits] = -1
    shift, mask, distinct = U(32 - bits), (1 << bits) - 1, 0
    for i in range(first, last):
        key = U(shingles[i]) + U(1)
        spot = np.int64(((U(shingles[i]) * U(0x9E3779B1)) & U(0xFFFFFFFF)) >> shift)
        while keys[spot] != U(0) and keys[spot] != key:
            spot = (spot + 1) & mask
        distinct += keys[spot] == U(0)
        keys[spot] = key
    return distinct, bits


@jit
def _shared(shingles, first, last, keys, seen, bits, mark):  # type: ignore[no-untyped-def]
    """How many distinct values of a set are in the table; each call needs a `mark` of its own."""
    shift, mask, both = U(32 - bits), (1 << bits) - 1, 0
    for i in range(first, last):
        key = U(shingles[i]) + U(1)
        spot = np.int64(((U(shingles[i]) * U(0x9E3779B1)) & U(0xFFFFFFFF)) >> shift)
        while keys[spot] != U(0) and keys[spot] != key:
            spot = (spot + 1) & mask
        if keys[spot] == key and seen[spot] != mark:
            seen[spot] = mark
            both += 1
    return both


@jit
def _jaccard(shingles, starts, pairs, result):  # type: ignore[no-untyped-def]
    longest = 8
    for i in range(starts.shape[0] - 1):
        longest = max(longest, starts[i + 1] - starts[i])
    keys, seen = np.empty(4 * longest, np.uint64), np.empty(4 * longest, np.int64)
    sizes = np.empty(starts.shape[0] - 1, np.int64)
    for i in range(starts.shape[0] - 1):
        sizes[i], _ = _enter(shingles, starts[i], starts[i + 1], keys, seen)
    before, bits = -1, 4
    for p in range(pairs.shape[0]):
        i, j = pairs[p, 0], pairs[p, 1]
        if i != before:
            _, bits = _enter(shingles, starts[i], starts[i + 1], keys, seen)
            before = i
        both = _shared(shingles, starts[j], starts[j + 1], keys, seen, bits, p)
        union = sizes[i] + sizes[j] - both
        result[p] = both / union if union else 1.0


def jaccard(shingles: np.ndarray, starts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """See sabia.kernels.minhash.jaccard."""
    result = np.empty(len(pairs))
    _jaccard(shingles, starts, np.ascontiguousarray(pairs, dtype=np.int64), result)
    return result


@jit
def gather(source, places, counts, target):  # type: ignore[no-untyped-def]
    """See sabia.kernels.minhash.gather."""
    n = 0
    for i in range(places.shape[0]):
        target[n : n + counts[i]] = source[places[i] : places[i] + counts[i]]
        n += counts[i]
