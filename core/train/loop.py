"""The training loop: rows by arithmetic, steps, validation, metrics, checkpoints, polite stops.

The rows of step s are samples s·B … s·B + B - 1 of the run's order; process r of R takes every
R-th. So the position is one integer and a run may be stopped anywhere and resumed by any number of
processes, on either backend. All processes decide alike when to save and when to stop, because
what one wishes travels with the sums of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, Interrupted
from sabia.core.parallel.launch import World
from sabia.core.shards.order import DataOrder
from sabia.core.train import checkpoint
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.schedule import ScheduleConfig, learning_rate
from sabia.core.train.stepper import Batch, Stepper
from sabia.core.train.telemetry import Line, Meter, RunLog, live_line
from sabia.core.train.token_rows import TokenRows


@dataclass(frozen=True)
class LoopConfig:
    """Lengths are in steps; `save_every_s` saves by time (both 0: only at the end)."""

    steps: int
    batch_rows: int
    schedule: ScheduleConfig
    save_every_steps: int = 0
    save_every_s: float = 0.0
    keep_checkpoints: int = 2
    eval_every: int = 0
    log_every: int = 1


@dataclass
class Training:
    """One run in progress; `meta` is what its checkpoints say besides step and position."""

    config: LoopConfig
    stepper: Stepper
    rows: TokenRows
    order: DataOrder
    run: RunDirectory
    world: World
    meter: Meter
    meta: dict[str, Any]
    validation: TokenRows | None = None
    step: int = 0
    tokens: int = 0
    seconds_before: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Run to the last step, from the newest checkpoint where there is one.

        Returns the last figures: step, loss, tokens, seconds, validation_loss. Raises Interrupted
        after a stop signal (state saved), Failed when a loss is not finite.
        """
        self._resume()
        self.saver = checkpoint.Saver(self.run.checkpoints, keep=self.config.keep_checkpoints)
        self.started = self.saved_at = time.monotonic()
        self.log = RunLog(self.run.path, self.world.rank, self.step)
        try:
            if self.step == 0:
                self._validate()
            self.meter.start()
            with live_line(self.config.steps, self.step, "training") as line:
                while self.step < self.config.steps:
                    self._one_step(line)
        finally:
            self.saver.close()
            self.log.close()
        return {"step": self.step, "tokens": self.tokens, "seconds": self._seconds(), **self.last}

    def _resume(self) -> None:
        found = checkpoint.latest(self.run.checkpoints)
        if found is None:
            return
        said = found.manifest
        if said["model"] != self.meta["model"]:
            raise BadData(f"checkpoint {found.path.name} is of another model; --force starts over")
        if said["data"]["rows"] != found.step * self.config.batch_rows:
            raise BadData(f"checkpoint {found.path.name}: its data position is not of this batch")
        self.stepper.load(checkpoint.Reader(found))
        self.step, self.tokens = found.step, int(said["data"]["tokens"])
        self.seconds_before = float(said["seconds"])
        notes.note(f"resuming at step {self.step:,} of {self.config.steps:,} ({found.path.name})")

    def _one_step(self, line: Line) -> None:
        self.saver.poll()
        batch = self._batch(self.step)
        lr = learning_rate(self.step, self.config.schedule)
        tokens = np.count_nonzero(batch["loss_mask"])
        wishes = np.array([stop.requested(), self._save_is_due(), tokens], np.float64)
        found = self.stepper.step(batch, lr, wishes)
        self._check(found)
        stopping, saving, trained = found.pop("tallies")
        self.step += 1
        self.tokens += int(trained)
        self.meter.tokens += int(trained)
        self._report(found, lr, line)
        done = self.step == self.config.steps
        if done or (self.config.eval_every and self.step % self.config.eval_every == 0):
            self._validate()
        if done or saving or stopping:
            self._save()
        if stopping and not done:
            raise Interrupted(
                f"stopped at step {self.step:,} of {self.config.steps:,}; state is saved: run "
                "again to resume"
            )

    def _batch(self, step: int) -> Batch:
        config = self.config
        numbers = self.order.rows(step * config.batch_rows, config.batch_rows)
        return self._rows(self.rows, numbers[self.world.rank :: self.world.size])

    def _rows(self, rows: TokenRows, numbers: np.ndarray) -> dict[str, np.ndarray]:
        length = rows.row_length if self.stepper.fixed_shapes else None
        batch = rows.batch(numbers, length)
        if rows.unpacked:  # plain causal attention is faster and means the same
            del batch["segments"], batch["positions"]
        return batch

    def _save_is_due(self) -> bool:
        """Whether this process, if it leads, wants a checkpoint after this step."""
        config = self.config
        if not self.world.leads:
            return False
        by_steps = config.save_every_steps and (self.step + 1) % config.save_every_steps == 0
        waited = time.monotonic() - self.saved_at
        return bool(by_steps or (config.save_every_s and waited >= config.save_every_s))

    def _check(self, found: dict[str, Any]) -> None:
        if found["updated"] or found["weight"] == 0:
            return
        first = self.step * self.config.batch_rows
        raise Failed(
            f"step {self.step + 1}: loss {found['loss']}, gradient norm {found['grad_norm']} "
            f"(expected finite numbers); the step's rows are samples {first} to "
            f"{first + self.config.batch_rows - 1}. Nothing was updated; try a lower --lr"
        )

    def _report(self, found: dict[str, Any], lr: float, line: Line) -> None:
        row: dict[str, Any] = {
            "step": self.step,
            "loss": found["loss"],
            "lr": lr,
            "grad_norm": found["grad_norm"],
            "tokens": self.tokens,
        }
        every = self.config.log_every
        if self.step % every == 0 or self.step in (1, self.config.steps):
            row |= self.meter.read() | {"seconds": round(self._seconds(), 3)}
            row |= _by_source("loss_by_source", found, self.rows)
            self.log.write(row)
        self.last |= {"loss": found["loss"]}
        line.show(row)

    def _validate(self) -> None:
        if self.validation is None:
            return
        since = time.monotonic()
        total = _Sums()
        for batch in self._validation_batches(self.validation):
            total.add(self.stepper.evaluate(batch))
        loss = total.loss / max(total.weight, 1.0)
        row = {"step": self.step, "validation_loss": loss}
        row |= {"validation_tokens": int(total.weight)}
        self.log.write(row | _by_source("validation_by_source", total.extras, self.validation))
        self.last |= {"validation_loss": loss}
        notes.note(f"step {self.step:,}: validation loss {loss:.4f}")
        self.meter.since += time.monotonic() - since  # not training time

    def _validation_batches(self, rows: TokenRows) -> Iterator[Batch]:
        """This process's part of all rows, in batches of one size; what is over has no weight."""
        size = self.config.batch_rows
        for start in range(0, len(rows), size):
            numbers = np.arange(start, start + size)
            inside = (numbers < len(rows)).astype(np.float32)
            mine = slice(self.world.rank, None, self.world.size)
            batch = self._rows(rows, np.minimum(numbers, len(rows) - 1)[mine])
            batch["loss_mask"] = batch["loss_mask"] * inside[mine, None]
            yield batch

    def _save(self) -> None:
        """Write a checkpoint; the leader does, the others meet it again in the next step."""
        self.log.sync()
        if self.world.leads:
            position = {"rows": self.step * self.config.batch_rows, "tokens": self.tokens}
            meta = self.meta | {"seconds": self._seconds()}
            meta["data"] = {**meta.get("data", {}), **position}
            self.saver.save(self.step, checkpoint.whole_pieces(self.stepper.state()), meta)
        self.saved_at = time.monotonic()

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started


class _Sums:
    def __init__(self) -> None:
        self.loss = self.weight = 0.0
        self.extras: dict[str, Any] = {}

    def add(self, found: dict[str, Any]) -> None:
        """Take in one evaluated batch."""
        self.loss += found["loss"] * found["weight"]
        self.weight += found["weight"]
        for name in ("source_loss", "source_weight"):
            self.extras[name] = self.extras.get(name, 0.0) + found[name].astype(np.float64)


def _by_source(label: str, found: dict[str, Any], rows: TokenRows) -> dict[str, Any]:
    """{label: {source: mean loss}} where there are several sources."""
    if len(rows.reported_sources) < 2:
        return {}
    named = zip(rows.reported_sources, found["source_loss"], found["source_weight"], strict=True)
    return {label: {name: float(loss / weight) for name, loss, weight in named if weight > 0}}
