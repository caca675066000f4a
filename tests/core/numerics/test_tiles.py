"""The oracle of NVFP4 and FP8: formulas by hand, ml_dtypes as caster, chance, the transform."""

import numpy as np
import pytest

from sabia.core.numerics import hadamard, tiles
from sabia.kernels.quantize.definitions import (
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    FP8_WEIGHT_TILES,
    NVFP4,
    NVFP4_WEIGHT,
)

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the judge of the codecs")


def matrix(rows: int = 48, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def test_nvfp4_as_published() -> None:
    x = matrix()
    found = tiles.encode(x, NVFP4)
    scale = np.abs(x).max() / (6 * 448)
    assert found.scale == pytest.approx(scale, rel=1e-6)
    blocks = np.abs(x).reshape(48, 4, 16).max(-1)
    wanted = (blocks / 6 / scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.tiles, wanted.view(np.uint8))
    step = np.repeat(wanted.astype(np.float64), 16, 1) * scale
    codes = np.clip(x / step, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert (found.codes == codes).mean() > 0.999  # the last bit of a product, at ties
    assert np.abs(tiles.decode(found, NVFP4) - x).max() <= (step * 1.2).max()


def test_weight_tiles_are_the_same_seen_from_both_sides() -> None:
    x = matrix()
    for layout in (NVFP4_WEIGHT, FP8_WEIGHT_TILES):
        seen = tiles.simulate(x, layout)
        np.testing.assert_array_equal(seen, tiles.simulate(x.T.copy(), layout).T)
    assert (tiles.simulate(x, NVFP4) != tiles.simulate(x.T.copy(), NVFP4).T).any()


def test_powers_of_two_do_not_round_twice() -> None:
    x = matrix(128, 128)
    once = tiles.simulate(x, FP8_TILES)
    again = tiles.simulate(once.T.copy(), FP8_TILES).T
    share = (once == again).mean()
    assert share > 0.99  # only what falls among the subnormal numbers of a larger tile may move
    assert tiles.encode(x, FP8_TILES).tiles.shape == (128, 1)
    assert np.isin(np.log2(tiles.encode(x, FP8_TILES).tiles), np.arange(-20, 20)).all()


def test_fp8_uses_the_whole_range() -> None:
    x = matrix()
    found = tiles.encode(x, FP8)
    assert (found.codes & 0x7F).max() == 0x7E
    theirs = (x / found.scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * found.scale
    assert np.mean(theirs == tiles.decode(found, FP8)) > 0.999
    assert tiles.encode(x, FP8_GRADIENT).codes.max() == 0xFB


def test_packing_keeps_every_pair() -> None:
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.stack([codes & 15, codes >> 4], -1)
    packed = tiles.pack_fp4(pairs)
    np.testing.assert_array_equal(packed[:, 0], codes)


def test_stochastic_nvfp4_has_the_mean_of_its_input() -> None:
    draws = 100_000
    row = np.float32([6, 0.3, -0.7, 1.2, 2.2, -3.3, 4.9, 0.05] * 2)
    x = np.tile(row, (draws, 1))
    found = tiles.simulate(x, NVFP4, tiles.uniforms(x.shape, (1, 2)))
    mean, spread = found.mean(0, dtype=np.float64), found.std(0, dtype=np.float64)
    assert (np.abs(mean - row) <= 4 * spread / draws**0.5 + 1e-6).all()
    assert (spread[1:8] > 0).all()


def test_uniform_numbers_are_uniform_and_repeatable() -> None:
    u = tiles.uniforms((1000, 1000), (3, 4))
    assert 0 < u.min() < 1e-5 and 1 - 1e-5 < u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert np.sum((counts - 1e4) ** 2 / 1e4) < 150  # chi square, 99 degrees of freedom
    flat = u.ravel()
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < 4e-3
    assert abs(np.corrcoef(flat, tiles.uniforms((1000, 1000), (3, 5)).ravel())[0, 1]) < 4e-3
    np.testing.assert_array_equal(u, tiles.uniforms((1000, 1000), (3, 4)))


def test_hadamard_keeps_products_and_spreads_outliers() -> None:
    signs = hadamard.signs(5)
    assert set(signs) == {-1.0, 1.0}
    assert (signs != hadamard.signs(6)).any()
    a, b = matrix(32, 64), matrix(40, 64)
    exact = hadamard.transform(a, signs).astype("f8") @ hadamard.transform(b, signs).astype("f8").T
    wanted = a.astype("f8") @ b.T.astype("f8")
    assert np.abs(exact - wanted).max() <= 1e-6 * np.abs(wanted).max()
    scipy = pytest.importorskip("scipy.linalg")
    wanted = (a.reshape(-1, 16) * signs) @ scipy.hadamard(16) / 4
    np.testing.assert_allclose(hadamard.transform(a, signs), wanted.reshape(a.shape), atol=1e-6)
    outlier = np.zeros((1, 16), np.float32)
    outlier[0, 3] = 16
    assert (np.abs(hadamard.transform(outlier, signs)) == 4).all()
