"""Splits of the data set that a YAML task names: files that are given, files that the task itself
names, or a local cache of Hugging Face. Nothing is downloaded."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core.bench.harness.yaml_file import FORMATS, Function, YamlTask
from sabia.core.bench.task_data.data_files import read_rows, split_files
from sabia.core.errors import BadData, UsageError

Row = dict[str, Any]


class Splits:
    """The splits of a task's data, each read once. given: PATH of --data, '' without it."""

    def __init__(self, task: YamlTask, given: str) -> None:
        self.task, self.given = task, given
        self._read: dict[tuple[str, Function | None], list[Row]] = {}

    def rows(self, split: str, process: Function | None) -> list[Row]:
        """The rows of a split after the task's own code. UsageError, BadData."""
        if (split, process) not in self._read:
            files = self._files(split)
            rows = _columns([row for file in files for row in _file_rows(file)], str(files[0]))
            self._read[split, process] = _processed(process, rows) if process else rows
        return self._read[split, process]

    def _files(self, split: str) -> list[Path]:
        task = self.task
        if self.given:
            path = Path(self.given)
            if path.is_dir():
                if matching := split_files(path, split, task.dataset_name):
                    return matching
                raise UsageError(f"--data: {task.task}: no file of the split {split} in {path}")
            return [path]
        if task.dataset_path in FORMATS:
            return self._named(split)
        for folder in cached_folders(task.dataset_path or "", task.dataset_name):
            if matching := split_files(folder, split, task.dataset_name):
                return matching
        raise UsageError(
            f"{task.task}: the data set {task.dataset_path} is not in the local cache of Hugging "
            f"Face; give its files by --data {task.task}=PATH"
        )

    def _named(self, split: str) -> list[Path]:
        files = self.task.dataset_kwargs.get("data_files")
        named = files.get(split) if isinstance(files, Mapping) else files
        if named is None or (not isinstance(files, Mapping) and split != "train"):
            raise UsageError(f"{self.task.path}: data_files has no split {split}")
        beside = Path(self.task.path).parent
        paths = [Path(name) for name in (named if isinstance(named, list) else [named])]
        return [beside / path if (beside / path).exists() else path for path in paths]


def cached_folders(path: str, name: str | None) -> Iterable[Path]:
    """Folders in the local caches of Hugging Face that may hold a data set."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    if not path:
        return
    if Path(path).is_dir():
        yield Path(path)
    sets = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    made = sets / path.replace("/", "___")
    # CONFIGURATION/VERSION/HASH/SET-SPLIT.arrow
    yield from sorted(made.glob(f"{name or '*'}/*/*/"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    yield from sorted((hub / f"datasets--{path.replace('/', '--')}").glob("snapshots/*/"))


def _file_rows(path: Path) -> list[Row]:
    if path.suffix != ".arrow":
        return read_rows(path, "--data")
    try:
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_stream(file).read_all().to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise BadData(f"{path}: not an Arrow stream ({error})") from error


def _columns(rows: list[Row], name: str) -> list[Row]:
    """The rows with all columns in each, as a table has them: what a row lacks is None."""
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise BadData(f"{name}: no rows (expected objects)")
    columns = dict.fromkeys(key for row in rows for key in row)
    try:
        table = {key: pa.array([row.get(key) for row in rows]).to_pylist() for key in columns}
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadData(f"{name}: a column has values of several types ({error})") from error
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _processed(process: Function, rows: list[Row]) -> list[Row]:
    """The rows after process_docs, which takes and returns a data set of Hugging Face."""
    try:
        from datasets import Dataset
    except ImportError as error:
        reason = "process_docs needs the package datasets (pip install datasets)"
        raise UsageError(reason) from error
    return [dict(row) for row in process(Dataset.from_list(rows))]
