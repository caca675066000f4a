"""Benchmarks as tasks of `eval` name them, as the index that `dedup --decontaminate` looks for.

One index serves both: eval writes it (`--index`), dedup cleans by it or builds the same one from
the task files, and eval tells, by digest, which of its tasks a corpus was not cleaned of, or was
cleaned of in another version.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from sabia.core import notes
from sabia.core.bench.items import Item, load_items
from sabia.core.bench.task import Task, load_task
from sabia.core.errors import UsageError
from sabia.core.files import unreadable
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.text.contamination import stage
from sabia.core.text.contamination.benchmark_index import Exam, Index
from sabia.core.text.dedup.first_pass import choose_engine


def run(job: Job, options: DedupOptions) -> None:
    """Clean the job's documents of the items of benchmarks."""
    stage.run(job, options, index_of(options.decontaminate))


def index_of(benches: Sequence[str]) -> Index:
    """The index of task files (.toml), folders of them, and indices (.parquet), taken together."""
    tasks: list[Task] = []
    indices: list[Index] = []
    for name in benches:
        path = Path(name)
        try:
            path.stat()
        except OSError as error:
            raise unreadable("--decontaminate", name, error) from error
        if path.suffix == ".parquet":
            indices.append(Index.load(name))
        elif path.is_dir():
            tasks += [load_task(str(one), "--decontaminate") for one in _tasks_in(path)]
        elif path.suffix == ".toml":
            tasks.append(load_task(name, "--decontaminate"))
        else:
            raise UsageError(
                f"--decontaminate: {name} (expected TASK.toml, a folder, INDEX.parquet)"
            )
    if tasks:
        indices.append(build(tasks))
    return reduce(Index.merged, indices)


def _tasks_in(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.toml"))
    if not found:
        raise UsageError(f"--decontaminate: {folder}: no task in it (expected *.toml)")
    return found


def build(tasks: Sequence[Task]) -> Index:
    """The index of all rows of some tasks, those that serve as examples too."""
    exams = (exam for task in tasks for exam in _exams(task))
    return Index.build(exams, choose_engine("auto"))


def _exams(task: Task) -> Iterator[Exam]:
    whole = replace(task, shots=0, shots_data="", limit=0)
    for item in load_items(whole):
        yield Exam(task.name, item.id, _question(item), item.choices, _answer(item))


def _question(item: Item) -> str:
    """The prompt; of a conversation what is not the system's word."""
    said = [m["content"] for m in item.messages if m["role"] != "system"]
    return item.text or "\n".join(said)


def _answer(item: Item) -> str:
    if isinstance(item.answer, int):
        return item.choices[item.answer]
    return item.answer or ""


def write_or_compare(path: str, tasks: Sequence[Task], force: bool = False) -> str:
    """Write the index of these tasks, or say how they differ from the one that is there.

    Returns one line for a report. With `force` an index that is there is written anew.
    """
    index = build(tasks)
    if force or not Path(path).exists():
        index.save(path)
        notes.note(f"{path}: index of {len(index.owners):,} items, for sabia dedup --decontaminate")
        return f"index {index.digest[:12]} written"
    known = Index.load(path).tasks
    missing = sorted(name for name in index.tasks if name not in known)
    changed = sorted(
        name for name in index.tasks if known.get(name, "") not in ("", index.tasks[name])
    )
    for name in missing:
        notes.warn(f"task {name} is not in {path}: the corpus was not cleaned of it")
    for name in changed:
        notes.warn(f"task {name} has other items than in {path}; --force writes the index anew")
    same = len(index.tasks) - len(missing) - len(changed)
    told = [f"{same} of {len(index.tasks)} tasks as in the index {path}"]
    told += [f"missing: {', '.join(missing)}"] if missing else []
    told += [f"changed: {', '.join(changed)}"] if changed else []
    notes.note("; ".join(told))
    return "; ".join(told)
