"""Tasks of the files that an option names: TOML, YAML of lm-evaluation-harness, folders of them.

A YAML file is one task. In a folder, files without a task of their own (those that others include,
and groups, whose tasks lie beside them) are passed over.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sabia.core.bench.harness.prompts import Prompts
from sabia.core.bench.harness.scores import check_metrics, named
from sabia.core.bench.harness.splits import Splits
from sabia.core.bench.harness.yaml_file import YamlTask, is_yaml, read_yaml, task_of
from sabia.core.bench.items import Item, load_items
from sabia.core.bench.task import Task, load_task
from sabia.core.errors import UsageError

KIND_OF_OUTPUT: Mapping[str, Any] = {
    "multiple_choice": "multiple_choice",
    "loglikelihood": "loglikelihood",
    "loglikelihood_rolling": "perplexity",
    "generate_until": "exact_match",
}


def load_tasks(
    paths: Sequence[str], data: Sequence[str] = (), trust: bool = False, option: str = "--task"
) -> list[Task]:
    """The tasks of some files and folders. data: TASK=PATH, or a data set's name as TASK.

    trust: code that YAML files name may run. Raises UsageError for an invalid file.
    """
    given = dict(_pair(text) for text in data)
    used: set[str] = set()
    tasks: list[Task] = []
    for name in paths:
        for path in _files(name, option):
            if is_yaml(path):
                settings = _task_of(path, trust, option)
                tasks.append(_from_yaml(settings, given, used))
            else:
                tasks.append(load_task(str(path), option))
    if unused := [name for name in given if name not in used]:
        raise UsageError(f"--data: {unused[0]} is neither a YAML task nor a data set of one")
    return tasks


def items_of(task: Task, limit: int = 0, seed: int = 0) -> list[Item]:
    """The items of a task of either form. UsageError, BadData."""
    if task.yaml is None:
        return load_items(task, limit, seed)
    splits = Splits(task.yaml, task.data)
    return Prompts(task.yaml, splits, task.shots, seed).items(limit)


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--data: {text} (expected TASK=PATH)")
    return name, path


def _files(name: str, option: str) -> list[Path]:
    path = Path(name)
    if not path.is_dir():
        return [path]
    present = sorted(p for p in path.iterdir() if p.suffix == ".toml" or is_yaml(p))
    tasks = [
        p
        for p in present
        if not is_yaml(p) or isinstance(read_yaml(p, True, option).get("task"), str)
    ]
    if not tasks:
        raise UsageError(f"{option}: {path}: no task in it (expected .toml, .yaml, .yml)")
    return tasks


def _task_of(path: Path, trust: bool, option: str) -> YamlTask:
    keys = read_yaml(path, trust, option)
    if isinstance(keys.get("task"), list):
        raise UsageError(f"{option}: {path} is a group; name its tasks, or their folder")
    settings = task_of(keys, str(path))
    check_metrics(settings)
    return settings


def _from_yaml(settings: YamlTask, data: Mapping[str, str], used: set[str]) -> Task:
    path = ""
    for name in (settings.task, settings.dataset_path or ""):
        if name in data and not path:
            path = data[name]
            used.add(name)
    first = settings.metric_list[0].name
    return Task(
        settings.task,
        KIND_OF_OUTPUT[settings.output_type],
        path,
        description=settings.task_alias,
        shots=settings.num_fewshot,
        metric=named(first, settings.filter_list[0].name),
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=float(settings.generation_kwargs.get("top_p", 1.0)),
        samples=settings.repeats if settings.temperature else 1,
        stop=settings.stops,
        path=settings.path,
        yaml=settings,
    )
