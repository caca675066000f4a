"""What is said of a classifier on documents that it was not trained on.

Precision, recall and F1 = 2PR/(P+R) of each label; AUC by ranks (Hanley and McNeil 1982: the chance
that a document with the label scores above one without, ties half); macro-F1 is the mean over
labels that occur. Of numbers: mean squared error, Pearson and Spearman correlation. A figure
without documents to count is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NAN = float("nan")


@dataclass(frozen=True)
class LabelFigures:
    """Of one label among the held-out documents: how many, and how well it is told."""

    label: str
    documents: int
    precision: float
    recall: float
    f1: float = NAN
    auc: float = NAN


@dataclass(frozen=True)
class Agreement:
    """Of all labels, or of numbers; what does not apply is NaN."""

    documents: int
    accuracy: float = NAN
    macro_f1: float = NAN
    mean_squared_error: float = NAN
    pearson: float = NAN
    spearman: float = NAN


def label_figures(
    label: str, true: np.ndarray, said: np.ndarray, scores: np.ndarray | None = None
) -> LabelFigures:
    """Figures of a label that documents bool[n] have and a classifier says bool[n] of them.

    scores: float[n], for the AUC.
    """
    right = int((true & said).sum())
    precision, recall = _ratio(right, int(said.sum())), _ratio(right, int(true.sum()))
    f1 = _ratio(2 * right, int(said.sum()) + int(true.sum()))
    found = NAN if scores is None else auc(true, scores)
    return LabelFigures(label, int(true.sum()), precision, recall, f1, found)


def one_of(
    names: Sequence[str], true: Sequence[str], scores: np.ndarray
) -> tuple[Agreement, list[LabelFigures]]:
    """Where each document has one label: the classifier says that of its highest score[n, L]."""
    given, best = np.array(true, object), scores.argmax(-1) if len(scores) else np.zeros(0, int)
    figures = []
    for label in sorted({*true, *names}):
        at = names.index(label) if label in names else -1
        column = None if at < 0 else scores[:, at]
        figures.append(label_figures(label, given == label, best == at, column))
    said = np.array(names, object)[best]
    agreement = Agreement(len(true), _ratio(int((said == given).sum()), len(true)), macro(figures))
    return agreement, figures


def any_of(
    names: Sequence[str], true: np.ndarray, scores: np.ndarray, threshold: float = 0.5
) -> tuple[Agreement, list[LabelFigures]]:
    """Where a document has any labels, bool[n, L]: those said whose score reaches the threshold."""
    said = scores >= threshold
    figures = [
        label_figures(name, true[:, i], said[:, i], scores[:, i]) for i, name in enumerate(names)
    ]
    whole = int((said == true).all(-1).sum())
    return Agreement(len(true), _ratio(whole, len(true)), macro(figures)), figures


def numbers(true: np.ndarray, said: np.ndarray) -> Agreement:
    """Agreement of numbers float[n]; accuracy is that of rounded ones."""
    if not len(true):
        return Agreement(0)
    near = float((np.rint(said) == np.rint(true)).mean())
    error = float(np.square(said - true).mean())
    ranked = correlation(ranks(true), ranks(said))
    return Agreement(len(true), near, NAN, error, correlation(true, said), ranked)


def macro(figures: Sequence[LabelFigures]) -> float:
    """Mean F1 of the labels that occur."""
    found = [one.f1 for one in figures if one.documents]
    return float(np.mean(found)) if found else NAN


def auc(true: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a document with the label scores above one without."""
    with_label, without = int(true.sum()), int((~true).sum())
    if not with_label or not without:
        return NAN
    above = ranks(scores)[true].sum() - with_label * (with_label + 1) / 2
    return float(above / (with_label * without))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks float64[n] from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; NaN where one does not vary."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size else NAN


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else NAN
