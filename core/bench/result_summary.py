"""Summary of score rows: values with intervals, and models compared item by item.

A task's headline metric is the one that its file names, else the first of its kind. Every pair of
models is compared on it over the items (and samples of the same number) that both have; p-values
are Holm-adjusted over all comparisons of the report. The overall value of a model is the mean of
its tasks' headline shares, if all models have the same tasks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from sabia.core.bench import statistics
from sabia.core.bench.corpus_metrics import item_values
from sabia.core.bench.metrics import (
    LOGLIKELIHOOD,
    MAXIMUM,
    METRICS,
    NO_ANSWER,
    NO_VERDICT,
    Metric,
    is_known,
    metric_of,
)
from sabia.core.bench.score_rows import Score
from sabia.core.bench.statistics import finite

Key = tuple[str, int]  # item id, sample
Groups = Mapping[str, str]  # item id → its cluster
Table = dict[str, dict[str, dict[str, dict[Key, float]]]]  # task → model → metric → sample → value
SCHEMA_VERSION = 1
HEADLINES = ("acc", "exact_match", "points", "share", "bits_per_byte")


@dataclass(frozen=True)
class Result:
    """One metric of one model on one task. maximum: of `points`, the maximum points.

    no_answer, no_verdict: samples that `interval` leaves out. bounds: the value if all of them were
    wrong, and if all were right; None without such samples, the second NaN if it is not known.
    """

    model: str
    task: str
    metric: str
    interval: statistics.Interval
    items: int
    samples_per_item: float
    no_verdict: int = 0
    maximum: float | None = None
    no_answer: int = 0
    bounds: tuple[float, float] | None = None

    @property
    def detectable(self) -> float:
        """The smallest difference to an independent result of equal width that a comparison would
        find in 80 % of the cases; one over the same items finds a smaller one."""
        return statistics.detectable(2**0.5 * self.interval.half_width)

    @property
    def missing(self) -> int:
        """Samples without a score."""
        return self.no_verdict + self.no_answer


@dataclass(frozen=True)
class Comparison:
    """Model b against model a on a task's headline metric; ids sorted by the size of the change."""

    task: str
    metric: str
    model_a: str
    model_b: str
    paired: statistics.Paired
    p_holm: float = float("nan")
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupResult:
    """A metric of a group of tasks for one model: the mean of `results`. of, filter: the metric and
    the filter that `metric` is named after; by_size: tasks are weighted by their items."""

    group: str
    model: str
    metric: str
    of: str
    filter: str
    interval: statistics.Interval
    results: tuple[Result, ...]
    by_size: bool

    @property
    def items(self) -> int:
        """The items of all tasks."""
        return sum(result.items for result in self.results)


@dataclass(frozen=True)
class Summary:
    """All results and comparisons of a report, in the order of models and tasks given."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    headlines: Mapping[str, str]
    results: tuple[Result, ...]
    comparisons: tuple[Comparison, ...]
    overall: Mapping[str, statistics.Interval] = field(default_factory=dict)
    # capability → model → mean of the headline shares of its tasks
    capabilities: Mapping[str, Mapping[str, statistics.Interval]] = field(default_factory=dict)
    groups: tuple[GroupResult, ...] = ()

    def result(self, model: str, task: str, metric: str = "") -> Result | None:
        """The result of a model on a task (its headline metric by default)."""
        wanted = metric or self.headlines.get(task)
        asked = (model, task, wanted)
        return next((r for r in self.results if (r.model, r.task, r.metric) == asked), None)


def tabulate(scores: Iterable[Score]) -> tuple[Table, dict[str, dict[str, str]]]:
    """The values by task, model, metric and sample, and the clusters of each task's items."""
    table: Table = {}
    groups: dict[str, dict[str, str]] = {}
    for score in scores:
        if score.cluster:
            groups.setdefault(score.task, {})[score.item_id] = score.cluster
        cell = table.setdefault(score.task, {}).setdefault(score.model, {})
        cell.setdefault(score.metric, {})[score.item_id, score.sample] = score.value
    return table, groups


