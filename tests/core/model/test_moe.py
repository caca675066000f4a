"""Experts: the grouped path and the other give each token its experts; loads and losses by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model import forward
from sabia.core.ops.product import Matrix, Product
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config
from sabia.core.spec.layers import Router

from .conftest import CONFIGS, compiled, perturbed

RANDOM = np.random.default_rng(5)
EXPERTS, CHOSEN = 5, 2
CHOICES = RANDOM.permuted(np.tile([0, 1, 3, 4], (2, 9, 1)), axis=-1)[..., :CHOSEN]  # nobody takes 2
SHARES = RANDOM.random((2, 9, CHOSEN), np.float32)


def arrays(inner: int, width: int) -> dict[str, np.ndarray]:
    shapes = {"y": (2, 9, width), "up": (EXPERTS, inner, width), "up_bias": (EXPERTS, inner)}
    shapes |= {"down": (EXPERTS, width, inner)}
    return {name: RANDOM.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def by_hand(x: dict[str, np.ndarray]) -> np.ndarray:
    """Each token's experts one after the other."""
    out = np.zeros(x["y"].shape)
    for place in np.ndindex(*CHOICES.shape):
        expert, token = CHOICES[place], x["y"][place[:2]].astype(np.float64)
        inner = x["up"][expert] @ token + x["up_bias"][expert]
        out[place[:2]] += SHARES[place] * (x["down"][expert] @ np.tanh(inner))
    return out


def mixed(ops: Any, x: dict[str, Any]) -> Any:
    rows, plan = ops.dispatch(x["y"], ops.integers(CHOICES, x["y"]), EXPERTS)
    up = Matrix("", x["up"], x["up_bias"])
    (inner,) = ops.multiply(Product(rows, (up,), plan))
    inner = ops.softcap(inner, 1.0)  # tanh
    (rows,) = ops.multiply(Product(inner, (Matrix("", x["down"]),), plan))
    return ops.combine(rows, plan, x["shares"])


def test_tokens_get_their_experts_and_gradients_theirs(ops: Any) -> None:
    x = arrays(7, 9)
    held = ops.to_device(x | {"shares": SHARES}, "float32")
    weight = RANDOM.standard_normal(x["y"].shape, np.float32)
    if ops.name == "torch":
        import torch

        held = {name: p.requires_grad_() for name, p in held.items()}
        out = mixed(ops, held)
        (out * torch.from_numpy(weight)).sum().backward()
        grads = {name: p.grad for name, p in held.items()}
    else:
        import jax

        out = compiled(ops, lambda p: mixed(ops, p))(held)
        grads = compiled(ops, jax.grad(lambda p: (mixed(ops, p) * weight).sum()))(held)
    found, grads = ops.to_numpy({"x": out})["x"], ops.to_numpy(grads)
    np.testing.assert_allclose(found, by_hand(x), rtol=1e-5, atol=1e-5)
    assert not grads["up"][2].any() and not grads["up_bias"][2].any() and grads["up"][1].any()
    step = 1e-3  # along the gradient of each array, the sum moves by the gradient's square
    for name, grad in grads.items():
        if name == "shares":
            continue
        moved = x | {name: x[name] + step * grad / np.linalg.norm(grad)}
        back = x | {name: x[name] - step * grad / np.linalg.norm(grad)}
        slope = ((by_hand(moved) - by_hand(back)) * weight).sum() / (2 * step)
        assert slope == pytest.approx(np.linalg.norm(grad), rel=1e-3), name
    per_copy = by_hand(x) * weight
    assert (grads["shares"] * SHARES).sum() == pytest.approx(per_copy.sum(), rel=1e-4)


