"""Intervals and paired tests against closed forms, scipy where present, and simulation."""

import math

import numpy as np
import pytest

from sabia.core.bench import statistics as s


def test_agresti_coull_by_hand_and_around_wilson() -> None:
    binomtest = pytest.importorskip("scipy.stats", reason="scipy is the judge").binomtest
    for k, n in ((0, 10), (0, 50), (3, 10), (10, 10), (50, 50), (179, 320), (1, 2000)):
        ours = s.mean_interval(np.repeat([1.0, 0.0], [k, n - k]))
        wilson = binomtest(k, n).proportion_ci(method="wilson")
        assert (max(wilson.low, 0) + min(wilson.high, 1)) / 2 == pytest.approx(
            (ours.low + ours.high) / 2, abs=0.06
        )
        assert 0 <= ours.low <= wilson.low + 1e-12 and wilson.high <= ours.high + 1e-12 <= 1 + 1e-12
        assert ours.low <= ours.value <= ours.high
    # (3 + 1.9207) / (10 + 3.8415) = 0.3555, ± 1.96 sqrt(0.3555 · 0.6445 / 13.8415)
    by_hand = s.agresti_coull(0.3, 10, s.z_value())
    assert (by_hand.low, by_hand.high) == pytest.approx((0.1033, 0.6077), abs=2e-4)
    # z = 1.96 (1 + .075) = 2.107: (3 + 2.2196) / (10 + 4.4393) = 0.3615, ± 2.107 · 0.12643
    by_hand = s.mean_interval(np.repeat([1.0, 0.0], [3, 7]))
    assert (by_hand.low, by_hand.high) == pytest.approx((0.0951, 0.6279), abs=2e-4)


def test_student_t_against_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is the judge")
    for degrees in (1, 2, 3, 4, 7, 14, 30, 101, 999, 5000):
        assert s.t_value(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)
        for t in (0.0, 0.3, 1.0, 2.2, -4.0):
            expected = 2 * stats.t.sf(abs(t), degrees)
            assert s.t_p_value(t, degrees) == pytest.approx(expected, rel=2e-3, abs=1e-12)


def test_mean_interval_is_students_for_other_values() -> None:
    x = np.array([2.0, 5.0, 9.0, 4.0])
    ours = s.mean_interval(x)
    half = s.t_value(3) * x.std(ddof=1) / 2
    assert ours.method == "student_t"
    assert (ours.low, ours.high) == pytest.approx((x.mean() - half, x.mean() + half))


def test_clusters_of_one_are_the_plain_standard_error() -> None:
    x = np.random.default_rng(0).random(50)
    assert s.standard_error(x, np.arange(50)) == pytest.approx(x.std(ddof=1) / 50**0.5)


def test_copies_of_an_item_add_no_certainty() -> None:
    x = np.random.default_rng(1).integers(0, 2, 40).astype(float)
    eight = np.repeat(x, 8)
    ours = s.mean_interval(eight, np.repeat(np.arange(40), 8))
    assert ours.method == "agresti_coull_t_clustered"
    single = s.mean_interval(x)
    assert (ours.low, ours.high) == pytest.approx((single.low, single.high), abs=0.01)
    error = x.std(ddof=1) / 40**0.5
    assert s.standard_error(eight, np.repeat(np.arange(40), 8)) == pytest.approx(error)


def test_samples_without_a_right_answer_are_not_certain() -> None:
    clusters = np.repeat(np.arange(30), 50)
    none = s.mean_interval(np.zeros(1500), clusters)
    assert (none.low, none.high) == (
        0.0,
        pytest.approx(s.mean_interval(np.zeros(30)).high, abs=0.02),
    )


def test_independent_samples_count_in_full() -> None:
    rng = np.random.default_rng(9)
    x = (rng.random(2000) < 0.3).astype(float)
    ours = s.mean_interval(x, np.repeat(np.arange(500), 4))
    assert ours.half_width == pytest.approx(s.mean_interval(x).half_width, rel=0.1)


def test_clustered_interval_covers_as_it_says() -> None:
    rng = np.random.default_rng(2)
    clusters = np.repeat(np.arange(100), 5)
    hits = 0
    for _ in range(400):
        chance = rng.beta(1, 1, 100)
        x = (rng.random(500) < np.repeat(chance, 5)).astype(float)
        interval = s.mean_interval(x, clusters)
        hits += interval.low <= 0.5 <= interval.high
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize(("b", "c"), [(0, 0), (5, 5), (10, 2), (0, 6), (31, 14), (1, 0)])
def test_mcnemar_is_the_exact_binomial_test(b: int, c: int) -> None:
    binomtest = pytest.importorskip("scipy.stats", reason="scipy is the judge").binomtest
    expected = binomtest(b, b + c).pvalue if b + c else 1.0
    assert s.mcnemar_exact(b, c) == pytest.approx(expected, abs=1e-12)


def test_mcnemar_by_hand() -> None:
    assert s.mcnemar_exact(0, 5) == 2 / 32
    assert s.mcnemar_exact(1, 4) == 2 * (1 + 5) / 32


def test_paired_counts_items_and_finds_what_an_unpaired_test_misses() -> None:
    rng = np.random.default_rng(3)
    a = (rng.random(220) < 0.6).astype(float)
    b = a.copy()
    right = np.flatnonzero(a == 1)
    b[right[:14]] = 0
    b[np.flatnonzero(a == 0)[:2]] = 1
    pair = s.paired(a, b, np.arange(220), 220)
    assert (pair.regressed, pair.fixed, pair.items, pair.test) == (14, 2, 220, "mcnemar_exact")
    assert pair.difference.value == pytest.approx(-12 / 220)
    assert pair.p_value < 0.01
    assert s.mean_interval(a).low < s.mean_interval(b).high  # their intervals overlap


def test_paired_with_samples_is_clustered() -> None:
    a, b = np.zeros(40), np.tile([1.0, 0.0], 20)
    pair = s.paired(a, b, np.repeat(np.arange(10), 4), 10)
    assert pair.test == "student_t_clustered"
    assert (pair.items, pair.fixed, pair.regressed) == (10, 20, 0)
    assert pair.difference.value == 0.5


def test_bootstrap_of_a_ratio_matches_the_delta_method() -> None:
    rng = np.random.default_rng(4)
    size = rng.integers(500, 1500, 300).astype(float)
    bits = size * rng.normal(2.0, 0.3, 300)
    ours = s.ratio_bootstrap(bits, size, np.arange(300))
    ratio = bits.sum() / size.sum()
    error = np.sqrt(((bits - ratio * size) ** 2).sum()) / size.sum()
    assert ours.value == pytest.approx(ratio)
    assert ours.half_width == pytest.approx(1.96 * error, rel=0.1)
    assert ours == s.ratio_bootstrap(bits, size, np.arange(300))


def test_holm_is_monotone_and_skips_nan() -> None:
    assert s.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    adjusted = s.holm([0.01, math.nan, 0.5])
    assert adjusted[0] == pytest.approx(0.02) and math.isnan(adjusted[1])


def test_macro_mean_of_two_tasks() -> None:
    mean = s.macro_mean([s.Interval(0.4, 0.3, 0.5, ""), s.Interval(0.6, 0.5, 0.7, "")])
    assert mean.value == pytest.approx(0.5)
    assert mean.half_width == pytest.approx(math.sqrt(0.02) / 2)
