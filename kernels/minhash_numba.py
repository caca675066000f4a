"""The compiled engine of sabia.kernels.minhash: one pass over the bytes of a batch.

Decoding, folding, word hashes, the rolling shingle hash, the slots of the signature, band digests
and the exact hash are fused in one loop, so a document costs no Python object and no memory beyond
its shingles. Compiled code is cached on disk, and runs without the GIL: threads scale.
Bit for bit equal to sabia.kernels.minhash_reference.
"""

import numba
import numpy as np

from sabia.kernels.minhash import (
    EXACT_STEP,
    MARK_SALT,
    SHINGLE_BASE,
    WORD_BASE,
    SketchConfig,
    Sketches,
    mix_int,
)
from sabia.kernels.text_table import (
    LETTER,
    MARK,
    SKIP,
    SOLO,
    SOLO_END,
    SPACE,
    TABLE_SIZE,
    folding_tables,
)

U = np.uint64
_P, _M, _MARK_SALT = U(WORD_BASE), U(SHINGLE_BASE), U(MARK_SALT)
_C0, _C1, _C2 = (U(step) for step in EXACT_STEP)
_KIND_SPACE, _KIND_MARK, _KIND_LETTER, _KIND_SOLO, _KIND_SKIP = (SPACE, MARK, LETTER, SOLO, SKIP)
_jit = numba.njit(nogil=True, cache=True, boundscheck=False)
_inline = numba.njit(nogil=True, cache=True, inline="always")


@_inline
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


@_inline
def _decode(data, i, end):  # type: ignore[no-untyped-def]
    """(code point, bytes used) of a lead byte >= 0x80 at i; (space, 1) if it is malformed."""
    first = np.int64(data[i])
    if 0xC2 <= first < 0xE0 and i + 2 <= end and (data[i + 1] & 0xC0) == 0x80:
        return ((first & 0x1F) << 6) | np.int64(data[i + 1] & 0x3F), 2
    if 0xE0 <= first < 0xF0 and i + 3 <= end:
        if (data[i + 1] & 0xC0) == 0x80 and (data[i + 2] & 0xC0) == 0x80:
            low = (np.int64(data[i + 1] & 0x3F) << 6) | np.int64(data[i + 2] & 0x3F)
            return ((first & 0x0F) << 12) | low, 3
    elif 0xF0 <= first < 0xF5 and i + 4 <= end:
        a, b, c = data[i + 1], data[i + 2], data[i + 3]
        if (a & 0xC0) == 0x80 and (b & 0xC0) == 0x80 and (c & 0xC0) == 0x80:
            low = (np.int64(b & 0x3F) << 6) | np.int64(c & 0x3F)
            return ((first & 0x07) << 18) | (np.int64(a & 0x3F) << 12) | low, 4
    return np.int64(0x20), 1


@_jit
def _document(data, start, end, folds, kinds, ngram, leave, ring, shingles, exact):  # type: ignore[no-untyped-def]
    """Fill shingles[…] and exact[2]; return (number of shingles, number of words)."""
    i, word, rolling = start, U(0), U(0)
    inside, words, count, place = False, 0, 0, U(0)
    exact0, exact1 = U(0), U(0)
    while i <= end:
        code, kind, used = np.int64(0x20), _KIND_SPACE, 1
        if i < end:
            code = np.int64(data[i])
            if code >= 0x80:
                code, used = _decode(data, i, end)
            if code < TABLE_SIZE:
                kind = np.int64(kinds[code])
                code = np.int64(folds[code])
            else:
                kind = _KIND_SOLO if code < SOLO_END else _KIND_MARK
        i += used
        if kind == _KIND_LETTER:
            word = word * _P + U(code + 1)
            inside = True
            continue
        if kind == _KIND_SKIP:
            continue
        for step in range(2):  # the word that ends here, then a word of one code point
            if step == 0:
                if not inside:
                    continue
                token = _mix(word)
                inside, word = False, U(0)
            else:
                if kind != _KIND_SOLO:
                    continue
                token = _mix(U(code + 1))
            exact0 += _mix(token + place * _C0)
            exact1 += _mix(token ^ (place * _C1 + _C2))
            place += U(1)
            slot = words % ngram
            rolling = rolling * _M + token
            if words >= ngram:
                rolling -= ring[slot] * leave
            ring[slot] = token
            words += 1
            if words >= ngram:
                shingles[count] = _mix(rolling)
                count += 1
        if kind == _KIND_MARK:
            token = _mix(U(code) + _MARK_SALT)
            exact0 += _mix(token + place * _C0)
            exact1 += _mix(token ^ (place * _C1 + _C2))
            place += U(1)
    if 0 < words < ngram:
        shingles[0] = _mix(rolling)
        count = 1
    exact[0] = _mix(exact0 + place)
    exact[1] = _mix(exact1 + place)
    return count, words


