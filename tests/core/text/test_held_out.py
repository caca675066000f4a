"""Held-out figures against their definitions, pair by pair and count by count."""

import numpy as np
import pytest

from sabia.core.text.classify import held_out_metrics

RANDOM = np.random.default_rng(4)


def test_auc_is_the_share_of_pairs_told_apart() -> None:
    for n in (2, 7, 40):
        true = np.arange(n) % 3 == 0
        scores = RANDOM.integers(0, 6, n).astype(float)
        pairs = scores[true][:, None] - scores[~true][None]
        expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
        assert held_out_metrics.auc(true, scores) == pytest.approx(expected)
    assert np.isnan(held_out_metrics.auc(np.ones(3, bool), np.arange(3.0)))


def test_one_of_counts_unknown_labels_as_missed() -> None:
    scores = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    agreement, figures = held_out_metrics.single_label_metrics(
        ("a", "b"), ["a", "b", "b", "c"], scores
    )
    by_name = {one.label: one for one in figures}
    assert agreement.accuracy == 0.5
    a, b, c = (by_name[name] for name in "abc")
    assert (a.precision, a.recall, a.f1) == (1 / 3, 1.0, 0.5)
    assert (b.precision, b.recall, b.f1) == (1.0, 0.5, 2 / 3)
    assert c.recall == 0.0 and np.isnan(c.precision) and np.isnan(c.auc)
    assert agreement.macro_f1 == pytest.approx((0.5 + 2 / 3 + 0) / 3)


def test_any_of_and_numbers() -> None:
    true = np.array([[1, 0], [1, 1], [0, 0]], bool)
    scores = np.array([[0.9, 0.6], [0.5, 0.7], [0.1, 0.2]])
    agreement, figures = held_out_metrics.multi_label_metrics(("x", "y"), true, scores)
    assert agreement.accuracy == pytest.approx(2 / 3)
    assert figures[0].f1 == 1.0 and figures[1].precision == 0.5
    values = RANDOM.standard_normal(30)
    metrics = held_out_metrics.regression_metrics(values, np.exp(values))
    assert metrics.spearman == pytest.approx(1.0)
    assert metrics.pearson == pytest.approx(np.corrcoef(values, np.exp(values))[0, 1])
    assert held_out_metrics.regression_metrics(np.zeros(0), np.zeros(0)).documents == 0
