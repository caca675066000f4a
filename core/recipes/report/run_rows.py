"""The rows that a training run has read: from a sample to its row, and from a row to its samples.

The order is arithmetic (core.shards.order): the position in a checkpoint names its seed, batch,
sources and weights. Rows are numbered source by source, as in core.train.token_rows; here the
numbers follow from the column `source` alone, and from the statistics of row groups with one
source.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core.digests import open_parquet
from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.report.given_outputs import RUN_RECORD, Output
from sabia.core.results import recorded_result
from sabia.core.shards.order import DataOrder, Stage
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.arrow_messages import ArrowShard, FileBytes
from sabia.core.shards.token_rows.row_index import encoded, sources_of
from sabia.core.shards.token_rows.row_store import (
    ENDING,
    default_source,
    fingerprint,
    index_in_place,
)
from sabia.core.train.checkpoint import local
from sabia.core.train.token_rows import skipped_rows
from sabia.kernels.runtime.cache_folder import writable_cache_folder

# runs of rows of one source that follow each other: their sizes and codes int64[R], the sources
Runs = tuple[np.ndarray, np.ndarray, Sequence[str | None]]


@dataclass(frozen=True)
class TrainingRun:
    """A run directory, and the token outputs among which its rows may be."""

    path: Path
    outputs: Sequence[Output]

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity of the run; see core.train.run_directory."""
        return self.record["identity"]

    @cached_property
    def record(self) -> dict[str, Any]:
        """run.json. Raises UsageError where there is none, BadData for another file."""
        try:
            record = dict(json.loads((self.path / RUN_RECORD).read_text("utf-8")))
            return record | {"identity": dict(record["identity"])}
        except OSError as error:
            raise UsageError(
                f"{self.path}: no run directory (expected one with {RUN_RECORD})"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(f"{self.path / RUN_RECORD}: not the record of a run ({error})") from error

    @property
    def command(self) -> str:
        """The command that trained."""
        return str(self.identity.get("command"))

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps of its checkpoints, ascending."""
        return local.steps(self.path / "checkpoints")[::-1]

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """That of its last valid checkpoint. Raises UsageError if it has none."""
        for step in reversed(self.checkpoints):
            try:
                path = local.path_of(self.path / "checkpoints", step)
                return local.open_checkpoint(path).manifest
            except (BadData, OSError):
                continue
        raise UsageError(f"{self.path}: no checkpoint (expected a run that has saved one)")

    @property
    def steps(self) -> int:
        """Steps up to the last checkpoint."""
        return int(self.manifest["step"])

    @property
    def batch_rows(self) -> int:
        """Rows of a step."""
        return int(self.manifest["data"]["batch_rows"])

    @cached_property
    def order(self) -> DataOrder:
        """The order of its rows."""
        data = self.manifest["data"]
        weights = data["weights"]
        return DataOrder(
            tuple(data["sources"].values()),
            int(data["seed"]),
            None if weights is None else tuple(weights),
            tuple(Stage(stage["start"], tuple(stage["weights"])) for stage in data["stages"]),
        )

    @cached_property
    def skipped(self) -> set[int]:
        """Numbers of the rows that a guard skipped."""
        return {int(entry["row"]) for entry in skipped_rows(self.path)}

    @cached_property
    def sources(self) -> list[Source]:
        """The shards of its rows, in order. Raises UsageError if one is not there."""
        if self.command == "sft":
            return [_row_file(self._chat_rows())]
        there = {
            fingerprint(source): source
            for output in self.outputs
            if output.kind == "tokens"
            for source in output.sources
        }
        cache = writable_cache_folder("rows")
        shards = []
        for one in self.identity["inputs"]:
            unpacked = cache / f"{one}{ENDING}"
            if one not in there and not unpacked.exists():
                raise UsageError(
                    f"{self.path}: a shard of its token rows is not among the given paths; give "
                    "the token rows that it was trained on, unchanged"
                )
            shards.append(there[one] if one in there else _row_file(unpacked))
        return shards

    def _chat_rows(self) -> Path:
        from sabia.core.recipes.chat_rows import FOLDER, row_file_name
        from sabia.core.recipes.preferences.pair_rows import form_of

        identity = self.identity
        prints, tokenizer = identity["inputs"], identity["tokenizer"]
        length, packed, chat = identity["length"], identity["packed"], identity.get("chat", {})
        result = recorded_result(self.record)
        form = form_of(identity["loss"]).name if "loss" in identity else ""
        name = row_file_name(prints, tokenizer, length, packed, chat, result, form)
        path = self.path / FOLDER / name
        if not path.exists():
            raise UsageError(f"{path}: missing (expected the rows that the run was trained on)")
        return path

    def row_of(self, step: int, row: int) -> int:
        """The number of the row that is number `row` of a step (from 1). Raises UsageError."""
        if not 1 <= step <= self.steps:
            raise UsageError(
                f"--token: step {step} of {self.path} (expected 1 to {self.steps}, its last "
                "checkpoint)"
            )
        if not 0 <= row < self.batch_rows:
            raise UsageError(f"--token: row {row} of a step (expected 0 to {self.batch_rows - 1})")
        return int(self.order.rows((step - 1) * self.batch_rows + row, 1)[0])

    def located(self, number: int) -> tuple[Source, int]:
        """(shard, number in it) of a row number."""
        starts, shard, first = self._by_number
        run = int(np.searchsorted(starts, number, side="right")) - 1
        return self.sources[shard[run]], int(first[run] + number - starts[run])

    def steps_of(self, source: Source, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number in `rows`, step from 1) for each time that a row of a shard was read, int64[k]
        each; none if the run did not read the shard."""
        reads = [np.zeros((2, 0), np.int64)]
        for number, shard in enumerate(self.sources):
            if shard.name == source.name:
                numbers = self._numbers(number, rows)
                which, samples = self.order.samples(numbers, self.steps * self.batch_rows)
                reads.append(np.stack([which, samples // self.batch_rows + 1]))
        which, steps = np.concatenate(reads, 1)
        return which, steps

    def is_skipped(self, source: Source, row: int) -> bool:
        """Whether a guard has skipped a row of a shard."""
        here = [n for n, shard in enumerate(self.sources) if shard.name == source.name]
        numbers = [int(self._numbers(n, np.array([row]))[0]) for n in here]
        return bool(self.skipped.intersection(numbers))

    def _numbers(self, shard: int, rows: np.ndarray) -> np.ndarray:
        """The numbers of rows of a shard."""
        of_shard, first, _, number = self._runs
        begin, end = np.searchsorted(of_shard, [shard, shard + 1])
        run = begin + np.searchsorted(first[begin:end], rows, side="right") - 1
        return number[run] + rows - first[run]

    @cached_property
    def _by_number(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        of_shard, first, _, number = self._runs
        order = np.argsort(number, kind="stable")
        return number[order], of_shard[order], first[order]

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each run of rows of one source in a shard, in the order of the shards: the shard, the
        number in it of the first row, the rows, and the number of the first row; int64[R] each."""
        codes, parts = dict[str, int](), [np.zeros((3, 0), np.int64)]
        for number, source in enumerate(self.sources):
            with source.reading():
                for sizes, local_codes, names in _runs_of(source):
                    named = [codes.setdefault(name or "", len(codes)) for name in names]
                    code = np.array(named, np.int64)[local_codes]
                    parts.append(np.stack([np.full(len(sizes), number), code, sizes]))
        shard, code, rows = np.concatenate(parts, 1)
        known = dict(zip(codes, np.bincount(code, rows).astype(int).tolist(), strict=True))
        if known != self.manifest["data"]["sources"]:
            raise BadData(
                f"{self.path}: it was trained on other rows than those of its shards (rows of "
                f"sources {known}, expected {self.manifest['data']['sources']})"
            )
        before = np.cumsum(rows) - rows
        first_of_shard = before[np.searchsorted(shard, shard)]
        order = np.argsort(code, kind="stable")
        number = np.empty_like(rows)
        number[order] = np.cumsum(rows[order]) - rows[order]
        return shard, before - first_of_shard, rows, number


def _row_file(path: Path) -> Source:
    return Source(str(path), "tokens", "arrow", partial(open, path, "rb"))  # type: ignore[arg-type]


def _runs_of(source: Source) -> Iterator[Runs]:
    """The runs of rows of one source in a shard, in order."""
    default = default_source(source)
    if source.form == "parquet":
        with source.open() as file:
            parquet = open_parquet(file, source.name, say=False)
            for group in range(parquet.num_row_groups):
                yield _runs_of_group(parquet, group, default)
    elif (index := index_in_place(source)) is not None:
        arrow = ArrowShard(FileBytes(source.name))
        for chunk, first in enumerate(index.first_entry[:-1].tolist()):
            entries = index.entries[first : int(index.first_entry[chunk + 1])]
            if len(entries) == 1:
                name = index.sources[entries[0, 2]]
                yield _one(int(entries[0, 3]), default if name is None else name)
                continue
            at, start = entries[0, :2].tolist()
            rows = int(entries[:, 3].sum())
            codes, names = sources_of(arrow, arrow.batch(at), start, rows, default)
            yield _equal_runs(codes, names)
    else:
        for batch in source.batches(columns=["source"]):
            yield _equal_runs(*encoded(batch.column("source").fill_null(default)))


def _runs_of_group(parquet: pq.ParquetFile, group: int, default: str) -> Runs:
    metadata = parquet.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    column = next((chunk for chunk in chunks if chunk.path_in_schema == "source"), None)
    if column is None:
        return _one(metadata.num_rows, default)
    known = column.statistics
    if known is not None and known.has_null_count and known.null_count == metadata.num_rows:
        return _one(metadata.num_rows, default)
    whole = known is not None and known.has_min_max and known.null_count == 0
    if whole and known.min == known.max:
        return _one(metadata.num_rows, str(known.min))
    names = parquet.read_row_group(group, ["source"]).column(0).cast(pa.string())
    return _equal_runs(*encoded(names.combine_chunks().fill_null(default)))


def _one(rows: int, name: str) -> Runs:
    return np.array([rows]), np.zeros(1, np.int64), [name]


def _equal_runs(codes: np.ndarray, names: Sequence[str | None]) -> Runs:
    starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]])[: len(codes)])
    return np.diff(np.append(starts, len(codes))), codes[starts], names