def summarise(
    scores: Iterable[Score],
    headlines: Mapping[str, str] | None = None,
    capabilities: Mapping[str, str] | None = None,
) -> Summary:
    """Values, intervals and comparisons; `headlines` and `capabilities` are those of tasks."""
    table, groups = tabulate(scores)
    models = tuple(dict.fromkeys(model for task in table.values() for model in task))
    chosen = {
        task: _headline(by_model, (headlines or {}).get(task)) for task, by_model in table.items()
    }
    results = tuple(
        result
        for task, by_model in table.items()
        for model, metrics in by_model.items()
        for result in _results(model, task, metrics, groups.get(task, {}))
    )
    pairs = [
        pair
        for task, by_model in table.items()
        for a, b in combinations([m for m in models if m in by_model], 2)
        if (pair := _compare(task, chosen[task], a, b, by_model, groups.get(task, {}))) is not None
    ]
    p_values = statistics.holm([pair.paired.p_value for pair in pairs])
    adjusted = tuple(replace(c, p_holm=p) for c, p in zip(pairs, p_values, strict=True))
    overall = _overall(models, chosen, results)
    named, by_capability = capabilities or {}, dict[str, dict[str, statistics.Interval]]()
    for name in dict.fromkeys(named.values()):
        own = {task: metric for task, metric in chosen.items() if named.get(task) == name}
        means = [_overall([model], own, results, least=1) for model in models]
        by_capability[name] = {model: mean for one in means for model, mean in one.items()}
    return Summary(models, tuple(table), chosen, results, adjusted, overall, by_capability)


def _headline(by_model: Mapping[str, Mapping[str, Any]], wanted: str | None) -> str:
    present = {metric for metrics in by_model.values() for metric in metrics}
    present |= {metric.name for metric in _reported(present)}
    every = (wanted, *HEADLINES, *METRICS, *sorted(present))
    known = [name for name in every if name in present and name and is_known(name)]
    return known[0] if known else min(present)


def _results(
    model: str, task: str, metrics: Mapping[str, Mapping[Key, float]], groups: Groups
) -> Iterable[Result]:
    silent, unanswered = (len(metrics.get(name, ())) for name in (NO_VERDICT, NO_ANSWER))
    if (silent or unanswered) and not any(map(is_known, metrics)):
        nothing = statistics.Interval(np.nan, np.nan, np.nan, "no_score_at_all")
        yield Result(model, task, "share", nothing, 0, 0.0, silent, None, unanswered, (0.0, 1.0))
    for metric in _reported(metrics):
        if metric.aggregate == "ratio":
            yield _ratio(model, task, metric, metrics, groups)
        else:
            yield _mean(model, task, metric, metrics, groups)


def _reported(rows: Collection[str]) -> list[Metric]:
    """The metrics that rows of these names give."""
    filters = dict.fromkeys(name.partition(",")[2] for name in rows if "," in name)
    named = (*METRICS, *(f"{name},{given}" for given in filters for name in METRICS))
    needed = {
        metric: (LOGLIKELIHOOD, metric.per) if metric.aggregate == "ratio" else metric.parts
        for metric in map(metric_of, named)
    }
    return [m for m, names in needed.items() if all(n in rows for n in names or (m.name,))]


def _ratio(
    model: str, task: str, metric: Metric, metrics: Mapping[str, Mapping[Key, float]],
    groups: Groups,
) -> Result:  # fmt: skip
    keys = sorted(metrics[LOGLIKELIHOOD])  # the draws do not depend on the order of the rows
    nats = -np.array([metrics[LOGLIKELIHOOD][key] for key in keys])
    per = np.array([metrics[metric.per][key] for key in keys])
    ratio = statistics.ratio_bootstrap(nats, per, clusters_of(keys, groups))
    return Result(model, task, metric.name, ratio.mapped(metric.transform), len(keys), 1.0)


