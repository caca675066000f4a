"""Words of documents with their byte ranges, n-gram look-ups, and alignment of texts.

Words are those of text.folding. A word's hash is w = mix(sum of (code + 1) * P**(length-1-i)) over
its folded code points, an n-gram's mix(sum of w_(j+i) * M**(n-1-i)) over its n words, modulo 2**64;
these hashes never change, because benchmark indexes store them. `numpy` is the reference, `numba`
the fast engine; both give the same integers.

`align` finds the common subsequence of greatest weight of two word sequences, the weighted form of
Wagner and Fischer 1974: the part of a known text that occurs in another, in order, whatever was
inserted, left out or replaced.
"""

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module
from sabia.kernels.word_spans.definitions import Words


def word_spans(data: np.ndarray, offsets: np.ndarray, engine: str = "numpy") -> Words:
    """Words of documents whose UTF-8 bytes are data[offsets[i]:offsets[i + 1]]."""
    return engine_module("word_spans", engine).word_spans(data, offsets)


def ngram_hashes(words: Words, ngram: int, engine: str = "numpy") -> np.ndarray:
    """uint64[w]: the hash of the n-gram that begins at each word; 0 where its document ends
    before the n-gram does."""
    return engine_module("word_spans", engine).ngram_hashes(words, ngram)


class Lookup:
    """Hashes wanted, uint64[k], ascending and distinct, prepared for `find`."""

    def __init__(self, wanted: np.ndarray, engine: str = "numpy") -> None:
        self.wanted, self.engine = np.ascontiguousarray(wanted, np.uint64), engine
        self.table = engine_module("word_spans", engine).table(self.wanted)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """int64[w]: the index of each hash in `wanted`, or ALONE; hash 0 has no match."""
        return engine_module("word_spans", self.engine).find(hashes, self.wanted, self.table)


def align(
    part: np.ndarray, weight: np.ndarray, window: np.ndarray, engine: str = "numpy"
) -> np.ndarray:
    """int64[p]: where in `window` (uint64[w]) each word of `part` (uint64[p], weights float64[p],
    none negative) stands in their common subsequence of greatest weight, or ALONE.

    Takes p * w steps and bytes. Of equal subsequences it takes the one that stands first.
    """
    return engine_module("word_spans", engine).align(part, weight, window)
