"""MinHash sketches of documents from Arrow buffers: definition and engines.

All arithmetic is modulo 2**64 if not stated otherwise; `mix` is the splitmix64 finaliser. Tokens
are the words and marks of text.folding, as the UTF-8 bytes of their folded code points; each byte
of a mark is a token. A token of L bytes, cut into eight-byte little-endian numbers c (the last
padded with zeros): h = L; for each c: h = (h ^ c) * P, h ^= h >> 32; then h = h * Q, h ^= h >> 29.
The shingle that starts at word j is s_j = mix(sum of h_(j+i) * M**(n-1-i)) >> 32 over n words (a
text of fewer words has one shingle, all of them). Signature slot k is the least s * A_k + B_k
modulo 2**32 (a bijection for odd A_k, so slots agree with probability equal to the Jaccard
similarity of the shingle sets); datasketch's scheme does the same after MurmurHash3's finaliser of
s. A band's digest folds its rows: d = mix(d * M + slot + 1), from mix(band). The exact hash has two
lanes, the sums over tokens t_j of mix(t_j + j * C0) and mix(t_j ^ (j * C1 + C2)), each finished by
mix(sum + number of tokens). Both engines give the same bits; `numpy` is the reference, `numba` the
fast one. Broder 1997; Indyk and Motwani 1998.
"""

import numpy as np

from sabia.kernels.minhash.definitions import SketchConfig, Sketches
from sabia.kernels.runtime.dispatch import engine_module


def sketch(
    data: np.ndarray, offsets: np.ndarray, config: SketchConfig, engine: str = "numpy"
) -> Sketches:
    """Sketch documents whose UTF-8 bytes are data[offsets[i]:offsets[i+1]].

    data[bytes] uint8, offsets[n + 1] int64. The numba engine holds no GIL while it works.
    """
    return engine_module("minhash", engine).sketch(data, offsets, config)


def signatures(
    data: np.ndarray, offsets: np.ndarray, config: SketchConfig, engine: str = "numpy"
) -> np.ndarray:
    """The slots themselves, uint32[n, bands * rows], of documents as `sketch` takes them."""
    module = engine_module("minhash", engine)
    sketches = module.sketch(data, offsets, SketchConfig(config.ngram, bands=0))
    return module.signatures(sketches.shingles, sketches.counts, config)


def jaccard(
    shingles: np.ndarray, starts: np.ndarray, pairs: np.ndarray, engine: str = "numpy"
) -> np.ndarray:
    """Jaccard similarity float64[p] of the sets of pairs[p, 2]; 1 where both are empty.

    Set i is shingles[starts[i]:starts[i+1]] (uint32, in any order, repeats allowed).
    """
    return engine_module("minhash", engine).jaccard(shingles, starts, pairs)


def gather(
    file: int, places: np.ndarray, counts: np.ndarray, target: np.ndarray, engine: str = "numpy"
) -> None:
    """Read runs of shingles from an open file (its descriptor) into target uint32, one by one.

    Run i has counts[i] shingles from the places[i]-th of the file on, int64[r] both. Read rather
    than mapped: pages of a mapping would count as this process's memory. Raises OSError.
    """
    engine_module("minhash", engine).gather(file, places, counts, target)
