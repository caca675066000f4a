"""The compiled engine of sabia.kernels.minhash: a few tight loops over the bytes of each document.

Folding, words and their hashes (words_numba), the rolling shingle hash, the slots of the
signature, band digests and the exact hash work in buffers that are reused, so a document needs no
Python object and no memory beyond its shingles. Compiled code is cached on disk and runs without
the GIL, so threads scale. Bit for bit equal to sabia.kernels.minhash.reference.
"""

import errno

import numba
import numpy as np

from sabia.kernels.minhash.definitions import FMIX, SHINGLE_BASE, SketchConfig, Sketches
from sabia.kernels.minhash.words_numba import (
    BLOCK,
    PADDING,
    U,
    find_tokens,
    hash_tokens,
    jit,
    mix,
    normalised,
)
from sabia.kernels.runtime.numba_jit import read_only
from sabia.kernels.text.folding import folding_tables
from sabia.kernels.text.reference import mix_int

_M = U(SHINGLE_BASE)
_S0, _F0, _S1, _F1, _S2 = (np.uint32(value) for value in FMIX)
_TOP = np.uint32(0xFFFFFFFF)
_pread = numba.types.ExternalFunction(  # of the C library
    "pread",
    numba.types.int64(numba.types.int32, numba.types.int64, numba.types.uint64, numba.types.int64),
)


@jit
def _shingles(words, count, ngram, leave, shingles, offset):
    """Write the shingles from `offset` on; returns their number."""
    rolling = U(0)
    for j in range(count):
        rolling = rolling * _M + words[j]  # sum of h_(j+i) * M**(n-1-i)
        if j >= ngram:
            rolling -= words[j - ngram] * leave  # leave = M**n: the word that leaves the window
        if j >= ngram - 1:
            shingles[offset + j - ngram + 1] = np.uint32(mix(rolling) >> U(32))
    if 0 < count < ngram:
        shingles[offset] = np.uint32(mix(rolling) >> U(32))
        return 1
    return max(count - ngram + 1, 0)


@jit
def _slots(shingles, a, b, slots):
    """min of s * A_k + B_k mod 2**32, of two slots at a time."""
    for k in range(0, a.shape[0], 2):
        least, p, q = _TOP, a[k], b[k]
        other = min(k + 1, a.shape[0] - 1)
        least_other, r, t = _TOP, a[other], b[other]
        for j in range(shingles.shape[0]):
            shingle = shingles[j]
            least = min(least, np.uint32(shingle * p + q))
            least_other = min(least_other, np.uint32(shingle * r + t))
        slots[k] = least
        slots[other] = least_other


@jit
def _fmix(shingles, mixed):
    for j in range(shingles.shape[0]):
        value = shingles[j]
        value = np.uint32((value ^ (value >> _S0)) * _F0)
        value = np.uint32((value ^ (value >> _S1)) * _F1)
        mixed[j] = value ^ (value >> _S2)


@jit
def _signatures(shingles, counts, a, b, finalise, slots):
    mixed, offset = np.empty(shingles.shape[0], np.uint32), 0
    for d in range(counts.shape[0]):
        values = shingles[offset : offset + counts[d]]
        if finalise:
            _fmix(values, mixed)
            values = mixed[: counts[d]]
        _slots(values, a, b, slots[d])
        offset += counts[d]


def signatures(shingles: np.ndarray, counts: np.ndarray, config: SketchConfig) -> np.ndarray:
    """uint32[n, bands * rows]: the least of each slot; 2**32 - 1 where there are no shingles."""
    a, b = config.slots()
    slots = np.empty((len(counts), len(a)), np.uint32)
    _signatures(shingles, counts, a, b, config.signatures == "datasketch", slots)
    return slots


@jit
def _digests(slots, first, digests):
    rows = slots.shape[0] // digests.shape[0]
    for band in range(digests.shape[0]):
        digest = first[band]
        for row in range(rows):
            # d = mix(d * M + slot + 1)
            digest = mix(digest * _M + U(slots[band * rows + row]) + U(1))
        digests[band] = digest


