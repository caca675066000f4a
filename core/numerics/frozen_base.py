"""Formats of frozen matrices beside trained adapters (QLoRA, arXiv 2305.14314); NumPy.

nf4: NF4 in blocks of 64 with double quantization, see `nf4`; 0.516 bytes per parameter.
int4: 4-bit integers with a BF16 scale for each 64 (or 32, 16) columns of a row, whichever divides
them, else for the row; the scale clips no value; 0.531 bytes per parameter.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from sabia.core.numerics import nf4
from sabia.core.numerics.compressed import encode_weight
from sabia.core.numerics.scales import choose_scales, encode
from sabia.core.numerics.schemes import SCHEMES
from sabia.core.numerics.stored import Stored, StoredMatrix, StoredStack, is_nf4

GROUP, LEAST_GROUP = 64, 16


def _int4(weight: np.ndarray) -> StoredMatrix:
    rows, columns = weight.shape
    group = math.gcd(columns, GROUP)
    scheme = SCHEMES["w4a16"].with_group(group if group >= LEAST_GROUP else None)
    scales = choose_scales(weight, scheme, "absmax")
    parts = encode_weight(encode(weight, scales, scheme), scales, scheme)
    return StoredMatrix(parts, scheme, (rows, columns))


def _nf4(weight: np.ndarray) -> nf4.Nf4:
    return nf4.encode(weight, double=True)


BYTES_PER_PARAMETER = {"nf4": 0.516, "int4": 0.532}
FORMATS: Mapping[str, Callable[[np.ndarray], StoredMatrix | nf4.Nf4]] = {"nf4": _nf4, "int4": _int4}


def stored_base(weight: np.ndarray | Stored, name: str) -> Stored:
    """weight[O, I], or weight[E, O, I] of experts, each apart, in a format of FORMATS; one that is
    stored in NF4 is NF4 as it is."""
    if isinstance(weight, Stored):
        if name == "nf4" and is_nf4(weight):
            return weight
        weight = weight.decoded()
    encoded = FORMATS[name]
    if weight.ndim == 3:
        return StoredStack([encoded(np.asarray(one, np.float32)) for one in weight])
    return encoded(np.asarray(weight, np.float32))
