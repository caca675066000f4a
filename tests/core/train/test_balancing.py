"""What training adds for mixtures: terms of the loss, and the bias that follows the load."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from sabia.core.model.storage.hub import init_params
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper import StepResult, balanced_bias, bias_names
from sabia.core.train.stepper_factory import make_stepper

SHAPE = {"hidden": 32, "layers": 2, "vocab": 97, "heads": 4, "ffn": 64, "experts": 6, "chosen": 2}
SPEC = from_config(new_config("deepseek_v3", **SHAPE) | {"first_k_dense_replace": 0})
PARAMS = init_params(SPEC, 0)
TERMS = {"balance": 0.3, "router_z": 0.02, "z_loss": 0.1}


def batch(rows: int = 4, length: int = 12) -> dict[str, np.ndarray]:
    """Rows of unequal lengths; the last one has no weight."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 97, (rows, length)).astype(np.int32)
    segments = (np.arange(length) < [[12], [5], [9], [12]]).astype(np.int32)
    mask = (segments * (random.random(ids.shape) < 0.8)).astype(np.float32)
    mask[3] = 0
    targets = np.roll(ids, -1, 1)
    return {"input_ids": ids, "targets": targets, "loss_mask": mask, "segments": segments}


def stepper(micro_batch: int = 0, **terms: float) -> Any:
    pytest.importorskip("torch", reason="the torch backend")
    return make_stepper(
        "torch", SPEC, PARAMS, partial(next_token_loss, **terms), micro_batch=micro_batch
    )


def in_jax() -> StepResult:
    """What a step of a stepper with all terms returns, by jax's own gradient."""
    jax = pytest.importorskip("jax", reason="the jax backend")
    ops = load_ops("jax")

    def loss(params: Any) -> Any:
        total, weight, extras = next_token_loss(SPEC, params, batch(), ops, **TERMS)
        return total, {"weight": weight, **extras}

    options = {"xla_backend_optimization_level": 0}
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)
    (total, found), grads = run(ops.to_device(PARAMS))
    norm = np.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
    sums = {**found, "weight": float(found["weight"]), "loss": float(total), "grad_norm": norm}
    return StepResult.of_sums(sums, updated=True)


def test_terms_are_sums_over_rows_whatever_the_micro_batch_and_backend() -> None:
    whole = stepper(**TERMS).step(batch(), 1e-3)
    for parts in (stepper(micro_batch=1, **TERMS).step(batch(), 1e-3), in_jax()):
        for name in ("loss", "weight", "grad_norm"):
            assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=2e-5), name
        for name in ("nll", "expert_load"):
            found, wanted = parts.extras[name], whole.extras[name]
            np.testing.assert_allclose(found, wanted, rtol=2e-5, err_msg=name)
    assert whole.extras["expert_load"].shape == (2, 6)
    assert whole.extras["expert_load"].sum(1).tolist() == [2 * (12 + 5 + 9)] * 2


def test_each_term_adds_its_coefficient_times_its_mean() -> None:
    plain = stepper().evaluate(batch())
    assert "nll" not in plain.extras
    total = plain.loss
    for name, coefficient in TERMS.items():
        one, two = (stepper(**{name: c}).evaluate(batch()) for c in (coefficient, 2 * coefficient))
        assert one.extras["nll"] / one.weight == pytest.approx(plain.loss, rel=1e-6)
        added = one.loss - plain.loss
        assert two.loss - plain.loss == pytest.approx(2 * added, rel=1e-4)
        assert added > 0.5 * coefficient * {"balance": 1, "router_z": 3, "z_loss": 20}[name] / 2
        total += added
    assert stepper(**TERMS).evaluate(batch()).loss == pytest.approx(total, rel=1e-6)


def test_the_bias_follows_the_load_in_every_kind_of_array() -> None:
    torch = pytest.importorskip("torch", reason="one of the kinds")
    jnp = pytest.importorskip("jax.numpy", reason="one of the kinds")
    bias, load = np.array([0.5, 0, -1, 0], np.float32), np.array([9, 1, 5, 5], np.float32)
    for kind in (np.asarray, torch.tensor, jnp.asarray):
        moved = balanced_bias(kind(bias), kind(load), 0.25)
        assert np.asarray(moved).tolist() == [0.25, 0.25, -1, 0]
        assert np.asarray(moved).dtype == np.float32


def test_the_bias_evens_out_a_router() -> None:
    """Scores that favour some experts: after enough steps every expert gets its part."""
    random = np.random.default_rng(0)
    scores = 1 / (1 + np.exp(-random.standard_normal((4000, 6)) - [0, 0, 1, 1, 2, 3]))
    bias = np.zeros(6, np.float32)
    for _ in range(400):
        chosen = np.argsort(-(scores + bias), axis=1)[:, :2]
        bias = balanced_bias(bias, np.bincount(chosen.ravel(), minlength=6), 2e-3)
    loads = np.bincount(np.argsort(-(scores + bias), axis=1)[:, :2].ravel(), minlength=6)
    assert np.abs(loads / loads.mean() - 1).max() < 0.05


def test_rows_of_loads_name_their_bias() -> None:
    assert bias_names(SPEC) == ("layers.0.mlp.correction", "layers.1.mlp.correction")
    assert bias_names(from_config(new_config("mixtral", **SHAPE))) == (None,) * 2
