"""Products with a matrix in panels: both engines agree, and a row's bits are those of the row
alone, whatever rows and outputs are beside it."""

import numpy as np
import pytest
import torch

from sabia.core.ops.packed_torch import Joined
from sabia.core.ops.product import Matrix
from sabia.kernels.panel_products.interface import PANEL, fill, panels_for, product
from sabia.kernels.panel_products.torch_arrays import serves
from sabia.kernels.runtime.torch_fp32 import HAS_AVX512
from sabia.kernels.runtime.torch_support import numbers

DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> np.ndarray:
    draw = torch.Generator().manual_seed(seed)
    return numbers(torch.randn(shape, generator=draw).to(dtype))


def made(x: np.ndarray, *weights: np.ndarray, engine: str = "numba") -> np.ndarray:
    outputs = sum(map(len, weights))
    panels, out = panels_for(weights[0], outputs), np.full((len(x), outputs), np.nan, np.float32)
    first = 0
    for weight in weights:
        fill(panels, weight, first, engine)
        first += len(weight)
    product(x, panels, out, engine)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 1, (1,)), (2, 30, (PANEL,)), (8, 64, (50, 3)), (9, 600, (7, PANEL, 60)), (200, 5, (100,)),
     (129, 1100, (49,))],
)  # fmt: skip
def test_engines_agree(
    rows: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = drawn(rows, inputs, seed=1)
    weights = [drawn(size, inputs, dtype=dtype, seed=n) for n, size in enumerate(outputs)]
    both = [made(x, *weights, engine=engine) for engine in ("numba", "reference")]
    np.testing.assert_allclose(*both, rtol=1e-6, atol=1e-5)
    assert (both[0] == both[1]).mean() > 0.999  # the reference rounds twice in a few cases


def test_the_bits_of_a_row_depend_on_no_other() -> None:
    x, weight = drawn(300, 700), drawn(130, 700, seed=1)
    whole = made(x, weight)
    for rows in (slice(0, 1), slice(17, 19), slice(100, 131), slice(4, 300)):
        np.testing.assert_array_equal(made(x[rows], weight), whole[rows])
        np.testing.assert_array_equal(made(x[rows], weight[60:63]), whole[rows, 60:63])


def test_a_number_that_is_none_is_in_its_row_and_its_output() -> None:
    x, weight = drawn(20, 40), drawn(70, 40, seed=1)
    x[19, 39], weight[69, 0] = np.nan, np.inf
    found = np.isfinite(made(x, weight))
    assert not found[19].any()
    assert not found[:, 69].any()
    assert found[:19, :69].all()


@pytest.mark.skipif(not HAS_AVX512, reason="only with vectors of 16 numbers")
def test_a_generation_in_one_thread_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = drawn(3, 5, 40), [drawn(30, 40, seed=1), drawn(60, 40, seed=2)]
    bias = torch.arange(60.0)
    tensors = map(torch.from_numpy, weights)
    joined = Joined([Matrix("a", next(tensors)), Matrix("b", next(tensors), bias)])
    assert not serves(torch.from_numpy(x))  # a gradient is asked for
    with torch.no_grad():
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert serves(torch.from_numpy(x))
        assert not serves(torch.from_numpy(x).bfloat16())
        y = joined.times(torch.from_numpy(x)).numpy()
        strided = joined.times(torch.from_numpy(x).transpose(0, 1)).numpy()
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert not serves(torch.from_numpy(x))
    expected = made(x.reshape(15, 40), *weights).reshape(3, 5, 90)
    expected[..., 30:] += bias.numpy()
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(strided, expected.transpose(1, 0, 2))