@jit
def _sketch(data, offsets, folds, kinds, ngram, leave, a, b, finalise, first, digests, exact,
            words, characters, counts, shingles):  # fmt: skip
    """Fill the outputs of all documents; returns the number of shingles."""
    longest = 0
    for d in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[d + 1] - offsets[d])
    capacity = 2 * longest + PADDING  # folding doubles a document's bytes at most
    text, marks = np.empty(capacity + BLOCK, np.uint8), np.empty(capacity // BLOCK + 2, np.uint64)
    starts, ends = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    hashes, slots = np.empty(capacity, np.uint64), np.empty(a.shape[0], np.uint32)
    mixed = np.empty(1 << 12, np.uint32)
    total = 0
    for d in range(offsets.shape[0] - 1):
        n = normalised(data, offsets[d], offsets[d + 1], folds, kinds, text, marks)
        tokens, characters[d] = find_tokens(text, n, marks, starts, ends)
        words[d] = hash_tokens(text, tokens, marks, starts, ends, hashes, exact[d])
        counts[d] = _shingles(hashes, words[d], ngram, leave, shingles, total)
        if a.shape[0]:
            values = shingles[total : total + counts[d]]
            if finalise:
                if mixed.shape[0] < counts[d]:
                    mixed = np.empty(2 * counts[d], np.uint32)
                _fmix(values, mixed)
                values = mixed[: counts[d]]
            _slots(values, a, b, slots)
            _digests(slots, first, digests[d])
        total += counts[d]
    return total


def sketch(data: np.ndarray, offsets: np.ndarray, config: SketchConfig) -> Sketches:
    """See sabia.kernels.minhash.interface.sketch."""
    n = len(offsets) - 1
    digests, exact = np.empty((n, config.bands), np.uint64), np.empty((n, 2), np.uint64)
    words, characters, counts = np.empty((3, n), np.int64)
    # a word has a byte at least, and all but the last of a document a byte after it
    shingles = np.empty(int(offsets[-1] - offsets[0] + n), np.uint32)
    folds, kinds = folding_tables()
    a, b = config.slots()
    first = np.array([mix_int(band) for band in range(config.bands)], np.uint64)
    leave = U(pow(SHINGLE_BASE, config.ngram, 1 << 64))
    total = _sketch(
        read_only(data), offsets, folds, kinds, config.ngram, leave, a, b,
        config.signatures == "datasketch", first, digests, exact, words,
        characters, counts, shingles,
    )  # fmt: skip
    return Sketches(digests, exact, words, characters, shingles[:total], counts)


@jit
def _find_slot(shingle, stamp, keys, shift):
    """(key, its slot or the free slot for it) in a table whose keys of other stamps are free."""
    key = (stamp << U(32)) | U(shingle)
    spot = np.int64(((U(shingle) * U(0x9E3779B1)) & U(0xFFFFFFFF)) >> shift)
    while keys[spot] >> U(32) == stamp and keys[spot] != key:
        spot = (spot + 1) & ((1 << np.int64(U(32) - shift)) - 1)
    return key, spot


@jit
def _jaccard(shingles, starts, pairs, result):
    """A table holds the first set (owner 0), then the second (1: in both, 2: only there)."""
    longest = 4
    for i in range(starts.shape[0] - 1):
        longest = max(longest, starts[i + 1] - starts[i])
    # two sets of at most `longest`, load at most 1/2
    keys, owner = np.zeros(8 * longest, np.uint64), np.empty(8 * longest, np.uint8)
    for p in range(pairs.shape[0]):
        i, j, stamp = pairs[p, 0], pairs[p, 1], U(p + 1)
        bits = 4
        while (1 << bits) < 2 * (starts[i + 1] - starts[i] + starts[j + 1] - starts[j]):
            bits += 1
        shift, union, both = U(32 - bits), 0, 0
        for k in range(starts[i], starts[i + 1]):
            key, spot = _find_slot(shingles[k], stamp, keys, shift)
            union += keys[spot] != key
            keys[spot] = key
            owner[spot] = 0
        for k in range(starts[j], starts[j + 1]):
            key, spot = _find_slot(shingles[k], stamp, keys, shift)
            if keys[spot] != key:
                keys[spot] = key
                owner[spot] = 2
                union += 1
            elif owner[spot] == 0:
                owner[spot] = 1
                both += 1
        result[p] = both / union if union else 1.0  # |A and B| / |A or B|


def jaccard(shingles: np.ndarray, starts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """See sabia.kernels.minhash.interface.jaccard."""
    result = np.empty(len(pairs))
    _jaccard(shingles, starts, np.ascontiguousarray(pairs, dtype=np.int64), result)
    return result


@jit
def _gather(file, places, counts, target):
    n = 0
    for i in range(places.shape[0]):
        size, done = 4 * counts[i], 0
        while done < size:
            address = np.int64(target.ctypes.data) + 4 * n + done
            got = _pread(np.int32(file), address, np.uint64(size - done), 4 * places[i] + done)
            if got <= 0:
                return False
            done += got
        n += counts[i]
    return True


def gather(file: int, places: np.ndarray, counts: np.ndarray, target: np.ndarray) -> None:
    """See sabia.kernels.minhash.interface.gather."""
    if not _gather(file, places, counts, target):
        raise OSError(errno.EIO, "a file of shingles is cut short or cannot be read")
