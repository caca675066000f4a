"""RMSNorm: every implementation against the definition in fp64, values and all gradients."""

import importlib
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sabia.kernels.rms_norm.interface import choose_rms_norm, rms_norm
from sabia.kernels.runtime.dispatch import Unavailable

SHAPE, EPS = (2, 7, 36), 1e-3
VARIANTS = [(False, False), (True, True)]


def arrays(add: bool) -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(0)
    names = ("x", "residual", "grad", "grad_h")
    data: dict[str, Any] = {n: rng.standard_normal(SHAPE).astype(np.float32) for n in names}
    if not add:
        data["residual"] = data["grad_h"] = None
    return data | {"weight": rng.standard_normal(SHAPE[-1]).astype(np.float32)}


def definition(data: dict[str, Any], plus_one: bool) -> list[np.ndarray]:
    """y, (h,) dx, dw in fp64 from the formulas by automatic differentiation of torch."""
    given = {n: None if a is None else torch.from_numpy(a).double() for n, a in data.items()}
    x, weight = given["x"].requires_grad_(), given["weight"].requires_grad_()
    h = x if given["residual"] is None else x + given["residual"]
    y = torch.nn.functional.rms_norm(h, SHAPE[-1:], weight + plus_one, EPS)
    total = (y * given["grad"]).sum()
    total = total if given["grad_h"] is None else total + (h * given["grad_h"]).sum()
    results = [y] + ([] if given["grad_h"] is None else [h])
    return [r.detach().numpy() for r in (*results, *torch.autograd.grad(total, (x, weight)))]


def run_torch(data: dict[str, Any], plus_one: bool, name: str) -> list[np.ndarray]:
    given = {n: None if a is None else torch.from_numpy(a) for n, a in data.items()}
    x, weight, residual = given["x"].requires_grad_(), given["weight"].requires_grad_(), None
    inputs, grads = [x, weight], [given["grad"]]
    if given["residual"] is not None:
        residual = given["residual"].requires_grad_()
        inputs.append(residual)
        grads.append(given["grad_h"])
    out = rms_norm(x, weight, EPS, residual=residual, plus_one=plus_one, implementation=name)
    outs = list(out) if residual is not None else [out]
    actual = torch.autograd.grad(outs, inputs, grads)
    if residual is not None:
        assert torch.equal(actual[0], actual[2])
    return [r.detach().numpy() for r in (*outs, *actual[:2])]


def run_jax(data: dict[str, Any], plus_one: bool, name: str) -> list[np.ndarray]:
    given = {n: None if a is None else jnp.asarray(a) for n, a in data.items()}

    def norm(x: Any, weight: Any) -> Any:
        return rms_norm(
            x, weight, EPS, residual=given["residual"], plus_one=plus_one, implementation=name
        )

    out, pull = jax.vjp(norm, given["x"], given["weight"])
    added = given["residual"] is not None
    grads = pull((given["grad"], given["grad_h"]) if added else given["grad"])
    return [np.asarray(r) for r in (*(out if added else (out,)), *grads)]


def agree(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("add, plus_one", VARIANTS)
@pytest.mark.parametrize("name", ["reference", "eager", "library", "triton"])
def test_torch(add: bool, plus_one: bool, name: str) -> None:
    if name in ("library", "eager") and add:
        with pytest.raises(Unavailable, match="residual"):
            run_torch(arrays(add), plus_one, name)
        return
    agree(run_torch(arrays(add), plus_one, name), definition(arrays(add), plus_one))


@pytest.mark.parametrize("add, plus_one", VARIANTS)
@pytest.mark.parametrize("name", ["reference", "pallas"])
def test_jax(add: bool, plus_one: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    agree(run_jax(arrays(add), plus_one, name), definition(arrays(add), plus_one))


def test_half_precision_is_rounded_once() -> None:
    """bfloat16 in and out of Triton: what fp32 gives, rounded."""
    data = arrays(False)
    x, weight = (torch.from_numpy(data[n]).bfloat16() for n in ("x", "weight"))
    y = rms_norm(x, weight, EPS, implementation="triton")
    wide = rms_norm(x.float(), weight.float(), EPS, implementation="reference")
    assert (y.float() - wide).abs().max() <= wide.abs().max() * 2**-7  # interpreter truncates


def test_no_rows() -> None:
    x, weight = torch.ones(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, EPS, implementation="triton")
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], torch.zeros(8))


def test_operators_are_sound() -> None:
    importlib.import_module("sabia.kernels.rms_norm.triton_impl")  # registers the operator
    x, weight = torch.ones(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    torch.library.opcheck(torch.ops.sabia.rms_norm_forward, (x, weight, None, EPS, True))


def test_choice_is_said() -> None:
    x = torch.ones(2, 8)
    assert choose_rms_norm(x, torch.ones(8)).implementation == "eager"
    with pytest.raises(ValueError, match=r"expected \[..., D\]"):
        rms_norm(x, torch.ones(7), EPS)
