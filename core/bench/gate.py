"""A gate: whether a model fell, against a baseline, by more than a file allows.

Each check is a non-inferiority test on the paired differences of one task, of the mean of a
capability's tasks, or of one rubric item. It is `red` if a fall of more than `max_drop` is shown,
`green` if it is excluded, and else `cannot tell`, with the number of items that would probably tell
(80 % power). Tests are one-sided at the gate's confidence; those of red are Holm-adjusted over the
checks of a model, so that a model equal to its baseline is red with a probability of at most
1 - confidence. Errors are by clusters of items, and allow for rare differences
(`statistics.middle_and_error`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import NormalDist

import numpy as np

from sabia.core.bench import statistics
from sabia.core.bench.gate_file import Gate, Rule
from sabia.core.bench.metrics import MAXIMUM, NO_ANSWER, metric_of
from sabia.core.bench.result_summary import Groups, Key, Table, clusters_of, per_item
from sabia.core.bench.verdict_rows import VerdictRow
from sabia.core.errors import UsageError

RED, GREEN, UNDECIDED = "red", "green", "cannot tell"


@dataclass(frozen=True)
class Difference:
    """Candidate minus baseline, positive if better. low, high: for tests (see the module); error:
    of their middle, with `degrees` of freedom. missing: answers that the candidate lacks, counted
    as wrong."""

    value: float
    middle: float
    error: float
    degrees: float
    items: int
    missing: int = 0
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One rule on what it matches of a candidate. noise: the largest difference of a repeat of the
    baseline, None without repeats. needed: items that would probably tell, 0 if it can tell."""

    candidate: str
    kind: str
    name: str
    metric: str
    unit: str
    max_drop: float
    difference: Difference
    low: float
    high: float
    p_value: float
    verdict: str
    needed: int = 0
    noise: float | None = None


class Scores:
    """What the checks read. table, groups: of `tabulate`; headlines: task → metric; capabilities:
    task → capability, as task files say."""

    def __init__(
        self,
        table: Table,
        groups: Mapping[str, Groups],
        headlines: Mapping[str, str],
        capabilities: Mapping[str, str],
        verdicts: Iterable[VerdictRow] = (),
    ) -> None:
        self.table, self.groups, self.headlines = table, groups, headlines
        self.capabilities = capabilities
        # (task, rubric item) → model → values
        self.rubrics: dict[tuple[str, str], dict[str, dict[Key, float]]] = {}
        for row in verdicts:
            if row.entry.judge == "" and row.step is None and row.entry.value is not None:
                of_item = self.rubrics.setdefault((row.task, row.entry.item), {})
                of_item.setdefault(row.model, {})[row.item_id, row.sample] = row.entry.value

    @property
    def models(self) -> list[str]:
        """All models, in the order of the rows."""
        return list(dict.fromkeys(model for task in self.table.values() for model in task))

    def of_task(self, task: str, name: str, first: str, second: str) -> Difference | None:
        """The difference of two models on a task; None if they have no sample in common."""
        by_model, metric = self.table[task], metric_of(name)
        if first not in by_model or second not in by_model:
            return None
        before, after = (dict(per_item(metric, by_model[model])) for model in (first, second))
        lost = [key for key in by_model[second].get(NO_ANSWER, {}) if key in before]
        bounded = metric.aggregate not in ("ratio", "corpus")
        if bounded:
            after |= dict.fromkeys(lost, 0.0)
        span, scale = float(bounded), 1.0
        if metric.aggregate == "sum":
            maxima = by_model[first].get(MAXIMUM, {})
            span = max((maxima.get(key, value) for key, value in before.items()), default=0.0)
            scale = float(len(before.keys() & after.keys()))
        sign = 1.0 if metric.higher_is_better else -1.0
        gap = difference(before, after, self.groups.get(task, {}), span, sign, scale)
        return gap and replace(gap, missing=len(lost) if bounded else 0)

    def of_rubric_item(self, task: str, item: str, first: str, second: str) -> Difference | None:
        """The same on the verdicts of a rubric item."""
        by_model = self.rubrics[task, item]
        before, after = by_model.get(first, {}), by_model.get(second, {})
        return difference(before, after, self.groups.get(task, {}), 1.0)


