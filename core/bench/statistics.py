"""Confidence intervals, and the paired comparison of two models item by item.

Shares have the interval of Agresti and Coull (1998): the normal one after z²/2 successes and z²/2
failures are added. For independent binary values its n is their number. Otherwise it is the number
of independent answers that have the standard error of the mean, share (1 - share) / error², and z
is the quantile of Student's t with C - 1 degrees of freedom. The samples of an item, and the items
of a cluster, are one of these C: the error is sqrt(Σ_C (Σ_of C (x - mean))²) / N with the factor
sqrt(C/(C-1)) (Miller 2024, arXiv 2411.00640, section 2.2). Where values are not only 0 and 1 they
may be skewed, as scores of rubrics are, and have the interval of Hall (1992, J. R. Stat. Soc. B 54,
221-228, transformation g1 with the quantiles of Student's t). A small sample may lack rare values:
the ends of these two are at least where the mean would be if the largest part of answers, or of
clusters, of which a sample has none with a probability of 5 % were worth 0, and 1. Without this,
scores of 0 beside many near 1 are covered by .77 only. A sample without them cannot tell whether
there are any, so the interval is too wide where there are none: it covers .97 to 1 of the means of
15 to 50 alike scores, never less than it says. Other means have Student's interval.
Perplexities and bits per byte are bootstrapped. Pairs: exact McNemar if each item is independent
and has one binary value, else the t test of the difference; intervals of differences of bounded
values are those of Agresti and Min (2005) by clusters, with the same allowance for rare values.
p-values of one report are Holm-adjusted. `tests/core/bench/test_coverage.py` measures how often
intervals cover.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeGuard

import numpy as np

CONFIDENCE = 0.95
POWER = 0.8
BOOTSTRAP_DRAWS = 2_000
UNSEEN = 0.05  # probability that a sample has none of the rare values that are allowed for
ROUNDING = 1e-12  # a smaller standard error of a share is that of equal values


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

    @property
    def ends(self) -> dict[str, float]:
        """The numbers by the names that records give them."""
        return {"value": self.value, "ci_low": self.low, "ci_high": self.high}

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The interval of a function of the value that rises with it."""
        value, low, high = map(function, (self.value, self.low, self.high))
        return Interval(value, low, high, self.method)


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
    detectable: float = math.nan  # the smallest difference found in 80 % of such comparisons


def interval_text(interval: Interval | None, form: str = ".3g") -> str:
    """`0.512 [0.489, 0.535]`; '' without an interval."""
    if interval is None:
        return ""
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def finite(value: object) -> float | None:
    """The finite number that a value is, or that a text is as Python reads it; None if it is
    none."""
    try:
        number = float(value)  # type: ignore[arg-type]  # what is no number raises TypeError
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and neither true nor false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbered(names: Iterable[Hashable]) -> np.ndarray:
    """The number of each name, of equal names the same, in the order of their first ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def z_value(confidence: float = CONFIDENCE) -> float:
    """The two-sided normal quantile: 1.96 for 95 %."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def t_value(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t, to 0.2 % (Abramowitz and Stegun 1964, 26.7.5)."""
    tail = (1 - confidence) / 2
    if degrees == 1:
        return math.tan(math.pi * (0.5 - tail))
    if degrees == 2:
        return (1 - 2 * tail) / math.sqrt(2 * tail * (1 - tail))
    z, v = z_value(confidence), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def t_p_value(t: float, degrees: int) -> float:
    """Two-sided p-value of Student's t (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4); that of the
    normal distribution from 20,000 degrees of freedom on."""
    if degrees >= 20_000:
        return 2 * (1 - NormalDist().cdf(abs(t)))
    angle = math.atan(abs(t) / math.sqrt(degrees))
    odd, cosine = degrees % 2, math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


def agresti_coull(share: float, n: float, z: float, method: str = "agresti_coull") -> Interval:
    """The interval of a share of n independent answers, for a quantile z."""
    wide = n + z * z
    middle = (share * n + z * z / 2) / wide
    half = z * math.sqrt(middle * (1 - middle) / wide)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half), method)


