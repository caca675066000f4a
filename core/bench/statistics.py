"""Confidence intervals, and the paired comparison of two models item by item.

Means of binary values over independent items have Wilson intervals; other means the normal interval
with the sample standard deviation (ddof 1). If an item was sampled several times, its samples are
one cluster: the standard error is sqrt(Σ_items (Σ_samples (x - mean))²) / N with the factor
sqrt(C/(C-1)) for C items (Miller 2024, arXiv 2411.00640, section 2.2), and binary values get
Wilson's interval for the number of independent answers with this error. Ratios of sums
(perplexity, bits per byte) are bootstrapped over items. Pairs: exact McNemar if each item has
one binary value, else the normal test of the clustered difference. p-values of one report are
Holm-adjusted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
BOOTSTRAP_DRAWS = 2_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval and the name of the method."""

    value: float
    low: float
    high: float
    method: str

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Paired:
    """Model b minus model a over the items that both have.

    regressed, fixed: binary items (or samples) that only a, or only b, got right.
    """

    difference: Interval
    p_value: float
    test: str
    items: int
    regressed: int
    fixed: int


def z_value(confidence: float = CONFIDENCE) -> float:
    """The two-sided normal quantile: 1.96 for 95 %."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def wilson(successes: float, n: float, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a share."""
    z, share = z_value(confidence), successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # at shares 0 and 1 the ends are exact; rounding must not exclude the value from the interval
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(share, min(share, low), max(share, high), "wilson")


def standard_error(values: np.ndarray, clusters: np.ndarray | None = None) -> float:
    """Standard error of the mean of values[N]; clusters[N] is the number of the item."""
    n = len(values)
    off = np.asarray(values, float) - np.mean(values)
    if clusters is None:
        return float(np.sqrt((off @ off) / (n - 1) / n)) if n > 1 else math.nan
    sums = np.bincount(clusters, weights=off)
    count = len(np.unique(clusters))
    return float(np.sqrt(sums @ sums * count / (count - 1)) / n) if count > 1 else math.nan


def mean_interval(
    values: Sequence[float] | np.ndarray,
    clusters: np.ndarray | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """Interval of a mean; `clusters` if several values belong to one item.

    Binary values get Wilson's interval, others the normal one, clipped to `bounds`. The effective
    number of answers is at most the number of values and at least that of the items.
    """
    x = np.asarray(values, float)
    grouped = clusters is not None and len(np.unique(clusters)) < len(x)
    binary = bool(np.isin(x, (0.0, 1.0)).all())
    if binary and not grouped:
        return wilson(float(x.sum()), len(x))
    error = standard_error(x, clusters if grouped else None)
    if binary and clusters is not None and not math.isnan(error):
        n, share = len(x), float(x.mean())
        items = len(np.unique(clusters))
        effective = min(n, max(share * (1 - share) / error**2 if error else 0, items))
        interval = wilson(share * effective, effective)
        return Interval(share, interval.low, interval.high, "wilson_clustered_by_item")
    half, mean = z_value() * error, float(x.mean())
    method = "normal_clustered_by_item" if grouped else "normal"
    if math.isnan(half):
        return Interval(mean, *bounds, "unknown_one_item")
    return Interval(mean, max(bounds[0], mean - half), min(bounds[1], mean + half), method)


def ratio_bootstrap(numerators: np.ndarray, denominators: np.ndarray) -> Interval:
    """Percentile bootstrap over items of Σ numerators / Σ denominators."""
    rng = np.random.default_rng(0)
    n = len(numerators)
    estimates = np.empty(BOOTSTRAP_DRAWS)
    for draw in range(BOOTSTRAP_DRAWS):
        picked = rng.integers(0, n, n)
        estimates[draw] = numerators[picked].sum() / denominators[picked].sum()
    low, high = np.quantile(estimates, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    value = float(numerators.sum() / denominators.sum())
    return Interval(value, float(low), float(high), "bootstrap_over_items")


def macro_mean(intervals: Sequence[Interval]) -> Interval:
    """Mean of independent tasks' shares; standard errors come from the interval widths."""
    if len(intervals) == 1:
        return intervals[0]
    mean = sum(i.value for i in intervals) / len(intervals)
    half = math.sqrt(sum(i.half_width**2 for i in intervals)) / len(intervals)
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), "macro_mean")


def mcnemar_exact(regressed: int, fixed: int) -> float:
    """Two-sided exact p-value of `regressed` against `fixed` discordant pairs."""
    n, k = regressed + fixed, min(regressed, fixed)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / 2**n)


def paired(a: np.ndarray, b: np.ndarray, clusters: np.ndarray) -> Paired:
    """Compare b[N] with a[N], values of the same items and samples; clusters[N] is the item's
    number."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    difference = y - x
    count = len(np.unique(clusters))
    error = standard_error(difference, clusters)
    mean = float(difference.mean())
    half = z_value() * error if not math.isnan(error) else math.inf
    regressed, fixed = int((difference < 0).sum()), int((difference > 0).sum())
    if count == len(x) and np.isin(np.concatenate([x, y]), (0.0, 1.0)).all():
        test, p = "mcnemar_exact", mcnemar_exact(regressed, fixed)
    else:
        test, p = "normal_clustered_by_item", _normal_p(mean, error)
    interval = Interval(mean, mean - half, mean + half, "normal_clustered_by_item")
    return Paired(interval, p, test, count, regressed, fixed)


def _normal_p(mean: float, error: float) -> float:
    if mean == 0:
        return 1.0
    if error == 0 or math.isnan(error):
        return math.nan
    return 2 * (1 - NormalDist().cdf(abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment; NaN stays NaN and is ignored."""
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, running = list(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - rank)))
        adjusted[i] = running
    return adjusted
