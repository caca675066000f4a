"""Groups of YAML tasks: their tasks, also through other groups and tags, and their mean metrics.

A file with `group` lists members in `task`: names of tasks, groups and tags of the files in its
folder and below, or mappings of `task` or `group` with keys that replace those of the file. A group
has a value where it has `aggregate_metric_list`: the mean over all its tasks, weighted by their
items unless `weight_by_size` is false, for each filter, as in lm-evaluation-harness 0.4.13.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.bench.harness.scores import named
from sabia.core.bench.harness.yaml_file import is_yaml, read_yaml
from sabia.core.bench.result_summary import GroupResult, Result, Summary, unit_key
from sabia.core.bench.statistics import Interval
from sabia.core.bench.task import Task
from sabia.core.errors import UsageError

KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag")
NORMALISED = "normalised"
METRIC_KEYS = ("metric", "filter_list", "aggregation", "weight_by_size")


@dataclass(frozen=True)
class GroupMetric:
    """An entry of aggregate_metric_list. filters: None for all that the tasks have."""

    metric: str
    filters: tuple[str, ...] | None
    by_size: bool


@dataclass(frozen=True)
class Group:
    """A group; members: tasks by name, and groups."""

    name: str
    members: "tuple[str | Group, ...]"
    metrics: tuple[GroupMetric, ...] = ()
    alias: str = ""
    version: str = "N/A"
    path: str = ""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks below."""
        parts = ((m,) if isinstance(m, str) else m.tasks for m in self.members)
        return tuple(name for part in parts for name in part)

    @property
    def below(self) -> "Iterator[Group]":
        """The group and all groups in it."""
        yield self
        for member in self.members:
            if isinstance(member, Group):
                yield from member.below


@dataclass(frozen=True)
class Read:
    """A group of a file, and its tasks: (keys, path of the file). changed: a member replaces keys
    of its file."""

    group: Group
    tasks: list[tuple[Mapping[str, Any], str]]
    changed: bool


@dataclass
class Folder:
    """The tasks, groups and tags of the YAML files in a folder and below."""

    path: Path
    trust: bool
    option: str
    _open: list[str] = field(default_factory=list)

    @cached_property
    def _entries(self) -> dict[str, tuple[Mapping[str, Any], str]]:
        made: dict[str, tuple[Mapping[str, Any], str]] = {}
        for path in sorted(p for p in self.path.rglob("*") if is_yaml(p)):
            try:
                keys = read_yaml(path, True, self.option)
            except UsageError as error:  # of a file that need not be the named one
                notes.note(f"a file is passed over: {error}")
                continue
            name = keys["group"] if is_group(keys) else keys.get("task")
            if isinstance(name, str):
                made.setdefault(name, (keys, str(path)))
        return made

    @cached_property
    def _tags(self) -> dict[str, list[str]]:
        tags: dict[str, list[str]] = {}
        for name, (keys, _) in self._entries.items():
            given = [] if is_group(keys) else keys.get("tag") or []
            for tag in [given] if isinstance(given, str) else given:
                tags.setdefault(str(tag), []).append(name)
        return {tag: sorted(names) for tag, names in tags.items()}

    def named(self, name: str) -> list[Read]:
        """The task, the group, or the tasks of the tag of this name; the group of a task has no
        name. UsageError."""
        if name not in self._entries and name not in self._tags:
            known = sorted({*self._entries, *self._tags})
            near = difflib.get_close_matches(name, known, 3) or known[:3]
            raise UsageError(
                f"{self.option}: {self.path / name} is no file, and no task, group or tag of the "
                f"YAML files in {self.path} and below ({len(known)} names, such as "
                f"{', '.join(near)})"
            )
        return list(self._members(name, "", {}, str(self.path)))

    def read(self, keys: Mapping[str, Any], path: str, more: Mapping[str, Any] = {}) -> Read:
        """The group of the keys of a file; more: keys that replace those of its tasks."""
        name = str(keys["group"])
        if name in self._open:
            raise UsageError(f"{path}: the group {name} contains itself")
        own = {key: value for key, value in keys.items() if key not in KEYS} | {**more}
        own.pop("task", None)
        listed = keys.get("task") or []
        self._open.append(name)
        members, tasks, changed = list[str | Group](), list[tuple[Mapping, str]](), bool(own)
        for entry in [listed] if isinstance(listed, str) else listed:
            for part in self._members(entry, name, own, path):
                members.append(part.group if part.group.name else str(part.tasks[0][0]["task"]))
                tasks += part.tasks
                changed = changed or part.changed
        self._open.pop()
        version = str(version_of(keys.get("metadata"), "N/A"))
        alias, metrics = str(keys.get("group_alias") or ""), _metrics(keys, path)
        group = Group(name, tuple(members), metrics, alias, version, path)
        return Read(group, tasks, changed)

    def _members(
        self, entry: object, group: str, own: Mapping[str, Any], path: str
    ) -> Iterator[Read]:
        """What an entry of `task` names; the group of a task has no name."""
        keys = {"task": entry} if isinstance(entry, str) else entry
        if not isinstance(keys, Mapping) or not {"task", "group"} & keys.keys():
            raise UsageError(f"{path}: task: {entry!r:.60} (expected a name, or task or group)")
        inner = "group" in keys
        name = str(keys["group" if inner else "task"])
        known = self._entries.get(name)
        if inner and known is None:
            yield self.read({**keys, "group": f"{group}::{name}"}, path, own)
        elif known is not None and is_group(known[0]):
            more = {key: value for key, value in keys.items() if key not in ("group", "task")}
            listed = {key: more.pop(key) for key in KEYS if key in more}
            yield self.read({**known[0], **listed}, known[1], {**own, **more})
        elif known is not None:
            yield self._task(name, {**own, **keys})
        elif name in self._tags:
            for tagged in self._tags[name]:
                yield self._task(tagged, {**own, **keys, "task": tagged})
        elif keys.get("dataset_path") or keys.get("include"):
            yield Read(Group("", ()), [({**own, **keys, "task": f"{group}::{name}"}, path)], True)
        else:
            raise UsageError(
                f"{path}: the group {group} names {name!r}, which is no task, group or tag of the "
                f"files in {self.path} and below"
            )

    def _task(self, name: str, more: Mapping[str, Any]) -> Read:
        _, path = self._entries[name]
        keys = read_yaml(Path(path), self.trust, self.option)
        return Read(
            Group("", ()), [({**keys, "task": name, **more}, path)], bool(more.keys() - {"task"})
        )


