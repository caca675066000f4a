"""Metrics of a whole corpus that are no mean over items: BLEU, chrF, TER, F1, MCC, Pearson's r,
checks.

An item contributes statistics, one score row each (`bleu.0`, `bleu.1`, …); the metric is a function
of their sums. BLEU, chrF and TER are those of sacrebleu, with its defaults and its order of the
statistics. F1 and MCC are made of the indices of the right and of the predicted choice, r of the
right and the given number. `checks` is the share of all checks that are passed, from the passed
ones and the number of checks of each item.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sabia.core.errors import UsageError

TRANSLATION = ("bleu", "chrf", "chrf++", "ter")


@dataclass(frozen=True)
class CorpusMetric:
    """parts: how many statistics an item has. spread: statistics[N, parts] → what is summed,
    [N, K]; value: sums[K] → the metric."""

    parts: int
    spread: Callable[[np.ndarray], np.ndarray]
    value: Callable[[np.ndarray], float]


def corpus_value(name: str, statistics: np.ndarray) -> float:
    """The metric of statistics[N, parts]."""
    metric = CORPUS[name]
    return metric.value(metric.spread(statistics).sum(axis=0))


def item_values(name: str, statistics: np.ndarray) -> np.ndarray:
    """values[N] whose mean is the metric of statistics[N, parts], and which differ from it by the
    jackknife's estimate of what each item changes: θ + (N - 1)(mean of θ₋ᵢ - θ₋ᵢ), where θ₋ᵢ is the
    metric without item i (Efron and Tibshirani 1993, chapter 11)."""
    metric, n = CORPUS[name], len(statistics)
    each = metric.spread(statistics)
    sums = each.sum(axis=0)
    whole = metric.value(sums)
    if n == 1:
        return np.array([whole])
    without = np.array([metric.value(sums - one) for one in each])
    return whole + (n - 1) * (without.mean() - without)


def translation_statistics(name: str, text: str, references: Sequence[str]) -> list[float]:
    """The statistics of a translation. UsageError without the package sacrebleu."""
    scorer = _scorer(name)
    return list(scorer._extract_corpus_statistics([text], [[other] for other in references])[0])


@lru_cache(maxsize=4)
def _scorer(name: str) -> Any:
    try:
        from sacrebleu.metrics import BLEU, CHRF, TER
    except ImportError as error:
        raise UsageError(f"metric {name}: needs the package sacrebleu ({error})") from error
    if name == "chrf++":
        return CHRF(word_order=2)
    return {"bleu": BLEU, "chrf": CHRF, "ter": TER}[name]()


def _of_translations(name: str, parts: int) -> CorpusMetric:
    def value(sums: np.ndarray) -> float:
        # counts are whole numbers, and sacrebleu takes them as such
        given = [int(x) if float(x).is_integer() else float(x) for x in sums]
        return float(_scorer(name)._compute_score_from_stats(given).score)

    return CorpusMetric(parts, lambda statistics: statistics, value)


def _pairs(statistics: np.ndarray) -> np.ndarray:
    """(right, predicted)[N, 2] → the cell of the table of both, of K labels, one-hot [N, K²]."""
    indices = statistics.astype(int)
    labels = max(int(indices.max()) + 1, 2)
    return np.eye(labels * labels)[indices[:, 0] * labels + indices[:, 1]]


def _binary_f1(sums: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of the label 1; 0 where it neither is nor is predicted."""
    _, false_positive, false_negative, true_positive = sums[:4]
    wanted = true_positive + false_negative + true_positive + false_positive
    return float(2 * true_positive / wanted) if wanted else 0.0


def _mcc(sums: np.ndarray) -> float:
    """Matthews' correlation of K labels (Gorodkin 2004); 0 where either is constant."""
    labels = round(len(sums) ** 0.5)
    table = sums.reshape(labels, labels)
    count, right = table.sum(), np.trace(table)
    wanted, given = table.sum(axis=1), table.sum(axis=0)
    spread = (count**2 - wanted @ wanted) * (count**2 - given @ given)
    return float((right * count - wanted @ given) / np.sqrt(spread)) if spread else 0.0


def _f1_macro(sums: np.ndarray) -> float:
    """The mean of 2 TP / (2 TP + FP + FN) over the labels that are right for an item."""
    labels = round(len(sums) ** 0.5)
    table = sums.reshape(labels, labels)
    wanted, given = table.sum(axis=1), table.sum(axis=0)
    present = wanted > 0
    return float((2 * np.diagonal(table)[present] / (wanted + given)[present]).mean())


def _moments(statistics: np.ndarray) -> np.ndarray:
    """(right, given)[N, 2] → 1, x, y, x², y², xy."""
    x, y = statistics.T
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _pearson(sums: np.ndarray) -> float:
    """Pearson's correlation; 0 where either is constant."""
    count, x, y, xx, yy, xy = sums
    spread = (count * xx - x * x) * (count * yy - y * y)
    constant = spread <= 1e-12 * count * xx * count * yy
    return 0.0 if constant else float((count * xy - x * y) / np.sqrt(spread))


CORPUS = {
    "checks": CorpusMetric(2, lambda each: each, lambda sums: float(sums[0] / sums[1])),
    "bleu": _of_translations("bleu", 10),
    "chrf": _of_translations("chrf", 18),
    "chrf++": _of_translations("chrf++", 24),
    "ter": _of_translations("ter", 2),
    "binary_f1": CorpusMetric(2, _pairs, _binary_f1),
    "mcc": CorpusMetric(2, _pairs, _mcc),
    "f1_macro": CorpusMetric(2, _pairs, _f1_macro),
    "pearson": CorpusMetric(2, _moments, _pearson),
}
