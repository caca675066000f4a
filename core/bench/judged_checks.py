"""Whether judged scores follow length or format, and break-outs of answers: from score rows.

The figures are those of `core.judge.reward_checks`; correlations are within the samples of an item,
so they are 0 where each item has one sample.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from sabia.core.bench.judging import POINTS_BREAK_OUT
from sabia.core.bench.score_rows import Score
from sabia.core.judge.prompt import BREAK_OUT
from sabia.core.judge.reward_checks import Traits, family_warning

Cell = tuple[str, str]  # task, model


def judged_traits(scores: Iterable[Score]) -> dict[Cell, Traits]:
    """The sums over the judged answers of each task and model."""
    texts: dict[Cell, dict[str, dict[int, str]]] = {}
    shares: dict[tuple[Cell, str, int], float] = {}
    patterns = {}
    for score in scores:
        cell, detail = (score.task, score.model), score.detail or {}
        if score.metric == "share":
            shares[cell, score.item_id, score.sample] = score.value
        if "response" in detail and ("judgment" in detail or "items" in detail):
            patterns[cell] = POINTS_BREAK_OUT if "judgment" in detail else BREAK_OUT
            samples = texts.setdefault(cell, {}).setdefault(score.item_id, {})
            samples[score.sample] = str(detail["response"])
    return {
        cell: Traits.of(
            (
                (list(samples.values()),
                 np.array([shares.get((cell, item, n), np.nan) for n in samples]))
                for item, samples in items.items()
            ),
            patterns[cell],
        )
        for cell, items in texts.items()
    }  # fmt: skip


def rows(traits: dict[Cell, Traits]) -> list[dict[str, Any]]:
    """The figures as plain data, by task and model."""
    return [{"task": task, "model": model} | one.row() for (task, model), one in traits.items()]


def warnings(traits: dict[Cell, Traits], models: Iterable[str], judges: Iterable[str]) -> list[str]:
    """One line of each kind of warning; models, judges: names of the judged and judging models."""
    lines: dict[str, list[str]] = {}
    for (task, model), one in traits.items():
        for kind, line in one.warnings(f"{task}, {model}").items():
            lines.setdefault(kind, []).append(line)
    judges = list(judges)
    for model in dict.fromkeys(models):
        if line := family_warning(model, judges):
            lines.setdefault("family", []).append(line)
    return [
        first + (f" (and {len(more)} more such warnings)" if more else "")
        for first, *more in lines.values()
    ]
