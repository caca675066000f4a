"""The training loop: rows by arithmetic, steps, validation, metrics, checkpoints, polite stops.

The rows of step s are samples s·B … s·B + B - 1 of the run's order, so the position is one integer
and a run may be stopped anywhere and resumed by any number of processes, on either backend. All
processes decide alike when to save, to stop and to go back, because what one wishes travels with
the sums of the step. A step that a guard refuses is not taken: the run goes back to its last good
checkpoint and on without the rows that stand out (see `core.train.guards`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, Interrupted
from sabia.core.options.training import Training
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.process_group import agree, barrier
from sabia.core.parallel.world import World
from sabia.core.train import checkpoint
from sabia.core.train.checkpoint import Interval
from sabia.core.train.guards import GuardConfig, SpikeGuard, outliers
from sabia.core.train.optimizer.schedule import ScheduleConfig, learning_rate
from sabia.core.train.profiling import Profile, parse_steps
from sabia.core.train.row_source import NameRows, RowSource, skipped_rows
from sabia.core.train.run_directory import RunDirectory, refuse_another
from sabia.core.train.stepper import Stepper
from sabia.core.train.telemetry import (
    Line,
    Meter,
    RunLog,
    expert_figures,
    live_line,
    memory_bytes,
)
from sabia.core.train.token_rows import TokenRows
from sabia.core.train.tracking import Tracker


@dataclass
class TrainingRun:
    """One run of `steps` in progress; `meta` is what its checkpoints say besides step and position.

    name_rows: what to call rows in messages and records, given their numbers.
    """

    options: Training
    steps: int
    schedule: ScheduleConfig
    interval: Interval
    guard_config: GuardConfig
    backend: str
    stepper: Stepper
    source: RowSource
    run: RunDirectory
    world: World
    meter: Meter
    meta: dict[str, Any]
    validation: TokenRows | None = None
    tracker: Tracker = field(default_factory=lambda: Tracker(()))
    name_rows: NameRows = lambda numbers: [f"row {number}" for number in numbers]
    step: int = 0
    tokens: int = 0
    rewinds: int = 0
    working_s: float = 0.0  # of the steps that count
    seconds_before: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Run to the last step, from the newest checkpoint where there is one.

        Returns the last figures: step, loss, tokens, seconds, validation_loss. Raises Interrupted
        after a stop signal (state saved), Failed when a step is refused and cannot be mended.
        """
        self.guard = SpikeGuard(self.guard_config)
        self.source.skipped |= {int(entry["row"]) for entry in skipped_rows(self.run.path)}
        self.started, self.first_started = time.monotonic(), self.run.started_at()
        traced = parse_steps(self.options.profile)
        self.profile = Profile(traced, self.backend, self.run.path, self.world.rank)
        self._resume()
        self.saver = self._saver()
        self.saved_at = time.monotonic()
        self.log = RunLog(self.run.path, self.world.rank, self.step)
        try:
            if self.step == 0:
                self._validate()
            self.meter.start()
            with live_line(self.steps, self.step, "training") as line:
                while self.step < self.steps:
                    self._one_step(line)
            watchdog.enter_phase(self.step, "waiting for the upload", 86400.0)
            self.saver.close()
        except BaseException:
            self._close_after_failure()
            raise
        finally:
            self.profile.close()
            self.tracker.close()
            self.log.close()
        return {"step": self.step, "tokens": self.tokens, "seconds": self._seconds(), **self.last}

    # -- checkpoints

    def _saver(self) -> checkpoint.Saver:
        options = self.options
        return checkpoint.Saver(
            self.run.checkpoints,
            options.checkpoint_url,
            world=self.world,
            barrier=lambda: barrier(self.world, self.backend, "checkpoint"),
            keep=options.keep_checkpoints,
            keep_every=options.keep_every,
            grace_s=options.grace or 0.0,
        )

    def _close_after_failure(self) -> None:
        """Finish what is being written; the error under way is the one to tell."""
        try:
            self.saver.close()
        except Exception as error:
            notes.warn(f"checkpoint: {error}")

    def _latest(self) -> checkpoint.Checkpoint | None:
        return checkpoint.latest(
            self.run.checkpoints,
            self.options.checkpoint_url,
            self.world,
            lambda flag: agree(self.world, self.backend, flag),
        )

    def _resume(self) -> None:
        watchdog.enter_phase(0, "looking for a checkpoint", 3600.0)
        found = self._latest()
        if found is None:
            return
        self._restore(found)
        notes.note(f"resuming at step {self.step:,} of {self.steps:,} ({found.path.name})")

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        said = found.manifest
        place = self.options.checkpoint_url or str(found.path)
        refuse_another(place, said["identity"], self.meta["identity"], "--checkpoint-url")
        if said["model"] != self.meta["model"]:
            raise BadData(f"checkpoint {found.path.name} is of another model; --force starts over")
        if said["data"]["rows"] != found.step * self.source.batch_rows:
            raise BadData(f"checkpoint {found.path.name}: its data position is not of this batch")
        self.stepper.load(checkpoint.Reader(found).read)
        self.guard.load(said.get("guard", {}))
        self._leave_out_again(said["left_out"])
        self.step, self.tokens = found.step, int(said["data"]["tokens"])
        self.working_s = float(said.get("working_s", 0.0))
        self.seconds_before = float(said["seconds"]) - (time.monotonic() - self.started)

    def _leave_out_again(self, entries: Sequence[dict[str, Any]]) -> None:
        """Rows that were left out where the record of them is lost."""
        lost = [entry for entry in entries if int(entry["row"]) not in self.source.skipped]
        if lost:
            self.source.leave_out(lost, self.run.path if self.world.leads else None)

    def _save(self) -> None:
        watchdog.enter_phase(self.step, "saving", 3600.0)
        self.log.sync()
        position = {"rows": self.step * self.source.batch_rows, "tokens": self.tokens}
        meta = self.meta | {"seconds": self._seconds(), "working_s": self.working_s}
        meta["guard"] = self.guard.state()
        meta["left_out"] = skipped_rows(self.run.path) if self.world.leads else []
        meta["data"] = {**meta.get("data", {}), **position}
        self.saver.save(self.step, self.stepper.pieces(), meta)
        self.saved_at = time.monotonic()

    def _save_is_due(self) -> bool:
        """Whether this process, if it leads, wants a checkpoint after this step."""
        if not self.world.leads:
            return False
        saver, waited = self.saver, time.monotonic() - self.saved_at
        return self.interval.due(self.step + 1, waited, saver.blocking_s, saver.upload_s)

    # -- steps

    def _one_step(self, line: Line) -> None:
        self.saver.poll()
        if self.step in self._stage_steps():
            self.guard.forget()  # another mix has other losses
        since = time.monotonic()
        self.profile.before(self.step + 1)
        watchdog.enter_phase(self.step + 1, "reading")
        batch = self.source.batch(self.step)
        lr = learning_rate(self.step, self.schedule)
        wishes = np.array([stop.requested(), self._save_is_due()], np.float64)
        watchdog.enter_phase(self.step + 1, "stepping")
        found = self.stepper.step(batch, lr, wishes, limits=self.guard.limits(), number=self.step)
        stopping, saving = found.pop("extra_sums")
        if not found["updated"] and found["weight"] > 0:
            self._refused(found)
            return
        self.working_s += time.monotonic() - since
        self._taken(found, lr, line)
        done, every = self.step == self.steps, self.options.eval_every
        if done or (every and self.step % every == 0):
            self._validate()
        if done or saving or stopping:
            self._save()
        if stopping and not done:
            raise Interrupted(
                f"stopped at step {self.step:,} of {self.steps:,}; state is saved: run "
                "again to resume"
            )

    def _stage_steps(self) -> set[int]:
        """The steps with which a new stage of the mix begins."""
        rows = self.source.batch_rows
        return {-(-stage.start // rows) for stage in self.source.order.stages}

    def _taken(self, found: dict[str, Any], lr: float, line: Line) -> None:
        if found["weight"] > 0:
            self.guard.accept(found)
        self.step += 1
        tokens = int(found.get("tokens", found["weight"]))
        self.tokens += tokens
        self.meter.tokens += tokens
        self.profile.after(self.step)
        self._report(found, lr, line)

    # -- refused steps

    def _refused(self, found: dict[str, Any]) -> None:
        """Leave rows out and take the step again, or go back to where the run was well."""
        config, at = self.guard_config, self.step
        most_loss, most_norm = self.guard.limits()
        least = f"at most {most_loss:.4g} and {most_norm:.4g}"
        told = (
            f"step {at + 1}: loss {found['loss']:.4g}, gradient norm {found['grad_norm']:.4g} "
            f"(expected {least if np.isfinite(most_loss) else 'finite numbers'})"
        )
        if config.action != "rewind":
            raise self._given_up(told)
        bad = self._stand_out(range(at, at + 1))
        if not 0 < len(bad) <= self.source.batch_rows / 2:  # not some rows: the model itself
            self.rewinds += 1
            if self.rewinds > config.rewinds:
                raise self._given_up(f"{told} after {config.rewinds} rewinds")
            if not self._go_back():
                raise self._given_up(f"{told}, and no checkpoint to go back to")
            bad = self._stand_out(range(self.step, at + 1)) or self._all_of(at)
        self.source.leave_out(bad, self.run.path if self.world.leads else None)
        notes.warn(
            f"{told}: on from step {self.step + 1:,} without {len(bad)} rows: "
            + self._named([entry["row"] for entry in bad])
        )
        if len(self.source.skipped) > config.most_left_out * len(self.source.rows):
            raise self._given_up(f"{told}; {len(self.source.skipped):,} rows are left out by now")

    def _given_up(self, told: str) -> Failed:
        rows = self._named(self.source.numbers(self.step))
        return Failed(
            f"{told}; its rows: {rows}. Nothing was updated; look at these rows, or try a lower "
            "--lr or --on-spike rewind"
        )

    def _go_back(self) -> bool:
        """To the last good checkpoint; False where there is none."""
        self.saver.settle()
        back = self._latest()
        if back is None:
            return False
        self._restore(back)
        self.log.close()
        self.log = RunLog(self.run.path, self.world.rank, self.step)
        self.meter.start()
        return True

    def _stand_out(self, steps: range) -> list[dict[str, Any]]:
        """The rows of these steps whose losses are outliers now."""
        numbers = np.concatenate([self.source.numbers(step) for step in steps])
        losses = []
        for step in steps:
            watchdog.enter_phase(step + 1, "judging rows")
            losses.append(self.source.row_losses(step))
        loss = np.concatenate(losses)
        groups = self.source.rows.source_of(numbers)
        at = np.repeat(np.array(steps), self.source.batch_rows)
        found = outliers(loss, groups, self.guard_config.row_sigmas)
        return self._entries(numbers[found], at[found], loss[found])

    def _all_of(self, step: int) -> list[dict[str, Any]]:
        numbers = self.source.numbers(step)
        return self._entries(numbers, np.full(len(numbers), step), np.full(len(numbers), np.nan))

    def _entries(
        self, numbers: np.ndarray, steps: np.ndarray, losses: np.ndarray
    ) -> list[dict[str, Any]]:
        """What is recorded of rows that are left out; a row that occurs twice once."""
        first = {int(number): place for place, number in reversed([*enumerate(numbers)])}
        names = self.name_rows(list(first))
        return [
            {"row": row, "name": name, "step": int(steps[i]) + 1, "loss": _finite(losses[i])}
            for (row, i), name in zip(first.items(), names, strict=True)
        ]

    def _named(self, numbers: Sequence[int] | np.ndarray) -> str:
        first = [int(number) for number in numbers[:8]]
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        return ", ".join(self.name_rows(first)) + more

    # -- what is told

    def _report(self, found: dict[str, Any], lr: float, line: Line) -> None:
        row: dict[str, Any] = {
            "step": self.step,
            "loss": _cross_entropy(found),
            "lr": lr,
            "grad_norm": found["grad_norm"],
            "tokens": self.tokens,
        }
        every = self.options.log_every
        if self.step % every == 0 or self.step in (1, self.steps):
            row |= self.meter.read() | {"seconds": round(self._seconds(), 3)}
            row |= memory_bytes(self.backend) | watchdog.figures()
            row["goodput"] = self.working_s / max(time.time() - self.first_started, 1e-9)
            if "expert_load" in found:
                row |= expert_figures(found["expert_load"])
            if "nll" in found:
                row["objective"] = found["loss"]
            row |= _by_source("loss_by_source", found, self.source.rows)
            self._tell(row)
        self.last |= {"loss": row["loss"]}
        line.show(row)

    def _validate(self) -> None:
        if self.validation is None:
            return
        since = time.monotonic()
        total = _Sums()
        for batch in self.source.validation(self.validation):
            watchdog.enter_phase(self.step, "validating")
            total.add(self.stepper.evaluate(batch))
        loss = total.loss / max(total.weight, 1.0)
        row = {"step": self.step, "validation_loss": loss}
        row |= {"validation_tokens": int(total.weight)}
        self._tell(row | _by_source("validation_by_source", total.extras, self.validation))
        self.last |= {"validation_loss": loss}
        notes.note(f"step {self.step:,}: validation loss {loss:.4f}")
        self.meter.since += time.monotonic() - since  # not training time

    def _tell(self, row: dict[str, Any]) -> None:
        self.log.write(row)
        self.tracker.write(row)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started


def _cross_entropy(found: dict[str, Any]) -> float:
    """The mean loss without the terms that are added to it."""
    return float(found["nll"] / found["weight"]) if "nll" in found else float(found["loss"])


def _finite(loss: float) -> float | None:
    """A number that JSON knows."""
    return float(loss) if np.isfinite(loss) else None


class _Sums:
    def __init__(self) -> None:
        self.loss = self.weight = 0.0
        self.extras: dict[str, Any] = {}

    def add(self, found: dict[str, Any]) -> None:
        """Take in one evaluated batch."""
        self.loss += _cross_entropy(found) * found["weight"] if found["weight"] else 0.0
        self.weight += found["weight"]
        for name in ("source_loss", "source_weight"):
            self.extras[name] = self.extras.get(name, 0.0) + found[name].astype(np.float64)


def _by_source(label: str, found: dict[str, Any], rows: TokenRows) -> dict[str, Any]:
    """{label: {source: mean loss}} where there are several sources."""
    if len(rows.reported_sources) < 2:
        return {}
    named = zip(rows.reported_sources, found["source_loss"], found["source_weight"], strict=True)
    return {label: {name: float(loss / weight) for name, loss, weight in named if weight > 0}}
