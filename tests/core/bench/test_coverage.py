"""How often the 95 % intervals cover the true value: exactly where that can be counted, else in
simulations with a fixed seed."""

from functools import cache
from math import comb

import numpy as np
import pytest

from sabia.core.bench import statistics as s

DRAWS = 1_000
NOISE = 2 * (0.935 * 0.065 / DRAWS) ** 0.5  # of one simulated coverage
SIZES = (15, 16, 17, 20, 21, 24, 25, 26, 27, 30, 36, 42, 50, 75, 100, 200, 500)
RUBRICS = (15, 30, 50, 100, 200, 350, 500)
SHARES = np.arange(0.02, 0.9801, 0.001)


def over_sizes(sizes: tuple[int, ...], means: np.ndarray) -> float:
    """The average over every n from 15 to 500 of means[size], linear between the sizes."""
    return float(np.interp(np.arange(15, 501), sizes, means).mean())


@cache
def of_shares() -> np.ndarray:
    """Coverage [size, share] of shares of independent binary items, by enumeration."""
    covers = []
    for n in SIZES:
        made = [s.mean_interval(np.repeat([1.0, 0.0], [k, n - k])) for k in range(n + 1)]
        low, high = (np.array([getattr(i, end) for i in made]) for end in ("low", "high"))
        ways = np.array([comb(n, k) for k in range(n + 1)], float)
        seen = np.arange(n + 1)
        weights = ways * SHARES[:, None] ** seen * (1 - SHARES[:, None]) ** (n - seen)
        inside = (low <= SHARES[:, None]) & (SHARES[:, None] <= high)
        covers.append((weights * inside).sum(1))
    return np.array(covers)


def test_shares_of_independent_items() -> None:
    assert of_shares().min() >= 0.935 and 0.935 <= of_shares().mean() <= 0.965
    assert of_shares()[-1].mean() <= 0.952  # what small samples need is no more there


SKEWED = {
    "beta(8, 1)": (lambda draw, n: draw.beta(8, 1, n), 8 / 9),
    "beta(1, 6)": (lambda draw, n: draw.beta(1, 6, n), 1 / 7),
    "5 items": (lambda draw, n: draw.binomial(5, 0.9, n) / 5, 0.9),
    "beta(20, 1/2)": (lambda draw, n: draw.beta(20, 0.5, n), 20 / 20.5),
    "beta(30, 2)": (lambda draw, n: draw.beta(30, 2, n), 15 / 16),
    "mostly 1": (lambda draw, n: np.where(draw.random(n) < 0.8, 1, draw.beta(2, 2, n)), 0.9),
    "beta(10, 0.2)": (lambda draw, n: draw.beta(10, 0.2, n), 10 / 10.2),
    "beta(0.2, 10)": (lambda draw, n: draw.beta(0.2, 10, n), 0.2 / 10.2),
    "rarely half": (
        lambda draw, n: np.where(draw.random(n) < 0.15, draw.beta(2, 2, n), draw.beta(40, 1, n)),
        0.15 / 2 + 0.85 * 40 / 41,
    ),
    "rarely half of few": (
        lambda draw, n: np.where(draw.random(n) < 0.1, draw.beta(2, 2, n), draw.beta(1, 40, n)),
        0.1 / 2 + 0.9 / 41,
    ),
    "10 items": (lambda draw, n: draw.binomial(10, draw.beta(6, 0.7, n)) / 10, 6 / 6.7),
}


def mixture(rare: float, value: float, of: tuple[float, float]):
    """Exactly `value` with this probability, else a beta distribution."""
    mean = rare * value + (1 - rare) * of[0] / sum(of)
    return lambda draw, n: np.where(draw.random(n) < rare, value, draw.beta(*of, n)), mean


RARE = {
    "0 of 40,1": (0.0, (40, 1), (0.02, 0.05, 0.1, 0.15, 0.3)),
    "1 of 1,40": (1.0, (1, 40), (0.05, 0.1, 0.15)),
    "0 of 8,1": (0.0, (8, 1), (0.05, 0.1)),
    "0 of 20,20": (0.0, (20, 20), (0.05, 0.1)),
}


def coverage(values, truth: float, seed: int, clusters: np.ndarray | None = None) -> float:
    draw, hits = np.random.default_rng(seed), 0
    for _ in range(DRAWS):
        interval = s.mean_interval(values(draw), clusters, share=True)
        hits += interval.low <= truth <= interval.high
    return hits / DRAWS


@cache
def of_skewed_shares() -> list[float]:
    return [
        coverage(lambda draw, n=n, of=of: of(draw, n), truth, n)
        for of, truth in SKEWED.values()
        for n in RUBRICS
    ]


def test_skewed_shares_of_rubrics() -> None:
    assert min(of_skewed_shares()) >= 0.935 - NOISE


@cache
def of_rare_values() -> list[float]:
    return [
        coverage(lambda draw, n=n, of=of: of(draw, n), truth, n)
        for value, most, shares in RARE.values()
        for of, truth in (mixture(share, value, most) for share in shares)
        for n in (15, 30, 100)
    ]


def test_rare_scores_of_exactly_zero_or_one() -> None:
    """With none of them in a sample, nothing tells that there are any."""
    assert min(of_rare_values()) >= 0.935 - NOISE


