"""The vocabulary loss: every implementation against torch's cross_entropy and logsumexp in fp64,
both results and both gradients, with a z-loss, ignored targets and a cap."""

import importlib
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sabia.kernels.runtime import torch_fp32
from sabia.kernels.vocabulary_loss import torch_impl
from sabia.kernels.vocabulary_loss.interface import (
    choose_linear_cross_entropy,
    linear_cross_entropy,
)

N, D, V = 21, 20, 293
CHUNK = 8 * V * 4  # 8 rows of fp32 at a time


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, N)
    targets[[0, 7, 20]] = -1, -100, V - 1
    return {
        "hidden": rng.standard_normal((N, D)).astype(np.float32),
        "weight": rng.standard_normal((V, D)).astype(np.float32),
        "targets": targets,
        "g_nll": rng.standard_normal(N).astype(np.float32),
        "g_lse": rng.standard_normal(N).astype(np.float32),
    }


def definition(data: dict[str, np.ndarray], cap: float | None) -> list[np.ndarray]:
    """nll, lse, d_hidden, d_weight."""
    given = {n: torch.from_numpy(a) for n, a in data.items()}
    hidden, weight = (given[n].double().requires_grad_() for n in ("hidden", "weight"))
    z = hidden @ weight.t()
    z = z if cap is None else cap * torch.tanh(z / cap)
    targets = torch.where(given["targets"] < 0, -100, given["targets"])
    nll, lse = F.cross_entropy(z, targets, reduction="none"), torch.logsumexp(z, -1)
    total = (nll * given["g_nll"]).sum() + (lse * given["g_lse"]).sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    return [r.detach().numpy() for r in (nll, lse, *grads)]


def run_torch(
    data: dict[str, np.ndarray], cap: float | None, name: str, chunk_bytes: int = CHUNK
) -> list[np.ndarray]:
    given = {n: torch.from_numpy(a) for n, a in data.items()}
    hidden, weight = (given[n].requires_grad_() for n in ("hidden", "weight"))
    outs = linear_cross_entropy(
        hidden, weight, given["targets"], softcap=cap, chunk_bytes=chunk_bytes, implementation=name
    )
    grads = torch.autograd.grad(outs, (hidden, weight), (given["g_nll"], given["g_lse"]))
    return [r.detach().numpy() for r in (*outs, *grads)]


def run_jax(data: dict[str, np.ndarray], cap: float | None, name: str) -> list[np.ndarray]:
    given = {n: jnp.asarray(a) for n, a in data.items()}

    def losses(hidden: Any, weight: Any) -> Any:
        return linear_cross_entropy(
            hidden, weight, given["targets"], softcap=cap, implementation=name
        )

    outs, pull = jax.vjp(losses, given["hidden"], given["weight"])
    return [np.asarray(r) for r in (*outs, *pull((given["g_nll"], given["g_lse"])))]


