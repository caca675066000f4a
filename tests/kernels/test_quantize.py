"""Every engine of NVFP4 and FP8 against the NumPy oracle, bit for bit."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    Layout,
    Quantized,
)
from sabia.kernels.quantize.interface import quantize

LAYOUTS = {
    "nvfp4": NVFP4,
    "nvfp4-weight": NVFP4_WEIGHT,
    "fp8": FP8,
    "fp8-gradient": FP8_GRADIENT,
    "fp8-tiles": FP8_TILES,
    "fp8-weight-tiles": FP8_WEIGHT_TILES,
}
KEY = (0x9E3779B9, 0x00C0FFEE)


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Many magnitudes; zeros, whole tiles of them, subnormals, outliers, ties."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * np.exp2(random.integers(-8, 8, (rows, columns)))
    special = random.random((rows, columns))
    x = np.where(special < 0.02, 0.0, x)
    x = np.where((special > 0.02) & (special < 0.03), -0.0, x)
    x = np.where((special > 0.03) & (special < 0.04), random.random((rows, columns)) * 1e-38, x)
    x = np.where(special > 0.9995, x * 3000, x)
    x = np.where((special > 0.5) & (special < 0.6), np.round(x * 4) / 4, x)
    x[: rows // 8, : columns // 4] = 0
    x[rows // 2 : rows // 2 + 2] *= 1e-6
    x[rows // 2 + 3] = 2e-39
    return x.astype(np.float32)


def torch_engine(x: np.ndarray, layout: Layout, key: Any) -> list[Any]:
    torch = pytest.importorskip("torch")
    actual = quantize(torch.from_numpy(x), layout, key, implementation="reference")
    return [None if part is None else part.numpy() for part in actual]


def jax_engine(x: np.ndarray, layout: Layout, key: Any) -> list[Any]:
    jax = pytest.importorskip("jax")
    words = None if key is None else np.array(key, np.uint32)
    run = jax.jit(lambda x, words: quantize(x, layout, words, implementation="reference"))
    return [None if part is None else np.asarray(part) for part in run(x, words)]


def pallas_engine(x: np.ndarray, layout: Layout, key: Any) -> list[Any]:
    pytest.importorskip("jax")
    from sabia.kernels.quantize.pallas_impl import quantize

    words = None if key is None else np.array(key, np.uint32)
    actual = quantize(x, layout, words, interpret=True)
    return [None if part is None else np.asarray(part) for part in actual]


ENGINES: dict[str, Callable[..., list[Any]]] = {"torch": torch_engine, "jax": jax_engine}


def same(actual: list[Any], wanted: Quantized) -> None:
    for mine, theirs in zip(actual, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


@functools.cache
def million(name: str, stochastic: bool) -> tuple[np.ndarray, Quantized]:
    """A million values and what the oracle makes of them."""
    x = matrix(1000, 1000)
    draws = tiles.uniforms(x.shape, KEY) if stochastic else None
    return x, tiles.encode(x, LAYOUTS[name], draws)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_million_values_get_the_codes_of_the_oracle(
    engine: str, name: str, stochastic: bool
) -> None:
    x, wanted = million(name, stochastic)
    same(ENGINES[engine](x, LAYOUTS[name], KEY if stochastic else None), wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("value", [0.0, 1e-39, 1e-36, 3e38, np.nan, np.inf, -np.inf])
def test_extremes_end_as_described(engine: str, name: str, value: float) -> None:
    x, layout = matrix(40, 300, 1) * np.float32(1e-3), LAYOUTS[name]
    x[3, 5] = value
    if abs(value) < 1:
        x = np.full_like(x, value)
    actual = ENGINES[engine](x, layout, None)
    same(actual, tiles.encode(x, layout))
    decoded = tiles.decode(Quantized(*actual), layout)
    if np.isfinite(value):
        assert np.isfinite(decoded).all()
        assert value > 1e-38 or not decoded.any()
    else:
        assert np.isnan(decoded[3, 5])
        assert np.isnan(decoded).all() == (layout.scale != "power2")


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rounded_values_are_the_decoded_codes(library: str, name: str) -> None:
    package = pytest.importorskip(library)
    x, layout = matrix(50, 200, 2), LAYOUTS[name]
    implementation: Any
    if library == "torch":
        from sabia.kernels.quantize import torch_arithmetic as implementation

        given: Any = package.from_numpy(x)
    else:
        from sabia.kernels.quantize import jax_arithmetic as implementation

        given = package.numpy.asarray(x)
    compiled = package.jit if library == "jax" else lambda function: function
    rounded = compiled(lambda x: implementation.rounded(x, layout))(given)
    values, scale = (np.asarray(part) for part in rounded)
    quantized = compiled(lambda x: implementation.quantize(x, layout))(given)
    codes, of_tiles = (None if x is None else np.asarray(x) for x in quantized[:2])
    np.testing.assert_array_equal(np.asarray(quantized.scale), scale)
    unscaled = Quantized(codes, of_tiles, np.float32(1))
    np.testing.assert_array_equal(values, tiles.decode(unscaled, layout))
    np.testing.assert_array_equal(values * scale, tiles.simulate(x, layout))
    bits = values.view(np.uint32)
    assert not (bits & 0xFFFF).any(), "a value that BF16 does not hold"


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_hadamard_transform_equals_the_oracle(library: str) -> None:
    module = pytest.importorskip(library)
    x, signs = matrix(64, 160, 3), hadamard.signs(7)
    x[np.abs(x) < 1e-30] = 0
    if library == "torch":
        from sabia.kernels.quantize.torch_arithmetic import hadamard as run

        actual = run(module.from_numpy(x), module.from_numpy(signs)).numpy()
    else:
        from sabia.kernels.quantize.jax_arithmetic import hadamard as run  # type: ignore[assignment]

        actual = np.asarray(module.jit(run)(x, signs))
    np.testing.assert_array_equal(actual, hadamard.transform(x, signs))


def test_torch_compiles_to_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    x = matrix(64, 128, 4)
    run = torch.compile(
        lambda x, key: quantize(x, NVFP4, key, implementation="reference"),
        fullgraph=True,
        backend="aot_eager",
    )
    key = torch.tensor(np.array(KEY, np.uint32).view(np.int32))
    actual = [part.numpy() for part in run(torch.from_numpy(x), key)]
    same(actual, tiles.encode(x, NVFP4, tiles.uniforms(x.shape, KEY)))


def cases() -> dict[str, tuple[np.ndarray, str, bool]]:
    """name → (matrix, layout, stochastic): edges that cut tiles, zeros, outliers, NaN, infinity."""
    actual = {}
    for number, name in enumerate(LAYOUTS):
        x = matrix(150, 390, 5)
        actual |= {f"x.{number}": (x, name, False), f"x.{number}.s": (x, name, True)}
        for value in (0.0, 1e-36, 3e38, np.nan, np.inf):
            special = matrix(40, 150, 6) * np.float32(1e-3)
            special[3, 5] = value
            if abs(value) < 1:
                special[:] = value
            actual[f"{value}".replace(".", "") + f".{number}"] = (special, name, False)
    return actual


def wanted_of(x: np.ndarray, name: str, stochastic: bool) -> Quantized:
    draws = tiles.uniforms(x.shape, KEY) if stochastic else None
    return tiles.encode(x, LAYOUTS[name], draws)


def test_the_triton_kernel_gives_the_codes_of_the_oracle(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).parents[1] / "support" / "triton_quantize.py"
    np.savez(tmp_path / "x.npz", **{name: case[0] for name, case in cases().items()})
    command = [sys.executable, str(program), str(tmp_path / "x.npz"), str(tmp_path / "found.npz")]
    subprocess.run(command, check=True)
    actual = np.load(tmp_path / "found.npz")
    for name, case in cases().items():
        parts = [actual.get(f"{name}/{field}") for field in Quantized._fields]
        same(parts, wanted_of(*case))


@pytest.mark.parametrize("name", cases())
def test_the_pallas_kernel_gives_the_codes_of_the_oracle(name: str) -> None:
    x, layout, stochastic = cases()[name]
    actual = pallas_engine(x, LAYOUTS[layout], KEY if stochastic else None)
    same(actual, wanted_of(x, layout, stochastic))


def test_an_unknown_implementation_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="expected one of reference"):
        quantize(torch.zeros(2, 2), FP8, implementation="cuda")