def difference(
    before: Mapping[Key, float],
    after: Mapping[Key, float],
    groups: Groups,
    span: float,
    sign: float = 1.0,
    scale: float = 1.0,
) -> Difference | None:
    """The difference over the samples of both; span: of a value's range, 0 if it has none; scale:
    of the mean. None without samples of both."""
    keys = [key for key in before if key in after]
    if not keys:
        return None
    off = sign * np.array([after[key] - before[key] for key in keys])
    middle, error, degrees = statistics.middle_and_error(off, clusters_of(keys, groups), span)
    change: dict[str, float] = {}
    for (item, _), by in zip(keys, off, strict=True):
        change[item] = change.get(item, 0.0) + float(by)
    order = sorted(change, key=change.__getitem__)
    return Difference(
        float(off.mean()) * scale, middle * scale, error * scale, max(degrees, 1), len(change),
        worse=tuple(item for item in order if change[item] < 0),
        better=tuple(item for item in reversed(order) if change[item] > 0),
    )  # fmt: skip


def mean_of(parts: Sequence[Difference]) -> Difference:
    """The mean over independent tasks; degrees of freedom by Welch and Satterthwaite."""
    count, variances = len(parts), [part.error**2 for part in parts]
    total = sum(variances)
    below = sum(v**2 / part.degrees for v, part in zip(variances, parts, strict=True))
    degrees = total**2 / below if 0 < total < math.inf else min(part.degrees for part in parts)
    return Difference(
        sum(part.value for part in parts) / count,
        sum(part.middle for part in parts) / count,
        math.sqrt(total) / count,
        degrees,
        sum(part.items for part in parts),
        sum(part.missing for part in parts),
    )


def judge(gate: Gate, scores: Scores) -> list[Check]:
    """All checks of all candidates. Raises UsageError where the gate does not fit the scores."""
    for name in (gate.baseline, *gate.repeats):
        if name not in scores.models:
            known = ", ".join(scores.models)
            raise UsageError(f"--gate: no scores of {name!r} (expected one of {known})")
    candidates = [m for m in scores.models if m not in (gate.baseline, *gate.repeats)]
    if not candidates:
        raise UsageError(f"--gate: no scores of a model other than {gate.baseline!r} to compare")
    checks: list[Check] = []
    for candidate in candidates:
        own = [check for rule in gate.rules for check in _checks(rule, gate, scores, candidate)]
        adjusted = statistics.holm([check.p_value for check in own])
        checks += [_decided(one, p, gate) for one, p in zip(own, adjusted, strict=True)]
    return checks


def failed(gate: Gate, checks: Sequence[Check]) -> list[Check]:
    """The checks that close the gate."""
    closing = (RED, UNDECIDED) if gate.undecided == "fail" else (RED,)
    return [check for check in checks if check.verdict in closing]


def _checks(rule: Rule, gate: Gate, scores: Scores, candidate: str) -> Iterator[Check]:
    count = 0
    for name, metric, unit, parts in _matches(rule, gate, scores):
        count += 1
        gap = _difference(scores, parts, metric, gate.baseline, candidate)
        if gap is None:
            raise UsageError(
                f"--gate: {rule.kind} {name}: {gate.baseline} and {candidate} have no items in "
                "common"
            )
        noise = [
            repeat.value
            for model in gate.repeats
            if (repeat := _difference(scores, parts, metric, gate.baseline, model))
        ]
        t = (gap.middle + rule.max_drop) / gap.error if gap.error > 0 else math.inf
        tail = statistics.t_p_value(abs(t), round(gap.degrees)) / 2 if t < math.inf else 0.0
        half = statistics.t_value(max(1, math.floor(gap.degrees)), 2 * gate.confidence - 1)
        yield Check(
            candidate, rule.kind, name, metric, unit, rule.max_drop, gap,
            gap.middle - half * gap.error, gap.middle + half * gap.error,
            tail if t < 0 else 1 - tail, GREEN,
            noise=max(map(abs, noise)) if noise else None,
        )  # fmt: skip
    if not count:
        raise UsageError(f"--gate: no {rule.kind.replace('_', ' ')} matches {rule.pattern!r}")