def version_of(metadata: object, default: str) -> Any:
    """The version in the metadata of a file."""
    return metadata.get("version", default) if isinstance(metadata, Mapping) else default


def is_group(keys: Mapping[str, Any]) -> bool:
    """Whether the keys of a file are those of a group."""
    of_task = {"output_type", "dataset_path", "doc_to_text", "doc_to_target"} & keys.keys()
    return "group" in keys and not (of_task and isinstance(keys.get("task"), str))


def _metrics(keys: Mapping[str, Any], path: str) -> tuple[GroupMetric, ...]:
    given = keys.get("aggregate_metric_list") or []
    made = []
    for entry in [given] if isinstance(given, Mapping) else given:
        where = f"{path}: aggregate_metric_list"
        if not isinstance(entry, Mapping) or "metric" not in entry:
            raise UsageError(f"{where}: {entry!r:.60} (expected a list with metric)")
        if unknown := [key for key in entry if key not in METRIC_KEYS]:
            raise UsageError(f"{where}: {unknown[0]} is not supported")
        if entry.get("aggregation", "mean") != "mean":
            raise UsageError(f"{where}: aggregation {entry['aggregation']!r} (expected mean)")
        filters = entry.get("filter_list")
        if filters is not None:
            filters = (filters,) if isinstance(filters, str) else tuple(map(str, filters))
        by_size = bool(entry.get("weight_by_size", True))
        made.append(GroupMetric(str(entry["metric"]), filters, by_size))
    return tuple(made)


def group_results(groups: Sequence[Group], summary: Summary) -> Iterator[GroupResult]:
    """The values of all groups. Tasks are taken as independent."""
    for group in groups:
        for model in summary.models:
            of_model = {(r.task, r.metric): r for r in summary.results if r.model == model}
            for metric in group.metrics:
                for name in metric.filters or _filters(metric.metric, group, of_model):
                    full = named(metric.metric, name)
                    parts = [of_model[t, full] for t in group.tasks if (t, full) in of_model]
                    if len(parts) < len(group.tasks):
                        without = [t for t in group.tasks if (t, full) not in of_model]
                        notes.warn(
                            f"group {group.name}: {model} has no {full} of {len(without)} of "
                            f"{len(group.tasks)} tasks ({', '.join(without[:3])})"
                        )
                    if parts:
                        yield GroupResult(
                            group.name, model, full, metric.metric, name,
                            _mean(parts, metric.by_size), tuple(parts), metric.by_size,
                        )  # fmt: skip


def normalised_results(tasks: Sequence[Task], summary: Summary) -> Iterator[GroupResult]:
    """The mean over the tasks of each group of TOML tasks of how far their headline values are from
    that of guessing to 1, as PoETa's normalised preferred metric."""
    for group in dict.fromkeys(task.group for task in tasks if task.group):
        of = [task for task in tasks if task.group == group and task.name in summary.tasks]
        for model in summary.models:
            every = [(task, summary.result(model, task.name)) for task in of]
            parts = [(task.guessing, part) for task, part in every if part is not None]
            if len(parts) < len(every) or not parts:
                notes.warn(f"group {group}: {model} has {len(parts)} of {len(every)} tasks")
                continue
            scaled = [replace(part, interval=_beyond(part.interval, guessing))
                      for guessing, part in parts]  # fmt: skip
            yield GroupResult(
                group, model, NORMALISED, NORMALISED, "none", _mean(scaled, False, False),
                tuple(part for _, part in parts), False,
            )  # fmt: skip


def _beyond(of: Interval, guessing: float) -> Interval:
    return of.mapped(lambda value: (value - guessing) / (1 - guessing))


def _filters(metric: str, group: Group, results: Mapping[tuple[str, str], Any]) -> list[str]:
    plain = named(metric, "none")
    parts = (name.partition(",") for task, name in results if task in group.tasks)
    return sorted({of or "none" for first, _, of in parts if first == plain}) or ["none"]


def _mean(parts: Sequence[Result], by_size: bool, of_shares: bool = True) -> Interval:
    weights = [float(part.items) if by_size else 1.0 for part in parts]
    whole = sum(weights) or math.nan
    shares = [weight / whole for weight in weights]
    mean = sum(w * part.interval.value for w, part in zip(shares, parts, strict=True))
    half = math.sqrt(
        sum((w * part.interval.half_width) ** 2 for w, part in zip(shares, parts, strict=True))
    )
    low, high = mean - half, mean + half
    if of_shares and all(unit_key(part.metric) == "share" for part in parts):
        low, high = max(0.0, low), min(1.0, high)
    return Interval(mean, low, high, "weighted_mean" if by_size else "macro_mean")
