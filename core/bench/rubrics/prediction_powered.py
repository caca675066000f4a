"""The mean of a score that people give, from a judge's scores of all answers and people's of some.

Prediction-powered inference with a tuned weight (PPI++, Angelopoulos et al. 2023, arXiv 2311.01453;
for judges Chen et al. 2026, arXiv 2601.05420): with judge scores f and human scores y,

    mean = weight · mean of f over answers without a label + mean of y - weight · f over the others

which is unbiased for any weight if the labelled answers are a random part. The weight of the least
variance is cov(y, f) / var(f) · U / (U + L) for U answers without and L with a label. The
variance is that of the linearised estimate, with one disagreement more, of the smallest difference
between two scores: where a judge errs rarely, a few labels show no error at all.
"""

from dataclasses import dataclass

import numpy as np

from sabia.core.bench.statistics import Interval, agresti_coull, t_value

LEAST = 5  # labelled clusters below which there is no interval worth the name


@dataclass(frozen=True)
class Corrected:
    """The mean by people's standard, that of the judge alone, and the weight of its scores."""

    interval: Interval
    judge_mean: float
    weight: float
    labelled: int
    answers: int


def corrected_mean(
    judged: np.ndarray, labels: np.ndarray, clusters: np.ndarray | None = None, share: bool = True
) -> Corrected | None:
    """judged[N]: scores of the judge; labels[N]: those of people, NaN where there is none; clusters
    [N]: numbers of independent groups of answers. share: scores lie between 0 and 1.

    None with fewer than LEAST labelled clusters.
    """
    f, y = np.asarray(judged, float), np.asarray(labels, float)
    own = np.arange(len(f)) if clusters is None else clusters
    has = ~np.isnan(y)
    count = len(np.unique(own[has]))
    if count < LEAST:
        return None
    total, labelled = len(f), int(has.sum())
    rest = total - labelled
    spread = float(f[has].var(ddof=1)) if labelled > 1 else 0.0
    weight = 0.0
    if rest and spread > 0:
        together = float(np.cov(y[has], f[has])[0, 1])
        weight = min(max(together / spread, 0.0), 1.0) * rest / total
    residuals = y[has] - weight * f[has]
    value = float(residuals.mean()) + (weight * float(f[~has].mean()) if rest else 0.0)
    influence = np.zeros(total)
    influence[has] = (residuals - residuals.mean()) / labelled
    if rest:
        influence[~has] = weight * (f[~has] - f[~has].mean()) / rest
    sums = np.bincount(np.unique(own, return_inverse=True)[1], weights=influence)
    unseen = _smallest_step(np.concatenate([y[has], f])) ** 2 / labelled**2 if weight else 0.0
    error = float(np.sqrt((sums @ sums + unseen) * count / (count - 1)))
    if share:
        inside = min(max(value, 0.0), 1.0)
        independent = inside * (1 - inside) / error**2 if error > 0 else 0.0
        n = max(independent, float(count))  # labels alone are worth as much
        interval = agresti_coull(inside, n, t_value(count - 1), "prediction_powered")
    else:
        half = t_value(count - 1) * error
        interval = Interval(value, value - half, value + half, "prediction_powered")
    return Corrected(interval, float(f.mean()), weight, labelled, total)


def _smallest_step(scores: np.ndarray) -> float:
    """The smallest difference between two scores that differ, 0 if none do."""
    steps = np.diff(np.unique(scores.round(9)))
    return float(steps.min()) if len(steps) else 0.0
