"""The GRPO losses against plain float64 loops over samples and tokens."""

import itertools
import math

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.options.grpo import PolicyLoss
from sabia.core.train.losses.grpo import (
    advantages,
    aggregation_weights,
    informative_groups,
    policy_losses,
)

GROUPS, SAMPLES, TOKENS, LONGEST = 4, 3, 7, 11
CAP = 1.1  # one that the rows below pass


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(3)
    lengths = random.integers(1, TOKENS + 1, GROUPS * SAMPLES)
    old = -random.gamma(2.0, 0.7, (GROUPS * SAMPLES, TOKENS))
    noise = random.standard_normal
    rewards = random.integers(0, 3, (GROUPS, SAMPLES)) / 2.0
    rewards[1] = 0.5
    rewards[2, 0] = np.nan
    rewards[3] = (0.0, 0.5, 1.0)
    return {
        "mask": (np.arange(TOKENS) < lengths[:, None]).astype(float),
        "old": old,
        "logp": np.minimum(old + 0.4 * noise(old.shape), -0.01),
        "sampler": np.minimum(old + 0.1 * noise(old.shape), -0.01),
        "ref": np.minimum(old + 0.4 * noise(old.shape), -0.01),
        "rewards": rewards,
    }


def loop_advantage(group, i, std):
    valid = [r for r in group if not math.isnan(r)]
    if math.isnan(group[i]):
        return 0.0
    a = group[i] - sum(valid) / len(valid)
    if std:
        variance = sum((r - sum(valid) / len(valid)) ** 2 for r in valid) / (len(valid) - 1)
        a /= math.sqrt(variance) + 1e-4
    return a


def loop_loss(rows, config, std=False):
    """Every formula spelled out for one token at a time."""
    per_row, tokens = [], 0
    for row in range(GROUPS * SAMPLES):
        group = rows["rewards"][row // SAMPLES].tolist()
        a = loop_advantage(group, row % SAMPLES, std)
        if math.isnan(group[row % SAMPLES]):
            continue
        n = int(rows["mask"][row].sum())
        logp, old, sampler, ref = (rows[k][row, :n] for k in ("logp", "old", "sampler", "ref"))
        losses = []
        for t in range(n):
            whole = config.ratio == "sequence"
            rho = math.exp(np.mean(logp - old)) if whole else math.exp(logp[t] - old[t])
            within = min(max(rho, 1 - config.clip_low), 1 + config.clip_high)
            loss = -min(rho * a, within * a)
            if config.dual_clip and a < 0:
                loss = min(loss, -config.dual_clip * a)
            weight = math.exp((old - sampler).sum())
            loss *= {
                "none": 1.0,
                "token-cap": min(math.exp(old[t] - sampler[t]), CAP),
                "sequence-cap": min(weight, CAP),
                "sequence-mask": weight if weight <= CAP else 0.0,
            }[config.correction]
            d = ref[t] - logp[t]
            k3 = math.exp(d) - d - 1
            losses.append(loss + config.beta * k3)
        per_row.append(losses)
        tokens += n
    if config.aggregation == "seq-mean":
        return sum(sum(x) / len(x) for x in per_row) / len(per_row)
    total = sum(map(sum, per_row))
    return total / (tokens if config.aggregation == "token" else len(per_row) * LONGEST)


def our_loss(rows, config, std=False, keep=None):
    """(numerator, denominator) over the rows with a reward, or those of them in `keep`."""
    a = advantages(rows["rewards"], std).reshape(-1, 1)
    valid = ~np.isnan(rows["rewards"].ravel())
    chosen = np.flatnonzero(valid if keep is None else valid & keep)
    x = {name: rows[name][chosen] for name in ("logp", "old", "mask", "sampler", "ref")}
    extra = {"sampler": x["sampler"], "ref": x["ref"]}
    losses, _ = policy_losses(
        x["logp"], x["old"], x["mask"], a[chosen], config, np, **extra
    )  # fmt: skip
    weights, shares = aggregation_weights(x["mask"], config.aggregation, LONGEST)
    return (losses * weights).sum(), shares.sum()


CASES = [
    *(PolicyLoss(aggregation=a, ratio=r, updates=2)
      for a, r in itertools.product(("token", "seq-mean", "dr"), ("token", "sequence"))),
    PolicyLoss(dual_clip=1.2, updates=2),
    PolicyLoss(beta=0.05),
    *(PolicyLoss(correction=c, beta=0.01, correction_cap=CAP)
      for c in ("token-cap", "sequence-cap", "sequence-mask")),
]  # fmt: skip


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("config", CASES, ids=str)
def test_loss_is_the_formula(rows, config, std):
    numerator, denominator = our_loss(rows, config, std)
    assert numerator / denominator == pytest.approx(loop_loss(rows, config, std), abs=1e-12)


@pytest.mark.parametrize("aggregation", ["token", "seq-mean", "dr"])
def test_micro_batches_add_up(rows, aggregation):
    config = PolicyLoss(aggregation=aggregation)
    whole = our_loss(rows, config)
    parts = [our_loss(rows, config, keep=np.arange(12) % 4 == part) for part in range(4)]
    assert np.allclose(np.sum(parts, axis=0), whole, atol=1e-12)


def test_clip_marks_where_it_binds():
    config = PolicyLoss()
    logp = np.log([[0.5, 1.3, 1.1, 0.5, 1.3]])
    mask = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]])
    _, up = policy_losses(logp, np.zeros_like(logp), mask, np.array([[1.0]]), config, np)
    _, down = policy_losses(logp, np.zeros_like(logp), mask, np.array([[-1.0]]), config, np)
    assert up.tolist() == [[0, 1, 0, 0, 0]]
    assert down.tolist() == [[1, 0, 0, 1, 0]]


def test_groups_that_teach_nothing(rows):
    rewards = np.array([[1, 1, 1], [0, 1, 0], [np.nan, 1, 1], [np.nan, np.nan, 1], [np.nan] * 3])
    assert informative_groups(rewards).tolist() == [False, True, False, False, False]
    assert np.isfinite(advantages(rewards)).all()
    assert advantages(rewards)[2:].tolist() == [[0.0] * 3] * 3
    assert advantages(rows["rewards"])[3].tolist() == [-0.5, 0.0, 0.5]


def test_impossible_settings():
    for name, value in (("aggregation", "mean"), ("clip_low", "0"), ("clip_high", "0"),
                        ("beta", "-1"), ("dual_clip", "0.5"), ("ratio", "word"),
                        ("correction", "always"), ("temperature", "0")):  # fmt: skip
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: '?{value}"):
            PolicyLoss.read({"updates": "2", name: value})


@pytest.mark.parametrize("name", ["ratio", "clip_low", "clip_high", "dual_clip"])
def test_the_ratio_of_a_single_update_is_1(name):
    """The options of the ratio are refused where they change nothing."""
    value = {"ratio": "sequence", "dual_clip": "2"}.get(name, "0.1")
    with pytest.raises(UsageError, match="only with --updates 2 or more"):
        PolicyLoss.read({name: value})
    logp = np.log([[0.5, 0.9], [0.2, 0.4]])
    ones, advantage = np.ones_like(logp), np.array([[1.0], [-1.0]])
    changed = PolicyLoss.read({name: value, "updates": "2"})
    losses = [policy_losses(logp, logp, ones, advantage, o, np)[0] for o in (PolicyLoss(), changed)]
    assert np.array_equal(*losses)
