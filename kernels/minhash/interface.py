"""MinHash sketches of documents straight from Arrow buffers: what is computed, and by which engine.

All arithmetic is modulo 2**64 unless said; `mix` is the splitmix64 finaliser. Tokens are the words
and marks of text.folding, as the UTF-8 bytes of their folded code points; each byte of a mark is a
token. A token of L bytes, cut into eight-byte little-endian numbers c (the last padded with zeros):
h = L; for each c: h = (h ^ c) * P, h ^= h >> 32; then h = h * Q, h ^= h >> 29.
The shingle that starts at word j is s_j = mix(sum of h_(j+i) * M**(n-1-i)) >> 32 over n words (a
text of fewer words has one shingle, all of them). Signature slot k is the least s * A_k + B_k
modulo 2**32 (a bijection for odd A_k, so slots agree with probability equal to the Jaccard
similarity of the shingle sets); datasketch's scheme does the same after MurmurHash3's finaliser
of s. A band's digest folds its rows: d = mix(d * M + slot + 1), from
mix(band). The exact hash has two lanes, the sums over tokens t_j of mix(t_j + j * C0) and
mix(t_j ^ (j * C1 + C2)), each finished by mix(sum + number of tokens).
Both engines give the same bits; `numpy` is the reference, `numba` the fast one. Broder 1997;
Indyk and Motwani 1998.
"""

import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

MASK64 = (1 << 64) - 1
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
            return _datasketch_slots(self.permutations or count, self.seed, count)
        state = [mix_int(mix_int(self.seed) + i * CHUNK_BASE) >> 32 for i in range(2 * count)]
        values = np.array(state, np.uint64).astype(np.uint32)
        return values[:count] | np.uint32(1), values[count:]


def _datasketch_slots(permutations: int, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors and terms of the first `count` permutations of datasketch's MinHash."""
    from datasketch import MinHash

    a, b = MinHash(permutations, seed % (1 << 32)).permutations
    return a[:count], b[:count]


class Sketches(NamedTuple):
    """Of n documents: digests uint64[n, bands], exact uint64[n, 2], words int64[n].

    shingles uint32[total] of one document after another, in the order of the text and repeated as
    there; counts int64[n] of them.
    """

    digests: np.ndarray
    exact: np.ndarray
    words: np.ndarray
    shingles: np.ndarray
    counts: np.ndarray


def mix_int(value: int) -> int:
    """The splitmix64 finaliser on a Python integer."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def numba_available() -> bool:
    """True when the package can be found; it is not imported."""
    return importlib.util.find_spec("numba") is not None


def room_of(engine: str) -> ModuleType:
    """The module of an engine, loaded when it is first used."""
    room: ModuleType
    if engine == "numba":
        from sabia.kernels.minhash import numba_impl as room
    else:
        from sabia.kernels.minhash import reference as room
    return room


def sketch(
    data: np.ndarray, offsets: np.ndarray, config: SketchConfig, engine: str = "numpy"
) -> Sketches:
    """Sketch documents whose UTF-8 bytes are data[offsets[i]:offsets[i+1]].

    data[bytes] uint8, offsets[n + 1] int64. The numba engine holds no GIL while it works.
    """
    return room_of(engine).sketch(data, offsets, config)


def signatures(
    data: np.ndarray, offsets: np.ndarray, config: SketchConfig, engine: str = "numpy"
) -> np.ndarray:
    """The slots themselves, uint32[n, bands * rows], of documents as `sketch` takes them."""
    room = room_of(engine)
    made = room.sketch(data, offsets, SketchConfig(config.ngram, bands=0))
    return room.signatures(made.shingles, made.counts, config)


def jaccard(
    shingles: np.ndarray, starts: np.ndarray, pairs: np.ndarray, engine: str = "numpy"
) -> np.ndarray:
    """Jaccard similarity float64[p] of the sets of pairs[p, 2]; 1 where both are empty.

    Set i is shingles[starts[i]:starts[i+1]] (uint32, in any order, repeats allowed).
    """
    return room_of(engine).jaccard(shingles, starts, pairs)


def gather(
    file: int, places: np.ndarray, counts: np.ndarray, target: np.ndarray, engine: str = "numpy"
) -> None:
    """Read runs of shingles from an open file (its descriptor) into target uint32, one by one.

    Run i has counts[i] shingles from the places[i]-th of the file on, int64[r] both. Read rather
    than mapped: pages of a mapping would count as this process's memory. Raises OSError.
    """
    room_of(engine).gather(file, places, counts, target)
