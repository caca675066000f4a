"""How often the verdicts of `seed_noise` are wrong, on simulated scores of runs."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from sabia.core.bench.seed_noise import (
    BETTER,
    EQUAL,
    FIRST_LOOK,
    OPEN,
    WORSE,
    Look,
    Rule,
    spending,
    t_quantile,
)

PAIRS = 10
MARGIN = 0.05
ITEMS = 60


def losses(
    rng: np.random.Generator,
    gap: float,
    noise: tuple[float, float] = (0.008, 0.008),
    shared: float = 0.5,
    of_items: float = 0.01,
    pairs: int = PAIRS,
    tails: float = math.inf,
) -> tuple[np.ndarray, np.ndarray]:
    """[pairs, ITEMS] nats of two ways whose losses differ by `gap` on all items there could be.

    noise: standard deviation between seeds of either way, of whose variance `shared` is common to
    both runs of a seed; of_items: between the items' own gaps; tails: degrees of freedom of the t
    distribution of the seeds' noise. Lengths are skewed, and each item of each run has noise of its
    own.
    """
    lengths = rng.lognormal(5, 0.7, ITEMS)
    # weighted by length, own gaps have the mean 0 over many draws of the items
    own = rng.normal(0, of_items, ITEMS) * math.sqrt(lengths.mean()) / np.sqrt(lengths)
    common = drawn(rng, pairs, tails) * math.sqrt(shared)
    ways = []
    for number, spread in enumerate(noise):
        alone = drawn(rng, pairs, tails) * math.sqrt(1 - shared)
        each = rng.normal(0, 0.01, (pairs, ITEMS))
        score = number * (gap + own) + spread * (common + alone) + each
        ways.append(3.0 * lengths * np.exp(score))
    return ways[0], ways[1]


def drawn(rng: np.random.Generator, count: int, tails: float) -> np.ndarray:
    """Noise of variance 1, [count, 1]."""
    if math.isinf(tails):
        return rng.normal(0, 1, (count, 1))
    return rng.standard_t(tails, (count, 1)) / math.sqrt(tails / (tails - 2))


def looks(rule: Rule, first: np.ndarray, second: np.ndarray) -> Iterator[Look]:
    """The states after each pair, until the rule ends."""
    clusters = np.arange(first.shape[1])
    for pairs in range(FIRST_LOOK, len(first) + 1):
        look = rule.look(first[:pairs], second[:pairs], clusters)
        yield look
        if rule.ends(look):
            return


def right(verdict: str, gap: float, margin: float) -> bool:
    return {BETTER: gap < 0, WORSE: gap > 0, EQUAL: abs(gap) <= margin, OPEN: True}[verdict]


def test_quantiles_are_those_of_students_t_and_never_smaller() -> None:
    for degrees in (1, 1.2, 1.5, 2, 2.7, 3, 4.4, 8, 20.5, 99.5, 150, 1000):
        for tail in (0.05, 0.01, 1e-3, 1e-4):
            ratio = t_quantile(tail, degrees) / stats.t.isf(tail / 2, degrees)
            assert 0.9999 < ratio < (1.04 if degrees % 1 else 1.001), (degrees, tail)


def test_the_looks_share_the_whole_error_and_no_more() -> None:
    spent = [spending(pairs)[0] for pairs in range(FIRST_LOOK, 20_000)]
    assert 0.9999 < sum(spent) <= 1 and spent == sorted(spent, reverse=True)


NULLS = {
    "as measured": {},
    "seeds alone": {"of_items": 0.0},
    "independent seeds": {"shared": 0.0},
    "one way is steady": {"noise": (0.001, 0.01), "shared": 0.0},
    "alike": {"shared": 0.95},
    "items differ": {"of_items": 0.08},
    "heavy tails": {"tails": 3},
}


def wrong_ones(name: str, count: int, margin: float = 1e-9) -> int:
    """How many of so many comparisons have a wrong verdict at any of the looks, also after the rule
    would have ended. The ways differ by just more than the margin, by nothing where it is 1e-9."""
    rng, rule, wrong = np.random.default_rng(len(name)), Rule(0.05, margin, PAIRS), 0
    gap, clusters = (1.001 * rule.margin if margin > 1e-9 else 0.0), np.arange(ITEMS)
    for _ in range(count):
        first, second = losses(rng, gap, **NULLS[name])
        seen = [rule.look(first[:n], second[:n], clusters) for n in range(2, PAIRS + 1)]
        wrong += not all(right(look.verdict, gap, rule.margin if gap else 0.0) for look in seen)
    return wrong


@pytest.mark.parametrize("name", NULLS)
def test_at_most_one_of_twenty_nulls_has_a_wrong_verdict_at_any_of_nine_looks(name: str) -> None:
    assert wrong_ones(name, 60) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("margin", [1e-9, 0.01, 0.03])
def test_the_same_of_two_thousand_also_of_ways_just_outside_the_margin(
    name: str, margin: float
) -> None:
    assert wrong_ones(name, 2000, margin) <= 100


def test_ways_just_outside_the_margin_are_not_called_equal() -> None:
    rng, rule, wrong = np.random.default_rng(0), Rule(0.05, 0.01, PAIRS), 0
    for number in range(400):
        gap = (1 if number % 2 else -1) * 1.001 * rule.margin
        first, second = losses(rng, gap, noise=(0.003, 0.003), of_items=0.002)
        wrong += any(
            not right(look.verdict, gap, rule.margin) for look in looks(rule, first, second)
        )
    assert wrong <= 20


def planted(rng: np.random.Generator) -> tuple[list[tuple[float, Look]], float]:
    """30 contrasts of 3 to 15 % and 30 nulls at noise as measured: (gap, last look) of each, and
    the mean share of the tokens of five fixed seeds."""
    rule, ends, used = Rule(0.05, MARGIN, 5), [], []
    for number in range(60):
        gap = 0.0 if number % 2 else float(rng.choice([-1, 1]) * rng.uniform(0.03, 0.15))
        first, second = losses(rng, gap, pairs=5)
        last = [*looks(rule, first, second)][-1]
        ends.append((gap, last))
        used.append(last.pairs / 5)
    return ends, float(np.mean(used))


def test_planted_contrasts_and_nulls() -> None:
    ends, used = planted(np.random.default_rng(1))
    decided = [(gap, look) for gap, look in ends if look.verdict != OPEN]
    rightly = sum(right(look.verdict, gap, math.log1p(MARGIN)) for gap, look in decided)
    assert len(decided) >= 50 and rightly >= 0.95 * len(decided)
    assert used <= 0.6, used


def test_most_nulls_are_told_to_be_equal_by_a_small_margin() -> None:
    """By two-sided intervals it would be about half of them."""
    rng, rule = np.random.default_rng(6), Rule(0.05, 0.03, 5)
    ends = [[*looks(rule, *losses(rng, 0.0, pairs=5))][-1] for _ in range(200)]
    assert np.mean([look.verdict == EQUAL for look in ends]) > 0.66
    assert all(max(-look.low, look.high) <= rule.margin for look in ends if look.verdict == EQUAL)


def test_a_forecast_of_more_pairs_is_kept() -> None:
    """Four of ten comparisons end within the pairs that were forecast after five, or nearly so."""
    rng, rule, kept = np.random.default_rng(2), Rule(0.05, 0.001, 200), []
    for _ in range(60):
        first, second = losses(rng, 0.01, of_items=0.001, pairs=60)
        clusters = np.arange(ITEMS)
        look = rule.look(first[:5], second[:5], clusters)
        if look.verdict == OPEN and look.more and look.more < 40:
            at = 5 + look.more
            kept.append(rule.look(first[:at], second[:at], clusters).verdict != OPEN)
    assert len(kept) > 20 and np.mean(kept) > 0.3, (len(kept), np.mean(kept))


def test_few_items_are_named_as_what_is_missing() -> None:
    first, second = losses(np.random.default_rng(3), 0.03, (0.003, 0.003), of_items=0.2)
    rule = Rule(0.05, 0.001, PAIRS)
    look = rule.look(first, second, np.arange(ITEMS))
    assert look.verdict == OPEN and look.more_items > 2
    assert rule.hopeless(look) and rule.ends(look)
    # copies of the pairs and of the items, as many as were forecast, and 5 % more
    pairs, items = (PAIRS + (look.more or 0)) * 21 // 20, int(look.more_items * 1.05) + 1
    ways = [np.tile(np.resize(way, (pairs, ITEMS)), items) for way in (first, second)]
    assert rule.look(*ways, np.arange(ITEMS * items)).verdict != OPEN
    ways = [np.resize(way, (pairs, ITEMS)) for way in (first, second)]
    assert rule.look(*ways, np.arange(ITEMS)).verdict == OPEN


def test_clusters_of_equal_items_count_once() -> None:
    first, second = losses(np.random.default_rng(4), 0.0)
    rule = Rule(0.05, 0.01, PAIRS)
    once = rule.look(first, second, np.arange(ITEMS))
    thrice = rule.look(np.tile(first, 3), np.tile(second, 3), np.tile(np.arange(ITEMS), 3))
    assert thrice.item_noise == pytest.approx(once.item_noise)


def test_noise_is_that_of_the_seeds() -> None:
    first, second = losses(np.random.default_rng(5), 0.0, (0.01, 0.01), 0.75, 0.0, 4000)
    look = Rule(0.05, 0.01, PAIRS).look(first, second, np.arange(ITEMS))
    # and 0.01 / √60 of the items, weighted by skewed lengths
    assert look.noise == pytest.approx(0.0102, rel=0.05)
    assert look.pair_noise == pytest.approx(0.0075, rel=0.08)
