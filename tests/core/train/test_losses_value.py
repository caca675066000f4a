"""The value head's losses and generalized advantages, against formulas of their own."""

from typing import Any

import numpy as np
import pytest

from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.build_ops import load_ops
from sabia.core.recipes.grpo.value_estimates import Estimates, estimated, normalise
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.grpo import grpo_loss
from sabia.core.train.losses.value import token_advantages, token_values, value_head, value_losses

RNG = np.random.default_rng(0)
LENGTHS = np.array([7, 1, 4, 0])
PRESENT = (np.arange(7) < LENGTHS[:, None]).astype(np.float32)
SPEC = from_config(new_config(hidden=32, layers=1, heads=2, vocab=41, context=64))


@pytest.fixture(params=["torch", "jax"])
def ops(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param, reason="the backend")
    return load_ops(request.param)


def by_the_sum(rewards: np.ndarray, values: np.ndarray, length: int, g: float, decay: float) -> Any:
    """Σ_k (g l)^k d_(t+k) of one sample (arXiv 1506.02438, equation 16)."""
    after = [*values[1:length], 0.0]
    d = [rewards[t] + g * after[t] - values[t] for t in range(length)]
    return [sum((g * decay) ** k * d[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize(("g", "decay"), [(1.0, 0.95), (0.9, 0.7), (1.0, 0.0), (0.97, 1.0)])
def test_advantages_are_the_sum_of_the_paper(g: float, decay: float) -> None:
    rewards, values = RNG.standard_normal((2, 4, 7))
    found = token_advantages(rewards, values, PRESENT, g, decay)
    for row, length in enumerate(LENGTHS):
        wanted = by_the_sum(rewards[row], values[row], length, g, decay)
        np.testing.assert_allclose(found[row], [*wanted, *[0.0] * (7 - length)], atol=1e-12)
    if decay == 1:  # the return is the discounted reward, whatever the values are
        whole = found[0] + values[0]
        np.testing.assert_allclose(whole[0], (g ** np.arange(7) * rewards[0]).sum(), atol=1e-12)


def batch_of(rewards: np.ndarray, forced: bool = False) -> dict[str, np.ndarray]:
    targets = np.where(PRESENT > 0, 5, -1)[:, None].astype(np.int32)
    mask = PRESENT[:, None].copy()
    if forced:
        mask[0, 0, 2] = 0  # not sampled
    return {"targets": targets, "loss_mask": mask, "advantage": rewards[:, None, None]}


def test_the_reward_is_that_of_the_last_token() -> None:
    options = GrpoOptions(model="m", advantage="gae", discount=0.9, gae_lambda=0.8)
    rewards, values = RNG.random(4), RNG.standard_normal((4, 1, 7))
    made = estimated(batch_of(rewards, forced=True), values, options)
    for row, length in enumerate(LENGTHS):
        given = np.zeros(7)
        given[length - 1] = rewards[row]
        wanted = by_the_sum(given, values[row, 0], length, 0.9, 0.8)
        np.testing.assert_allclose(made["advantage"][row, 0, :length], wanted, atol=1e-6)
        returns = np.array(wanted) + values[row, 0, :length]
        np.testing.assert_allclose(made["returns"][row, 0, :length], returns, atol=1e-6)
        assert not made["advantage"][row, 0, length:].any()


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3)])
def test_normalised_over_all_batches_and_processes(cuts: tuple[int, ...]) -> None:
    options = GrpoOptions(model="m", advantage="gae")
    batch = batch_of(RNG.random(4), forced=True)
    batch |= estimated(batch, RNG.standard_normal((4, 1, 7)), options)
    chosen = batch["advantage"][batch["loss_mask"] > 0].astype(np.float64)
    wanted = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    returns = batch["returns"][batch["loss_mask"] > 0].astype(np.float64)
    left = returns - batch["values"][batch["loss_mask"] > 0]
    explained = 1 - left.var() / returns.var()
    names = ("loss_mask", "advantage", "returns", "values")
    rows = np.split(np.arange(4), cuts)
    parts = [{name: batch[name][some] for name in names} for some in rows]
    own: list[Any] = []
    for part in parts:  # each is a process that has its batch twice, and counts half of it
        normalise([{k: v.copy() for k, v in part.items()}] * 2, 0.5,
                  lambda x: (own.append(x), [x])[1])  # fmt: skip
    sums = []
    for part, mine in zip(parts, own, strict=True):

        def everyone(x: Any, mine: Any = mine) -> Any:
            np.testing.assert_allclose(x, mine)
            return own

        sums.append(normalise([part], 1.0, everyone))
    found = np.concatenate([p["advantage"][p["loss_mask"] > 0] for p in parts])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    total = Estimates(*np.sum(sums, 0))
    assert total.valued == len(chosen)
    assert total.explained_variance == pytest.approx(explained, abs=1e-6)
    assert Estimates().explained_variance == 0


