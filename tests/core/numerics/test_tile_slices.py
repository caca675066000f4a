"""Parts of stored matrices decode to the same parts of the decoded matrices."""

import math

import numpy as np
import pytest

from sabia.core.numerics import nf4
from sabia.core.numerics.compressed import encode_weight
from sabia.core.numerics.scales import choose_scales, encode
from sabia.core.numerics.schemes import SCHEMES
from sabia.core.numerics.stored import Stored, StoredMatrix, StoredStack

ROWS, COLUMNS = 768, 1536
FORMATS = [n for n, s in SCHEMES.items() if s.quantizes and not s.bitsandbytes]
NF4 = {"nf4": False, "nf4-double": True}
DRAW = np.random.default_rng(5)


def stored(name: str, rows: int = ROWS, columns: int = COLUMNS) -> StoredMatrix | nf4.Nf4:
    weight = DRAW.standard_normal((rows, columns)).astype(np.float32)
    if name in NF4:
        return nf4.encode(weight, double=NF4[name])
    scheme = SCHEMES[name]
    scales = choose_scales(weight, scheme, "absmax")
    parts = encode_weight(encode(weight, scales, scheme), scales, scheme)
    return StoredMatrix(parts, scheme, weight.shape)


def bytes_of(one: Stored) -> int:
    if isinstance(one, nf4.Nf4):
        return sum(x.nbytes for x in (one.packed, one.largest, one.nested) if x is not None)
    assert isinstance(one, StoredMatrix)
    return sum(x.nbytes for x in one.parts.values())


@pytest.mark.parametrize("name", [*FORMATS, *NF4])
def test_parts_are_those_of_the_decoded_matrix(name: str) -> None:
    whole = stored(name)
    dense, every = whole.decoded(), slice(None)
    for ways in (1, 2, 3):
        for n in range(ways):
            rows, columns = (slice(n * size // ways, (n + 1) * size // ways)
                             for size in (ROWS, COLUMNS))  # fmt: skip
            for part in ((every, columns), (rows, every)):
                cut = whole[part]
                assert np.array_equal(cut.decoded(), dense[part]) and cut.shape == dense[part].shape
                assert bytes_of(cut) <= bytes_of(whole) / ways * 1.1
                again = cut[every, slice(0, 128)]
                assert np.array_equal(again.decoded(), dense[part][:, :128])


def test_blocks_that_span_rows() -> None:
    """48 columns: four rows are three blocks, whose scales of double quantization end within."""
    for double in (False, True):
        whole = nf4.encode(DRAW.standard_normal((1200, 48)).astype(np.float32), double=double)
        dense = whole.decoded()
        for rows in (slice(0, 400), slice(400, 800), slice(1196, 1200)):
            assert np.array_equal(whole[rows, slice(None)].decoded(), dense[rows])
        for part in ((slice(0, 2), slice(None)), (slice(None), slice(0, 24))):
            with pytest.raises(ValueError, match="expected multiples of"):
                whole[part]


def test_experts_are_cut_each() -> None:
    experts = [stored(name, 64, 128) for name in ("w4a16", "w4a16", "nf4")]
    whole = StoredStack(experts)
    part = slice(1, 3), slice(0, 32), slice(None)
    cut = whole[part]
    assert cut.shape == (2, 32, 128) and np.array_equal(cut.decoded(), whole.decoded()[part])


@pytest.mark.parametrize(
    ("name", "part", "unit"),
    [
        ("w4a16", (slice(None), slice(0, 64)), SCHEMES["w4a16"].group),
        ("w4a16-asym", (slice(0, 4), slice(None)), 8),  # zero points, packed along the rows
        ("fp8-block", (slice(0, 64), slice(None)), 128),
        ("nvfp4", (slice(None), slice(8, 16)), 16),
        ("nf4", (slice(None), slice(0, 32)), 64),
    ],
)
def test_parts_that_cut_a_tile_are_refused(name: str, part: tuple, unit: int) -> None:
    with pytest.raises(ValueError, match=rf"\(expected multiples of {unit}, whose codes share"):
        stored(name)[part]
    wide = math.lcm(unit, 128)
    assert stored(name)[slice(0, wide), slice(0, wide)].shape == (wide, wide)
