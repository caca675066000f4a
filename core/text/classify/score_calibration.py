"""Turn scores into probabilities by isotonic regression or Platt scaling, whichever fits better.

Isotonic: the nondecreasing step function with the least squared error, by pooling adjacent
violators (Ayer et al. 1955), with linear interpolation between steps. Platt 1999: p = 1 /
(1 + exp(-(a x + b))) with targets (P + 1)/(P + 2) and 1/(N + 2), by Newton's method; x is the logit
of a score in [0, 1] and the score itself otherwise. Five-fold cross-validation chooses the method
with the lower Brier score (mean squared error of the probability). Expected calibration error: the
mean over ten bins of |mean probability - share of positives|, weighted by their documents (Naeini
et al. 2015), here of the cross-validated predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

METHODS = ("isotonic", "platt")
FOLDS, BINS, STEPS = 5, 10, 50
_EDGE = 1e-6


@dataclass(frozen=True)
class Calibration:
    """A map of scores to probabilities: knots (x, y) to interpolate, or (a, b) of a sigmoid."""

    method: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    logit: bool = False  # Platt's x is the logit of the score

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """float64[n] of scores[n]; NaN stays NaN."""
        if self.method == "isotonic":
            return np.where(np.isnan(scores), np.nan, np.interp(scores, self.x, self.y))
        (a,), (b,) = self.x, self.y
        return _sigmoid(a * (_logit(scores) if self.logit else scores) + b)


@dataclass(frozen=True)
class Bin:
    """Documents with a probability in [low, high): their number, mean, and share of positives."""

    low: float
    high: float
    documents: int
    mean: float
    positives: float


def fit(scores: np.ndarray, truth: np.ndarray, seed: int) -> tuple[Calibration, np.ndarray]:
    """(the better calibration, its cross-validated probabilities float64[n]).

    scores[n] are floats, truth[n] booleans that hold both values.
    """
    folds = np.random.default_rng(seed).permutation(len(scores)) % FOLDS
    validated = {method: _cross_validated(method, scores, truth, folds) for method in METHODS}
    best = min(METHODS, key=lambda method: brier(validated[method], truth))
    return fit_one(best, scores, truth), validated[best]


def _cross_validated(
    method: str, scores: np.ndarray, truth: np.ndarray, folds: np.ndarray
) -> np.ndarray:
    probabilities = np.empty(len(scores))
    for fold in range(FOLDS):
        held_out = folds == fold
        rest = truth[~held_out]
        if rest.all() or not rest.any():
            probabilities[held_out] = rest.mean() if len(rest) else 0.5
            continue
        calibration = fit_one(method, scores[~held_out], rest)
        probabilities[held_out] = calibration.probabilities(scores[held_out])
    return probabilities


def fit_one(method: str, scores: np.ndarray, truth: np.ndarray) -> Calibration:
    """The calibration of one method."""
    return _isotonic(scores, truth) if method == "isotonic" else _platt(scores, truth)


def _isotonic(scores: np.ndarray, truth: np.ndarray) -> Calibration:
    values, index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(index, truth) / counts
    blocks: list[list[float]] = []  # mean, weight, first value, last value
    for mean, count, value in zip(means.tolist(), counts.tolist(), values.tolist(), strict=True):
        blocks.append([mean, count, value, value])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, weight, _, last = blocks.pop()
            before = blocks[-1]
            total = before[1] + weight
            before[0] = (before[0] * before[1] + mean * weight) / total
            before[1], before[3] = total, last
    knots = [(x, mean) for mean, _, low, high in blocks for x in dict.fromkeys((low, high))]
    return Calibration("isotonic", tuple(x for x, _ in knots), tuple(y for _, y in knots))


def _platt(scores: np.ndarray, truth: np.ndarray) -> Calibration:
    logit = bool(scores.min() >= 0 and scores.max() <= 1)
    x = _logit(scores) if logit else scores.astype(float)
    positives, negatives = int(truth.sum()), int((~truth).sum())
    target = np.where(truth, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    design = np.stack([x, np.ones(len(x))], 1)
    weights = np.array([0.0, np.log((positives + 1) / (negatives + 1))])
    for _ in range(STEPS):
        p = _sigmoid(design @ weights)
        slope = design.T @ (target - p)
        curve = (design * (p * (1 - p))[:, None]).T @ design + 1e-9 * np.eye(2)
        step = np.linalg.solve(curve, slope)
        weights = weights + np.clip(step, -5, 5)
        if np.abs(step).max() < 1e-9:
            break
    return Calibration("platt", (float(weights[0]),), (float(weights[1]),), logit)


def brier(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """Mean squared error of probabilities[n]."""
    return float(np.mean(np.square(probabilities - truth)))


def reliability(probabilities: np.ndarray, truth: np.ndarray) -> list[Bin]:
    """Ten bins of equal width over [0, 1], without the empty ones."""
    index = np.clip((probabilities * BINS).astype(int), 0, BINS - 1)
    rows = []
    for number in np.unique(index).tolist():
        mask = index == number
        rows.append(Bin(number / BINS, (number + 1) / BINS, int(mask.sum()),
                        float(probabilities[mask].mean()), float(truth[mask].mean())))  # fmt: skip
    return rows


def expected_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error of a reliability table."""
    total = sum(row.documents for row in bins)
    return sum(row.documents * abs(row.mean - row.positives) for row in bins) / total


def from_json(fields: dict[str, Any]) -> Calibration:
    """The calibration of `asdict`; KeyError, TypeError or ValueError for anything else."""
    x, y = (tuple(float(v) for v in fields[name]) for name in "xy")
    method = fields["method"]
    valid = method in METHODS and len(x) == len(y) > 0 and list(x) == sorted(x)
    if not valid or (method == "platt" and len(x) != 1):
        raise ValueError(f"invalid knots of method {method!r}")
    return Calibration(method, x, y, bool(fields.get("logit", False)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def _logit(scores: np.ndarray) -> np.ndarray:
    clipped = np.clip(scores.astype(float), _EDGE, 1 - _EDGE)
    return np.log(clipped / (1 - clipped))