def agree(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("name", ["reference", "eager", "triton"])
def test_torch(cap: float | None, name: str) -> None:
    agree(run_torch(arrays(), cap, name), definition(arrays(), cap))


@pytest.mark.skipif(not torch_fp32.HAS_ONEDNN, reason="no oneDNN")
def test_products_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_fp32, "MKL_IS_FASTER", False)
    monkeypatch.setattr(torch_fp32, "LARGE", 1)
    shapes, product = [], torch_fp32.onednn_linear
    monkeypatch.setattr(
        torch_fp32, "onednn_linear", lambda *both: (shapes.append(both[0].shape), product(*both))[1]
    )
    agree(run_torch(arrays(), None, "eager", 1 << 20), definition(arrays(), None))
    assert shapes == [(N, D), (N, V), (D, N)]  # scores, d hidden, d weight transposed


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 1 << 20])  # scores are computed again, or saved
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_tokens_without_gradients_are_left_out_on_cpus(
    share: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = arrays()
    data |= {name: np.tile(data[name], 5) for name in ("targets", "g_nll", "g_lse")}
    data["hidden"] = np.random.default_rng(1).standard_normal((5 * N, D)).astype(np.float32)
    some = np.random.default_rng(2).random(5 * N) < share
    data |= {name: data[name] * some for name in ("g_nll", "g_lse")}
    given = {name: torch.from_numpy(array) for name, array in data.items()}
    inputs = [given[name].requires_grad_() for name in ("hidden", "weight")]
    outs = linear_cross_entropy(
        *inputs, given["targets"], softcap=5.0, chunk_bytes=chunk_bytes, implementation="eager"
    )
    multiplied = []
    product = torch_impl.times
    monkeypatch.setattr(
        torch_impl, "times", lambda x, w: (multiplied.append(len(x)), product(x, w))[1]
    )
    grads = torch.autograd.grad(outs, inputs, (given["g_nll"], given["g_lse"]))
    agree([r.detach().numpy() for r in (*outs, *grads)], definition(data, 5.0))
    left = (some & ((data["targets"] >= 0) | (data["g_lse"] != 0))).sum()
    assert sum(multiplied) == (left if left <= 0.95 * 5 * N else 5 * N)


@pytest.mark.parametrize("cap", [pytest.param(None, marks=pytest.mark.slow), 5.0])
@pytest.mark.parametrize("name", ["reference", "eager", "pallas"])
def test_jax(cap: float | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    agree(run_jax(arrays(), cap, name), definition(arrays(), cap))


def test_no_tokens() -> None:
    hidden, weight = torch.ones(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    targets = torch.ones(0, dtype=torch.int64)
    nll, lse = linear_cross_entropy(hidden, weight, targets, implementation="triton")
    (grad,) = torch.autograd.grad(nll.sum() + lse.sum(), weight)
    assert nll.shape == lse.shape == (0,) and torch.equal(grad, torch.zeros(5, 4))


def test_scores_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest product that the Triton path asks for is a chunk's."""
    rows: list[int] = []
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: rows.append(out.shape[0]) or product(a, b, out=out)
    )
    run_torch(arrays(), None, "triton")
    assert max(rows) == 8 < N


def test_operators_are_sound() -> None:
    importlib.import_module("sabia.kernels.vocabulary_loss.triton_impl")  # registers one of them
    hidden, weight = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    inputs = (hidden, weight, torch.tensor([0, -1, 4]), 0.0, 2)
    torch.library.opcheck(torch.ops.sabia.vocabulary_loss_forward, inputs)
    inputs = (*inputs[:3], None, 20, True)
    torch.library.opcheck(torch.ops.sabia.cpu_linear_cross_entropy, inputs)


@pytest.mark.parametrize("chunk", [CHUNK, 1 << 20])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_in_bf16_on_a_cpu_with_units_for_it(
    chunk: int, cap: float | None, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators give what the eager function gives, with scores that are saved or computed
    again, in one or several products, and leave their inputs as they were."""
    monkeypatch.setattr(torch_impl, "HAS_BF16_UNITS", True)
    monkeypatch.setattr(torch_impl, "PRODUCT_BYTES", 8 * V * 2)
    data = {n: torch.from_numpy(a) for n, a in arrays().items()}
    results = []
    torch._dynamo.reset()
    for compute in (
        linear_cross_entropy,
        torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True),
    ):
        hidden = data["hidden"].bfloat16().requires_grad_()
        weight = data["weight"].bfloat16().requires_grad_(not frozen)
        inputs = [hidden] if frozen else [hidden, weight]
        outs = compute(hidden, weight, data["targets"], softcap=cap, chunk_bytes=chunk)
        given = data["g_nll"], data["g_lse"]
        grads = torch.autograd.grad(outs, inputs, given, retain_graph=True)
        assert all(map(torch.equal, grads, torch.autograd.grad(outs, inputs, given)))
        results.append([*outs, *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)


def test_choice_is_said() -> None:
    assert choose_linear_cross_entropy(torch.ones(2, 3)).implementation == "eager"
    with pytest.raises(ValueError, match=r"expected \[N, D\]"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 4), torch.ones(2))
