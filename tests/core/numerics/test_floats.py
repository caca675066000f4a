"""BF16 and the small floats against ml_dtypes: all codes, ties, saturation, NaN, chance."""

import numpy as np
import pytest

from sabia.core.numerics import floats

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the judge of the codecs")
THEIRS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
by_name = pytest.mark.parametrize("name", THEIRS)


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


@by_name
def test_every_code_decodes_as_ml_dtypes(name: str) -> None:
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
    theirs = codes.view(THEIRS[name]).astype(np.float32)
    np.testing.assert_array_equal(floats.FORMATS[name].decode(codes), theirs)


@by_name
def test_codes_equal_ml_dtypes_inside_the_range(name: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1_000_000) * np.exp2(rng.integers(-26, 17, 1_000_000))
    x = x.astype(np.float32)
    x[:1000], x[1000:2000] = 0, -0.0
    x = x[np.abs(x) <= floats.FORMATS[name].max]
    theirs = x.astype(THEIRS[name]).view(np.uint8)
    np.testing.assert_array_equal(floats.FORMATS[name].encode(x), theirs)


@by_name
def test_ties_go_to_the_even_code(name: str) -> None:
    values = floats.FORMATS[name].values
    middle = (values[:-1] + values[1:]) / 2
    codes = floats.FORMATS[name].encode(middle)
    assert (codes % 2 == 0).all()
    np.testing.assert_array_equal(codes, middle.astype(THEIRS[name]).view(np.uint8))


@by_name
def test_saturates_and_keeps_nan(name: str) -> None:
    kind = floats.FORMATS[name]
    codes = kind.encode(np.float32([1e9, -np.inf, np.nan, 1e-39, -1e-39]))
    largest = kind.largest
    wanted = [largest, largest | kind.sign, kind.nan or 0, 0, kind.sign]
    assert codes.tolist() == wanted


@by_name
def test_codes_survive_a_round_trip(name: str) -> None:
    kind = floats.FORMATS[name]
    codes = np.arange(2 * kind.sign, dtype=np.int32).astype(np.uint8)
    codes = codes[np.isfinite(kind.decode(codes))]
    np.testing.assert_array_equal(kind.encode(kind.decode(codes)), codes)


@by_name
def test_stochastic_rounding_has_the_mean_of_its_input(name: str) -> None:
    kind, draws = floats.FORMATS[name], 100_000
    uniforms = np.random.default_rng(2).random(draws, np.float32)
    for x in (0.3, -0.8, 1.1, 2.9, 5.2, 1e-3):
        found = kind.decode(kind.encode(np.full(draws, x, np.float32), uniforms))
        low, high = found.min(), found.max()
        assert low <= x <= high
        assert abs(found.mean(dtype=np.float64) - x) < 4 * (high - low) / 2 / draws**0.5


def test_e8m0_is_the_power_of_two_above() -> None:
    x = np.float32([1, 1.0001, 2, 0.75, 2.0**-127, 0, np.nan, np.inf, 3e38])
    codes = floats.encode_e8m0(x)
    assert codes.tolist() == [127, 128, 128, 127, 0, 0, 255, 255, 255]
    everything = np.arange(256, dtype=np.uint8)
    theirs = everything.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(floats.decode_e8m0(everything), theirs)
