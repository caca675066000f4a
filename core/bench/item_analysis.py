"""Items that tell little, or have perhaps a wrong key, from the score rows of several models.

An item that all models solve, or none, does not distinguish them. One that better models fail and
others solve is suspect: its correlation with the models' scores on the other items (the corrected
item-total correlation of classical test theory) is negative, with a one-sided p-value of Student's
t below P_VALUE. Of items without any relation, as many are below it by chance as `by_chance` says.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core import page
from sabia.core.bench.result_summary import Table
from sabia.core.bench.score_rows import Score
from sabia.core.bench.statistics import t_p_value

LEAST_MODELS = 6
P_VALUE = 0.01
METRICS = ("acc", "exact_match")
SHOWN = 50
QUESTION_CHARACTERS = 400


@dataclass(frozen=True)
class Suspect:
    """An item that better models fail; failed_by and solved_by: models, the best first."""

    item: str
    correlation: float
    p_value: float
    failed_by: tuple[str, ...]
    solved_by: tuple[str, ...]


@dataclass(frozen=True)
class ItemAnalysis:
    """Ids of the items that all models solve, and that none does; suspects, the clearest first."""

    task: str
    models: int
    items: int
    solved: tuple[str, ...]
    failed: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    by_chance: float


def analyses(table: Table) -> list[ItemAnalysis]:
    """The analysis of each task with right and wrong answers of LEAST_MODELS models or more to the
    same items."""
    made = []
    for task, by_model in table.items():
        metric = next((m for m in METRICS if any(m in cell for cell in by_model.values())), "")
        values = {
            model: means for model, cell in by_model.items() if (means := _means(cell.get(metric)))
        }
        if len(values) >= LEAST_MODELS:
            common = set.intersection(*(set(means) for means in values.values()))
            ids = [item for item in next(iter(values.values())) if item in common]
            if len(ids) > 1:
                made.append(_analysis(task, list(values), ids, values))
    return made


def _means(by_sample: Mapping[tuple[str, int], float] | None) -> dict[str, float]:
    """The mean of each item's samples."""
    sums: dict[str, list[float]] = {}
    for (item, _), value in (by_sample or {}).items():
        sums.setdefault(item, []).append(value)
    return {item: sum(values) / len(values) for item, values in sums.items()}


def _analysis(
    task: str, models: Sequence[str], ids: Sequence[str], values: Mapping[str, Mapping[str, float]]
) -> ItemAnalysis:
    right = np.array([[values[model][item] for item in ids] for model in models])
    rest = right.sum(axis=1, keepdims=True) - right  # of each model on the other items
    a, b = right - right.mean(axis=0), rest - rest.mean(axis=0)
    spread = np.sqrt((a * a).sum(axis=0) * (b * b).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.where(spread > 1e-12, (a * b).sum(axis=0) / spread, 0.0)
    varied = (right.min(axis=0) < 1) & (right.max(axis=0) > 0)
    order = np.argsort(-right.mean(axis=1), kind="stable")
    suspects = []
    for column in np.flatnonzero(varied & (correlation < 0)):
        p = _p_value(float(correlation[column]), len(models))
        if p < P_VALUE:
            failed = tuple(models[i] for i in order if right[i, column] < 0.5)
            solved = tuple(models[i] for i in order if right[i, column] >= 0.5)
            one = Suspect(ids[int(column)], float(correlation[column]), p, failed, solved)
            suspects.append(one)
    return ItemAnalysis(
        task,
        len(models),
        len(ids),
        tuple(item for item, least in zip(ids, right.min(axis=0), strict=True) if least == 1),
        tuple(item for item, most in zip(ids, right.max(axis=0), strict=True) if most == 0),
        tuple(sorted(suspects, key=lambda one: one.p_value)),
        P_VALUE * int(varied.sum()),
    )


def _p_value(correlation: float, models: int) -> float:
    """One-sided, of a correlation this negative among unrelated values."""
    if correlation <= -1 + 1e-12:
        return 0.0
    t = correlation * math.sqrt((models - 2) / (1 - correlation**2))
    return t_p_value(abs(t), models - 2) / 2


def lines(made: Iterable[ItemAnalysis]) -> list[str]:
    """One line a task."""
    return [
        f"{one.task}: of {one.items} items {len(one.solved)} are solved by all {one.models} models "
        f"and {len(one.failed)} by none; better models fail {len(one.suspects)} that others solve "
        f"({one.by_chance:.1f} by chance)"
        + (f": is the answer right? {_some(one.suspects)}" if one.suspects else "")
        for one in made
    ]


def _some(suspects: Sequence[Suspect]) -> str:
    named = ", ".join(one.item for one in suspects[:5])
    return named + (f" and {len(suspects) - 5} more" if len(suspects) > 5 else "")


def section(made: Sequence[ItemAnalysis], scores: Iterable[Score]) -> str:
    """The section of the report: the lines, and the suspects with question and answer."""
    details: dict[tuple[str, str], Mapping[str, Any]] = {}
    wanted = {(one.task, suspect.item) for one in made for suspect in one.suspects}
    for score in scores:
        key = (score.task, score.item_id)
        if key in wanted and score.detail and "question" in score.detail:
            details.setdefault(key, score.detail)
    cells = [
        [
            one.task, suspect.item, f"{suspect.correlation:.2f}", f"{suspect.p_value:.2g}",
            ", ".join(suspect.failed_by), ", ".join(suspect.solved_by),
            detail.get("answer", ""), str(detail.get("question", ""))[-QUESTION_CHARACTERS:],
        ]
        for one in made
        for suspect in one.suspects[:SHOWN]
        for detail in [details.get((one.task, suspect.item), {})]
    ]  # fmt: skip
    columns = ["task", "item", "correlation", "p", "failed by", "solved by", "answer", "question"]
    parts = [page.paragraph(line) for line in lines(made)]
    return page.section("Items", [*parts, *([page.table(columns, cells)] if cells else [])])


def to_json(made: Iterable[ItemAnalysis]) -> list[dict[str, Any]]:
    """Records of the analyses."""
    return [
        {
            "task": one.task, "models": one.models, "items": one.items,
            "solved_by_all": list(one.solved), "solved_by_none": list(one.failed),
            "suspects_by_chance": one.by_chance,
            "suspects": [
                {"item": s.item, "correlation": s.correlation, "p_value": s.p_value,
                 "failed_by": list(s.failed_by), "solved_by": list(s.solved_by)}
                for s in one.suspects
            ],
        }
        for one in made
    ]  # fmt: skip
