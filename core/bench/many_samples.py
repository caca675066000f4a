"""Several samples of an item: pass@k, pass^k, majority and best of k, and the tokens they cost.

pass@k is the unbiased estimate that one or more of k samples are right, 1 - C(n-c, k) / C(n, k) for
c right ones of n (Chen et al. 2021, arXiv 2107.03374, section 2.1); pass^k that all of them are,
C(c, k) / C(n, k). majority@k is whether the answer that most of k samples give is right (of equally
frequent ones, the share that is), in the mean over DRAWS random choices of k of the n samples.
best@k is whether the sample that a judge graded best is right (of equally good ones, the share that
is), in the mean over all choices; a sample without a grade is worse than any other.
Samples without an answer or a verdict are left out, and items with fewer than k of the others.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sabia.core import page, svg
from sabia.core.bench.rubrics.graded_samples import GRADE
from sabia.core.bench.score_rows import Score
from sabia.core.bench.statistics import Interval, finite, interval_text, mean_interval, numbered

METRIC = "exact_match"
DRAWS = 100
SCORES = ("pass@k", "pass^k", "majority@k", "best@k")
COLUMNS = ("task", "model", "k", *(f"{name} [95 %]" for name in SCORES), "tokens an item", "items")


@dataclass(frozen=True)
class Sampled:
    """The scores of k samples an item, by their names in SCORES: without majority if rows have no
    answers, without best if a judge has graded none. tokens: sampled for the k, mean over items,
    NaN if it is not known."""

    task: str
    model: str
    k: int
    items: int
    scores: Mapping[str, Interval]
    tokens: float


@dataclass
class _Item:
    cluster: str
    right: list[float] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    grades: list[float | None] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def by_samples(scores: Iterable[Score]) -> list[Sampled]:
    """For each task and model with several samples an item: k = 1, 2, 4 and so on, and the number
    of samples that most items have at least."""
    cells: dict[tuple[str, str], dict[str, _Item]] = {}
    for score in scores:
        if score.metric == METRIC:
            items = cells.setdefault((score.task, score.model), {})
            item = items.setdefault(score.item_id, _Item(score.cluster or f"\0{score.item_id}"))
            detail = score.detail or {}
            item.right.append(score.value)
            item.answers.append(detail.get("extracted"))
            item.grades.append(detail.get(GRADE))
            item.tokens.append(float(detail.get("tokens", math.nan)))
    return [one for (task, model), items in cells.items() for one in _of_cell(task, model, items)]


def _of_cell(task: str, model: str, items: Mapping[str, _Item]) -> Iterator[Sampled]:
    most = int(np.median([len(item.right) for item in items.values()]))
    if most < 2:
        return
    for k in sorted({2**power for power in range(most.bit_length())} | {most}):
        enough = {name: item for name, item in items.items() if len(item.right) >= k}
        counts = [(len(item.right), round(sum(item.right))) for item in enough.values()]
        values = {
            "pass@k": [pass_at(n, c, k) for n, c in counts],
            "pass^k": [all_pass(n, c, k) for n, c in counts],
        }
        if any(answer is not None for item in enough.values() for answer in item.answers):
            values["majority@k"] = [
                majority(item.right, item.answers, k, name) for name, item in enough.items()
            ]
        if any(grade is not None for item in enough.values() for grade in item.grades):
            values["best@k"] = [best_of(item.right, item.grades, k) for item in enough.values()]
        clusters = numbered(item.cluster for item in enough.values())
        scores = {name: mean_interval(each, clusters, share=True) for name, each in values.items()}
        tokens = k * float(np.mean([np.mean(item.tokens) for item in enough.values()]))
        yield Sampled(task, model, k, len(enough), scores, tokens)


def pass_at(n: int, c: int, k: int) -> float:
    """The probability that k of n samples, c of them right, include a right one."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def all_pass(n: int, c: int, k: int) -> float:
    """The probability that k of n samples, c of them right, are all right."""
    return math.comb(c, k) / math.comb(n, k)


def majority(
    right: Sequence[float], answers: Sequence[str | None], k: int, seed: str = ""
) -> float:
    """How often the most frequent answer of k samples is right; samples without one do not vote."""
    draw = random.Random(seed)
    chosen = [range(len(right))] if k == len(right) else (
        draw.sample(range(len(right)), k) for _ in range(DRAWS))  # fmt: skip
    results = []
    for numbers in chosen:
        votes: dict[str, list[float]] = {}
        for number in numbers:
            if (answer := answers[number]) is not None:
                votes.setdefault(answer, []).append(right[number])
        most = max(map(len, votes.values()), default=0)
        winners = [values[0] for values in votes.values() if len(values) == most]
        results.append(sum(winners) / len(winners) if winners else 0.0)
    return sum(results) / len(results)


def best_of(right: Sequence[float], grades: Sequence[float | None], k: int) -> float:
    """How often the best graded of k samples is right, in the mean over all choices of k."""
    levels: dict[float, list[float]] = {}
    for value, grade in zip(right, grades, strict=True):
        levels.setdefault(-math.inf if grade is None else grade, []).append(value)
    total, below = 0.0, 0
    for level in sorted(levels):
        values, under = levels[level], math.comb(below, k)
        below += len(values)
        total += (math.comb(below, k) - under) * sum(values) / len(values)
    return total / math.comb(len(right), k)


def rows(sampled: Sequence[Sampled]) -> list[list[str]]:
    """A row for each k."""
    return [
        [
            one.task, one.model, str(one.k),
            *(interval_text(one.scores.get(name)) for name in SCORES),
            f"{one.tokens:,.0f}" if math.isfinite(one.tokens) else "", str(one.items),
        ]
        for one in sampled
    ]  # fmt: skip


def section(sampled: Sequence[Sampled]) -> str:
    """The section of the report: a chart of the scores over tokens for each task, and the table."""
    charts = []
    for task in dict.fromkeys(one.task for one in sampled):
        lines = [
            svg.Series(f"{model}: {name}", points)
            for model in dict.fromkeys(one.model for one in sampled if one.task == task)
            for name, points in _lines([o for o in sampled if (o.task, o.model) == (task, model)])
        ]
        if lines:
            charts.append(page.figure(svg.line_chart(lines, task, "tokens an item", "share")))
    return page.section("Several samples an item", [*charts, page.table(COLUMNS, rows(sampled))])


def _lines(sampled: Sequence[Sampled]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    known = [one for one in sampled if math.isfinite(one.tokens)]
    for name in SCORES:
        if points := [(one.tokens, one.scores[name].value) for one in known if name in one.scores]:
            yield name, points


def to_json(sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Records of the rows; shares are fractions of 1."""
    return [
        {"task": one.task, "model": one.model, "k": one.k, "items": one.items}
        | {
            f"{name.replace('@', '_at_').replace('^', '_hat_')}_{end}_share": value
            for name, interval in one.scores.items()
            for end, value in interval.ends.items()
        }
        | {"tokens_per_item": finite(one.tokens)}
        for one in sampled
    ]
