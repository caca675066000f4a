"""The batches of a run: the rows of each step in the data order, with skipped rows masked.

A skipped row keeps its position in the order and has no weight (its mask is 0), so the position of
a run remains one integer. Skipped rows are recorded in the run's directory, `skipped.jsonl`, one
line per row, which a rewind does not undo as it undoes checkpoints. A thread prepares the batch of
the next step while the current one is computed.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.parallel.health import watchdog
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.order import DataOrder
from sabia.core.train.guards import outliers
from sabia.core.train.stepper import Batch, Stepper
from sabia.core.train.token_rows import TokenRows, check_ids

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
