"""Metrics of a classifier on held-out documents.

Precision, recall and F1 = 2PR/(P+R) of each label; AUC by ranks (Hanley and McNeil 1982: the
probability that a document with the label scores above one without, ties count half); macro-F1, the
mean over the labels that occur. For regression: mean squared error, Pearson and Spearman
correlation. A metric without documents is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NAN = float("nan")


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics of one label; documents: the held-out documents that have it."""

    label: str
    documents: int
    precision: float
    recall: float
    f1: float = NAN
    auc: float = NAN


@dataclass(frozen=True)
class OverallMetrics:
    """Metrics over all labels, or of a regression; NaN where a metric does not apply."""

    documents: int
    accuracy: float = NAN
    macro_f1: float = NAN
    mean_squared_error: float = NAN
    pearson: float = NAN
    spearman: float = NAN


def label_metrics(
    label: str, true: np.ndarray, predicted: np.ndarray, scores: np.ndarray | None = None
) -> LabelMetrics:
    """Metrics of a label from true bool[n], predicted bool[n] and, for the AUC, scores float[n]."""
    right, positives, passing = (int(x.sum()) for x in (true & predicted, true, predicted))
    precision, recall = _ratio(right, passing), _ratio(right, positives)
    area = NAN if scores is None else auc(true, scores)
    return LabelMetrics(
        label, positives, precision, recall, _ratio(2 * right, passing + positives), area
    )


def single_label_metrics(
    names: Sequence[str], true: Sequence[str], scores: np.ndarray
) -> tuple[OverallMetrics, list[LabelMetrics]]:
    """Metrics where each document has one label; predicted is the highest of scores[n, L]."""
    labels, best = np.array(true, object), scores.argmax(-1) if len(scores) else np.zeros(0, int)
    by_label = []
    for label in sorted({*true, *names}):
        index = names.index(label) if label in names else -1
        column = None if index < 0 else scores[:, index]
        by_label.append(label_metrics(label, labels == label, best == index, column))
    right = int((np.array(names, object)[best] == labels).sum())
    return OverallMetrics(len(true), _ratio(right, len(true)), mean_f1(by_label)), by_label


def multi_label_metrics(
    names: Sequence[str], true: np.ndarray, scores: np.ndarray, threshold: float = 0.5
) -> tuple[OverallMetrics, list[LabelMetrics]]:
    """Metrics where documents have any number of labels, bool[n, L].

    Predicted are the labels whose score reaches the threshold.
    """
    predicted = scores >= threshold
    by_label = [
        label_metrics(name, true[:, i], predicted[:, i], scores[:, i])
        for i, name in enumerate(names)
    ]
    right = int((predicted == true).all(-1).sum())
    return OverallMetrics(len(true), _ratio(right, len(true)), mean_f1(by_label)), by_label


def regression_metrics(true: np.ndarray, predicted: np.ndarray) -> OverallMetrics:
    """Metrics of a regression, float[n]; accuracy is that of the rounded regression_metrics."""
    if not len(true):
        return OverallMetrics(0)
    accuracy = float((np.rint(predicted) == np.rint(true)).mean())
    error = float(np.square(predicted - true).mean())
    spearman = correlation(ranks(true), ranks(predicted))
    return OverallMetrics(len(true), accuracy, NAN, error, correlation(true, predicted), spearman)


def mean_f1(by_label: Sequence[LabelMetrics]) -> float:
    """Mean F1 of the labels that occur."""
    scores = [one.f1 for one in by_label if one.documents]
    return float(np.mean(scores)) if scores else NAN


def auc(true: np.ndarray, scores: np.ndarray) -> float:
    """The probability that a document with the label scores above one without it."""
    with_label, without = int(true.sum()), int((~true).sum())
    if not with_label or not without:
        return NAN
    above = ranks(scores)[true].sum() - with_label * (with_label + 1) / 2
    return float(above / (with_label * without))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks float64[n] from 1; equal values share the mean of theirs."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; NaN where one of the two is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size else NAN


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else NAN