@_jit
def _signature(shingles, count, a, b, slots):  # type: ignore[no-untyped-def]
    slots[:] = np.uint32(0xFFFFFFFF)
    for j in range(count):
        x = np.uint32(shingles[j] >> U(32))
        for k in range(slots.shape[0]):
            value = np.uint32(x * a[k] + b[k])
            slots[k] = min(slots[k], value)


@_jit
def _sketch(data, offsets, folds, kinds, ngram, leave, a, b, first, digests, exact, words):  # type: ignore[no-untyped-def]
    bands = digests.shape[1]
    rows = a.shape[0] // max(bands, 1)
    ring = np.zeros(ngram, np.uint64)
    slots = np.empty(a.shape[0], np.uint32)
    shingles = np.empty(1 << 14, np.uint64)
    for d in range(offsets.shape[0] - 1):
        start, end = offsets[d], offsets[d + 1]
        if end - start > shingles.shape[0]:
            shingles = np.empty(end - start, np.uint64)
        count, words[d] = _document(
            data, start, end, folds, kinds, ngram, leave, ring, shingles, exact[d]
        )
        if bands == 0:
            continue
        _signature(shingles, count, a, b, slots)
        for band in range(bands):
            digest = first[band]
            for row in range(rows):
                digest = _mix(digest * _M + U(slots[band * rows + row]) + U(1))
            digests[d, band] = digest


@_jit
def _shingle_sets(data, offsets, folds, kinds, ngram, leave, values, starts):  # type: ignore[no-untyped-def]
    ring = np.zeros(ngram, np.uint64)
    exact = np.empty(2, np.uint64)
    total = 0
    starts[0] = 0
    for d in range(offsets.shape[0] - 1):
        room = values[total:]
        count, _ = _document(
            data, offsets[d], offsets[d + 1], folds, kinds, ngram, leave, ring, room, exact
        )
        ordered = np.sort(room[:count])
        for j in range(count):
            if j == 0 or ordered[j] != ordered[j - 1]:
                values[total] = ordered[j]
                total += 1
        starts[d + 1] = total
    return total


@_jit
def _jaccard(values, starts, pairs, result):  # type: ignore[no-untyped-def]
    for p in range(pairs.shape[0]):
        i, i_end = starts[pairs[p, 0]], starts[pairs[p, 0] + 1]
        j, j_end = starts[pairs[p, 1]], starts[pairs[p, 1] + 1]
        size, both = (i_end - i) + (j_end - j), 0
        while i < i_end and j < j_end:
            left, right = values[i], values[j]
            both += left == right
            i += left <= right
            j += right <= left
        union = size - both
        result[p] = both / union if union else 1.0


def _leave(ngram: int) -> np.uint64:
    """What the oldest word of a full window weighs when it leaves: M**ngram."""
    return U(pow(SHINGLE_BASE, ngram, 1 << 64))


def sketch(data: np.ndarray, offsets: np.ndarray, config: SketchConfig) -> Sketches:
    """See sabia.kernels.minhash.sketch."""
    n = len(offsets) - 1
    result = Sketches(
        np.empty((n, config.bands), np.uint64), np.empty((n, 2), np.uint64), np.empty(n, np.int64)
    )
    folds, kinds = folding_tables()
    a, b = config.slots()
    first = np.array([mix_int(band) for band in range(config.bands)], np.uint64)
    leave = _leave(config.ngram)
    _sketch(data, offsets, folds, kinds, config.ngram, leave, a, b, first, *result)
    return result


def shingle_sets(
    data: np.ndarray, offsets: np.ndarray, ngram: int
) -> tuple[np.ndarray, np.ndarray]:
    """See sabia.kernels.minhash.shingle_sets."""
    folds, kinds = folding_tables()
    values = np.empty(int(offsets[-1] - offsets[0]) + len(offsets), np.uint64)
    starts = np.empty(len(offsets), np.int64)
    total = _shingle_sets(data, offsets, folds, kinds, ngram, _leave(ngram), values, starts)
    return values[:total].copy(), starts


def jaccard(values: np.ndarray, starts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """See sabia.kernels.minhash.jaccard."""
    result = np.empty(len(pairs))
    _jaccard(values, starts, np.ascontiguousarray(pairs, dtype=np.int64), result)
    return result