def test_a_constant_has_no_advantage() -> None:
    parts = [
        {"loss_mask": np.ones((1, 1, n)), "advantage": np.full((1, 1, n), 0.3)} for n in (3, 1)
    ]
    for part in parts:
        part |= {"returns": part["advantage"], "values": 0 * part["advantage"]}
    normalise(parts, 1.0, lambda x: [x])
    assert all(np.abs(part["advantage"]).max() <= 1e-6 for part in parts)


def test_losses_of_values(ops: Any) -> None:
    value, before, returns = RNG.standard_normal((3, 5, 6)).astype(np.float32)
    for clip in (0.2, 0.0):
        options = GrpoOptions(model="m", advantage="gae", value_clip=clip)
        arrays = ops.to_device({"v": value, "b": before, "r": returns})
        loss, far = value_losses(arrays["v"], arrays["b"], arrays["r"], options, ops)
        near = before + np.clip(value - before, -clip, clip) if clip else value
        wanted = np.maximum((value - returns) ** 2, (near - returns) ** 2) / 2
        made = ops.to_numpy({"loss": loss, "far": far})
        np.testing.assert_allclose(made["loss"], wanted, atol=1e-6)
        np.testing.assert_array_equal(made["far"], (near - returns) ** 2 > (value - returns) ** 2)


def test_the_head_begins_at_zero_and_reads_hidden_states(ops: Any) -> None:
    weight, bias = value_head(SPEC)
    assert (weight.shape, bias.shape) == ((1, 32), (1,)) and weight.init.kind == "zeros"
    x, w = RNG.standard_normal((2, 3, 32)).astype(np.float32), RNG.random((1, 32), np.float32)
    held = ops.to_device({"value_head": w, "value_bias": np.ones(1, np.float32), "x": x})
    made = ops.to_numpy({"v": token_values(held, held["x"], ops)})["v"]
    np.testing.assert_allclose(made, x @ w[0] + 1, atol=1e-5)


def rows() -> dict[str, np.ndarray]:
    """Three samples of three tokens behind prompts of two."""
    rng = np.random.default_rng(5)
    ids = rng.integers(1, 41, (3, 5)).astype(np.int32)
    shape = (3, 1, 3)
    targets = np.concatenate([ids[:, 2:], rng.integers(1, 41, (3, 1))], 1)[:, None, 1:4]
    return {
        "input_ids": ids, "completion_at": np.array([[2, 3, 4]] * 3, np.int32),
        "targets": targets.astype(np.int32).reshape(shape), "loss_mask": np.ones(shape, np.float32),
        "weights": np.ones(shape, np.float32), "share": np.full((3, 1, 1), 3, np.float32),
        "sampler": np.full(shape, -2, np.float32), "old": np.full(shape, -3.6, np.float32),
        "advantage": rng.standard_normal(shape).astype(np.float32),
        "values": rng.standard_normal(shape).astype(np.float32),
        "returns": rng.standard_normal(shape).astype(np.float32),
        "slot": np.ones((3, 1), np.float32),
    }  # fmt: skip


