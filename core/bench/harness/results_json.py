"""The results of one model in the schema of lm-evaluation-harness 0.4.13: what its `results.json`
holds of the tasks and groups. Standard errors are given where the harness has a formula (means);
where it draws samples they are "N/A", as its own are without bootstrap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from sabia.core.bench.harness.groups import Group, version_of
from sabia.core.bench.harness.scores import AGGREGATIONS, LOWER_IS_BETTER, named
from sabia.core.bench.harness.yaml_file import Function, YamlTask
from sabia.core.bench.result_summary import GroupResult, Result, Summary, Table
from sabia.core.bench.task import Task

NOTHING = "N/A"


def harness_json(
    model: str,
    tasks: Sequence[Task],
    groups: Sequence[Group],
    summary: Summary,
    table: Table,
    originals: Mapping[str, int],
    config: Mapping[str, Any],
) -> dict[str, object]:
    """The results of a model. originals: task → rows of its split; config: settings of the run."""
    yaml = {task.name: task.yaml for task in tasks if task.yaml is not None}
    results: dict[str, dict[str, Any]] = {
        name: _of_task(name, settings, table.get(name, {}).get(model, {}), summary, model)
        for name, settings in yaml.items()
    }
    for group in _children_first(groups):
        mine = [one for one in summary.groups if (one.group, one.model) == (group.name, model)]
        results[group.name] = _of_group(group, mine, results)
    shots = {task.name: task.shots for task in tasks if task.yaml is not None}
    better = {name: {m: m not in LOWER_IS_BETTER for m in t.metrics} for name, t in yaml.items()}
    for group in groups:
        names = _names(group)
        if len(counts := {shots[name] for name in names if name in shots}) == 1:
            shots[group.name] = counts.pop()
        merged: dict[str, Any] = {}
        for directions in (better[name] for name in names if name in better):
            for metric, direction in directions.items():
                merged[metric] = direction if merged.get(metric, direction) == direction else None
        if merged:
            better[group.name] = merged
    versions = {name: version_of(task.metadata, "Yaml") for name, task in yaml.items()}
    versions |= {group.name: group.version for group in groups}
    with_values = {group.name: results[group.name] for group in groups if group.metrics}
    return {
        "results": results,
        **({"groups": with_values} if with_values else {}),
        "group_subtasks": {group.name: _names(group) for group in groups},
        "configs": {name: _config(yaml[name]) for name in sorted(yaml)},
        "versions": dict(sorted(versions.items())),
        "n-shot": dict(sorted(shots.items())),
        "higher_is_better": dict(sorted(better.items())),
        "n-samples": {
            name: {"original": originals[name], "effective": results[name]["sample_len"]}
            for name in yaml
        },
        "model_name": model,
        "config": dict(config),
    }


def _names(group: Group) -> list[str]:
    return [member if isinstance(member, str) else member.name for member in group.members]


def _children_first(groups: Sequence[Group]) -> list[Group]:
    """All groups, each after those in it."""
    made: dict[str, Group] = {}
    for group in groups:
        for one in reversed(list(group.below)):
            made.setdefault(one.name, one)
    return list(made.values())


def _of_task(
    name: str, settings: YamlTask, cells: Mapping[str, Mapping[Any, float]], summary: Summary,
    model: str,
) -> dict[str, object]:  # fmt: skip
    figures: dict[str, Any] = {}
    sizes = [0]
    for given in settings.filter_list:
        for metric in settings.metrics:
            full = named(metric, given.name)
            result: Result | None = summary.result(model, name, full)
            if result is None:
                continue
            sizes.append(result.items)
            error: Any = NOTHING
            if metric not in AGGREGATIONS and len(values := list(cells[full].values())) > 1:
                error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
            figures[f"{metric},{given.name}"] = result.interval.value
            figures[f"{metric}_stderr,{given.name}"] = error
    alias = settings.task_alias or name
    return {"name": name, "alias": alias, "sample_len": max(sizes), **figures}


def _of_group(
    group: Group, results: Sequence[GroupResult], tasks: Mapping[str, Mapping[str, Any]]
) -> dict[str, object]:
    made: dict[str, Any] = {"alias": group.alias or group.name, "name": group.name}
    if not group.metrics:
        return made
    made["sample_len"] = sum(tasks[name]["sample_len"] for name in group.tasks)
    counts: dict[str, int] = {}
    for one in results:
        key = f"{one.of},{one.filter}"
        sizes = np.array([part.items for part in one.results], float)
        of_tasks = [
            tasks[part.task].get(f"{one.of}_stderr,{one.filter}", NOTHING) for part in one.results
        ]
        made[key] = one.interval.value
        counts[key] = int(sizes.sum())
        error: Any = NOTHING
        if NOTHING not in of_tasks:
            errors = np.array(of_tasks)
            if not one.by_size:
                error = float(np.sqrt((errors**2).sum()) / len(errors))
            elif (spare := sizes.sum() - len(sizes)) > 0:
                pooled = ((sizes - 1) * errors**2 * sizes).sum() / spare
                error = float(np.sqrt(pooled / sizes.sum()))
        made[f"{one.of}_stderr,{one.filter}"] = error
    return made | ({"sample_count": counts} if counts else {})


def _config(settings: YamlTask) -> dict[str, object]:
    """The keys of a task as in its file, without those that have no value."""
    made: dict[str, Any] = {}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if one.name not in ("path", "tag") and value not in (None, "", {}):
            made[one.name] = _plain(value)
    made["metric_list"] = [
        {"metric": metric.name, **_plain(metric.settings)} for metric in settings.metric_list
    ]
    made["filter_list"] = [
        {"name": given.name, "filter": [{"function": name, **_plain(keys)}
                                        for name, keys in given.steps]}
        for given in settings.filter_list
    ]  # fmt: skip
    return made


def _plain(value: object) -> Any:
    if isinstance(value, Function):
        return f"!function {value.file}:{value.name}"
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