def _mean(
    model: str, task: str, metric: Metric, metrics: Mapping[str, Mapping[Key, float]],
    groups: Groups,
) -> Result:  # fmt: skip
    by_key = per_item(metric, metrics)
    values, items = np.array([*by_key.values()]), len({item for item, _ in by_key})
    clusters = clusters_of(list(by_key), groups)
    share = metric.unit == "share"
    interval, maximum = statistics.mean_interval(values, clusters, share), None
    maxima = metrics.get(MAXIMUM, {})
    if metric.aggregate == "sum":
        # the sum with its interval, within 0 to the maximum points if these are known
        total, scale = round(float(values.sum()), 9), float(len(values))
        if all(maxima.get(key, 0) > 0 for key in by_key):
            most = np.array([maxima[key] for key in by_key])
            interval = statistics.share_of_sums(values, most, clusters)
            scale = maximum = round(float(most.sum()), 9)
        low, high = interval.low * scale, interval.high * scale
        interval = statistics.Interval(total, low, high, interval.method)
    silent, unanswered = (metrics.get(name, {}) for name in (NO_VERDICT, NO_ANSWER))
    bounds_if_missing = None
    if missing := [*silent, *unanswered]:
        total, count = float(values.sum()), len(values) + len(missing)
        bounds_if_missing = (total / count, (total + len(missing)) / count)
        if metric.aggregate == "sum":
            bounds_if_missing = (total, total + sum(maxima.get(key, np.nan) for key in missing))
    return Result(
        model, task, metric.name, interval, items, len(values) / items, len(silent), maximum,
        len(unanswered), bounds_if_missing,
    )  # fmt: skip


def clusters_of(keys: Sequence[Key], groups: Groups) -> np.ndarray:
    """The number of the cluster of each sample: those of an item, or of all items of a group."""
    return statistics.numbered((groups.get(item, item), item in groups) for item, _ in keys)


def per_item(metric: Metric, metrics: Mapping[str, Mapping[Key, float]]) -> Mapping[Key, float]:
    """Values by item; ratios use the sums of the item, and corpus metrics values of their mean."""
    if metric.aggregate == "corpus":
        columns = [metrics.get(name, {}) for name in metric.parts]
        keys = [key for key in columns[0] if all(key in column for column in columns)]
        if not keys:
            return {}
        matrix = np.array([[column[key] for column in columns] for key in keys])
        values = item_values(metric.name.partition(",")[0], matrix)
        return dict(zip(keys, values.tolist(), strict=True))
    if metric.aggregate != "ratio":
        return metrics.get(metric.name, {})
    nats, per = metrics.get(LOGLIKELIHOOD, {}), metrics.get(metric.per, {})
    return {key: metric.transform(-nats[key] / per[key]) for key in nats if per.get(key)}


def _compare(
    task: str, name: str, a: str, b: str,
    by_model: Mapping[str, Mapping[str, Mapping[Key, float]]], groups: Groups,
) -> Comparison | None:  # fmt: skip
    metric = metric_of(name)
    first, second = per_item(metric, by_model[a]), per_item(metric, by_model[b])
    keys = [key for key in first if key in second]
    if not keys:
        return None
    x, y = (np.array([values[key] for key in keys]) for values in (first, second))
    ids = list(dict.fromkeys(item for item, _ in keys))
    sign = 1.0 if metric.higher_is_better else -1.0
    bounded = metric.aggregate not in ("ratio", "corpus")
    span = float(bounded and unit_key(name) == "share")
    if metric.aggregate == "sum":
        maxima = by_model[a].get(MAXIMUM, {})
        span = max(maxima.get(key, first[key]) for key in keys)
    pair = statistics.paired(x, y, clusters_of(keys, groups), len(ids), span)
    if metric.aggregate == "sum":
        pair = statistics.scaled(pair, len(keys))
    if sign < 0:
        pair = replace(pair, regressed=pair.fixed, fixed=pair.regressed)
    numbers = statistics.numbered(item for item, _ in keys)
    change = np.bincount(numbers, weights=sign * (y - x))
    order = np.argsort(change, kind="stable")
    worse = tuple(ids[i] for i in order if change[i] < 0)
    better = tuple(ids[i] for i in order[::-1] if change[i] > 0)
    return Comparison(task, name, a, b, pair, worse=worse, better=better)


