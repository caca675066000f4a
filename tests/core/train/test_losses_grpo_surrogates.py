"""CISPO, SAPO, masked samples and the weighted KL beside formulas, with gradients."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sabia.core.options.grpo import PolicyLoss
from sabia.core.parallel.build_ops import load_ops
from sabia.core.train.losses.grpo import policy_losses

ROWS, TOKENS = 9, 8
CASES = [
    PolicyLoss(surrogate="cispo", clip_high=0.1, updates=2),
    PolicyLoss(surrogate="cispo", clip_high=0.1, ratio="sequence", updates=2),
    PolicyLoss(surrogate="sapo", updates=2),
    PolicyLoss(sequence_mask=0.05, updates=2),
    PolicyLoss(surrogate="sapo", sequence_mask=0.05, beta=0.1, updates=2),
    PolicyLoss(beta=0.3, kl_times_ratio=True, updates=2),
    PolicyLoss(beta=0.3, kl_times_ratio=True, ratio="sequence", updates=2),
]


def rows(seed: int, by_token: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = -rng.gamma(2.0, 0.7, (ROWS, TOKENS))
    near = [np.minimum(old + 0.3 * rng.standard_normal(old.shape), -0.01) for _ in range(2)]
    mask = (np.arange(TOKENS) < rng.integers(1, TOKENS + 1, ROWS)[:, None]).astype(float)
    advantage = rng.standard_normal((ROWS, TOKENS if by_token else 1))
    return {"old": old, "logp": near[0], "ref": near[1], "mask": mask, "advantage": advantage}


def constants(x: dict[str, np.ndarray], o: PolicyLoss) -> dict[str, np.ndarray]:
    """What has no gradient: CISPO's weights, and which samples are left out."""
    size = x["mask"].sum(1, keepdims=True)
    log_ratio = (x["logp"] - x["old"]) * x["mask"]
    if o.ratio == "sequence":
        log_ratio = log_ratio.sum(1, keepdims=True) / size + 0 * log_ratio
    far = -((x["logp"] - x["old"]) * x["mask"]).sum(1, keepdims=True) / size > o.sequence_mask
    kept = ~(far & (x["advantage"] < 0)) if o.sequence_mask else np.ones_like(x["mask"], bool)
    return {"weight": np.minimum(np.exp(log_ratio), 1 + o.clip_high), "kept": kept}


def formula(x: dict[str, np.ndarray], o: PolicyLoss, held: dict[str, np.ndarray]) -> float:
    mask, a = x["mask"], x["advantage"]
    log_ratio = (x["logp"] - x["old"]) * mask
    if o.ratio == "sequence":
        log_ratio = log_ratio.sum(1, keepdims=True) / mask.sum(1, keepdims=True) + 0 * log_ratio
    rho = np.exp(log_ratio)
    if o.surrogate == "cispo":
        loss = -held["weight"] * a * x["logp"]
    elif o.surrogate == "sapo":
        t = np.where(a < 0, 1.05, 1.0)
        loss = -a * 4 / t / (1 + np.exp(-t * (rho - 1)))
    else:
        loss = -np.minimum(rho * a, np.clip(rho, 1 - o.clip_low, 1 + o.clip_high) * a)
    d = x["ref"] - x["logp"]
    kl = (np.exp(d) - d - 1) * (rho if o.kl_times_ratio else 1)
    return float(((loss * held["kept"] + o.beta * kl) * mask).sum())


@pytest.mark.parametrize("o", CASES, ids=str)
@pytest.mark.parametrize("by_token", [False, True])
def test_loss_and_gradient_are_the_formula(o: PolicyLoss, by_token: bool) -> None:
    x = rows(3, by_token)
    held = constants(x, o)
    if o.sequence_mask:
        assert 0 < held["kept"].mean() < 1
    given: dict[str, Any] = {name: torch.from_numpy(value) for name, value in x.items()}
    logp = given["logp"].clone().requires_grad_()
    losses, _ = policy_losses(
        logp, given["old"], given["mask"], given["advantage"], o, load_ops("torch"),
        ref=given["ref"],
    )  # fmt: skip
    losses.sum().backward()
    assert losses.sum().item() == pytest.approx(formula(x, o, held), abs=1e-9)
    for index in map(tuple, np.argwhere(x["mask"] > 0)):
        around = []
        for sign in (1, -1):
            moved = x["logp"].copy()
            moved[index] += sign * 1e-6
            around.append(formula(x | {"logp": moved}, o, held))
        slope = (around[0] - around[1]) / 2e-6
        assert logp.grad[index].item() == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_jax_has_the_same_losses() -> None:
    jax = pytest.importorskip("jax")
    x = rows(4, True)
    for o in CASES[:5]:
        found = []
        for ops, array in ((load_ops("torch"), torch.from_numpy), (load_ops("jax"), None)):
            given = {k: (array or jax.numpy.asarray)(v.astype(np.float32)) for k, v in x.items()}
            losses, _ = policy_losses(
                given["logp"], given["old"], given["mask"], given["advantage"], o, ops,
                ref=given["ref"],
            )  # fmt: skip
            found.append(np.asarray(losses))
        assert np.abs(found[0] - found[1]).max() <= 1e-5
