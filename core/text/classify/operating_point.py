"""Choose the threshold of a score: for a target precision, a target recall, or the best F1.

A document passes when its score is at least the threshold, which is halfway between two scores that
occur. Of all thresholds that reach the target precision, the one with the highest recall is chosen,
and vice versa. Shares have Wilson's score interval (Wilson 1927): with z the normal quantile,
n trials and share p, (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from sabia.core.options.classify_threshold import Target

CONFIDENCE = 0.95


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold and its metrics on the documents it was chosen on.

    The threshold is None where none reaches the target; then no document passes.
    """

    threshold: float | None
    documents: int
    positives: int
    passing: int
    precision: float
    precision_interval: tuple[float, float]
    recall: float
    recall_interval: tuple[float, float]
    f1: float


def wilson(successes: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) float64[n] of successes[n] out of trials[n]; (0, 1) without trials."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    n = np.maximum(np.asarray(trials, float), 1)
    share = np.asarray(successes, float) / n
    middle = share + z * z / (2 * n)
    half = z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    empty = np.asarray(trials) == 0
    return np.where(empty, 0.0, np.clip(low, 0, 1)), np.where(empty, 1.0, np.clip(high, 0, 1))


def choose(scores: np.ndarray, truth: np.ndarray, target: Target) -> OperatingPoint:
    """The operating point for scores[n] of documents with truth bool[n]."""
    order = np.argsort(-scores, kind="stable")
    ordered, positives = scores[order], int(truth.sum())
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # of equal scores
    right, passing = np.cumsum(truth[order])[last], last + 1
    best = _best_candidate(right, passing, positives, target)
    if best is None:
        return _operating_point(None, len(scores), positives, 0, 0)
    row = last[best]
    below = ordered[row + 1] if row + 1 < len(ordered) else ordered[row]
    threshold = (float(ordered[row]) + float(below)) / 2
    return _operating_point(threshold, len(scores), positives, int(right[best]), int(passing[best]))


def _best_candidate(
    right: np.ndarray, passing: np.ndarray, positives: int, target: Target
) -> int | None:
    """Index among the candidate thresholds, highest first; None where none reaches the target."""
    if not positives:
        return None
    if target.precision:
        share = wilson(right, passing)[0] if target.sure else right / passing
        reach = np.flatnonzero((share >= target.precision) & (right > 0))
        return int(reach[-1]) if len(reach) else None
    if target.recall:
        whole = np.full(len(right), positives)
        share = wilson(right, whole)[0] if target.sure else right / positives
        reach = np.flatnonzero(share >= target.recall)
        return int(reach[0]) if len(reach) else None
    return int(np.argmax(2 * right / (passing + positives)))


def _operating_point(
    threshold: float | None, documents: int, positives: int, right: int, passing: int
) -> OperatingPoint:
    counts = np.array([right, right]), np.array([passing, positives])
    low, high = wilson(*counts)
    precision, recall = (r / n if n else float("nan") for r, n in zip(*counts, strict=True))
    f1 = 2 * right / (passing + positives) if passing + positives else float("nan")
    return OperatingPoint(threshold, documents, positives, passing, float(precision),
               (float(low[0]), float(high[0])), float(recall), (float(low[1]), float(high[1])),
               f1)  # fmt: skip