def _overall(
    models: Sequence[str], headlines: Mapping[str, str], results: Sequence[Result], least: int = 2
) -> dict[str, statistics.Interval]:
    """Mean of the headline metrics that are shares, if every model has all of them, and they are
    `least` or more."""
    tasks = [
        task
        for task, metric in headlines.items()
        if unit_key(metric) == "share" and metric_of(metric).higher_is_better
    ]
    by_cell = {(r.model, r.task): r.interval for r in results if headlines.get(r.task) == r.metric}
    if len(tasks) < least or any((m, t) not in by_cell for m in models for t in tasks):
        return {}
    return {m: statistics.macro_mean([by_cell[m, t] for t in tasks]) for m in models}


def to_json(summary: Summary, shown_ids: int = 50) -> dict[str, object]:
    """The summary as plain data; shares are fractions of 1, at most `shown_ids` ids of changed
    items."""
    return {
        "schema_version": SCHEMA_VERSION,
        "confidence_share": statistics.CONFIDENCE,
        "models": list(summary.models),
        "headline_metrics": dict(summary.headlines),
        "results": [_result_json(result, summary) for result in summary.results],
        "overall": [
            {"model": model, "tasks": len(summary.headlines)} | _interval_json(interval, "share")
            for model, interval in summary.overall.items()
        ],
        "capabilities": [
            {"capability": name, "model": model} | _interval_json(interval, "share")
            for name, by_model in summary.capabilities.items()
            for model, interval in by_model.items()
        ],
        "paired": [_comparison_json(c, shown_ids) for c in summary.comparisons],
    } | ({"groups": [_group_json(one) for one in summary.groups]} if summary.groups else {})


def unit_key(metric: str) -> str:
    """The suffix that names a metric's unit in a key: share, points, bits_per_byte, perplexity."""
    return metric_of(metric).unit.replace(" ", "_") or "value"


def _interval_json(interval: statistics.Interval, unit: str) -> dict[str, object]:
    ends = {f"{name}_{unit}": finite(value) for name, value in interval.ends.items()}
    return ends | {"ci_method": interval.method}


def _group_json(one: GroupResult) -> dict[str, object]:
    record = {"group": one.group, "model": one.model, "metric": one.metric, "items": one.items,
              "tasks": len(one.results), "weighted_by_items": one.by_size}  # fmt: skip
    return record | _interval_json(one.interval, unit_key(one.results[0].metric))


def _result_json(result: Result, summary: Summary) -> dict[str, object]:
    record = {
        "task": result.task,
        "model": result.model,
        "metric": result.metric,
        "headline": summary.headlines[result.task] == result.metric,
        "items": result.items,
        "samples_per_item": result.samples_per_item,
        "items_without_verdict": result.no_verdict,
        "items_without_answer": result.no_answer,
    } | _interval_json(result.interval, unit := unit_key(result.metric))
    record[f"detectable_{unit}"] = finite(result.detectable)
    if result.bounds is not None:
        wrong, right = result.bounds
        record[f"missing_as_wrong_{unit}"] = wrong
        record[f"missing_as_right_{unit}"] = finite(right)
    return record if result.maximum is None else record | {"maximum_points": result.maximum}


def _comparison_json(c: Comparison, shown: int) -> dict[str, object]:
    p = c.paired
    return {
        "task": c.task,
        "metric": c.metric,
        "model_a": c.model_a,
        "model_b": c.model_b,
        **{k.replace("value", "difference"): v
           for k, v in _interval_json(p.difference, unit_key(c.metric)).items()},
        "p_value": finite(p.p_value),
        "p_value_holm": finite(c.p_holm),
        "test": p.test,
        f"detectable_{unit_key(c.metric)}": finite(p.detectable),
        "items": p.items,
        "regressed_samples": p.regressed,
        "fixed_samples": p.fixed,
        "regressed_items": list(c.worse[:shown]),
        "fixed_items": list(c.better[:shown]),
    }  # fmt: skip
