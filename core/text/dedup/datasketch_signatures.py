"""Conversion between signatures and datasketch's MinHash objects.

Both hold the same numbers: the least value of each permutation over a document's shingles. An
object holds all permutations, a signature the first bands * rows of them. A complete signature
comes from the minhash kernel's `signatures` with SketchConfig(n, 1, num_perm, seed, "datasketch").
Neither records what was hashed: objects of another program are comparable only if they were
updated with sabia's shingles and hashfunc=int.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.kernels.minhash.definitions import SketchConfig

if TYPE_CHECKING:
    from datasketch import MinHash


def to_datasketch(signatures: np.ndarray, config: SketchConfig) -> Iterator["MinHash"]:
    """A MinHash object for each of n signatures, uint32[n, num_perm].

    Raises UsageError for signatures of another scheme, and for incomplete signatures.
    """
    template = _empty(config)
    if signatures.shape[1] != template.num_perm:
        raise UsageError(
            f"signatures of {signatures.shape[1]} hashes (expected all {template.num_perm}"
            f" permutations: bands=1, rows={template.num_perm})"
        )
    return (_filled(template, values) for values in signatures)


def from_datasketch(minhashes: Iterable["MinHash"], config: SketchConfig) -> np.ndarray:
    """The signatures uint32[n, bands * rows] of n objects.

    Raises UsageError for a configuration of another scheme; BadData for objects of another scheme,
    number of permutations, seed, or permutations.
    """
    template, rows = _empty(config), []
    for number, minhash in enumerate(minhashes):
        expected = {"scheme": template.scheme, "num_perm": len(template), "seed": template.seed}
        actual = {"scheme": minhash.scheme, "num_perm": len(minhash), "seed": minhash.seed}
        for name, value in expected.items():
            if actual[name] != value:
                raise BadData(f"MinHash {number}: {name} {actual[name]!r} (expected {value!r})")
        # LeanMinHash has no permutations
        permutations = getattr(minhash, "permutations", template.permutations)
        if not np.array_equal(permutations, template.permutations):
            raise BadData(f"MinHash {number}: permutations that do not follow from its seed")
        rows.append(minhash.hashvalues[: config.bands * config.rows])
    return np.array(rows, np.uint32).reshape(len(rows), config.bands * config.rows)


def _empty(config: SketchConfig) -> "MinHash":
    """The object without shingles."""
    from datasketch import MinHash

    if config.signatures != "datasketch":
        raise UsageError(f"signatures: {config.signatures!r} (expected 'datasketch')")
    count = config.permutations or config.bands * config.rows
    return MinHash(count, config.seed % (1 << 32), hashfunc=int)


def _filled(template: "MinHash", values: np.ndarray) -> "MinHash":
    minhash = template.copy()
    minhash.hashvalues = values.astype(np.uint32)
    return minhash
