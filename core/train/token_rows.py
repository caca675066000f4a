"""Token rows with random access, and the batches of a run.

The rows are those of row files (core.shards.token_rows), of which a batch reads its own rows and
what locates them. Row numbers go through the sources in turn: source by source, in each
file by file, in the order of the shards. Batches are built with array operations: segments number
the documents of a row from 1 (0 is padding), positions restart in each, and a token's target is the
next token of the same document; a token's `loss_mask` says whether that token is a target.

A `RowSource` has the rows of each step in the data order, with skipped rows masked. A skipped row
keeps its position in the order and has no weight (its mask is 0), so the position of a run remains
one integer. Skipped rows are recorded in the run's directory, `skipped.jsonl`, one line per row,
which a rewind does not undo as it undoes checkpoints. A thread prepares the batch of the next step
while the current one is computed.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData
from sabia.core.parallel.health import watchdog
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.order import DataOrder
from sabia.core.shards.token_rows.arrow_messages import BufferBytes
from sabia.core.shards.token_rows.row_file import RowFile
from sabia.core.train.guards import outliers
from sabia.core.train.stepper import Batch, Stepper

BatchArrays = dict[str, np.ndarray]
SOURCES = 32  # losses are reported for this many sources, the last of which holds all others


@dataclass(frozen=True)
class TokenRows:
    """The rows of all files; raises BadData if there are none."""

    files: tuple[RowFile, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise BadData("no token rows (expected at least one row of tokens)")

    def __len__(self) -> int:
        return sum(self.source_sizes)

    @cached_property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(file.index.tokens for file in self.files)

    @cached_property
    def row_length(self) -> int:
        """Length of the longest row."""
        return max(file.index.row_length for file in self.files)

    @cached_property
    def unpacked(self) -> bool:
        """True if no row holds more than one document."""
        return all(file.index.single for file in self.files)

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of the files that know theirs; see `check_ids` for the others."""
        return max(file.index.largest_id or 0 for file in self.files)

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """The sources, in the order of their first rows."""
        return tuple(dict.fromkeys(name for file in self.files for name in file.sources))

    @cached_property
    def source_sizes(self) -> tuple[int, ...]:
        """Rows of each source."""
        ends = np.concatenate([[0], self._runs[0]])
        code = self._runs[1]
        return tuple(np.bincount(code, np.diff(ends), len(self.source_names)).astype(int).tolist())

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each run of rows of a source in a chunk, in the order of row numbers: the
        number after the last row, the source, the file, the chunk in it, and how many rows of the
        chunk are before the first one if those are ordered by source; int64[runs] each."""
        code = {name: number for number, name in enumerate(self.source_names)}
        parts = []
        for number, file in enumerate(self.files):
            *_, source, rows = file.index.entries.T
            sources = np.array([code[name] for name in file.sources], np.int64)
            chunk, before = file.index.chunk_of_entry, np.cumsum(rows) - rows
            before = before - file.index.first_row[chunk]
            parts.append([sources[source], np.full(len(rows), number), chunk, before, rows])
        code_of, of_file, batch, before, rows = np.concatenate(parts, 1, dtype=np.int64)
        order = np.argsort(code_of, kind="stable")
        columns = (code_of, of_file, batch, before)
        return np.cumsum(rows[order]), *(column[order] for column in columns)

    def _located(self, numbers: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """The rows by chunk: (file, chunk in it, the rows' numbers in the chunk, which of
        `numbers` they are)."""
        ends, _, of_file, batch, before = self._runs
        numbers = np.asarray(numbers, np.int64)
        run = np.searchsorted(ends, numbers, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        position = before[run] + numbers - starts[run]
        order = np.lexsort((batch[run], of_file[run]))
        keys = np.stack([of_file[run], batch[run]])[:, order]
        changes = 1 + np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0))
        for which in np.split(order, changes):
            if len(which):
                file, number = int(of_file[run[which[0]]]), int(batch[run[which[0]]])
                rows = self.files[file].batch(number).order[position[which]]
                yield file, number, rows, which

    def located(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file of each row number, and the row's number in its shard, int64[B] each."""
        of_file, in_shard = np.zeros((2, len(numbers)), np.int64)
        for file, batch, rows, which in self._located(numbers):
            of_file[which], in_shard[which] = file, self.files[file].index.first_row[batch] + rows
        return of_file, in_shard

    def row_sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each row, int64[B]."""
        sizes = np.zeros(len(numbers), np.int64)
        for file, batch, rows, which in self._located(numbers):
            sizes[which] = self.files[file].batch(batch).size[rows]
        return sizes

    @property
    def reported_sources(self) -> tuple[str, ...]:
        """Names for the columns of a batch's `source`."""
        if len(self.source_names) <= SOURCES:
            return self.source_names
        return (*self.source_names[: SOURCES - 1], "(others)")

    def batch(self, rows: np.ndarray, length: int | None = None) -> BatchArrays:
        """The rows (numbers in source order) as a batch of arrays [B, T], T the longest of them.

        input_ids, targets, segments, positions int32; loss_mask float32 (1 where the target
        counts); source float32 [B, S], one-hot.
        """
        located = list(self._located(rows))
        width = 1
        for file, number, local, _ in located:  # all reads begin before the first is waited for
            part = self.files[file].batch(number)
            width = max(width, int(part.size[local].max()))
            for row in local.tolist():
                part.will_need(row)
        width = length or width
        ids = np.zeros((len(rows), width), np.int32)
        counts = np.ones((len(rows), width), bool)  # whether a token's loss counts
        documents = [np.zeros(0, np.int32)] * len(rows)
        for file, number, local, which in located:
            read = self.files[file].read(number, local.tolist())
            for index, (tokens, lengths, mask) in zip(which.tolist(), read, strict=True):
                ids[index, : len(tokens)] = tokens[:width]
                documents[index] = lengths
                if mask is not None:
                    counts[index, : len(tokens)] = mask[:width]
        segments, positions = _documents(documents, width)
        targets, has_target = np.zeros_like(ids), np.zeros(ids.shape, bool)
        targets[:, :-1] = ids[:, 1:]
        # the next token is in the same document, which is not padding
        has_target[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        has_target[:, :-1] &= counts[:, 1:]
        batch = {"input_ids": ids, "targets": targets, "loss_mask": has_target.astype(np.float32)}
        return batch | {"segments": segments, "positions": positions, "source": self._one_hot(rows)}

    def source_of(self, rows: np.ndarray) -> np.ndarray:
        """Index of each row's source."""
        return np.searchsorted(np.cumsum(self.source_sizes), rows, side="right")

    def _one_hot(self, rows: np.ndarray) -> np.ndarray:
        code = np.minimum(self.source_of(rows), SOURCES - 1)
        return np.eye(len(self.reported_sources), dtype=np.float32)[code]


def _documents(documents: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions) [B, width] of rows of these document lengths; 0 after the last one."""
    counts = np.array([len(lengths) for lengths in documents], np.int64)  # [B]
    row = np.repeat(np.arange(len(counts)), counts)  # [documents of the batch]
    lengths = np.concatenate([np.zeros(0, np.int64), *documents]).astype(np.int64)
    total = np.cumsum(lengths)
    # [B] tokens of the rows before
    tokens_before = np.concatenate([[0], total])[np.cumsum(counts) - counts]
    begins = total - lengths - tokens_before[row]  # column at which each document starts
    ends = np.zeros(len(counts), np.int64)  # [B] end of each row's last document
    np.maximum.at(ends, row, begins + lengths)
    starts_at = np.zeros((len(counts), width + 1), np.int32)
    # [B, T + 1]: how many documents start at a column; empty ones do not count
    np.add.at(starts_at, (row, np.minimum(begins, width)), (lengths > 0).astype(np.int32))
    column = np.arange(width)
    in_document = column < ends[:, None]
    segments = np.where(in_document, np.cumsum(starts_at[:, :width], 1), 0).astype(np.int32)
    # [B, T]: start of the document that a column is in
    origin = np.maximum.accumulate(np.where(starts_at[:, :width] > 0, column, 0), 1)
    return segments, np.where(in_document, column - origin, 0).astype(np.int32)


def read_token_rows(batches: Iterable[pa.RecordBatch]) -> TokenRows:
    """Token records as rows in memory; raises BadData if lengths do not match."""
    from sabia.core.shards.token_rows.row_writer import RowWriter

    held = io.BytesIO()
    writer = RowWriter(held)
    for batch in batches:
        writer.add(batch)
    writer.close()
    return TokenRows((RowFile.of_bytes(BufferBytes(held.getbuffer(), "token rows")),))


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise BadData if an id of a batch is not in the model's vocabulary."""
    lowest, largest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or largest >= vocab_size:
        raise BadData(
            f"token id {largest if lowest >= 0 else lowest} in the rows (expected below the model's"
            f" vocabulary of {vocab_size}; were the rows made by another tokenizer? A model gets "
            "new tokens only from a tokenizer that tokenize --extend made of its own)"
        )


FILE = "skipped.jsonl"
NameRows = Callable[[Sequence[int]], Sequence[str]]
Entry = dict[str, Any]  # of one skipped row: row, name, step, loss


def skipped_rows(directory: Path) -> list[Entry]:
    """The skipped rows of a run, in the order in which they were found."""
    path = directory / FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@dataclass
class RowSource:
    """Batches of `batch_rows` for one process; `skipped`: numbers of skipped rows.

    `close` ends the thread that reads ahead; without `read_ahead` there is none. names: row numbers
    → names of the rows in messages and records. complete: adds arrays to a batch. See
    core.train.loop.Source.
    """

    rows: TokenRows
    order: DataOrder
    batch_rows: int
    stepper: Stepper
    skipped: set[int] = field(default_factory=set)
    read_ahead: bool = False
    names: NameRows = lambda numbers: [f"row {number}" for number in numbers]
    complete: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict
    _run: Path | None = None  # the run directory
    _records: bool = False  # whether this process records skipped rows
    _next: tuple[int, Future[dict[str, np.ndarray]]] | None = None  # a step, and its batch
    _thread: ThreadPoolExecutor | None = None

    def open(self, run: Path, leads: bool) -> None:
        """See Source; a rewind does not undo skipping: the record in the run directory counts."""
        self._run, self._records = run, leads
        self.skipped |= {int(entry["row"]) for entry in skipped_rows(run)}

    def batches(self, step: int) -> Iterator[Batch]:
        """See Source: one update a step."""
        yield self.batch(step)

    def sums(self) -> np.ndarray:
        """See Source."""
        return np.zeros(0)

    def new_stage(self, step: int) -> bool:
        """See Source: the first step of another data mix."""
        return step in {-(-stage.start // self.batch_rows) for stage in self.order.stages}

    def describe(self, step: int) -> str:
        """See Source."""
        return self.named(self.numbers(step))

    def state(self, step: int) -> dict[str, object]:
        """See Source: the rows read so far."""
        left_out = skipped_rows(self._run) if self._run and self._records else []
        return {"data": {"rows": step * self.batch_rows}, "left_out": left_out}

    def load(self, name: str, manifest: Mapping[str, Any], step: int) -> None:
        """See Source."""
        # another batch size would read other rows
        if manifest["data"]["rows"] != step * self.batch_rows:
            raise BadData(f"checkpoint {name}: its data position is not of this batch")
        # skipped rows that skipped.jsonl lacks, as in a new directory
        lost = [row for row in manifest["left_out"] if int(row["row"]) not in self.skipped]
        if lost:
            self.skip(lost)

    def numbers(self, step: int) -> np.ndarray:
        """Row numbers of a step, for all processes, int64[batch_rows]."""
        return self.order.rows(step * self.batch_rows, self.batch_rows)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """This process's part of a step's rows; raises BadData for ids that the model lacks."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == step:
            batch = ahead[1].result()
        else:
            batch = self.read(self.rows, self.numbers(step))
        if self.read_ahead:
            self._thread = self._thread or ThreadPoolExecutor(1, "next-batch")
            following = self.numbers(step + 1)
            self._next = step + 1, self._thread.submit(self.read, self.rows, following)
        # rows may have been skipped since they were read
        is_read = [number not in self.skipped for number in self.numbers(step).tolist()]
        return self._weighted(batch, np.array(is_read))

    def close(self) -> None:
        """Wait for the batch that is being read, and end the thread."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def validation(self, rows: TokenRows) -> Iterator[Batch]:
        """This process's part of `rows`; the last batch is padded with rows without weight."""
        size = self.batch_rows
        for start in range(0, len(rows), size):
            numbers = np.arange(start, start + size)  # [batch_rows]
            batch = self.read(rows, np.minimum(numbers, len(rows) - 1))
            yield self._weighted(batch, numbers < len(rows))

    def read(self, rows: TokenRows, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """This process's part of a batch of these rows; raises BadData as `batch` does."""
        # process p of n has the rows p, p + n, …
        part, parts = self.stepper.row_part
        length = rows.row_length if self.stepper.fixed_shapes else None
        batch = rows.batch(numbers[part::parts], length)
        check_ids(batch["input_ids"], self.stepper.spec.vocab_size)
        if rows.unpacked:  # plain causal attention is equivalent and faster
            del batch["segments"], batch["positions"]
        return batch

    def _weighted(
        self, batch: dict[str, np.ndarray], has_weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The batch, where `has_weight` bool[batch_rows] says which rows count."""
        part, parts = self.stepper.row_part
        # [B, T] · [B, 1]
        batch["loss_mask"] = batch["loss_mask"] * has_weight[part::parts, None].astype(np.float32)
        return self.complete(batch)

    def row_losses(self, step: int) -> np.ndarray:
        """Current mean loss of each row of a step, float64[batch_rows]; NaN: no tokens.

        One pass without gradients over all processes, in which each row is a source of its own.
        """
        part, parts = self.stepper.row_part
        # [B, batch_rows]: row r is its own source
        source = np.eye(self.batch_rows, dtype=np.float32)[part::parts]
        sums = self.stepper.evaluate(self.batch(step) | {"source": source})
        weight = np.asarray(sums.extras["source_weight"], np.float64)
        loss = np.asarray(sums.extras["source_loss"], np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(weight > 0, loss / weight, np.nan)
        # an infinite or undefined loss of a row with tokens counts as infinite
        return np.where((weight > 0) & ~np.isfinite(mean), np.inf, mean)

    def skip(self, entries: Sequence[Entry]) -> None:
        """Skip rows from now on; one process records them in the run directory."""
        self.skipped |= {int(entry["row"]) for entry in entries}
        if self._run is not None and self._records:
            known = skipped_rows(self._run)
            lines = [json.dumps(entry) + "\n" for entry in (*known, *entries)]
            write_atomic(self._run / FILE, "".join(lines))

    def outliers(self, steps: range, sigmas: float) -> list[Entry]:
        """The rows of these steps whose current losses are outliers."""
        numbers = np.concatenate([self.numbers(step) for step in steps])
        losses = []
        for step in steps:
            watchdog.enter_phase(step + 1, "computing row losses")
            losses.append(self.row_losses(step))
        loss = np.concatenate(losses)  # [rows of all steps]
        groups = self.rows.source_of(numbers)
        step_of_row = np.repeat(np.array(steps), self.batch_rows)  # [rows of all steps]
        is_outlier = outliers(loss, groups, sigmas)
        return self._entries(numbers[is_outlier], step_of_row[is_outlier], loss[is_outlier])

    def all_rows(self, step: int) -> list[Entry]:
        """The records of all rows of a step."""
        numbers = self.numbers(step)
        return self._entries(numbers, np.full(len(numbers), step), np.full(len(numbers), np.nan))

    def _entries(self, numbers: np.ndarray, steps: np.ndarray, losses: np.ndarray) -> list[Entry]:
        """The records of skipped rows; a row that occurs twice has one record."""
        # reversed, so that the first occurrence of a row counts
        index_of_row = {int(number): index for index, number in reversed([*enumerate(numbers)])}
        names = self.names(list(index_of_row))
        entries: list[Entry] = []
        for (row, i), name in zip(index_of_row.items(), names, strict=True):
            loss = float(losses[i]) if np.isfinite(losses[i]) else None  # JSON has no NaN
            entries.append({"row": row, "name": name, "step": int(steps[i]) + 1, "loss": loss})
        return entries

    def named(self, numbers: Sequence[int] | np.ndarray) -> str:
        """The names of rows, at most 8 of them."""
        first = [int(number) for number in numbers[:8]]
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        return ", ".join(self.names(first)) + more