Part = tuple[str, str]  # task, rubric item or ''


def _matches(
    rule: Rule, gate: Gate, scores: Scores
) -> Iterator[tuple[str, str, str, Sequence[Part]]]:
    """(name, metric or '' for each task's own, unit, tasks and rubric items) of each match."""
    if rule.kind == "rubric_item":
        for task, item in scores.rubrics:
            if fnmatchcase(item, rule.pattern):
                yield f"{item} ({task})", "verdict", "share", [(task, item)]
    elif rule.kind == "task":
        for task in scores.table:
            if fnmatchcase(task, rule.pattern):
                name = rule.metric or scores.headlines[task]
                yield task, name, metric_of(name).unit, [(task, "")]
    else:
        for name, tasks in _tasks_of(gate, scores).items():
            if fnmatchcase(name, rule.pattern):
                for task in tasks:
                    metric = rule.metric or scores.headlines[task]
                    if (unit := metric_of(metric).unit) != "share":
                        raise UsageError(
                            f"--gate: capability {name}: {task} is measured in {unit or metric}, "
                            "which has no mean with shares; give the task a rule of its own"
                        )
                yield name, rule.metric, "share", [(task, "") for task in tasks]


def _tasks_of(gate: Gate, scores: Scores) -> dict[str, list[str]]:
    """The tasks of each capability, by the task files and the gate file."""
    tasks: dict[str, list[str]] = {}
    for task in scores.table:
        named = [scores.capabilities[task]] if task in scores.capabilities else []
        named += [name for name, patterns in gate.capabilities.items()
                  if any(fnmatchcase(task, pattern) for pattern in patterns)]  # fmt: skip
        for name in dict.fromkeys(named):
            tasks.setdefault(name, []).append(task)
    return tasks


def _difference(
    scores: Scores, parts: Sequence[Part], metric: str, first: str, second: str
) -> Difference | None:
    gap = [
        scores.of_rubric_item(task, item, first, second)
        if item
        else scores.of_task(task, metric or scores.headlines[task], first, second)
        for task, item in parts
    ]
    present = [one for one in gap if one is not None]
    if len(present) < len(parts):
        return None
    return present[0] if len(present) == 1 else mean_of(present)


def _decided(check: Check, p_adjusted: float, gate: Gate) -> Check:
    if p_adjusted <= 1 - gate.confidence:
        return replace(check, p_value=p_adjusted, verdict=RED)
    if check.low > -check.max_drop:
        return replace(check, p_value=p_adjusted)
    needed = _needed(check, gate.confidence)
    return replace(check, p_value=p_adjusted, verdict=UNDECIDED, needed=needed)


def _needed(check: Check, confidence: float) -> int:
    """Items with which a test tells with a probability of 80 % that equal models are equal, or, if
    there are as many, that a fall is the measured one."""
    if not math.isfinite(check.difference.error):
        return 0
    reach = NormalDist().inv_cdf(confidence) + NormalDist().inv_cdf(statistics.POWER)
    items = check.difference.items
    for distance in (check.max_drop, abs(check.difference.middle + check.max_drop)):
        share = reach * check.difference.error / max(distance, 1e-3 * check.max_drop)
        if (needed := math.ceil(items * share**2)) > items:
            return needed
    return items + 1
