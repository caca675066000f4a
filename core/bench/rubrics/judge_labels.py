"""A judge beside people: how often its verdicts are right, and scores by the standard of people.

`--judge-labels` names a file of verdicts of people on rubric items of some answers. Sensitivity is
the share of the items that people call met which the judge calls met, specificity that of unmet
ones; of points it is the mean difference. An answer all of whose items have a label has a score by
people: from these and the judge's scores of all answers follows the corrected score, which supposes
that the labelled answers are a random part of all. It is prediction-powered inference with a tuned
weight (PPI++, Angelopoulos et al. 2023, arXiv 2311.01453; for judges Chen et al. 2026, arXiv
2601.05420): with judge scores f and human scores y,

    mean = weight · mean of f over answers without a label + mean of y - weight · f over the others

which is unbiased for any weight if the labelled answers are a random part. The weight of the least
variance is cov(y, f) / var(f) · U / (U + L) for U answers without and L with a label. The
variance is that of the linearised estimate, with one disagreement more, of the smallest difference
between two scores: where a judge errs rarely, a few labels show no error at all.

Several judges have n / (1 + (n - 1) r) effective votes, the number of independent judges whose mean
varies as much (Kish 1965, design effect), where r is the mean correlation of their errors, or of
their verdicts where there are no labels: these also agree because they are right, so that it is a
lower limit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import page
from sabia.core.bench.score_rows import Score
from sabia.core.bench.statistics import (
    Interval,
    agresti_coull,
    finite,
    interval_text,
    mean_interval,
    numbered,
    t_value,
)
from sabia.core.bench.task_data.data_files import read_rows
from sabia.core.bench.verdict_rows import POINTS, VerdictRow
from sabia.core.errors import BadData
from sabia.core.judge.agreement import Pairs

OPTION = "--judge-labels"
LEAST = 5  # labelled clusters below which there is no interval worth the name
DECIDED = "decided"  # the verdict of several judges together
WORDS: Mapping[Any, float] = {
    "met": 1.0, "unmet": 0.0, "true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0,
}  # fmt: skip
Cell = tuple[str, str]  # task, model
Answer = tuple[str, str, str, int]  # task, model, item, sample
Labels = Mapping[Answer, Mapping[str, float]]  # rubric item → 0, 1, or points
COLUMNS = ("task", "model", "judge", "sensitivity [95 %]", "specificity [95 %]", "agreement", "κ",
           "labels")  # fmt: skip
CORRECTED = ("task", "model", "metric", "judge alone", "corrected [95 %]", "labelled", "answers",
             "weight of the judge")  # fmt: skip
VOTES = ("task", "model", "judges", "effective votes", "correlation", "of", "verdicts")


def load_labels(path: str, verdicts: Sequence[VerdictRow]) -> dict[Answer, dict[str, float]]:
    """The labels of a file of rows with `item_id` (or `id`) and `verdict`, and where there are
    several of them `task`, `model`, `sample` and `item`. Raises BadData for a row that belongs to
    no verdict, or says neither met nor unmet, nor points."""
    known: dict[Answer, dict[str, float]] = {}
    for decided in verdicts:
        if not decided.entry.judge:
            answer = (decided.task, decided.model, decided.item_id, decided.sample)
            known.setdefault(answer, {})[decided.entry.item] = decided.entry.weight
    tasks, models = {answer[0] for answer in known}, {answer[1] for answer in known}
    made: dict[Answer, dict[str, float]] = {}
    for number, row in enumerate(read_rows(Path(path), OPTION)):
        where = f"{OPTION} {path}, row {number}"
        name = row.get("item_id", row.get("id"))
        task, model = _given(row, "task", tasks, where), _given(row, "model", models, where)
        answer = (task, model, str(name), int(row.get("sample") or 0))
        items = known.get(answer)
        if items is None:
            raise BadData(f"{where}: no verdict on item {name!r:.60} of {task}, {model}")
        item = _given(row, "item", set(items), where)
        if item not in items:
            raise BadData(f"{where}: item {item!r:.60} (expected one of {', '.join(items)})")
        given = row.get("verdict")
        value = WORDS.get(str(given).lower(), finite(given))
        most = items[item] if item == POINTS else 1.0
        if value is None or not 0 <= value <= most or (item != POINTS and value not in (0, 1)):
            expected = f"points from 0 to {most:g}" if item == POINTS else "met or unmet"
            raise BadData(f"{where}: verdict {given!r:.40} (expected {expected})")
        if made.setdefault(answer, {}).setdefault(item, value) != value:
            raise BadData(f"{where}: a second verdict on item {item} of {name} (expected one)")
    if not made:
        raise BadData(f"{OPTION} {path}: no rows")
    return made


def _given(row: Mapping[str, Any], column: str, known: set[str], where: str) -> str:
    value = row.get(column)
    if value is None and len(known) == 1:
        return next(iter(known))
    if value is None:
        raise BadData(f"{where}: no {column} (there are {len(known)} of them)")
    return str(value)


@dataclass(frozen=True)
class Beside:
    """A judge beside people; sensitivity and specificity are None of points."""

    task: str
    model: str
    judge: str
    sensitivity: Interval | None
    specificity: Interval | None
    pairs: Pairs


@dataclass(frozen=True)
class Corrected:
    """The mean by people's standard, that of the judge alone, and the weight of its scores."""

    interval: Interval
    judge_mean: float
    weight: float
    labelled: int
    answers: int


