"""`dedup --decontaminate`: the index of the benchmark items in task files of `eval`.

Both commands use one index: eval writes it (`--index`), dedup removes its items from documents or
builds the same one from the task files. By its digests eval reports the tasks whose items were not
removed from a corpus, or were removed in another version.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from pathlib import Path

from sabia.core import notes
from sabia.core.bench.items import Item, question_of
from sabia.core.bench.task import Task, load_tasks_of
from sabia.core.bench.task_files import items_of
from sabia.core.errors import UsageError
from sabia.core.files import unreadable
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.text.contamination import stage
from sabia.core.text.contamination.benchmark_index import BenchmarkItem, Index
from sabia.core.text.dedup.first_pass import choose_engine


def run(job: Job, options: DedupOptions) -> None:
    """Remove the items of benchmarks from the job's documents."""
    stage.run(job, options, index_of(options.decontaminate))


def index_of(benches: Sequence[str]) -> Index:
    """The merged index of task files (.toml), folders of them, and indices (.parquet)."""
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
            in_folder = sorted(path.glob("*.toml"))
            if not in_folder:
                raise UsageError(f"--decontaminate: {path}: no task in it (expected *.toml)")
            of_files = (load_tasks_of(str(file), "--decontaminate") for file in in_folder)
            tasks += chain.from_iterable(of_files)
        elif path.suffix == ".toml":
            tasks += load_tasks_of(name, "--decontaminate")
        else:
            raise UsageError(
                f"--decontaminate: {name} (expected TASK.toml, a folder, INDEX.parquet)"
            )
    if tasks:
        indices.append(build(tasks))
    return reduce(Index.merged, indices)


def build(tasks: Sequence[Task]) -> Index:
    """The index of all rows of some tasks, including those that are few-shot examples."""
    every_row = [replace(task, shots=0, shots_data="", limit=0) for task in tasks]
    exams = (
        BenchmarkItem(task.name, item.id, question_of(item), item.choices, _answer(item))
        for task in every_row
        for item in items_of(task)
    )
    return Index.build(exams, choose_engine("auto"))


def _answer(item: Item) -> str:
    if isinstance(item.answer, int):
        return item.choices[item.answer]
    return item.answer or ""


def write_or_compare(path: str, tasks: Sequence[Task], force: bool = False) -> str:
    """Write the index of these tasks, or report how they differ from the existing one.

    Returns one line for a report. With `force` an existing index is replaced.
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
    parts = [f"{same} of {len(index.tasks)} tasks as in the index {path}"]
    parts += [f"missing: {', '.join(missing)}"] if missing else []
    parts += [f"changed: {', '.join(changed)}"] if changed else []
    line = "; ".join(parts)
    notes.note(line)
    return line
