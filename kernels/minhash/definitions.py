"""Constants and types of the MinHash kernels; `interface` defines what is computed with them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sabia.kernels.text.reference import mix_int

CHUNK_BASE, TOKEN_BASE = 0x9E3779B97F4A7C15, 0x8CB92BA72F3D8DD7  # P, Q
SHINGLE_BASE = 0xD6E8FEB86659FD93  # M
FMIX = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)  # MurmurHash3's finaliser of 32 bits
EXACT_STEP = (0xA24BAED4963EE407, 0x9FB21C651E98DF25, 0xC2B2AE3D27D4EB4F)  # C0, C1, C2
ENGINES = ("numba", "numpy")


@dataclass(frozen=True)
class SketchConfig:
    """Word n-gram length, bands and rows per band (0 bands: exact hash only), seed of the slots.

    `signatures` is sabia or datasketch: then slots are the first hash values of datasketch's
    MinHash(permutations, seed, hashfunc=int) (2.0, its default scheme affine32) over the same
    shingles, bit for bit; 0 permutations are bands * rows.
    """

    ngram: int = 5
    bands: int = 16
    rows: int = 8
    seed: int = 0
    signatures: str = "sabia"
    permutations: int = 0

    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """(A, B), uint32[bands * rows] each; every A is odd."""
        count = self.bands * self.rows
        if self.signatures == "datasketch":
            from datasketch import MinHash

            a, b = MinHash(self.permutations or count, self.seed % (1 << 32)).permutations
            return a[:count], b[:count]
        state = [mix_int(mix_int(self.seed) + i * CHUNK_BASE) >> 32 for i in range(2 * count)]
        values = np.array(state, np.uint64).astype(np.uint32)
        return values[:count] | np.uint32(1), values[count:]


class Sketches(NamedTuple):
    """Of n documents: digests uint64[n, bands], exact uint64[n, 2], words and characters int64[n].

    characters: code points of words and marks. shingles uint32[total] of one document after
    another, in the order of the text and repeated as there; counts int64[n] of them.
    """

    digests: np.ndarray
    exact: np.ndarray
    words: np.ndarray
    characters: np.ndarray
    shingles: np.ndarray
    counts: np.ndarray
