"""The plain NumPy engine of sabia.kernels.minhash: the definition of the results.

Works on whole batches without a Python loop over documents: on code points, then on the bytes of
their folded forms, eight bytes of every token at a step. Batches are cut so that working memory
stays near CHUNK_BYTES * 60.
"""

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sabia.kernels.minhash.definitions import (
    CHUNK_BASE,
    EXACT_STEP,
    FMIX,
    SHINGLE_BASE,
    TOKEN_BASE,
    SketchConfig,
    Sketches,
)
from sabia.kernels.text.folding import LETTER, MARK, SKIP, SPACE
from sabia.kernels.text.reference import decode, folded, mix, mix_int

CHUNK_BYTES = 1 << 20
_U = np.uint64


class Tokens(NamedTuple):
    """Tokens of n documents in order: hash uint64[t], is_word bool[t], starts int64[n + 1], and
    characters int64[n], the code points of words and marks."""

    hash: np.ndarray
    is_word: np.ndarray
    starts: np.ndarray
    characters: np.ndarray


def utf8(code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(UTF-8 bytes uint8[b] of code points one after another, number of bytes of each int64[c])."""
    # bytes of each code point
    length = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    ends = np.cumsum(length)
    result = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    lead = np.array([0, 0, 0xC0, 0xE0, 0xF0])
    result[ends - length] = lead[length] | (code >> (6 * (length - 1)))  # lead bytes
    for back in range(1, 4):  # the byte `back` bytes before the end of the code point
        has = length > back
        result[ends[has] - back] = 0x80 | ((code[has] >> (6 * (back - 1))) & 0x3F)
    return result, length


def token_hashes(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint64[t] of the tokens data[starts[i]:ends[i]]."""
    hashes, position = (ends - starts).astype(np.uint64), starts.copy()
    padded = np.concatenate((data, np.zeros(8, np.uint8))).astype(np.uint64)
    todo = np.arange(len(starts))
    while len(todo):
        chunk = np.zeros(len(todo), np.uint64)
        for k in range(8):
            inside = position[todo] + k < ends[todo]
            # eight bytes, little-endian, padded with zeros
            chunk |= np.where(inside, padded[position[todo] + k], _U(0)) << _U(8 * k)
        value = (hashes[todo] ^ chunk) * _U(CHUNK_BASE)  # h = (h ^ c) * P
        hashes[todo] = value ^ (value >> _U(32))  # h ^= h >> 32
        position[todo] += 8
        todo = todo[position[todo] < ends[todo]]
    hashes *= _U(TOKEN_BASE)  # h * Q, then h ^= h >> 29
    return hashes ^ (hashes >> _U(29))


def tokenize(data: np.ndarray, offsets: np.ndarray) -> Tokens:
    """Words and marks of each document."""
    code, document, _ = decode(data, offsets)
    code, kind = folded(code)
    compared = document[(kind != SKIP) & (kind != SPACE)]
    keep = kind != SKIP
    code, kind, document = code[keep], kind[keep], document[keep]
    text, length = utf8(code)
    kind, document = np.repeat(kind, length), np.repeat(document, length)
    first_byte = np.zeros(len(text), bool)
    first_byte[np.cumsum(length) - length] = True
    fresh = np.ones(len(text), bool)  # first byte of a token (or of a space)
    joined = (kind[1:] == LETTER) & (kind[:-1] == LETTER) & (document[1:] == document[:-1])
    fresh[1:] = ~joined & (first_byte[1:] | (kind[1:] == MARK))
    start = np.flatnonzero(fresh)
    end = np.append(start[1:], len(text))
    start, end = start[kind[start] != SPACE], end[kind[start] != SPACE]
    counts = np.bincount(document[start], minlength=len(offsets) - 1)
    starts = np.concatenate(([0], np.cumsum(counts)))
    characters = np.bincount(compared, minlength=len(offsets) - 1)
    return Tokens(token_hashes(text, start, end), kind[start] != MARK, starts, characters)


def exact_hashes(tokens: Tokens) -> np.ndarray:
    """uint64[n, 2] over words and marks."""
    n = len(tokens.starts) - 1
    counts = np.diff(tokens.starts)
    position = np.arange(len(tokens.hash)) - np.repeat(tokens.starts[:-1], counts)
    position = position.astype(np.uint64)
    terms = (
        mix(tokens.hash + position * _U(EXACT_STEP[0])),
        mix(tokens.hash ^ (position * _U(EXACT_STEP[1]) + _U(EXACT_STEP[2]))),
    )
    result = np.empty((n, 2), np.uint64)
    for lane, term in enumerate(terms):
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(term, dtype=np.uint64)))
        # [n]: sum over each document's tokens
        total = sums[tokens.starts[1:]] - sums[tokens.starts[:-1]]
        result[:, lane] = mix(total + counts.astype(np.uint64))  # mix(sum + number of tokens)
    return result


