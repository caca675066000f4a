"""The training loop: batches, steps, validation, metrics, checkpoints, graceful shutdown.

The rows of step s are samples s·B … s·B + B - 1 of the run's data order, so the position is one
integer and a run can be stopped at any step and resumed by any number of processes, on either
backend. All processes make the same decisions to save, to stop and to rewind, because control flags
are summed with the losses of the step. A step that exceeds the limits of the spike guard makes no
update: the run repeats it without the outlier rows, or goes back to its last valid checkpoint (see
`core.train.guards`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, Interrupted
from sabia.core.options.training import Training
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.process_group import agree, barrier
from sabia.core.parallel.world import World
from sabia.core.train import checkpoint, telemetry
from sabia.core.train.checkpoint import Interval
from sabia.core.train.guards import GuardConfig, SpikeGuard, outliers
from sabia.core.train.optimizer.schedule import ScheduleConfig, learning_rate
from sabia.core.train.profiling import Profile, parse_steps
from sabia.core.train.row_source import Entry, NameRows, RowSource, skipped_rows
from sabia.core.train.run_directory import RunDirectory, refuse_another
from sabia.core.train.stepper import Stepper
from sabia.core.train.token_rows import TokenRows
from sabia.core.train.tracking import Tracker


@dataclass
class TrainingRun:
    """One run of `steps` steps; `meta`: entries of its checkpoints besides step and position.

    name_rows: row numbers → names of the rows in messages and records.
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
    meter: telemetry.Meter
    meta: dict[str, Any]
    validation: TokenRows | None = None
    tracker: Tracker = field(default_factory=lambda: Tracker(()))
    name_rows: NameRows = lambda numbers: [f"row {number}" for number in numbers]
    step: int = 0
    tokens: int = 0
    rewinds: int = 0
    working_s: float = 0.0  # seconds of the steps that were not undone
    seconds_before: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Run to the last step, from the newest checkpoint if there is one.

        Returns the last metrics: step, loss, tokens, seconds, validation_loss. Raises Interrupted
        after a stop signal (state saved), Failed if a step is refused and there is no remedy.
        """
        self.guard = SpikeGuard(self.guard_config)
        # a rewind does not undo skipping, so the record in the run directory counts
        self.source.skipped |= {int(entry["row"]) for entry in skipped_rows(self.run.path)}
        self.started, self.first_started = time.monotonic(), self.run.started_at()
        traced = parse_steps(self.options.profile)
        self.profile = Profile(traced, self.backend, self.run.path, self.world.rank)
        watchdog.enter_phase(0, "looking for a checkpoint", 3600.0)
        newest = self._latest()
        if newest is not None:
            self._restore(newest)
            name = newest.path.name
            notes.note(f"resuming at step {self.step:,} of {self.steps:,} ({name})")
        options = self.options
        self.saver = checkpoint.Saver(
            self.run.checkpoints,
            options.checkpoint_url,
            world=self.world,
            barrier=lambda: barrier(self.world, self.backend, "checkpoint"),
            keep=options.keep_checkpoints,
            keep_every=options.keep_every,
            grace_s=options.grace or 0.0,
        )
        self.saved_at = time.monotonic()
        self.log = telemetry.RunLog(self.run.path, self.world.rank, self.step)
        try:
            # the first validation is of the initial model
            if self.step == 0:
                self._validate()
            self.meter.start()
            with (
                stop.polling("training"),
                telemetry.progress_line(self.steps, self.step, "training") as line,
            ):
                while self.step < self.steps:
                    self._one_step(line)
            watchdog.enter_phase(self.step, "waiting for the upload", 86400.0)
            self.saver.close()
        except BaseException:
            try:
                self.saver.close()
            except Exception as error:  # only a warning, because another error is being raised
                notes.warn(f"checkpoint: {error}")
            raise
        finally:
            self.source.close()
            self.profile.close()
            self.tracker.close()
            self.log.close()
        return {"step": self.step, "tokens": self.tokens, "seconds": self._seconds(), **self.last}

    # -- checkpoints

    def _latest(self) -> checkpoint.Checkpoint | None:
        url, agreed = self.options.checkpoint_url, partial(agree, self.world, self.backend)
        return checkpoint.latest(self.run.checkpoints, url, self.world, agreed)

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        manifest = saved.manifest
        location = self.options.checkpoint_url or str(saved.path)
        refuse_another(location, manifest["identity"], self.meta["identity"], "--checkpoint-url")
        if manifest["model"] != self.meta["model"]:
            raise BadData(f"checkpoint {saved.path.name} is of another model; --force starts over")
        # another batch size would read other rows
        if manifest["data"]["rows"] != saved.step * self.source.batch_rows:
            raise BadData(f"checkpoint {saved.path.name}: its data position is not of this batch")
        self.stepper.load(checkpoint.Reader(saved).read)
        self.guard.load(manifest.get("guard", {}))
        # skipped rows that skipped.jsonl lacks, as in a new directory
        lost = [row for row in manifest["left_out"] if int(row["row"]) not in self.source.skipped]
        if lost:
            self.source.skip(lost, self.run.path if self.world.leads else None)
        self.step, self.tokens = saved.step, int(manifest["data"]["tokens"])
        self.working_s = float(manifest.get("working_s", 0.0))
        self.seconds_before = float(manifest["seconds"]) - (time.monotonic() - self.started)

    def _save(self) -> None:
        watchdog.enter_phase(self.step, "saving", 3600.0)
        self.log.sync()
        # the position in the data order: rows read so far
        position = {"rows": self.step * self.source.batch_rows, "tokens": self.tokens}
        meta = self.meta | {"seconds": self._seconds(), "working_s": self.working_s}
        meta["guard"] = self.guard.state()
        meta["left_out"] = skipped_rows(self.run.path) if self.world.leads else []
        meta["data"] = {**meta.get("data", {}), **position}
        self.saver.save(self.step, self.stepper.pieces(), meta)
        self.saved_at = time.monotonic()

    def _save_is_due(self) -> bool:
        """Whether to save after this step; only the leader decides."""
        if not self.world.leads:
            return False
        saver, waited = self.saver, time.monotonic() - self.saved_at
        return self.interval.due(self.step + 1, waited, saver.blocking_s, saver.upload_s)

    # -- steps

    def _one_step(self, line: telemetry.ProgressLine) -> None:
        self.saver.poll()
        rows = self.source.batch_rows
        if self.step in {-(-stage.start // rows) for stage in self.source.order.stages}:
            self.guard.reset()  # the first step of another data mix, whose losses differ
        since = time.monotonic()
        self.profile.before(self.step + 1)
        watchdog.enter_phase(self.step + 1, "reading")
        batch = self.source.batch(self.step)
        lr = learning_rate(self.step, self.schedule)
        # summed over all processes with the losses, so that all decide alike
        flags = np.array([stop.requested(), self._save_is_due()], np.float64)
        watchdog.enter_phase(self.step + 1, "stepping")
        result = self.stepper.step(batch, lr, flags, limits=self.guard.limits(), number=self.step)
        stopping, saving = result.pop("extra_sums")
        # a batch without weight makes no update, but is no spike
        if not result["updated"] and result["weight"] > 0:
            self._handle_refused_step(result)
            return
        self.working_s += time.monotonic() - since
        if result["weight"] > 0:
            self.guard.accept(result)
        self.step += 1
        tokens = int(result.get("tokens", result["weight"]))
        self.tokens += tokens
        self.meter.tokens += tokens
        self.profile.after(self.step)
        self._report(result, lr, line)
        done, every = self.step == self.steps, self.options.eval_every
        if done or (every and self.step % every == 0):
            self._validate()
        if done or saving or stopping:
            self._save()
        if stopping and not done:
            raise Interrupted(
                f"stopped at step {self.step:,} of {self.steps:,}; the state is saved: run the "
                "same command again to resume"
            )

    # -- refused steps

    def _handle_refused_step(self, result: dict[str, Any]) -> None:
        """Skip the outlier rows and repeat the step, or go back to the last valid checkpoint."""
        config, step = self.guard_config, self.step
        max_loss, max_norm = self.guard.limits()
        limits_text = f"at most {max_loss:.4g} and {max_norm:.4g}"
        message = (
            f"step {step + 1}: loss {result['loss']:.4g}, gradient norm {result['grad_norm']:.4g} "
            f"(expected {limits_text if np.isfinite(max_loss) else 'finite numbers'})"
        )
        if config.action != "rewind":
            raise self._failure(message)
        outlier_rows = self._outlier_rows(range(step, step + 1))
        # no outliers, or more than half of the rows: the model itself has diverged
        if not 0 < len(outlier_rows) <= self.source.batch_rows / 2:
            self.rewinds += 1
            if self.rewinds > config.rewinds:
                raise self._failure(f"{message} after {config.rewinds} rewinds")
            if not self._rewind():
                raise self._failure(f"{message}, and no checkpoint to go back to")
            # the rows from the checkpoint to the refused step, judged by the restored model
            outlier_rows = self._outlier_rows(range(self.step, step + 1)) or self._all_rows(step)
        self.source.skip(outlier_rows, self.run.path if self.world.leads else None)
        notes.warn(
            f"{message}: on from step {self.step + 1:,} without {len(outlier_rows)} rows: "
            + self._named([entry["row"] for entry in outlier_rows])
        )
        if len(self.source.skipped) > config.max_skipped_share * len(self.source.rows):
            raise self._failure(f"{message}; {len(self.source.skipped):,} rows are left out by now")

    def _failure(self, message: str) -> Failed:
        rows = self._named(self.source.numbers(self.step))
        return Failed(
            f"{message}; its rows: {rows}. The step made no update; look at these rows, or try a "
            "lower --lr or --on-spike rewind"
        )

    def _rewind(self) -> bool:
        """Go back to the last valid checkpoint; False if there is none."""
        self.saver.wait_for_commit()
        newest = self._latest()
        if newest is None:
            return False
        self._restore(newest)
        self.log.close()
        self.log = telemetry.RunLog(self.run.path, self.world.rank, self.step)
        self.meter.start()
        return True

    def _outlier_rows(self, steps: range) -> list[Entry]:
        """The rows of these steps whose current losses are outliers."""
        numbers = np.concatenate([self.source.numbers(step) for step in steps])
        losses = []
        for step in steps:
            watchdog.enter_phase(step + 1, "computing row losses")
            losses.append(self.source.row_losses(step))
        loss = np.concatenate(losses)  # [rows of all steps]
        groups = self.source.rows.source_of(numbers)
        step_of_row = np.repeat(np.array(steps), self.source.batch_rows)  # [rows of all steps]
        is_outlier = outliers(loss, groups, self.guard_config.row_sigmas)
        return self._entries(numbers[is_outlier], step_of_row[is_outlier], loss[is_outlier])

    def _all_rows(self, step: int) -> list[Entry]:
        numbers = self.source.numbers(step)
        return self._entries(numbers, np.full(len(numbers), step), np.full(len(numbers), np.nan))

    def _entries(self, numbers: np.ndarray, steps: np.ndarray, losses: np.ndarray) -> list[Entry]:
        """The records of skipped rows; a row that occurs twice has one record."""
        # reversed, so that the first occurrence of a row counts
        index_of_row = {int(number): index for index, number in reversed([*enumerate(numbers)])}
        names = self.name_rows(list(index_of_row))
        entries: list[Entry] = []
        for (row, i), name in zip(index_of_row.items(), names, strict=True):
            loss = float(losses[i]) if np.isfinite(losses[i]) else None  # JSON has no NaN
            entries.append({"row": row, "name": name, "step": int(steps[i]) + 1, "loss": loss})
        return entries

    def _named(self, numbers: Sequence[int] | np.ndarray) -> str:
        # at most 8 names
        first = [int(number) for number in numbers[:8]]
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        return ", ".join(self.name_rows(first)) + more

    # -- metrics

    def _report(self, result: dict[str, Any], lr: float, line: telemetry.ProgressLine) -> None:
        row: dict[str, Any] = {"step": self.step, "loss": _cross_entropy(result), "lr": lr}
        row |= {"grad_norm": result["grad_norm"], "tokens": self.tokens}
        every = self.options.log_every
        if self.step % every == 0 or self.step in (1, self.steps):
            row |= self.meter.read() | {"seconds": round(self._seconds(), 3)}
            row |= telemetry.memory_bytes(self.backend) | watchdog.figures()
            # seconds of the steps that count, as a share of all time since the first start
            row["goodput"] = self.working_s / max(time.time() - self.first_started, 1e-9)
            if "expert_load" in result:
                row |= telemetry.expert_metrics(result["expert_load"])
            if "nll" in result:
                row["objective"] = result["loss"]
            row |= _by_source("loss_by_source", result, self.source.rows)
            self._write_metrics(row)
        self.last |= {"loss": row["loss"]}
        line.show(row)

    def _validate(self) -> None:
        if self.validation is None:
            return
        since = time.monotonic()
        loss_sum = weight = 0.0
        by_source: dict[str, Any] = {"source_loss": 0.0, "source_weight": 0.0}
        for batch in self.source.validation(self.validation):
            watchdog.enter_phase(self.step, "validating")
            sums = self.stepper.evaluate(batch)
            weight += sums["weight"]
            loss_sum += _cross_entropy(sums) * sums["weight"] if sums["weight"] else 0.0
            # in float64, because the sums are over many batches
            by_source = {k: v + sums[k].astype(np.float64) for k, v in by_source.items()}
        loss = loss_sum / max(weight, 1.0)
        row = {"step": self.step, "validation_loss": loss, "validation_tokens": int(weight)}
        self._write_metrics(row | _by_source("validation_by_source", by_source, self.validation))
        self.last |= {"validation_loss": loss}
        notes.note(f"step {self.step:,}: validation loss {loss:.4f}")
        # validation is not training time
        self.meter.since += time.monotonic() - since

    def _write_metrics(self, row: dict[str, Any]) -> None:
        self.log.write(row)
        self.tracker.write(row)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started


def _cross_entropy(result: dict[str, Any]) -> float:
    """The mean cross-entropy, without auxiliary losses."""
    return float(result["nll"] / result["weight"]) if "nll" in result else float(result["loss"])


def _by_source(label: str, sums: dict[str, Any], rows: TokenRows) -> dict[str, Any]:
    """{label: {source: mean loss}} if there are several sources."""
    if len(rows.reported_sources) < 2:
        return {}
    named = zip(rows.reported_sources, sums["source_loss"], sums["source_weight"], strict=True)
    return {label: {name: float(loss / weight) for name, loss, weight in named if weight > 0}}
