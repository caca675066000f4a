"""Training in torch and in JAX is one training: same losses, and a hand-over in the middle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel import build_ops
from sabia.core.spec import ModelSpec, from_config, new_config

torch = pytest.importorskip("torch", reason="compares torch with JAX")
jax = pytest.importorskip("jax", reason="compares torch with JAX")
optax = pytest.importorskip("optax", reason="compares torch with JAX")

STEPS = 20
RATE, DECAY = 3e-3, 0.1
SPEC = from_config(
    new_config("qwen3", hidden=48, layers=2, vocab=131, heads=4, kv_heads=2, head_dim=16)
)
Losses = list[float]


def batch(step: int) -> np.ndarray:
    """ids[4, 25], learnable: each token follows from the one before."""
    start = np.random.default_rng(step).integers(0, 11, (4, 1))
    return (start + np.arange(25)) % 11


def mean_loss(spec: ModelSpec, params: Any, ids: Any, ops: Any) -> Any:
    """Mean next-token loss."""
    states = forward.hidden(spec, params, ids[:, :-1], ops)
    return forward.token_losses(spec, params, states, ids[:, 1:], ops)[0].mean()


def train_torch(params: dict[str, np.ndarray], steps: range) -> tuple[Losses, dict]:
    """(losses, parameters after) with torch.optim.AdamW, its state fresh."""
    ops = build_ops.load_ops("torch")
    weights = {k: v.requires_grad_() for k, v in ops.to_device(params, "float32").items()}
    optimizer = torch.optim.AdamW(
        weights.values(), RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY
    )
    losses = []
    for step in steps:
        loss = mean_loss(SPEC, weights, batch(step), ops)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, ops.to_numpy(weights)


def train_jax(params: dict[str, np.ndarray], steps: range) -> tuple[Losses, dict]:
    """(losses, parameters after) with optax.adamw, its state fresh."""
    ops = build_ops.load_ops("jax")
    weights: Any = ops.to_device(params, "float32")
    optimizer = optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=DECAY)
    state = optimizer.init(weights)

    @jax.jit
    def update(weights: Any, state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: mean_loss(SPEC, p, ids, ops))(weights)
        changes, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    losses = []
    for step in steps:
        weights, state, loss = update(weights, state, batch(step))
        losses.append(float(loss))
    return losses, ops.to_numpy(weights)


def test_training_and_hand_over(tmp_path: Path) -> None:
    start = hub.init_params(SPEC, seed=5)
    ours, after_torch = train_torch(start, range(STEPS))
    theirs, after_jax = train_jax(start, range(STEPS))
    assert np.abs(np.subtract(ours, theirs)).max() <= 1e-5
    assert ours[0] > 4.5 and ours[-1] < 3.5  # it learns
    worst = max(np.abs(after_torch[name] - after_jax[name]).max() for name in after_torch)
    assert worst <= 1e-3

    half = STEPS // 2
    _, middle = train_jax(start, range(half))
    hub.save_model(tmp_path / "middle", SPEC, middle)
    spec, loaded = hub.load_model(tmp_path / "middle")
    assert spec == SPEC
    continued, _ = train_torch(loaded, range(half, STEPS))
    _, middle_torch = train_torch(start, range(half))
    expected, _ = train_torch(middle_torch, range(half, STEPS))
    assert np.abs(np.subtract(continued, expected)).max() <= 1e-5


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first, again, other = (hub.init_params(SPEC, seed) for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() for name in first)
    assert not (first["embed"] == other["embed"]).any()
    deeper = from_config(SPEC.config | {"num_hidden_layers": 3})
    name = "layers.1.mlp.gate"
    assert (hub.init_params(deeper, 1)[name] == first[name]).all()
    std = SPEC.hidden_size**-0.5
    assert first["layers.0.attn.q"].std() == pytest.approx(std, rel=0.05)
    assert first["layers.0.attn.o"].std() == pytest.approx(
        std / 2, rel=0.05
    )  # 1/sqrt(2 layers · 2)
    assert (first["final_norm"] == 1).all()