def shingles(tokens: Tokens, ngram: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(shingles uint32 in text order, counts int64[n], words int64[n])."""
    running = np.concatenate(([0], np.cumsum(tokens.is_word)))
    bounds = running[tokens.starts]
    words = np.diff(bounds)
    hashes = tokens.hash[tokens.is_word]  # [words]: marks are no part of shingles
    # [n]: shingles of each document
    counts = np.where(words == 0, 0, np.maximum(words - ngram + 1, 1))
    starts = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(np.arange(len(words)), counts)  # [shingles]: document of each
    first = bounds[:-1][owner] + np.arange(len(owner)) - starts[:-1][owner]
    total = np.zeros(len(owner), np.uint64)
    for step in range(ngram):
        live = step < words[owner]  # a short text has one shingle of all its words
        index = np.minimum(first + step, max(len(hashes) - 1, 0))
        # sum of h_(j+i) * M**(n-1-i)
        total = np.where(live, total * _U(SHINGLE_BASE) + hashes[index], total)
    return (mix(total) >> _U(32)).astype(np.uint32), counts, words


def band_digests(signatures: np.ndarray, config: SketchConfig) -> np.ndarray:
    """uint64[n, bands] of signatures uint32[n, bands * rows]."""
    digests = np.empty((len(signatures), config.bands), np.uint64)
    for band in range(config.bands):
        digest = np.full(len(signatures), mix_int(band), np.uint64)
        for row in range(config.rows):
            slot = signatures[:, band * config.rows + row].astype(np.uint64)  # [n]
            digest = mix(digest * _U(SHINGLE_BASE) + slot + _U(1))  # d = mix(d * M + slot + 1)
        digests[:, band] = digest
    return digests


def fmix(value: np.ndarray) -> np.ndarray:
    """MurmurHash3's finaliser, elementwise on uint32."""
    first, one, second, two, third = map(np.uint32, FMIX)
    value = (value ^ (value >> first)) * one
    value = (value ^ (value >> second)) * two
    return value ^ (value >> third)


def signatures(values: np.ndarray, counts: np.ndarray, config: SketchConfig) -> np.ndarray:
    """uint32[n, bands * rows]: the least of each slot; 2**32 - 1 where there are no shingles."""
    a, b = config.slots()
    values = fmix(values) if config.signatures == "datasketch" else values
    result = np.full((len(counts), len(a)), 0xFFFFFFFF, np.uint32)
    some = np.flatnonzero(counts)
    starts = (np.cumsum(counts) - counts)[some]
    for slot in range(len(a)):
        if len(some):
            # min of s * A_k + B_k mod 2**32
            result[some, slot] = np.minimum.reduceat(values * a[slot] + b[slot], starts)
    return result


def _chunks(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Document ranges of about CHUNK_BYTES (one long document alone may be more)."""
    low, n = 0, len(offsets) - 1
    while low < n:
        high = int(np.searchsorted(offsets, offsets[low] + CHUNK_BYTES, side="right")) - 1
        high = max(high, low + 1)
        yield low, high
        low = high


def sketch(data: np.ndarray, offsets: np.ndarray, config: SketchConfig) -> Sketches:
    """See sabia.kernels.minhash.interface.sketch."""
    chunks = [*_chunks(offsets)] or [(0, 0)]
    parts = [_sketch(data, offsets[low : high + 1], config) for low, high in chunks]
    return Sketches(*map(np.concatenate, zip(*parts, strict=True)))


def _sketch(data: np.ndarray, offsets: np.ndarray, config: SketchConfig) -> Sketches:
    tokens = tokenize(data, offsets)
    values, counts, words = shingles(tokens, config.ngram)
    digests = np.empty((len(words), 0), np.uint64)
    if config.bands:
        digests = band_digests(signatures(values, counts, config), config)
    return Sketches(digests, exact_hashes(tokens), words, tokens.characters, values, counts)


def jaccard(shingles: np.ndarray, starts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """See sabia.kernels.minhash.interface.jaccard."""
    result = np.empty(len(pairs))
    for i, (a, b) in enumerate(pairs.tolist()):
        first = np.unique(shingles[starts[a] : starts[a + 1]])
        second = np.unique(shingles[starts[b] : starts[b + 1]])
        both = len(np.intersect1d(first, second, assume_unique=True))  # |A and B|
        union = len(first) + len(second) - both
        result[i] = both / union if union else 1.0
    return result


def gather(file: int, places: np.ndarray, counts: np.ndarray, target: np.ndarray) -> None:
    """See sabia.kernels.minhash.interface.gather."""
    n = 0
    for position, count in zip(places.tolist(), counts.tolist(), strict=True):
        raw = os.pread(file, 4 * count, 4 * position)
        if len(raw) != 4 * count:
            raise OSError(errno.EIO, "a file of shingles is cut short or cannot be read")
        target[n : n + count] = np.frombuffer(raw, np.uint32)
        n += count
