"""The probability and the threshold of a score, from documents with the truth.

`fit` turns scores into probabilities by isotonic regression or Platt scaling, whichever fits
better. Isotonic: the nondecreasing step function with the least squared error, by pooling adjacent
violators (Ayer et al. 1955), with linear interpolation between steps. Platt 1999: p = 1 / (1 +
exp(-(a x + b))) with targets (P + 1)/(P + 2) and 1/(N + 2), by Newton's method; x is the logit of a
score in [0, 1] and the score itself otherwise. Five-fold cross-validation chooses the method with
the lower Brier score (mean squared error of the probability). Expected calibration error: the mean
over ten bins of |mean probability - share of positives|, weighted by their documents (Naeini et al.
2015), here of the cross-validated predictions.

`choose` serves a target precision, a target recall, or the best F1. A document passes when its
score is at least the threshold, which is halfway between two scores that occur. Of all thresholds
that reach the target precision, the one with the highest recall is chosen, and vice versa. Shares
have Wilson's score interval (Wilson 1927): with z the normal quantile, n trials and share p, (p +
z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).

`CalibrationFile` is the JSON file that `classify threshold` writes and `classify --calibration`
applies: {"score": NAME, "thresholds": {"other": 0.43, "pt": 0.51, "de": null}, "calibration": {…},
…}: a document passes when its score reaches the threshold of its language (`other` for languages
without one); null means that no document passes. Thresholds apply to the score before calibration.
The file adds the scores NAME_ok (1 or 0) and NAME_probability and does not change NAME, so applying
it twice gives the same result.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData, UsageError
from sabia.core.options.classify_threshold import Target
from sabia.core.shards.arrow_arrays import cast
from sabia.core.text.score_column import alike, score_names, score_values

METHODS = ("isotonic", "platt")
FOLDS, BINS, STEPS = 5, 10, 50
_EDGE = 1e-6
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


OTHER = "other"


@dataclass(frozen=True)
class CalibrationFile:
    """The calibration of a score and its thresholds by language; `digest` is a hash of the file."""

    path: str
    score: str
    thresholds: dict[str, float | None]
    calibration: Calibration
    digest: str

    def apply(self, values: np.ndarray, language: pa.Array) -> dict[str, np.ndarray]:
        """The new scores, float64[n] each, NaN where values[n] is."""
        names = [name for name in self.thresholds if name != OTHER]
        limits = [self.thresholds[name] for name in (*names, OTHER)]
        thresholds = np.array([np.inf if limit is None else limit for limit in limits])
        index = pc.fill_null(pc.index_in(language, pa.array(names, pa.string())), len(names))
        passes = values >= thresholds[np.asarray(index)]
        missing = np.isnan(values)
        return {
            f"{self.score}_ok": np.where(missing, np.nan, passes),
            f"{self.score}_probability": self.calibration.probabilities(values),
        }


def read_calibration_file(path: str) -> CalibrationFile:
    """Read a calibration file. Raises UsageError (it cannot be opened), BadData."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UsageError(f"--calibration: {path}: {error.strerror}") from error
    try:
        fields = json.loads(content)
        limits = {str(k): None if v is None else float(v) for k, v in fields["thresholds"].items()}
        if OTHER not in limits:
            raise ValueError(f"no threshold for {OTHER!r}")
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        calibration = from_json(fields["calibration"])
        return CalibrationFile(path, str(fields["score"]), limits, calibration, digest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"({type(error).__name__}: {error})"
        raise BadData(
            f"--calibration: {path} is not a file of `classify threshold` {reason}"
        ) from error


def values_of(batch: pa.RecordBatch, name: str, option: str, required: bool) -> np.ndarray:
    """float64[n] of a score or of a column of numbers; NaN where missing.

    Raises UsageError for a column of another type and for a `required` score that no row has.
    """
    if name in batch.schema.names:
        what = f"{option}: column {name!r}"
        column = cast(batch.column(name), pa.float64(), what, "numbers", UsageError)
        return column.to_numpy(zero_copy_only=False)
    values = score_values(batch.column("scores"), name)
    if required and batch.num_rows and np.isnan(values).all():
        numbers = {
            field.name for field in batch.schema
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        }  # fmt: skip
        known = score_names(batch.column("scores")) | numbers
        raise UsageError(f"{option}: no row has a score {name!r}{alike(name, known)}")
    return values