def of_answers(share: float, n: int) -> Interval:
    """The interval of a share of n yes/no items. Its quantile is larger by 3/4n, so that it covers
    shares from .02 to .98 in 93.5 % or more of the samples from n = 15 on (without: 92.3 %)."""
    return agresti_coull(share, n, z_value() * (1 + 0.75 / n))


def share_interval(share: float, parts: np.ndarray, binary: bool, method: str) -> Interval:
    """The interval of a share that differs from the true one by the mean of parts[C] of independent
    clusters, whose sum is 0; as many answers are independent at least."""
    clusters, t = len(parts), t_value(len(parts) - 1)
    variance = float(parts @ parts) / (clusters - 1) / clusters
    equal = variance < ROUNDING**2
    if binary or equal:
        n = clusters if equal else max(share * (1 - share) / variance, clusters)
        made = agresti_coull(share, n, t, method)
    else:
        low, high = hall_ends(share, parts, t)
        made = Interval(share, low, high, method.replace("agresti_coull_t", "hall"))
    rare = unseen(clusters)
    low, high = min(made.low, share * (1 - rare)), max(made.high, share + rare * (1 - share))
    return replace(made, low=max(0.0, low), high=min(1.0, high))


def unseen(count: int) -> float:
    """The largest part of answers of which `count` have none with a probability of UNSEEN."""
    return float(1 - UNSEEN ** (1 / count))


def hall_ends(mean: float, parts: np.ndarray, quantile: float) -> tuple[float, float]:
    """The ends of the interval of a mean after Hall's transformation g1, which removes the skewness
    of its distribution: g1(T) = T + γT²/3 + γ²T³/27 + γ/6n."""
    count, spread = len(parts), float(parts.std(ddof=1))
    skewness = float(((parts / spread) ** 3).mean())
    if abs(skewness) < 1e-6:
        skewness = 1e-6
    reach = quantile / math.sqrt(count)
    ends = [
        mean - spread * 3 / skewness
        * (float(np.cbrt(1 + skewness * (x - skewness / (6 * count)))) - 1)
        for x in (reach, -reach)
    ]  # fmt: skip
    return ends[0], ends[1]


def detectable(half_width: float, binary_pairs: int = 0) -> float:
    """The smallest difference that a test at the level of the intervals finds with a probability of
    80 %, from the half width of the difference's interval. Fewer than 6 of `binary_pairs` that
    differ are never enough (2 / 2⁶ < 0.05 < 2 / 2⁵)."""
    smallest = half_width * (1 + NormalDist().inv_cdf(POWER) / z_value())
    return max(smallest, 6 / binary_pairs) if binary_pairs else smallest


def standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Standard error of the mean of values[N]; clusters[N] is the number of the item."""
    n = len(values)
    off = np.asarray(values, float) - np.mean(values)
    sums = np.bincount(clusters, weights=off)
    count = len(np.unique(clusters))
    return float(np.sqrt(sums @ sums * count / (count - 1)) / n) if count > 1 else math.nan


def mean_interval(
    values: Sequence[float] | np.ndarray, clusters: np.ndarray | None = None, share: bool = False
) -> Interval:
    """Interval of a mean; `clusters` if several values belong to one item or cluster.

    share: the values are between 0 and 1, as binary ones always are.
    """
    x = np.asarray(values, float)
    own = np.arange(len(x)) if clusters is None else clusters
    count, mean = len(np.unique(own)), float(x.mean())
    grouped = count < len(x)
    binary = bool(((x == 0) | (x == 1)).all())
    if binary and not grouped:
        return of_answers(mean, len(x))
    ending = "_clustered" if grouped else ""
    if count == 1:
        low, high = (0.0, 1.0) if share or binary else (-math.inf, math.inf)
        return Interval(mean, low, high, "unknown_one_cluster")
    if share or binary:
        parts = np.bincount(own, weights=x - mean) * (count / len(x))
        return share_interval(mean, parts, binary, f"agresti_coull_t{ending}")
    half = t_value(count - 1) * standard_error(x, own)
    return Interval(mean, mean - half, mean + half, f"student_t{ending}")


def share_of_sums(parts: np.ndarray, wholes: np.ndarray, clusters: np.ndarray) -> Interval:
    """Interval of Σ parts / Σ wholes, with parts[N] from 0 to wholes[N]: that of a share with the
    linearised error of the ratio."""
    count, share = len(np.unique(clusters)), float(parts.sum() / wholes.sum())
    share = min(max(share, 0.0), 1.0)
    if count == 1:
        return Interval(share, 0.0, 1.0, "unknown_one_cluster")
    off = np.bincount(clusters, weights=parts - share * wholes) * (count / wholes.sum())
    return share_interval(share, off, False, "agresti_coull_t_of_sums")


def ratio_bootstrap(
    numerators: np.ndarray, denominators: np.ndarray, clusters: np.ndarray
) -> Interval:
    """Percentile bootstrap over items, or clusters of them, of Σ numerators / Σ denominators."""
    rng = np.random.default_rng(0)
    numerators, denominators = (np.bincount(clusters, x) for x in (numerators, denominators))
    n = len(numerators)
    estimates = np.empty(BOOTSTRAP_DRAWS)
    for draw in range(BOOTSTRAP_DRAWS):
        picked = rng.integers(0, n, n)
        estimates[draw] = numerators[picked].sum() / denominators[picked].sum()
    low, high = np.quantile(estimates, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    value = float(numerators.sum() / denominators.sum())
    return Interval(value, float(low), float(high), "bootstrap")


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


def paired(
    a: np.ndarray, b: np.ndarray, clusters: np.ndarray, items: int, span: float = 0.0
) -> Paired:
    """Compare b[N] with a[N], values of the same samples of some items; clusters[N] is the number
    of the item's cluster. span: of a value's range, 0 if it has none."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    difference = y - x
    count = len(np.unique(clusters))
    mean = float(difference.mean())
    middle, error, degrees = middle_and_error(difference, clusters, span)
    half = t_value(degrees) * error if degrees else math.inf
    regressed, fixed = int((difference < 0).sum()), int((difference > 0).sum())
    alone = count == len(x)
    pairs = len(x) if alone and np.isin(np.concatenate([x, y]), (0.0, 1.0)).all() else 0
    if pairs:
        test, p = "mcnemar_exact", mcnemar_exact(regressed, fixed)
    else:
        test = "student_t" if alone else "student_t_clustered"
        p = _t_p(mean, standard_error(difference, clusters), count)
    method = ("agresti_min_t" if span else "student_t") + "_clustered" * (not alone)
    low, high = middle - half, middle + half
    if span:
        seen, rare = mean * (1 - unseen(count)), span * unseen(count)
        low, high = max(min(low, seen - rare), -span), min(max(high, seen + rare), span)
    interval = Interval(mean, low, high, method)
    return Paired(interval, p, test, items, regressed, fixed, detectable(half, pairs))


def middle_and_error(
    off: np.ndarray, clusters: np.ndarray, span: float = 0.0
) -> tuple[float, float, int]:
    """(middle, standard error, degrees of freedom) for tests of the mean of differences off[N].

    Differences of values with a range `span` get two more pairs, one of which differs by the span,
    half in either direction (Agresti and Min 2005): pairs that are all equal prove little. With one
    cluster, and no pairs more, the error is infinite and there are 0 degrees.
    """
    sums, counts = np.bincount(clusters, weights=off), np.bincount(clusters)
    count, samples = len(sums), len(off)
    added = 2 * (span > 0)
    wide = samples + added * samples / count
    middle = float(off.sum()) / wide
    squares = float(np.sum((sums - counts * middle) ** 2)) + (span * samples / count) ** 2
    total = count + added
    error = math.sqrt(squares * total / (total - 1)) / wide if total > 1 else math.inf
    return middle, error, total - 1


def scaled(pair: Paired, scale: float) -> Paired:
    """The comparison of sums, where `pair` is that of means; scale: the number of values."""
    sums = pair.difference.mapped(lambda value: value * scale)
    return replace(pair, difference=sums, detectable=pair.detectable * scale)


def _t_p(mean: float, error: float, clusters: int) -> float:
    if mean == 0:
        return 1.0
    if error == 0 or math.isnan(error):
        return math.nan
    return t_p_value(mean / error, clusters - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment; NaN stays NaN and is ignored."""
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, running = list(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - rank)))
        adjusted[i] = running
    return adjusted