def test_gradients_are_those_of_both_losses_in_both_backends() -> None:
    """Policy loss + coefficient · value loss; the head's gradient by hand, the others by torch."""
    torch = pytest.importorskip("torch", reason="the reference")
    from sabia.core.model.forward import hidden
    from sabia.core.model.init import init_params
    from sabia.core.train.stepper_factory import make_stepper

    options = GrpoOptions(model="m", advantage="gae", updates=2, value_coefficient=0.3)
    params = init_params(SPEC, 1)

    def loss(*given: Any, value: Any = options) -> Any:
        return grpo_loss(*given, options=options, value=value)

    heads, batch, found = value_head(SPEC), rows(), {}
    for backend in ("torch", "jax"):
        pytest.importorskip(backend, reason="both backends")
        stepper = make_stepper(backend, SPEC, params, loss, heads=heads)
        found[backend] = stepper.gradients(batch)
    again = make_stepper("torch", SPEC, params, loss, heads=heads, micro_batch=1)
    found["micro"] = again.gradients({**batch, "slot": np.eye(3, dtype=np.float32)})
    for name, gradient in found["torch"].items():
        np.testing.assert_allclose(found["micro"][name], gradient, atol=1e-6)
        np.testing.assert_allclose(found["jax"][name], gradient, atol=1e-6)
    assert np.abs(found["torch"]["value_head"]).max() > 0.01
    ops = load_ops("torch")
    with torch.no_grad():
        x = hidden(SPEC, ops.to_device(params), batch["input_ids"], ops).numpy()[:, 2:]
    # V = 0 is at most the range away from some of the old values: only there does the loss move
    old, returns = batch["values"][:, 0], batch["returns"][:, 0]
    near = old + np.clip(-old, -0.2, 0.2)
    slope = np.where(returns**2 >= (near - returns) ** 2, -returns, 0)
    wanted = 0.3 * (slope[..., None] * x).sum((0, 1)) / 9
    np.testing.assert_allclose(found["torch"]["value_head"][0], wanted, atol=1e-6)
    np.testing.assert_allclose(found["torch"]["value_bias"], 0.3 * slope.sum() / 9, atol=1e-6)
    plain = make_stepper("torch", SPEC, params, lambda *given: loss(*given, value=None))
    for name, gradient in plain.gradients(batch).items():  # the head is 0: no other gradient yet
        np.testing.assert_allclose(found["torch"][name], gradient, atol=1e-6)


def test_what_a_run_records_and_refuses() -> None:
    from sabia.core.errors import UsageError
    from sabia.core.recipes.grpo.policy_config import identity, optimizer_config

    def of(**values: Any) -> GrpoOptions:
        made = GrpoOptions(model="m", **values)
        made.check()
        return made

    assert optimizer_config(of(advantage="gae", value_lr=3.0)).lr_scales == {
        "value_head": 3.0, "value_bias": 3.0}  # fmt: skip
    # a bias as slow as the weights leaves the mean return to them
    assert optimizer_config(of(advantage="gae", value_lr=3.0), 64).lr_scales == {
        "value_head": 3.0,
        "value_bias": 192.0,
    }
    assert not optimizer_config(of(), 64).lr_scales
    plain, made = identity(of()), identity(of(advantage="gae"))
    assert made["advantage"] == "gae" and plain.keys() == made.keys() - {"advantage"}
    for name, value in (("gae_lambda", 0.5), ("discount", 0.9), ("value_clip", 0.0),
                        ("value_coefficient", 1.0), ("value_lr", 1.0)):  # fmt: skip
        assert identity(of(advantage="gae", **{name: value})) != made
    of(advantage="gae", group=1)
    for values, message in (
        ({"group": 1}, r"--group: 1 \(expected 2 or more, or --advantage gae\)"),
        ({"advantage": "gae", "refill": 2}, "--refill: not together with --advantage gae"),
    ):
        with pytest.raises(UsageError, match=message):
            of(**values)
