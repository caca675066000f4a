"""Signatures as datasketch's MinHash objects, and such objects as signatures.

Both stand for the same numbers: the least value of each permutation over a document's shingles. An
object holds all permutations, a signature the first bands * rows of them. All of a signature come
from sabia.kernels.minhash.signatures with SketchConfig(n, 1, num_perm, seed, "datasketch"). What
was hashed is not written down in either: objects from elsewhere are comparable with ours only
where they were updated with sabia's shingles and hashfunc=int.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.kernels.minhash import SketchConfig

if TYPE_CHECKING:
    from datasketch import MinHash


def to_datasketch(signatures: np.ndarray, config: SketchConfig) -> Iterator["MinHash"]:
    """The object of each of n signatures, uint32[n, num_perm].

    Raises UsageError for signatures of another scheme, and for parts of signatures.
    """
    made = _empty(config)
    if signatures.shape[1] != made.num_perm:
        raise UsageError(
            f"signatures of {signatures.shape[1]} hashes (expected all {made.num_perm}"
            f" permutations: bands=1, rows={made.num_perm})"
        )
    return (_filled(made, values) for values in signatures)


def from_datasketch(minhashes: Iterable["MinHash"], config: SketchConfig) -> np.ndarray:
    """The signatures uint32[n, bands * rows] of n objects.

    Raises UsageError for a configuration of another scheme; BadData for objects of another scheme,
    number of permutations, seed, or permutations.
    """
    made, rows = _empty(config), []
    for place, one in enumerate(minhashes):
        expected = {"scheme": made.scheme, "num_perm": len(made), "seed": made.seed}
        found = {"scheme": one.scheme, "num_perm": len(one), "seed": one.seed}
        for name, value in expected.items():
            if found[name] != value:
                raise BadData(f"MinHash {place}: {name} {found[name]!r} (expected {value!r})")
        permutations = getattr(one, "permutations", made.permutations)  # LeanMinHash has none
        if not np.array_equal(permutations, made.permutations):
            raise BadData(f"MinHash {place}: permutations that do not follow from its seed")
        rows.append(one.hashvalues[: config.bands * config.rows])
    return np.array(rows, np.uint32).reshape(len(rows), config.bands * config.rows)


def _empty(config: SketchConfig) -> "MinHash":
    """The object of no shingles."""
    from datasketch import MinHash

    if config.signatures != "datasketch":
        raise UsageError(f"signatures: {config.signatures!r} (expected 'datasketch')")
    count = config.permutations or config.bands * config.rows
    return MinHash(count, config.seed % (1 << 32), hashfunc=int)


def _filled(made: "MinHash", values: np.ndarray) -> "MinHash":
    one = made.copy()
    one.hashvalues = values.astype(np.uint32)
    return one
