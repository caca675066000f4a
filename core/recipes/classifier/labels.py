"""Labels of documents as numbers: one of several, any of several, or a number.

The column decides: lists of names mean any of several, names one of several; numbers count as names
unless a regression is requested.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.spec.model import Problem
from sabia.core.text.classify import held_out_metrics

SINGLE: Problem = "single_label_classification"
MULTI: Problem = "multi_label_classification"
NUMBER: Problem = "regression"
WEIGHTS = ("none", "balanced")


@dataclass(frozen=True)
class Labels:
    """The problem and the names of a classifier's scores, in order."""

    problem: Problem
    names: tuple[str, ...]

    def encoded(self, values: Sequence[Any]) -> np.ndarray:
        """Targets float32[n, L] of values that `usable` returned."""
        if self.problem == NUMBER:
            return np.array([[float(value)] for value in values], np.float32).reshape(-1, 1)
        column = {name: number for number, name in enumerate(self.names)}
        targets = np.zeros((len(values), len(self.names)), np.float32)
        for row, value in enumerate(values):
            for name in value if self.problem == MULTI else (value,):
                targets[row, column[name]] = 1
        return targets

    def include(self, value: Any) -> bool:
        """Whether a value has only labels that these names contain."""
        if self.problem == NUMBER:
            return True
        return set(value if self.problem == MULTI else (value,)) <= set(self.names)

    def weights(self, values: Sequence[Any], kind: str) -> np.ndarray:
        """Weights float32[n] of documents; balanced: n / (labels · documents with the label)."""
        if kind not in WEIGHTS:
            raise UsageError(f"--class-weights: {kind!r} (expected {' or '.join(WEIGHTS)})")
        if kind == "none":
            return np.ones(len(values), np.float32)
        if self.problem != SINGLE:
            raise UsageError(f"--class-weights: {kind} with a {self.problem} (expected one label)")
        counts = Counter(values)
        share = {name: len(values) / (len(counts) * count) for name, count in counts.items()}
        return np.array([share[value] for value in values], np.float32)

    def figures(
        self, values: Sequence[Any], scores: np.ndarray
    ) -> tuple[held_out_metrics.OverallMetrics, list[held_out_metrics.LabelMetrics]]:
        """The agreement of scores[n, L] of documents with their values, in all and by label."""
        if self.problem == SINGLE:
            return held_out_metrics.single_label_metrics(self.names, list(values), scores)
        targets = self.encoded(values)
        if self.problem == MULTI:
            return held_out_metrics.multi_label_metrics(self.names, targets > 0, scores)
        numbers = targets[:, 0].astype(np.float64)
        return held_out_metrics.regression_metrics(numbers, scores[:, 0]), []


def usable(value: Any, regression: bool) -> Any:
    """A value of a label column as it is used, None if it is empty; BadData if it is unusable."""
    if value is None or value == "":
        return None
    if isinstance(value, list):
        return tuple(sorted({str(item) for item in value if item is not None}))
    if not regression:
        return str(value).strip() or None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadData(f"label {value!r} is not a number") from None
    if not math.isfinite(number):
        raise BadData(f"label {value!r} is not finite")
    return number


def labels_of(values: Sequence[Any], column: str, regression: bool) -> Labels:
    """The labels in the values of a column; BadData where there are too few different ones."""
    lists = {isinstance(value, tuple) for value in values}
    if len(lists) > 1 or (True in lists and regression):
        raise BadData(f"--label {column}: lists and single values (expected one kind)")
    if regression:
        return Labels(NUMBER, (column,))
    multi = True in lists
    names = {name for value in values for name in (value if multi else (value,))}
    if len(names) < (1 if multi else 2):
        raise BadData(f"--label {column}: {len(names)} different labels (expected 2 or more)")
    return Labels(MULTI if multi else SINGLE, tuple(sorted(names)))
