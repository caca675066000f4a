"""Comparison of two ways to train from the scores of pairs of runs, tested after every pair.

A pair is a run of each way with one seed. The score of a run is the logarithm of its summed loss
(nats) over held-out items, so that the difference of two scores is a relative difference of loss.
Runs are compared by their score, because the seed changes it for all items at once: an interval
over items alone takes the luck of a seed for a property of the data.

The interval of the difference holds after all pairs at once, so that training may stop at any look
(a confidence sequence: Darling and Robbins 1967, PNAS 58, 66-68; Howard et al. 2021, Ann. Stat. 49,
arXiv 1810.08240): each look gets a share of the error that is allowed (`spending`), and the sum of
the shares is 1. Most of it goes to the first looks, where a verdict saves the most runs. Ways are
equal by two one-sided tests (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657-680): if they
differ by more than the margin, only one end of an interval can be on the wrong side of it, so that
each end may fail with the whole error of the look. Each look has two intervals, and the shorter one
counts: Student's for the differences of the pairs, which is short where a shared seed moves both
scores alike, and Welch's (1947) for the runs of either way, which has more degrees of freedom; they
share the look's error. Both suppose scores of a normal distribution, Welch's also that a shared
seed does not move the scores apart. The square of the half width from the choice of held-out items,
which more runs do not reduce, is added (Banerjee 1960, Sankhya 22, 357-358: such intervals cover at
least as often as their parts).
`tests/core/bench/test_seed_noise.py` measures how often verdicts are wrong.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from sabia.core.bench import statistics

FIRST_LOOK = 2  # pairs
# after so many pairs: the share of the error that the look gets, and that of its paired interval
LOOKS = {2: (0.35, 0.02), 3: (0.25, 0.1), 4: (0.2, 0.2)}
LATER = 0.2, 0.3  # of all later ones together, and of each
FARTHEST, STEP = 1_000, 1.05  # pairs that a forecast looks at
FORECAST_LOOK = 3  # pairs, from which on a forecast may end the comparison
BETTER, WORSE, EQUAL, OPEN = "better", "worse", "equal", "cannot tell"


@dataclass(frozen=True)
class Look:
    """What `pairs` pairs of runs say about the second way minus the first, in logarithms of loss.

    low, high: the ends of the interval; for `equal` each of them holds with the look's confidence,
    for the other verdicts both do.

    noise: standard deviation between the seeds of a way; pair_noise: between the differences of
    pairs; item_noise: standard error of the difference from the choice of items. more: pairs that,
    with `more_items` times as many items, are expected to give a verdict; None if FARTHEST are not.
    """

    pairs: int
    difference: float
    low: float
    high: float
    noise: float
    pair_noise: float
    item_noise: float
    verdict: str
    more: int | None = 0
    more_items: float = 1.0


@dataclass(frozen=True)
class Rule:
    """When a comparison ends. error: probability of a wrong verdict at any look; delta: relative
    difference below which ways are equal; most: pairs at most."""

    error: float
    delta: float
    most: int
    margin: float = field(init=False)  # delta as a logarithm

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", math.log1p(self.delta))

    def look(self, first: np.ndarray, second: np.ndarray, clusters: np.ndarray) -> Look:
        """The state after n pairs, from losses[n, items] (nats) of both; clusters[items]: the
        number of an item's cluster. Less loss is better."""
        pairs = len(first)
        a, b = np.log(first.sum(1)), np.log(second.sum(1))
        gap, spread = float(np.mean(b - a)), float(np.std(b - a, ddof=1))
        seeds = Seeds(spread**2, float(np.var(a, ddof=1)), float(np.var(b, ddof=1)))
        items = _of_items(first.mean(0), second.mean(0), clusters)
        verdict, half = self._verdict(gap, pairs, seeds, items)
        more, more_items = (0, 1.0) if verdict != OPEN else self._forecast(gap, seeds, items, pairs)
        noise = math.sqrt((seeds.first + seeds.second) / 2)
        return Look(pairs, gap, gap - half, gap + half, noise, spread, math.sqrt(items.variance),
                    verdict, more, more_items)  # fmt: skip

    def hopeless(self, look: Look) -> bool:
        """Whether the most pairs are not expected to give a verdict."""
        if look.verdict != OPEN or look.pairs < FORECAST_LOOK:
            return False
        return look.more is None or look.more_items > 1 or look.pairs + look.more > self.most

    def ends(self, look: Look) -> bool:
        """Whether a comparison ends after this look."""
        return look.verdict != OPEN or look.pairs >= self.most or self.hopeless(look)

    def _verdict(self, gap: float, pairs: int, seeds: "Seeds", items: "Part") -> tuple[str, float]:
        """The verdict, and the half width that it is drawn from."""
        half = self._half(pairs, seeds, items, sides=1)
        if abs(gap) + half <= self.margin:
            return EQUAL, half
        half = self._half(pairs, seeds, items, sides=2)
        if abs(gap) <= half:
            return OPEN, half
        return (BETTER if gap < 0 else WORSE), half

    def _forecast(
        self, gap: float, seeds: "Seeds", items: "Part", pairs: int
    ) -> tuple[int | None, float]:
        """(more pairs, times as many items) that are expected to give a verdict; (None, 1): more
        pairs than a forecast looks at."""
        for later in _later(pairs):
            if self._verdict(gap, later, seeds, items)[0] != OPEN:
                return later - pairs, 1.0
        reach, nothing = max(abs(gap), self.margin - abs(gap)), Part(0.0, items.degrees)
        for later in _later(pairs):
            if self._half(later, seeds, nothing, sides=2) <= reach / 2:
                of_items = self._half(later, Seeds(0.0, 0.0, 0.0), items, sides=2)
                return later - pairs, (of_items / reach) ** 2 / 0.75  # 1/4 + 3/4 = 1
        return None, 1.0

    def _half(self, pairs: int, seeds: "Seeds", items: "Part", sides: int) -> float:
        """Half width of the interval after so many pairs with these variances; sides: on which of
        its ends together it fails with the look's error."""
        spent, of_pairs = spending(pairs)
        error = self.error * spent * 2 / sides
        paired = Part(seeds.pairs / pairs, pairs - 1)
        apart = Part(seeds.first / pairs, pairs - 1) + Part(seeds.second / pairs, pairs - 1)
        return min(
            math.hypot(seeds_part.half(share * error), items.half(share * error))
            for seeds_part, share in ((paired, of_pairs), (apart, 1 - of_pairs))
        )


