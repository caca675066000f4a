"""Types, constants and hashes of fastText classifiers; `interface` defines the scores."""

from typing import NamedTuple

import numpy as np

EOS = b"</s>"
LABEL = b"__label__"
BLANKS = (0, 9, 10, 11, 12, 13, 32)
NGRAM_BASE = 116049371
FNV_BASIS, FNV_PRIME = 2166136261, 16777619
WIDE_BASIS, WIDE_PRIME = 0xCBF29CE484222325, 0x100000001B3
TINY = 1e-5  # what the library adds before it takes a logarithm
SIGMOID_STEPS, SIGMOID_LIMIT = 512, 8.0
HIERARCHICAL, NEGATIVE, SOFTMAX, ONE_VS_ALL = 1, 2, 3, 4


class Vocabulary(NamedTuple):
    """Words first, then labels. Entry i is spelled text[starts[i]:starts[i + 1]].

    The compiled engine knows a token by two hashes, 96 bits, and not by its letters, so that a
    look-up is one cache line: slots[j] is (wide hash, entry + 1), j from FNV-1a in 32 bits on,
    open addressing; (0, 0) is empty. The wide hash is FNV-1a in 64 bits.
    """

    text: np.ndarray  # uint8[bytes]
    starts: np.ndarray  # int64[words + labels + 1]
    words: int
    slots: np.ndarray  # uint64[power of two, 2]


class Grams(NamedTuple):
    """How n-grams become rows; `pruned` maps bucket to row (-1: none), empty if not pruned."""

    words: int  # wordNgrams
    minn: int
    maxn: int
    bucket: int
    dropped: bool  # pruned of all n-grams
    pruned: np.ndarray  # int32[bucket] or int32[0]


class Rows(NamedTuple):
    """Input rows: dense float32[rows, dim]; or, with dense[0, dim], product-quantized ones.

    Row i is norms[i] times the concatenation over q of centroids[q, codes[i, q]] (the last of them
    cut to dim). weight[i] is the number of rows that row i of a word stands for: 1, or more where
    the rows of its character n-grams were added to it beforehand (`fold_subwords`)."""

    dense: np.ndarray
    weight: np.ndarray  # int32[words]
    codes: np.ndarray  # uint8[rows, parts]
    centroids: np.ndarray  # float32[parts, 256, width]
    norms: np.ndarray  # float32[rows]


class Head(NamedTuple):
    """The output layer: weights float32[dim, nodes]; nodes are labels, or inner nodes of the tree
    of hierarchical softmax, whose node n (leaves are 0 … labels - 1) has two children."""

    loss: int
    labels: int
    weights: np.ndarray
    left: np.ndarray  # int32[labels - 1], children of node labels + i
    right: np.ndarray
    sigmoid: np.ndarray  # float32[513], the library's table


class Classifier(NamedTuple):
    """A fastText classifier as arrays; made by sabia.kernels.fasttext.model_file."""

    vocabulary: Vocabulary
    grams: Grams
    rows: Rows
    head: Head


def fnv(token: bytes) -> int:
    """The library's 32-bit hash of a token: FNV-1a with bytes taken as signed."""
    h = FNV_BASIS
    for byte in token:
        h = ((h ^ (byte | 0xFFFFFF00 if byte > 127 else byte)) * FNV_PRIME) & 0xFFFFFFFF
    return h


def wide_fnv(token: bytes) -> int:
    """FNV-1a in 64 bits, by which the compiled engine knows tokens."""
    h = WIDE_BASIS
    for byte in token:
        h = ((h ^ byte) * WIDE_PRIME) & 0xFFFFFFFFFFFFFFFF
    return h


def sigmoid_table() -> np.ndarray:
    """float32[513] of 1 / (1 + exp(-x)) for x from -8 to 8."""
    x = np.arange(SIGMOID_STEPS + 1) * 2 * SIGMOID_LIMIT / SIGMOID_STEPS - SIGMOID_LIMIT
    return (1 / (1 + np.exp(-x))).astype(np.float32)
