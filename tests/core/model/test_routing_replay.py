"""Experts of a sampler, replayed: the same experts, gates and gradients of the present router."""

from typing import Any

import numpy as np
import pytest

from sabia.core.model import feed_forward, forward
from sabia.core.model.routing import Routing
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import ModelSpec, from_config
from sabia.core.spec.layers import Router

from .conftest import CONFIGS, compiled, perturbed

NAMES = ["qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss", "qwen3-next"]
DRAW = np.random.default_rng(2)
IDS = DRAW.integers(1, 293, (3, 11))
HIDDEN = DRAW.random((3, 11)) < 0.2  # tokens without choices


def other_router(spec: ModelSpec) -> dict[str, np.ndarray]:
    """The parameters with noise on the routers, as those of a sampler."""
    params, draw = perturbed(spec), np.random.default_rng(7)
    for name in (name for name in params if name.endswith(("mlp.router", "mlp.correction"))):
        noise = draw.standard_normal(params[name].shape, np.float32)
        params[name] = params[name] + noise * np.abs(params[name]).mean() / 2
    return params


def passed(spec: ModelSpec, params: Any, ops: Any, **more: Any) -> tuple[np.ndarray, Any]:
    """(hidden states, {statistic: [L, …]}) of IDS."""

    def run(params: Any, routing: Any) -> Any:
        return forward.hidden_and_stats(
            spec, params, IDS, ops, routing=routing, wanted=frozenset(more.get("wanted", ()))
        )

    x, stats = compiled(ops, run)(ops.to_device(params, "float32"), more.get("routing"))
    arrays = {f"{k}{i}": v for k, layers in stats.items() for i, v in layers.items()}
    made = ops.to_numpy({"x": x, **arrays})
    return made["x"], {k: np.stack([made[f"{k}{i}"] for i in sorted(v)]) for k, v in stats.items()}


def sampled(spec: ModelSpec, ops: Any) -> np.ndarray:
    """The experts [B, T, L, k] of the other router, numbered from 1; 0 for some tokens."""
    chosen = passed(spec, other_router(spec), ops, wanted=["experts"])[1]["experts"]
    return np.where(HIDDEN[..., None, None], 0, np.moveaxis(chosen, 0, 2) + 1).astype(np.int16)


def gates_by_hand(router: Router, scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The gates [B, T, k] of given experts."""
    every = np.exp(scores - scores.max(-1, keepdims=True))
    if router.scores == "sigmoid":
        every = 1 / (1 + np.exp(-scores))
    elif router.scores == "softmax":
        every = every / every.sum(-1, keepdims=True)
    gates = np.stack([every[place][own] for place, own in
                      ((p, chosen[p]) for p in np.ndindex(chosen.shape[:2]))])  # fmt: skip
    if router.normalised or router.scores == "softmax_top_k":
        gates = gates / gates.sum(-1, keepdims=True)
    return (gates * router.scale).reshape(chosen.shape)


JAX = [pytest.param(name, "jax", marks=[pytest.mark.slow] * (name != "mixtral")) for name in NAMES]


@pytest.mark.parametrize(("name", "backend"), [*((name, "torch") for name in NAMES), *JAX])
def test_tokens_have_the_given_experts_with_gates_of_the_router(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    spec, ops = from_config(CONFIGS[name]), load_ops(backend)
    given, params = sampled(spec, ops), perturbed(spec)
    own, first = passed(spec, params, ops, wanted=["experts"])
    x, stats = passed(spec, params, ops, routing=given, wanted=["experts", "rerouted"])
    chosen = np.moveaxis(stats["experts"], 0, 2)
    np.testing.assert_array_equal(chosen[~HIDDEN], given[~HIDDEN] - 1)
    assert np.abs(x - own).max() > 1e-3
    if ops.name == "jax":  # the same numbers
        expected = passed(spec, params, load_ops("torch"), routing=given)[0]
        np.testing.assert_allclose(x, expected, atol=2e-4)
        return
    seen: list[np.ndarray] = []  # the choices of the routers

    def by_hand(router: Router, block: Any, scores: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(feed_forward, "_replayed", lambda block, chosen: chosen)
            seen.append(plain(router, block, scores)[0].numpy())
        place = spec.expert_layers.index(block.index)
        experts = np.where(given[:, :, place] > 0, given[:, :, place] - 1, seen[-1])
        gates = gates_by_hand(router, scores.double().numpy(), experts)
        return block.ops.integers(experts, scores), scores.new_tensor(gates)

    plain = feed_forward.route
    monkeypatch.setattr(feed_forward, "route", by_hand)
    np.testing.assert_allclose(x, passed(spec, params, ops)[0], atol=1e-4)
    # counts of choices that the router would not have made
    for layer, (choice, found) in enumerate(zip(seen, stats["rerouted"], strict=True)):
        count = np.zeros(len(IDS))
        for place in np.argwhere(~HIDDEN):
            row, token = place
            count[row] += len(set(given[row, token, layer] - 1) - set(choice[row, token]))
        np.testing.assert_array_equal(found, count)
    assert stats["rerouted"].sum() > 0
    np.testing.assert_array_equal(np.moveaxis(first["experts"], 0, 2)[..., 0, :], seen[0])


@pytest.mark.parametrize("name", NAMES)
def test_its_own_choices_change_nothing_and_the_router_has_a_gradient(name: str) -> None:
    ops: Any = load_ops("torch")
    spec = from_config(CONFIGS[name])
    x, stats = passed(spec, perturbed(spec), ops, wanted=["experts"])
    own = np.moveaxis(stats["experts"], 0, 2).astype(np.int16) + 1
    again, counts = passed(spec, perturbed(spec), ops, routing=own, wanted=["rerouted"])
    np.testing.assert_array_equal(x, again)
    assert not counts["rerouted"].any()
    params = ops.to_device(perturbed(spec), "float32")
    routers = [name for name in params if name.endswith("mlp.router")]
    for name in routers:
        params[name].requires_grad_()
    made = forward.hidden(spec, params, IDS, ops, routing=sampled(spec, ops), remat="full")
    (made[..., :3] ** 2).sum().backward()
    assert len(routers) == len(spec.expert_layers)
    assert all(float(params[name].grad.abs().max()) > 1e-4 for name in routers)


def test_experts_travel_as_bytes() -> None:
    small, large = Routing(2, 3, 256), Routing(2, 3, 300)
    for routing, size in ((small, 6), (large, 12)):
        chosen = DRAW.integers(0, routing.experts, (7, 2, 3))
        packed = routing.packed([chosen[:4], chosen[4:]])
        assert len(packed) == 7 * size == 7 * routing.token_bytes
        np.testing.assert_array_equal(routing.unpacked(packed), chosen)
        routing.check(packed, 7)
        with pytest.raises(ValueError, match="3 experts for each of 8 tokens in 2 layers"):
            routing.check(packed, 8)
    with pytest.raises(ValueError, match="expert 300"):
        large.check(large.packed([np.full((1, 2, 3), 300)]), 1)
    assert Routing.of(from_config(CONFIGS["llama"])) is None
    spec = from_config(CONFIGS["deepseek-v3"])
    assert Routing.of(spec) == Routing(len(spec.expert_layers), 4, 15)