def spending(pairs: int) -> tuple[float, float]:
    """The share of the error that the look after so many pairs gets, and that of its paired
    interval."""
    if pairs in LOOKS:
        return LOOKS[pairs]
    first = max(LOOKS)  # the sum of 1 / (n (n - 1)) from n = first + 1 on is 1 / first
    return LATER[0] * first / (pairs * (pairs - 1)), LATER[1]


def _later(pairs: int) -> Iterator[int]:
    """Larger numbers of pairs to look at: each up to 40, then in steps of 5 %."""
    while (pairs := max(pairs + 1, int(pairs * STEP))) <= FARTHEST:
        yield pairs


@dataclass(frozen=True)
class Seeds:
    """Variances between seeds: of the differences of pairs, and of the scores of either way."""

    pairs: float
    first: float
    second: float


@dataclass(frozen=True)
class Part:
    """An estimated variance of a mean, and its degrees of freedom."""

    variance: float
    degrees: float

    def __add__(self, other: "Part") -> "Part":
        """The sum of independent ones; degrees of freedom by Welch and Satterthwaite."""
        total = self.variance + other.variance
        if not total:
            return self
        squares = sum(part.variance**2 / part.degrees for part in (self, other))
        return Part(total, total**2 / squares)

    def half(self, error: float) -> float:
        """Half width of Student's interval."""
        return t_quantile(error, self.degrees) * math.sqrt(self.variance)


def _of_items(first: np.ndarray, second: np.ndarray, clusters: np.ndarray) -> Part:
    """The variance from the choice of items, by their part in the logarithm of the ratio."""
    parts = np.bincount(clusters, second / second.sum() - first / first.sum())
    count = len(parts)
    return Part(float(parts @ parts) * count / (count - 1), count - 1)


@lru_cache(1 << 16)
def t_quantile(tail: float, degrees: float) -> float:
    """The value that Student's t exceeds in absolute value with the probability `tail`.

    Between whole degrees of freedom its logarithm is interpolated over their inverse, to 4 %.
    """
    if degrees >= 100:
        return statistics.t_value(int(degrees), 1 - tail)
    below = math.floor(degrees)
    if below < degrees:
        share = (1 / below - 1 / degrees) / (1 / below - 1 / (below + 1))
        low, high = (math.log(t_quantile(tail, n)) for n in (below, below + 1))
        return math.exp(low + share * (high - low))
    low, high = 0.0, math.log1p(2 / tail)  # no quantile is larger than that of one degree
    for _ in range(60):
        middle = (low + high) / 2
        if statistics.t_p_value(math.expm1(middle), below) > tail:
            low = middle
        else:
            high = middle
    return math.expm1((low + high) / 2)
