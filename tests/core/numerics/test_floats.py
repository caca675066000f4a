"""BF16 and E4M3 against ml_dtypes: all codes, ties, saturation, NaN."""

import numpy as np
import pytest

from sabia.core.numerics import floats

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the judge of the codecs")


def numbers() -> np.ndarray:
    """Values of many magnitudes, with specials."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(20_000) * np.exp2(rng.integers(-30, 30, 20_000))
    return np.concatenate([wide, [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(np.float32)


def test_bfloat16_rounds_as_ml_dtypes() -> None:
    x = numbers()
    theirs = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(floats.round_bfloat16(x), theirs)
    assert np.signbit(floats.round_bfloat16(np.float32([-0.0])))[0]


def test_every_e4m3_code_decodes_as_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(floats.decode_e4m3(codes), theirs)


def test_e4m3_codes_equal_ml_dtypes_inside_its_range() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(50_000) * np.exp2(rng.integers(-12, 7, 50_000))).astype(np.float32)
    x = x[np.abs(x) <= floats.E4M3_MAX]
    theirs = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(floats.encode_e4m3(x), theirs)


def test_e4m3_ties_go_to_the_even_code() -> None:
    values = floats.E4M3[:127]
    middle = (values[:-1] + values[1:]) / 2
    codes = floats.encode_e4m3(middle)
    assert (codes % 2 == 0).all()
    np.testing.assert_array_equal(codes, middle.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_e4m3_saturates_and_keeps_nan() -> None:
    codes = floats.encode_e4m3(np.float32([449, 1e9, -np.inf, np.nan]))
    assert codes.tolist() == [0x7E, 0x7E, 0xFE, 0x7F]


def test_codes_survive_a_round_trip() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    np.testing.assert_array_equal(floats.encode_e4m3(floats.decode_e4m3(codes)), codes)
