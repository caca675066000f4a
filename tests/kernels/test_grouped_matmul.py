"""Grouped matrix products: every implementation against the loop over groups, values and both
gradients; empty groups, rows left over, sizes that no block divides."""

import importlib
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sabia.kernels.grouped_matmul import jax_impl
from sabia.kernels.grouped_matmul.interface import choose_grouped_matmul, grouped_matmul
from sabia.kernels.runtime.dispatch import Unavailable

COUNTS = {
    "uneven": [5, 17, 16, 3],
    "empty groups and rows left over": [0, 9, 0, 0, 21, 0],
    "nothing": [0, 0],
    "one": [41],
    "whole blocks": [16, 0, 32],
}


def arrays(counts: list[int], d: int = 20, f: int = 37) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = max(41, sum(counts))
    shapes = {"x": (rows, d), "weight": (len(counts), f, d), "grad": (rows, f)}
    data = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return data | {"counts": np.array(counts, np.int32)}


def definition(data: dict[str, np.ndarray]) -> list[np.ndarray]:
    """out, dx, dweight in fp64, a row at a time."""
    x, weight, grad = (data[n].astype(np.float64) for n in ("x", "weight", "grad"))
    out, dx, dw = np.zeros_like(grad), np.zeros_like(x), np.zeros_like(weight)
    for row, group in enumerate(np.repeat(np.arange(len(weight)), data["counts"])):
        out[row] = weight[group] @ x[row]
        dx[row] = grad[row] @ weight[group]
        dw[group] += np.outer(grad[row], x[row])
    return [out, dx, dw]


def run_torch(data: dict[str, np.ndarray], name: str | None, dtype: Any) -> list[np.ndarray]:
    x, weight, grad = (torch.from_numpy(data[n]).to(dtype) for n in ("x", "weight", "grad"))
    x.requires_grad_()
    weight.requires_grad_()
    out = grouped_matmul(x, weight, torch.from_numpy(data["counts"]), implementation=name)
    results = (out, *torch.autograd.grad(out, (x, weight), grad))
    return [r.detach().float().numpy() for r in results]


def run_jax(data: dict[str, np.ndarray], name: str | None, dtype: Any) -> list[np.ndarray]:
    x, weight, grad = (jnp.asarray(data[n], dtype) for n in ("x", "weight", "grad"))
    counts = jnp.asarray(data["counts"])

    def product(x: Any, weight: Any) -> Any:
        if name == "megablox":
            return jax_impl.megablox(x, weight, counts)
        return grouped_matmul(x, weight, counts, implementation=name)

    out, pull = jax.vjp(product, x, weight)
    return [np.asarray(r, np.float32) for r in (out, *pull(grad))]


def agree(got: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 1e-5) -> None:
    for one, other in zip(got, expected, strict=True):
        size = max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(one / size, other / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["reference", "eager", "triton"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_torch(counts: list[int], name: str) -> None:
    data = arrays(counts)
    agree(run_torch(data, name, torch.float32), definition(data))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_torch_library(counts: list[int]) -> None:
    """bfloat16 only; results are rounded to it: 1 %."""
    data = arrays(counts, 24, 40)
    agree(run_torch(data, "library", torch.bfloat16), definition(data), 1e-2)


@pytest.mark.parametrize("name", ["reference", "library"])
@pytest.mark.parametrize("counts", list(COUNTS.values())[:3], ids=list(COUNTS)[:3])
def test_jax(counts: list[int], name: str) -> None:
    data = arrays(counts)
    agree(run_jax(data, name, jnp.float32), definition(data))


def test_pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    data = arrays(COUNTS["empty groups and rows left over"])
    agree(run_jax(data, "pallas", jnp.float32), definition(data))


@pytest.mark.slow
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_pallas_for_more_counts(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    data = arrays(counts)
    agree(run_jax(data, "pallas", jnp.float32), definition(data))


@pytest.mark.slow
def test_megablox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    data = arrays([0, 100, 0, 90], 24, 40)
    spare = np.zeros((256 - 190, 1), np.float32)
    for name in ("x", "grad"):
        data[name] = np.concatenate((data[name], spare * np.ones(data[name].shape[1:])))
    data["x"][190:] = np.nan  # left-over rows may hold anything
    expected = definition(data)
    agree(run_jax(data, "megablox", jnp.float32), expected)


def test_operators_are_sound() -> None:
    importlib.import_module("sabia.kernels.grouped_matmul.triton_impl")  # registers the operator
    x, weight, counts = torch.ones(5, 4), torch.ones(2, 3, 4), torch.tensor([2, 3])
    inputs = (x.requires_grad_(), weight.requires_grad_(), counts, False)
    torch.library.opcheck(torch.ops.sabia.grouped_rows, inputs)


def test_choice_is_said_and_never_replaced() -> None:
    x, weight = torch.ones(4, 20), torch.ones(2, 8, 20)
    assert choose_grouped_matmul(x, weight).implementation == "eager"
    assert (
        choose_grouped_matmul(jnp.ones((4, 20)), jnp.ones((2, 8, 20))).implementation == "library"
    )
    with pytest.raises(Unavailable, match="16 bytes"):
        choose_grouped_matmul(x.bfloat16(), weight.bfloat16(), implementation="library")
    with pytest.raises(ValueError, match="counts"):
        grouped_matmul(x, weight, torch.ones(3))