@dataclass(frozen=True)
class CorrectedScore:
    """The score of a task's answers; None with too few labels."""

    task: str
    model: str
    metric: str
    score: Corrected | None
    labelled: int


@dataclass(frozen=True)
class Votes:
    """The effective votes of several judges; of: what the correlation is of."""

    task: str
    model: str
    judges: int
    effective: float | None
    correlation: float | None
    of: str
    verdicts: int


@dataclass(frozen=True)
class People:
    """All that is said about judges beside people."""

    beside: Sequence[Beside] = ()
    corrected: Sequence[CorrectedScore] = ()
    votes: Sequence[Votes] = ()


def compared(
    scores: Iterable[Score], verdicts: Sequence[VerdictRow], labels: Labels,
    headlines: Mapping[str, str],
) -> People:  # fmt: skip
    """The judges of each task and model beside people; without labels their effective votes."""
    values: dict[Cell, dict[str, dict[tuple[Answer, str], float]]] = {}
    weights: dict[Answer, dict[str, float]] = {}
    for row in verdicts:
        answer = (row.task, row.model, row.item_id, row.sample)
        entry = row.entry
        if not entry.judge:
            weights.setdefault(answer, {})[entry.item] = entry.weight
        if entry.value is not None and row.step is None:
            by_judge = values.setdefault((row.task, row.model), {})
            points = entry.value * (entry.weight if entry.item == POINTS else 1.0)
            by_judge.setdefault(entry.judge or DECIDED, {})[answer, entry.item] = points
    judged = {
        (s.metric, s.task, s.model, s.item_id, s.sample): s.value
        for s in scores
        if s.metric in ("share", "points")
    }
    beside = [
        _beside(cell, judge, given, labels)
        for cell, by_judge in values.items()
        for judge, given in by_judge.items()
    ]
    corrected = [
        _corrected(cell, headlines.get(cell[0], ""), judged, labels, weights)
        for cell in values
        if any(answer[:2] == cell for answer in labels)
    ]
    votes = [
        _votes(cell, {name: one for name, one in by_judge.items() if name != DECIDED}, labels)
        for cell, by_judge in values.items()
        if len(by_judge) > 2
    ]
    return People([one for one in beside if one.pairs.number], corrected, votes)


def _beside(
    cell: Cell, judge: str, given: Mapping[tuple[Answer, str], float], labels: Labels
) -> Beside:
    pairs, points = Pairs(), False
    right: dict[float, list[tuple[str, float]]] = {0.0: [], 1.0: []}
    for (answer, item), value in given.items():
        label = labels.get(answer, {}).get(item)
        if label is None:
            continue
        pairs = pairs.plus(Pairs.of(value, label))
        points = points or item == POINTS
        if item != POINTS:
            right[label].append((answer[2], float(value == label)))
    ends = [None if points or not right[label] else _share(right[label]) for label in (1.0, 0.0)]
    return Beside(*cell, judge, ends[0], ends[1], pairs)


