"""Integer codes, scales and packing against their definitions, written out plainly here."""

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.numerics import floats, integers


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


@pytest.mark.parametrize("bits", [4, 8])
def test_absmax_scales_clip_nothing_and_are_bfloat16(bits: int) -> None:
    weight = np.random.default_rng(1).standard_normal((16, 128)).astype(np.float32)
    scale = integers.choose_scales(weight, bits, 32, "absmax")
    assert scale.shape == (16, 4)
    np.testing.assert_array_equal(scale, floats.round_bfloat16(scale))
    error = np.abs(integers.decode(integers.encode(weight, scale, bits), scale) - weight)
    # half a step, and what rounding the scale to BF16 (at most 2^-9) cuts off the largest value
    bound = np.repeat(scale, 32, 1) * (0.5 + integers.code_range(bits)[1] * 2**-8)
    assert (error <= bound).all()


def test_mse_scales_never_lose_to_absmax_and_win_on_outliers() -> None:
    weight = np.random.default_rng(2).standard_t(3, (64, 256)).astype(np.float32)

    def error(method: str) -> np.ndarray:
        scale = integers.choose_scales(weight, 4, 64, method)
        back = integers.decode(integers.encode(weight, scale, 4), scale)
        return ((back - weight) ** 2).reshape(64, 4, 64).sum(-1)

    assert (error("mse") <= error("absmax")).all()
    assert error("mse").sum() < 0.9 * error("absmax").sum()


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    whole = integers.choose_scales(weight, 4, 32)
    monkeypatch.setattr(integers, "_CHUNK_ELEMENTS", 64 * 7)
    np.testing.assert_array_equal(integers.choose_scales(weight, 4, 32), whole)


def test_a_row_of_zeros_is_coded_as_zeros() -> None:
    weight = np.zeros((2, 32), np.float32)
    scale = integers.choose_scales(weight, 4, 32)
    assert (integers.decode(integers.encode(weight, scale, 4), scale) == 0).all()


def test_a_group_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"128 does not divide 96 columns; groups of 32 fit"):
        integers.choose_scales(np.ones((2, 96), np.float32), 4, 128)
