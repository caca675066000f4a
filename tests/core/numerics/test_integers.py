"""Integer codes and packing against their definitions, written out plainly here."""

import numpy as np
import pytest

from sabia.core.numerics import integers


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [8, 10, 33])
def test_packing_places_code_j_in_its_bits(bits: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    low, high = integers.code_range(bits)
    codes = rng.integers(low, high + 1, (5, columns)).astype(np.int8)
    words = integers.pack(codes, bits).view(np.uint32)
    per_word = 32 // bits
    for row in range(5):
        for j in range(columns):
            field = int(words[row, j // per_word]) >> (bits * (j % per_word)) & (2**bits - 1)
            assert field - 2 ** (bits - 1) == codes[row, j]
    np.testing.assert_array_equal(integers.unpack(words.view(np.int32), bits, columns), codes)
