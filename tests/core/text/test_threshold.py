"""Thresholds, calibration and drift, beside brute force and plain formulas."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.options.classify_threshold import Target
from sabia.core.text.classify import drift_stage, score_calibration
from sabia.core.text.classify.score_calibration import (
    OperatingPoint,
    _operating_point,
    choose,
    read_calibration_file,
    wilson,
)
from sabia.core.text.plain_table import plain, sparkline, table


def data(seed: int, n: int = 300, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    truth = draw.random(n) < 0.4
    scores = 1 / (1 + np.exp(-(draw.normal(size=n) * 1.5 + 2 * truth - 1)))
    return (scores.round(1) if ties else scores), truth


def test_wilson_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is the judge")
    low, high = wilson(np.array([0, 3, 50, 7]), np.array([5, 3, 80, 900]))
    for i, (k, n) in enumerate([(0, 5), (3, 3), (50, 80), (7, 900)]):
        actual = stats.binomtest(k, n).proportion_ci(method="wilson")
        assert (low[i], high[i]) == pytest.approx((actual.low, actual.high), abs=1e-9)
    assert [float(x[0]) for x in wilson(np.array([0]), np.array([0]))] == [0, 1]


def measure(scores: np.ndarray, truth: np.ndarray, threshold: float | None) -> OperatingPoint:
    """What a given threshold does to documents."""
    passes = np.zeros(len(scores), bool) if threshold is None else scores >= threshold
    right = int((passes & truth).sum())
    return _operating_point(threshold, len(scores), int(truth.sum()), right, int(passes.sum()))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("target", [Target(), Target(precision=0.8), Target(recall=0.9),
                                    Target(precision=0.7, sure=True)], ids=str)  # fmt: skip
def test_choice_is_the_best_of_all_thresholds(target: Target, ties: bool) -> None:
    for seed in range(5):
        scores, truth = data(seed, ties=ties)
        actual = choose(scores, truth, target)
        every = [measure(scores, truth, float(t)) for t in np.unique(scores)]
        if target.precision:
            reach = [cut for cut in every if target.precision <=
                     (cut.precision_interval[0] if target.sure else cut.precision)]  # fmt: skip
            assert (actual.threshold is None) == (not reach)
            if not reach:
                continue
            assert actual.recall == max(cut.recall for cut in reach)
        elif target.recall:
            assert actual.recall >= 0.9
            assert actual.passing == min(cut.passing for cut in every if cut.recall >= 0.9)
        else:
            assert actual.f1 == max(cut.f1 for cut in every)
        again = measure(scores, truth, actual.threshold)
        assert again == actual  # halfway between two scores, the same rows pass


def test_no_threshold_will_do() -> None:
    scores, truth = np.array([0.1, 0.9, 0.5]), np.array([True, False, False])
    cut = choose(scores, truth, Target(precision=0.9))
    assert cut.threshold is None and cut.passing == 0 and np.isnan(cut.precision)
    assert choose(scores, np.zeros(3, bool), Target()).threshold is None


def test_isotonic_is_the_min_max_formula() -> None:
    for seed in range(4):
        scores, truth = data(seed, 40, ties=seed % 2 == 1)
        values = np.unique(scores)
        mean = {(a, b): truth[(scores >= a) & (scores <= b)].mean()
                for a in values for b in values if a <= b}  # fmt: skip
        expected = [
            max(min(mean[a, b] for b in values if b >= v) for a in values if a <= v) for v in values
        ]
        actual = score_calibration.fit_one("isotonic", scores, truth).probabilities(values)
        assert actual == pytest.approx(expected)


def test_platt_stands_at_the_top_of_its_likelihood() -> None:
    scores, truth = data(2)
    actual = score_calibration.fit_one("platt", scores, truth)
    target = np.where(truth, (truth.sum() + 1) / (truth.sum() + 2), 1 / ((~truth).sum() + 2))

    def loss(a: float, b: float) -> float:
        p = score_calibration.Calibration("platt", (a,), (b,), True).probabilities(scores)
        return float(-(target * np.log(p) + (1 - target) * np.log(1 - p)).sum())

    (a,), (b,) = actual.x, actual.y
    assert actual.logit
    assert all(loss(a + da, b + db) > loss(a, b) for da, db in
               [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)])  # fmt: skip


def test_calibration_mends_scores_that_lie() -> None:
    draw = np.random.default_rng(0)
    probability = draw.random(4000)
    truth = draw.random(4000) < probability
    lying = probability**3
    fitted, crossed = score_calibration.fit(lying, truth, 0)
    before = score_calibration.expected_error(score_calibration.reliability(lying, truth))
    after = score_calibration.expected_error(score_calibration.reliability(crossed, truth))
    assert before > 0.1 > 0.04 > after
    assert np.abs(fitted.probabilities(lying) - probability).mean() < 0.04
    again = score_calibration.from_json(json.loads(json.dumps(vars(fitted))))
    assert np.array_equal(again.probabilities(lying), fitted.probabilities(lying))
    far, _ = score_calibration.fit(
        probability * 300 - 150, truth, 0
    )  # no probability, large numbers
    assert np.isfinite(far.probabilities(np.array([-1e9, 0, 1e9]))).all()


def test_decision_goes_by_language(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    knots = {"method": "isotonic", "x": [0, 1], "y": [0.2, 0.8], "logit": False}
    limits = {"other": 0.5, "pt": 0.3, "de": None}
    path.write_text(json.dumps({"score": "s", "thresholds": limits, "calibration": knots}))
    values = np.array([0.4, 0.4, 0.9, 0.5, np.nan])
    given = read_calibration_file(str(path)).apply(values, pa.array(["pt", "en", "de", None, "pt"]))
    assert np.array_equal(given["s_ok"], [1, 0, 0, 1, np.nan], equal_nan=True)
    assert given["s_probability"][:4] == pytest.approx([0.44, 0.44, 0.74, 0.5])
    for content in ("", "{}", "[]", '{"score": "s", "thresholds": {}}'):
        path.write_text(content)
        with pytest.raises(BadData, match="not a file of"):
            read_calibration_file(str(path))
    with pytest.raises(UsageError, match="No such file"):
        read_calibration_file(str(tmp_path / "none"))


def counts(values: np.ndarray) -> drift_stage.ScoreDistribution:
    made = drift_stage.ScoreDistribution()
    made.add(values)
    return made


def test_drift_figures() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.normal(size=20_000), draw.normal(0.7, 1.2, size=15_000)
    row = drift_stage.compare("x", counts(a), counts(b))
    both = np.sort(np.concatenate([a, b]))
    exact = np.abs(np.searchsorted(np.sort(a), both, "right") / len(a)
                   - np.searchsorted(np.sort(b), both, "right") / len(b)).max()  # fmt: skip
    assert row.ks == pytest.approx(exact, abs=0.005)
    edges = np.quantile(a, np.arange(1, 10) / 10)
    p, q = (np.bincount(np.searchsorted(edges, x), minlength=10) / len(x) for x in (a, b))
    assert row.psi == pytest.approx(((q - p) * np.log(q / p)).sum(), abs=0.02)
    assert row.verdict == "much" and (row.mean_before, row.mean_after) == pytest.approx(
        (a.mean(), b.mean())
    )
    assert drift_stage.compare("x", counts(a), counts(a)).verdict == "none"
    constant = counts(np.full(10, 0.0))
    assert drift_stage.compare("x", constant, counts(np.full(10, -0.0))).psi == 0


def test_small_reports() -> None:
    assert table(("a", "b"), [("x", 1234), ("yy", None)]).splitlines() == [
        "a       b", "x   1,234", "yy      –"]  # fmt: skip
    assert sparkline([0, 1, 8]) == " ▂█"
    assert plain({"a": [float("nan"), 1.0]}) == {"a": [None, 1.0]}