def _share(right: Sequence[tuple[str, float]]) -> Interval:
    clusters = numbered(item for item, _ in right)
    return mean_interval([value for _, value in right], clusters, share=True)


def _corrected(
    cell: Cell, headline: str, judged: Mapping[tuple[Any, ...], float], labels: Labels,
    weights: Mapping[Answer, Mapping[str, float]],
) -> CorrectedScore:  # fmt: skip
    metric = "points" if headline == "points" else "share"
    of_judge, of_people, items = [], [], []
    for (name, task, model, item, sample), value in judged.items():
        if (name, task, model) == (metric, *cell):
            answer = (task, model, item, sample)
            of_judge.append(value)
            of_people.append(_by_people(labels.get(answer, {}), weights.get(answer, {}), metric))
            items.append(item)
    people = np.array(of_people, float)
    labelled = int((~np.isnan(people)).sum())
    score = corrected_mean(np.array(of_judge), people, numbered(items), metric == "share")
    if score is not None and metric == "points":  # the sum, as the report gives points
        count = len(of_judge)
        sums = score.interval.mapped(lambda mean: mean * count)
        score = Corrected(sums, score.judge_mean * count, score.weight, labelled, count)
    return CorrectedScore(*cell, metric, score, labelled)


def corrected_mean(
    judged: np.ndarray, labels: np.ndarray, clusters: np.ndarray | None = None, share: bool = True
) -> Corrected | None:
    """judged[N]: scores of the judge; labels[N]: those of people, NaN where there is none; clusters
    [N]: numbers of independent groups of answers. share: scores lie between 0 and 1.

    None with fewer than LEAST labelled clusters.
    """
    f, y = np.asarray(judged, float), np.asarray(labels, float)
    own = np.arange(len(f)) if clusters is None else clusters
    has = ~np.isnan(y)
    count = len(np.unique(own[has]))
    if count < LEAST:
        return None
    total, labelled = len(f), int(has.sum())
    rest = total - labelled
    spread = float(f[has].var(ddof=1)) if labelled > 1 else 0.0
    weight = 0.0
    if rest and spread > 0:
        together = float(np.cov(y[has], f[has])[0, 1])
        weight = min(max(together / spread, 0.0), 1.0) * rest / total
    residuals = y[has] - weight * f[has]
    value = float(residuals.mean()) + (weight * float(f[~has].mean()) if rest else 0.0)
    influence = np.zeros(total)
    influence[has] = (residuals - residuals.mean()) / labelled
    if rest:
        influence[~has] = weight * (f[~has] - f[~has].mean()) / rest
    sums = np.bincount(np.unique(own, return_inverse=True)[1], weights=influence)
    unseen = _smallest_step(np.concatenate([y[has], f])) ** 2 / labelled**2 if weight else 0.0
    error = float(np.sqrt((sums @ sums + unseen) * count / (count - 1)))
    if share:
        inside = min(max(value, 0.0), 1.0)
        independent = inside * (1 - inside) / error**2 if error > 0 else 0.0
        n = max(independent, float(count))  # labels alone are worth as much
        interval = agresti_coull(inside, n, t_value(count - 1), "prediction_powered")
    else:
        half = t_value(count - 1) * error
        interval = Interval(value, value - half, value + half, "prediction_powered")
    return Corrected(interval, float(f.mean()), weight, labelled, total)


def _smallest_step(scores: np.ndarray) -> float:
    """The smallest difference between two scores that differ, 0 if none do."""
    steps = np.diff(np.unique(scores.round(9)))
    return float(steps.min()) if len(steps) else 0.0


