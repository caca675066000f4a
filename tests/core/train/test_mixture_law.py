"""The arithmetic of mixture search: the law is found again, limits hold, weights follow excess."""

import numpy as np
import pytest

from sabia.core.train import mixture_law as room


def true_losses(mixes: np.ndarray) -> np.ndarray:
    """Each source learns from itself with diminishing returns; the second also from the first."""
    own = 2.0 - 0.3 * np.log(mixes + 0.01)
    own[:, 1] -= 0.4 * mixes[:, 0]
    return own


def test_the_law_is_found_from_few_runs() -> None:
    mixes = room.draw_mixes([1, 1, 1], 24, 0)
    noise = np.random.default_rng(1).normal(0, 0.003, (24, 3))
    law = room.fit(mixes, true_losses(mixes) + noise)
    fresh = room.draw_mixes([1, 2, 1], 200, 5)
    assert np.abs(law(fresh) - true_losses(fresh)).max() < 0.05
    assert (law.rank > 0.97).all() and (law.error < 0.03).all()


def test_leave_one_out_is_what_refitting_without_it_predicts() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(12, 4)), rng.normal(size=12)
    _, left_out = room._ridge(x, y, 0.5)
    for i in range(12):
        keep = np.arange(12) != i
        whole = np.concatenate((np.ones((11, 1)), x[keep]), axis=1)
        shrink = np.diag([1e-12, *[0.5] * 4])
        found = np.linalg.solve(whole.T @ whole + shrink, whole.T @ y[keep])
        assert left_out[i] == pytest.approx(found[0] + x[i] @ found[1:], abs=1e-6)


def test_the_best_mix_is_near_the_true_one_and_within_limits() -> None:
    mixes = room.draw_mixes([1, 1, 1], 30, 0)
    law = room.fit(mixes, true_losses(mixes))
    target = np.array([0.0, 1.0, 0.0])
    mix, predicted = room.best_mix(law, [1, 1, 1], target, np.ones(3), 0)
    grid = room.draw_mixes([1, 1, 1], 5000, 9)
    best = (true_losses(grid) @ target).min()
    assert (true_losses(mix[None]) @ target)[0] < best + 0.03 and abs(predicted - best) < 0.06
    limited, _ = room.best_mix(law, [1, 1, 1], target, np.array([1, 0.3, 1]), 0)
    assert limited[1] <= 0.3 + 1e-6 and limited.sum() == pytest.approx(1)
    tight, _ = room.best_mix(law, [1, 1, 1], target, np.array([0.2, 0.3, 0.5]), 0)
    assert tight == pytest.approx([0.2, 0.3, 0.5], abs=1e-6)


def test_draws_are_mixes_and_begin_with_the_prior() -> None:
    drawn = room.draw_mixes([3, 1], 50, 0)
    assert drawn[0] == pytest.approx([0.75, 0.25])
    assert drawn.sum(1) == pytest.approx(1) and (drawn >= 0).all()
    assert (drawn == room.draw_mixes([3, 1], 50, 0)).all()


def test_excess_gains_weight() -> None:
    weights = room.Reweighting(3)
    for _ in range(20):
        weights.update(np.array([0.2, 0.0, np.nan]))
    by_hand = np.full(3, 1 / 3)
    for _ in range(20):
        by_hand = by_hand * np.exp([0.2, 0, 0])
        by_hand = 0.999 * by_hand / by_hand.sum() + 0.001 / 3
    assert weights.weights == pytest.approx(by_hand)
    assert weights.mean[0] > weights.mean[1] == weights.mean[2]
    assert weights.mean.sum() == pytest.approx(1)


def test_row_weights_make_the_weighted_mean_over_sources() -> None:
    rng = np.random.default_rng(0)
    source, tokens = np.array([0, 0, 2, 2, 2]), np.array([3.0, 5, 2, 2, 4])
    loss, wanted = rng.random(5), np.array([0.5, 0.3, 0.2])
    scale = room.row_weights(wanted, source, tokens)
    mean = [np.average(loss[source == s], weights=tokens[source == s]) for s in (0, 2)]
    expected = (0.5 * mean[0] + 0.2 * mean[1]) / 0.7
    assert (scale * tokens * loss).sum() / (scale * tokens).sum() == pytest.approx(expected)
    assert (scale * tokens).sum() == pytest.approx(tokens.sum())
