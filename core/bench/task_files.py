"""Tasks of the files that an option names: TOML, YAML of lm-evaluation-harness, folders of them.

A YAML file is one task, or a group, which stands for its tasks; FOLDER/NAME is a task, a group or a
tag of the YAML files in a folder. In a folder, files without a task of their own (those that others
include) are passed over, and groups are those of the tasks in it. A name without an ending is one
of the definitions in `definitions/`, of several in a folder or a file there, or of one of these.
Their data are always given, the authors' file or its folder, but for those that lie beside them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.bench.harness.groups import Folder, Group, Read, is_group
from sabia.core.bench.harness.prompts import Prompts
from sabia.core.bench.harness.scores import check_metrics, named
from sabia.core.bench.harness.splits import Splits
from sabia.core.bench.harness.yaml_file import YamlTask, is_yaml, read_yaml, task_of
from sabia.core.bench.items import Item
from sabia.core.bench.task import Task, load_tasks_of
from sabia.core.bench.task_data.data_files import files_of
from sabia.core.bench.task_data.few_shot import load_items
from sabia.core.errors import UsageError

KIND_OF_OUTPUT: Mapping[str, Any] = {
    "multiple_choice": "multiple_choice",
    "loglikelihood": "loglikelihood",
    "loglikelihood_rolling": "perplexity",
    "generate_until": "exact_match",
}
DEFINITIONS = Path(__file__).parent / "definitions"


def load_tasks(
    paths: Sequence[str], data: Sequence[str] = (), trust: bool = False, option: str = "--task"
) -> list[Task]:
    """The tasks of some files and folders. data: TASK=PATH, or a YAML task's data set as TASK.

    trust: code that YAML files name may run. Raises UsageError for an invalid file.
    """
    return load_groups(paths, data, trust, option)[0]


def load_groups(
    paths: Sequence[str], data: Sequence[str] = (), trust: bool = False, option: str = "--task"
) -> tuple[list[Task], list[Group]]:
    """The same tasks, and the groups of them."""
    given = dict(_pair(text) for text in data)
    used: set[str] = set()
    tasks: list[Task] = []
    groups: list[Group] = []

    def add(part: Read) -> None:
        groups.extend(part.group.below if part.group.name else ())
        for of_task, file in part.tasks:
            settings = task_of(of_task, file)
            check_metrics(settings)
            tasks.append(_from_yaml(settings, given, used))

    for name in paths:
        if (path := Path(name)).suffix == "" and not path.exists() and _has_yaml(path.parent):
            for part in Folder(path.parent, trust, option).named(path.name):
                add(part)
            continue
        for path in _files(name, option):
            if not is_yaml(path):
                of_file = load_tasks_of(str(path), option)
                named_one = [task for task in of_file if task.name == name] or of_file
                tasks += [_with_data(task, given, used) for task in named_one]
                continue
            keys = read_yaml(path, trust, option)
            if is_group(keys):
                add(Folder(path.parent, trust, option).read(keys, str(path)))
            else:
                add(Read(Group("", ()), [(keys, str(path))], False))
        if Path(name).is_dir():
            groups += _groups_in(Path(name), {task.name for task in tasks}, option)
    if unused := [name for name in given if name not in used]:
        raise UsageError(f"--data: {unused[0]} is neither a task nor a YAML task's data set")
    return tasks, list({group.name: group for group in groups}.values())


def _groups_in(folder: Path, present: Collection[str], option: str) -> list[Group]:
    """The groups in a folder whose tasks are all present, as their files have them."""
    made: list[Group] = []
    whole = Folder(folder, True, option)
    for path in sorted(p for p in folder.iterdir() if is_yaml(p)):
        if is_group(keys := read_yaml(path, True, option)):
            try:
                read = whole.read(keys, str(path))
            except UsageError as error:
                notes.note(f"a group is passed over: {error}")
                continue
            if not read.changed and set(read.group.tasks) <= set(present):
                made += read.group.below
    return made


def items_of(task: Task, limit: int = 0, seed: int = 0) -> list[Item]:
    """The items of a task of either form. UsageError, BadData."""
    if task.yaml is None:
        return load_items(task, limit, seed)
    splits = Splits(task.yaml, task.data)
    return Prompts(task.yaml, splits, task.shots, seed).items(limit)


def rows_of(task: Task) -> int:
    """The rows of the split that a YAML task evaluates. UsageError, BadData."""
    assert task.yaml is not None, "only called for YAML tasks"
    split = task.yaml.test_split or task.yaml.validation_split or ""
    return len(Splits(task.yaml, task.data).rows(split, task.yaml.process_docs))


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--data: {text} (expected TASK=PATH)")
    return name, path


def _files(name: str, option: str) -> list[Path]:
    path = Path(name)
    if not path.is_dir():
        defined = definitions()
        if path.suffix or "/" in name or path.exists():
            return [path]
        path = defined.get(name) or _file_with(name, option)
        if not path.is_dir():
            return [path]
    present = sorted(p for p in path.iterdir() if p.suffix == ".toml" or is_yaml(p))
    tasks = [p for p in present if not is_yaml(p) or _is_task(read_yaml(p, True, option))]
    if not tasks:
        raise UsageError(f"{option}: {path}: no task in it (expected .toml, .yaml, .yml)")
    return tasks


def _file_with(name: str, option: str) -> Path:
    """The file of the definition of a task that is one of several. UsageError."""
    for path in sorted(DEFINITIONS.rglob("*.toml")):
        if any(task.name == name for task in load_tasks_of(str(path))):
            return path
    raise UsageError(
        f"{option}: {name} is no file, no folder and none of the definitions "
        f"{', '.join(definitions())}"
    )


def _has_yaml(folder: Path) -> bool:
    """Whether a folder that is named, and not only the current one, has YAML files in it."""
    return folder != Path() and folder.is_dir() and any(map(is_yaml, folder.rglob("*")))


def _is_task(keys: Mapping[str, Any]) -> bool:
    return isinstance(keys.get("task"), str) and not is_group(keys)


def definitions() -> dict[str, Path]:
    """The files of the definitions that come with sabia, by name."""
    present = [path for path in DEFINITIONS.iterdir() if path.is_dir() or path.suffix == ".toml"]
    return {path.stem: path for path in sorted(present) if path.name != "__pycache__"}


def _with_data(task: Task, data: Mapping[str, str], used: set[str]) -> Task:
    """A TOML task with the data that are given for it, which a definition needs. UsageError."""
    folder, file = Path(task.path).parent, Path(task.path).stem
    defined = DEFINITIONS in (folder, folder.parent)
    group = folder.name if folder.parent == DEFINITIONS else file if defined else task.name
    for name in (task.name, group):
        if name in data:
            used.add(name)
            path = Path(data[name]).absolute()
            main, shots = (_at(path, wanted) for wanted in (task.data, task.shots_data or "-"))
            if path.is_dir() and not files_of(main):
                raise UsageError(f"--data: {name}={data[name]}: {_expected(task, group)}")
            main = main if path.is_dir() else path
            if task.shots_data and (defined or files_of(shots)):
                task = replace(task, shots_data=str(shots))
            return replace(task, data=str(main))
    if defined and not files_of(task.resolve(task.data)):
        raise UsageError(f"--data: is missing for {task.name} ({_expected(task, group)})")
    return task


def _expected(task: Task, group: str) -> str:
    """What --data must name for a task."""
    source = f" of {task.source}" if task.source else ""
    return f"expected --data {group}=PATH: {task.data}{source}, or a folder with it"


def _at(path: Path, wanted: str) -> Path:
    """The file that a task names in a folder, or beside a file: at the path below, or its name."""
    folder = path if path.is_dir() else path.parent
    return folder / wanted if files_of(folder / wanted) else folder / Path(wanted).name


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