def _by_people(given: Mapping[str, float], weights: Mapping[str, float], metric: str) -> float:
    """The score of an answer by its labels, NaN unless all items have one."""
    if not weights or given.keys() != weights.keys():
        return math.nan
    if POINTS in given:
        points, most = given[POINTS], weights[POINTS]
    else:
        points = sum(weight * given[item] for item, weight in weights.items())
        most = sum(max(weight, 0.0) for weight in weights.values())
    return points if metric == "points" else min(max(points / most, 0.0), 1.0)


def _votes(
    cell: Cell, by_judge: Mapping[str, Mapping[tuple[Answer, str], float]], labels: Labels
) -> Votes:
    common = set.intersection(*(set(given) for given in by_judge.values()))
    known = [key for key in sorted(common) if key[1] in labels.get(key[0], {})]
    of = "errors" if known else "verdicts"
    keys = known or sorted(common)
    right = np.array([labels[answer][item] for answer, item in known] if known else 0.0)
    columns = [np.array([given[key] for key in keys]) - right for given in by_judge.values()]
    pairs = [
        float(np.corrcoef(x, y)[0, 1])
        for x, y in combinations(columns, 2)
        if len(keys) > 1 and x.std() > 0 and y.std() > 0
    ]
    judges = len(by_judge)
    if not pairs:
        return Votes(*cell, judges, None, None, of, len(keys))
    r = sum(pairs) / len(pairs)
    effective = judges / (1 + (judges - 1) * r) if 1 + (judges - 1) * r > 0 else float(judges)
    return Votes(*cell, judges, min(effective, float(judges)), r, of, len(keys))


def tables(people: People) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, columns, rows) of what there is."""
    beside = [
        [one.task, one.model, one.judge,
         interval_text(one.sensitivity), interval_text(one.specificity),
         f"{one.pairs.agreement or 0:.1%}", _short(one.pairs.kappa), str(int(one.pairs.number))]
        for one in people.beside
    ]  # fmt: skip
    corrected = []
    for one in people.corrected:
        too_few = f"fewer than {LEAST} answers with labels on all items"
        cells = ["", too_few, str(one.labelled), "", ""]
        if s := one.score:
            cells = [f"{s.judge_mean:.4g}", interval_text(s.interval), str(s.labelled),
                     str(s.answers), f"{s.weight:.2f}"]  # fmt: skip
        corrected.append([one.task, one.model, one.metric, *cells])
    votes = [
        [one.task, one.model, str(one.judges), _short(one.effective), _short(one.correlation),
         one.of, str(one.verdicts)]
        for one in people.votes
    ]  # fmt: skip
    named = (
        ("Judges beside people", COLUMNS, beside),
        ("Scores corrected by people's verdicts", CORRECTED, corrected),
        ("Effective votes of several judges", VOTES, votes),
    )
    return [(title, columns, rows) for title, columns, rows in named if rows]


def section(people: People) -> list[str]:
    """The section of the report, none where there is nothing to say."""
    parts = [
        f"<h3>{page.text(title)}</h3>{page.table(columns, rows)}"
        for title, columns, rows in tables(people)
    ]
    return [page.section("Judges and people", parts)] if parts else []


def to_json(people: People) -> dict[str, object]:
    """The figures as plain data; shares are fractions of 1."""
    return {
        "judge_labels": [
            {"task": one.task, "model": one.model, "judge": one.judge,
             "labels": int(one.pairs.number), "agreement": one.pairs.agreement,
             "kappa": one.pairs.kappa}
            | _json("sensitivity", one.sensitivity) | _json("specificity", one.specificity)
            for one in people.beside
        ],
        "corrected_scores": [
            {"task": one.task, "model": one.model, "metric": one.metric, "labelled": one.labelled}
            | ({"judge_alone": one.score.judge_mean, "weight": one.score.weight,
                "answers": one.score.answers} | _json("corrected", one.score.interval)
               if one.score else {})
            for one in people.corrected
        ],
        "effective_votes": [dict(vars(one)) for one in people.votes],
    }  # fmt: skip


def _json(name: str, interval: Interval | None) -> dict[str, float]:
    ends = interval.ends if interval else {}
    return {f"{name}_{end}": value for end, value in ends.items()}


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