@pytest.mark.parametrize("size", [15, 24, 50, 100, 200])
def test_two_values_counted_exactly(size: int) -> None:
    """All but a few have the same score, and the others 0: the hardest case of each size."""
    for most in (1 - 1e-6, 0.5):
        made = [
            s.mean_interval(np.repeat([most, 0.0], [k, size - k]), share=True)
            for k in range(size + 1)
        ]
        low, high = (np.array([getattr(i, end) for i in made]) for end in ("low", "high"))
        for share in np.arange(0.01, 0.5, 0.002):
            weights = [comb(size, k) * share ** (size - k) * (1 - share) ** k
                       for k in range(size + 1)]  # fmt: skip
            truth = (1 - share) * most
            inside = (low <= truth + 1e-9) & (truth - 1e-9 <= high)
            assert weights @ inside >= 0.935, share


def test_the_average_over_all_of_these() -> None:
    """Each n from 15 to 500 counts alike; the three kinds of scores do, too."""
    skewed = np.reshape(of_skewed_shares(), (len(SKEWED), len(RUBRICS)))
    kinds = (
        over_sizes(SIZES, of_shares().mean(1)),
        over_sizes(RUBRICS, skewed.mean(0)),
        float(np.mean(of_clusters())),
    )
    assert 0.935 <= np.mean(kinds) <= 0.965, kinds


def test_widths_are_those_of_the_spread_where_samples_are_large() -> None:
    draw = np.random.default_rng(0)
    for a, b, least in ((2, 2, 15), (8, 1, 200), (30, 2, 2000)):
        x = draw.beta(a, b, least)
        half = s.t_value(least - 1) * s.standard_error(x, np.arange(least))
        assert s.mean_interval(x, share=True).half_width == pytest.approx(half, rel=0.1)


def test_equal_values_are_as_uncertain_as_binary_ones() -> None:
    for value in (0.7, 0.1 + 0.2, 1.0):  # also where their mean is rounded
        interval = s.mean_interval(np.full(15, value), share=True)
        assert interval.half_width > 0.1


@cache
def of_clusters() -> list[float]:
    """Coverage with fifteen clusters of eight binary items."""
    clusters, covers = np.repeat(np.arange(15), 8), []
    for truth in (0.1, 0.3, 0.5, 0.7, 0.9):
        for alike in (0.05, 0.2, 0.4):  # intraclass correlation
            a, b = (share * (1 / alike - 1) for share in (truth, 1 - truth))

            def values(draw: np.random.Generator, a: float = a, b: float = b) -> np.ndarray:
                chances = np.repeat(draw.beta(a, b, 15), 8)
                return (draw.random(120) < chances).astype(float)

            covers.append(coverage(values, truth, 3, clusters))
    return covers


def test_fifteen_clusters_of_eight() -> None:
    assert min(of_clusters()) >= 0.935 - NOISE and np.mean(of_clusters()) <= 0.975


def test_clusters_of_which_few_fail_as_a_whole() -> None:
    """As the samples of items that a model never solves, beside items that it mostly does."""
    for count in (15, 30):
        clusters = np.repeat(np.arange(count), 8)
        for rare in (0.05, 0.1, 0.15):

            def values(draw: np.random.Generator, n: int = count, rare: float = rare) -> np.ndarray:
                chances = np.repeat(np.where(draw.random(n) < rare, 0.0, 0.98), 8)
                return (draw.random(n * 8) < chances).astype(float)

            covered = coverage(values, (1 - rare) * 0.98, 5, clusters)
            assert covered >= 0.935 - NOISE, (count, rare)


def test_points_as_shares_of_sums() -> None:
    draw, hits, truth = np.random.default_rng(0), 0, 0.8
    for _ in range(DRAWS):
        most = draw.choice([0.5, 1.0, 2.0], 40)
        interval = s.share_of_sums(most * draw.beta(4, 1, 40), most, np.arange(40))
        hits += interval.low <= truth <= interval.high
    assert hits / DRAWS == pytest.approx(0.95, abs=0.015 + NOISE)


@pytest.mark.parametrize("n", [15, 30, 100, 500])
def test_paired_differences_of_which_few_or_none_are_seen(n: int) -> None:
    draw, hits = np.random.default_rng(n), []
    for worse, better in ((0.02, 0.0), (0.05, 0.02), (0.1, 0.1), (0.3, 0.1)):
        if worse * n < 2:
            worse = 2 / n  # where fewer are expected, no interval of 95 % knows of them
        u = draw.random((DRAWS, n))
        change = np.where(u < worse, -1.0, np.where(u < worse + better, 1.0, 0.0))
        pairs = [s.paired(one < 0, one + (one < 0), np.arange(n), n, 1.0) for one in change]
        ends = [(pair.difference.low, pair.difference.high) for pair in pairs]
        hits.append(np.mean([low <= better - worse <= high for low, high in ends]))
    assert min(hits) >= 0.93 - NOISE, hits


def test_equal_pairs_prove_little() -> None:
    pair = s.paired(np.ones(20), np.ones(20), np.arange(20), 20, 1.0)
    assert -0.2 < pair.difference.low < -0.05 and pair.difference.high == -pair.difference.low
    assert s.paired(np.ones(20), np.ones(20), np.arange(20), 20).difference.low == 0  # unbounded


def test_the_detectable_difference_is_found_in_eighty_of_a_hundred() -> None:
    draw, n, spread = np.random.default_rng(1), 60, 0.3
    zeros = np.zeros(n)
    of_one = [s.paired(zeros, draw.normal(0, spread, n), np.arange(n), n) for _ in range(200)]
    least = float(np.mean([pair.detectable for pair in of_one]))
    p_values = [
        s.paired(zeros, draw.normal(least, spread, n), np.arange(n), n).p_value
        for _ in range(DRAWS)
    ]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.8, abs=0.04)