def test_torch_takes_one_grouped_product_in_bfloat16_where_rows_are_aligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="the torch backend")
    ops_torch = load_ops("torch")

    calls: list[torch.dtype] = []
    grouped = torch.nn.functional.grouped_mm

    def counted(rows: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(rows.dtype)
        return grouped(rows, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    x = arrays(16, 24)
    found = []
    for dtype in ("float32", "bfloat16"):
        held = ops_torch.to_device(x | {"shares": SHARES}, dtype)
        held = {name: p.requires_grad_() for name, p in held.items()}
        out = mixed(ops_torch, held)
        out.sum().backward()
        assert out.dtype == getattr(torch, dtype)
        found.append(out.detach().float().numpy())
    assert calls == [torch.bfloat16] * 2
    assert 1e-4 < np.abs(found[1] - found[0]).max() / np.abs(found[0]).max() < 0.03
    calls.clear()
    mixed(ops_torch, ops_torch.to_device(arrays(20, 24) | {"shares": SHARES}, "bfloat16"))
    assert calls == []  # 40 bytes a row: one product per expert


def test_torch_without_grouped_mm_multiplies_experts_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="the torch backend")
    from sabia.core.ops import rounding_torch

    ops_torch = load_ops("torch")

    held = ops_torch.to_device(arrays(16, 24) | {"shares": SHARES}, "bfloat16")
    rows = torch.randn(6, 16, dtype=torch.bfloat16)
    grad = torch.randn(6, 8, dtype=torch.bfloat16)
    ends = SimpleNamespace(ends=torch.tensor([2, 2, 6], dtype=torch.int32))
    found = []
    for has in (True, False):
        if not has:
            monkeypatch.delattr(torch.nn.functional, "grouped_mm")
        found.append((mixed(ops_torch, held), rounding_torch._weight_gradient(grad, rows, ends)))
    for with_it, without in zip(*found, strict=True):
        torch.testing.assert_close(without, with_it, rtol=0.02, atol=0.02)


IDS = RANDOM.integers(1, 293, (3, 12))
SEGMENTS = np.where(np.arange(12) < [[12], [7], [0]], 1, 0)


def stats_of(name: str, ops: Any) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(spec, the last layer's stats, its router's scores and choice as transformers has them)."""
    spec = from_config(CONFIGS[name])
    wanted = frozenset({"expert_load", "balance", "router_z"})

    def run(params: Any) -> Any:
        return forward.hidden_and_stats(spec, params, IDS, ops, segments=SEGMENTS, wanted=wanted)[1]

    params = ops.to_device(perturbed(spec), "float32")
    found = compiled(ops, run)(params)
    last = len(spec.layers) - 1
    assert all(set(layers) <= {0, 1} and last in layers for layers in found.values())
    return spec, ops.to_numpy({key: layers[last] for key, layers in found.items()}), params


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_loads_and_losses_count_real_tokens_row_by_row(
    name: str, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sabia.core.model import feed_forward

    seen: list[Any] = []
    plain = feed_forward.add_stats

    def spy(router: Router, block: Any, scores: Any, chosen: Any) -> None:
        seen.append((scores, chosen))
        plain(router, block, scores, chosen)

    if ops.name == "jax":  # the same numbers, checked against what torch's scores say
        pytest.importorskip("torch", reason="torch is not installed")
        torch_stats = stats_of(name, load_ops("torch"))[1]
        for key, values in stats_of(name, ops)[1].items():
            np.testing.assert_allclose(values, torch_stats[key], rtol=1e-5, err_msg=key)
        return
    monkeypatch.setattr(feed_forward, "add_stats", spy)
    spec, stats, _ = stats_of(name, ops)
    router = spec.layers[-1].mlp.router
    scores, chosen = (x.double().numpy() if x.is_floating_point() else x.numpy() for x in seen[-1])
    for row, segments in enumerate(SEGMENTS):
        count = int(segments.sum())
        real, picks = scores[row][:count], chosen[row][:count]
        load = np.bincount(picks.ravel(), minlength=router.experts)
        assert stats["expert_load"][row].tolist() == load.tolist()
        if not count:
            assert stats["balance"][row] == stats["router_z"][row] == 0
            continue
        squashed = np.exp(real - real.max(-1, keepdims=True))
        if router.scores == "sigmoid":
            squashed = 1 / (1 + np.exp(-real))
        mean = (squashed / squashed.sum(-1, keepdims=True)).mean(0)
        balance = (router.experts / (router.top_k * count) * load * mean).sum()
        assert stats["balance"][row] == pytest.approx(balance, rel=1e-5)
        lse = np.log(np.exp(real).sum(-1))
        assert stats["router_z"][row] == pytest.approx((lse**2).mean(), rel=1e-5)


def test_nothing_is_reported_that_nobody_wants() -> None:
    pytest.importorskip("torch", reason="the torch backend")
    ops = load_ops("torch")
    spec = from_config(CONFIGS["qwen3-moe"])
    params = ops.to_device(perturbed(spec), "float32")
    assert forward.hidden_and_stats(spec, params, IDS, ops)[1] == {}


@pytest.mark.parametrize(
    "wrong", [{"top_k": 6}, {"groups": 2}, {"groups": 5, "top_k_groups": 1, "top_k": 2}]
)
def test_routers_that_cannot_choose_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="experts"):
        Router(**{"experts": 5, "top_k": 2} | wrong)
