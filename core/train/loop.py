"""The training loop: batches, steps, validation, metrics, checkpoints, graceful shutdown.

A run takes batches from a `Source` and its figures from an `Objective`; the loss is the stepper's.
The position of a run is the number of its steps, so it can be stopped at any step and resumed by
any number of processes, on either backend. All processes make the same decisions to save, to stop
and to rewind, because control flags are summed with the losses of the step. A step that exceeds the
limits of the spike guard makes no update: the run goes on without it, or repeats it without the
outlier rows, or goes back to its last valid checkpoint (see `core.train.guards`).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, Interrupted, SabiaError
from sabia.core.options.training import RunOptions
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.process_group import agree, barrier
from sabia.core.parallel.world import World
from sabia.core.train import telemetry
from sabia.core.train.checkpoint.local import Checkpoint
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Interval, Saver
from sabia.core.train.guards import GuardConfig, SpikeGuard
from sabia.core.train.optimizer.config import ScheduleConfig, learning_rate
from sabia.core.train.run_directory import RunDirectory, refuse_another
from sabia.core.train.stepper import Batch, Stepper, StepResult
from sabia.core.train.token_rows import RowSource

if TYPE_CHECKING:
    from sabia.core.train.profiling import Profile
    from sabia.core.train.tracking import Tracker

Results = Sequence[StepResult]  # one for each update of a step


class Source(Protocol):
    """The batches of a run; every process calls the same methods in the same order."""

    def open(self, run: Path, leads: bool) -> None:
        """Read what an earlier start has recorded in the run directory."""

    def batches(self, step: int) -> Iterable[Batch]:
        """This process's arrays of each update of a step (from 0)."""

    def sums(self) -> np.ndarray:
        """Numbers of this process about the batches just read, to be summed over processes."""

    def new_stage(self, step: int) -> bool:
        """Whether losses from this step on are not comparable with those before."""

    def describe(self, step: int) -> str:
        """The rows of a step, for messages."""

    def state(self, step: int) -> dict[str, Any]:
        """Entries of a checkpoint's manifest; those of `data` are the position."""

    def load(self, name: str, manifest: Mapping[str, Any], step: int) -> None:
        """Continue at a checkpoint; raises BadData if it is not of this source."""

    def close(self) -> None:
        """End what `batches` has started."""


class Display(Protocol):
    """Shows a metrics row per step."""

    def show(self, row: telemetry.Row) -> None:
        """Show the row of one more step."""


class Objective(Protocol):
    """The figures of a run."""

    def display(self, total: int, done: int) -> AbstractContextManager[Display]:
        """What shows the steps on the terminal."""

    def tokens(self, results: Results, sums: np.ndarray) -> tuple[int, int]:
        """(tokens with a loss, tokens in the forward passes) of a step, over all processes."""

    def figures(self, results: Results, sums: np.ndarray, lr: float) -> telemetry.Row:
        """The metrics of every step."""

    def details(self, results: Results, sums: np.ndarray) -> telemetry.Row:
        """More metrics, of the steps that are logged."""

    def summary(self, row: telemetry.Row) -> dict[str, object]:
        """The last figures of a run, from the row of its last step."""

    def validate(self, step: int) -> telemetry.Row:
        """Metrics on held-out data; {} without such data."""


@dataclass
class TrainingRun:
    """One run of `steps` steps; `meta`: entries of its checkpoints besides step and position.

    best_by: the figure of a validation by whose maximum a checkpoint is kept, '' for none; best:
    (that figure, its step), None before a validation has it.
    """

    options: RunOptions
    steps: int
    schedule: ScheduleConfig
    interval: Interval
    guard_config: GuardConfig
    backend: str
    stepper: Stepper
    source: Source
    objective: Objective
    run: RunDirectory
    world: World
    meter: telemetry.Meter
    meta: dict[str, Any]
    tracker: "Tracker | None" = None
    step: int = 0
    saved_step: int = 0
    tokens: int = 0
    best_by: str = ""
    best: tuple[float, int] | None = None
    remedies: int = 0  # rewinds, and updates left out
    working_s: float = 0.0  # seconds of the steps that were not undone
    seconds_before: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, Any]:
        """Run to the last step, from the newest checkpoint if there is one.

        Returns the last metrics: step, loss, tokens, seconds, validation_loss. Raises Interrupted
        after a stop signal (state saved), Failed if a step is refused and there is no remedy.
        """
        self.guard = SpikeGuard(self.guard_config)
        self.source.open(self.run.path, self.world.leads)
        self.started, self.first_started = time.monotonic(), self.run.started_at()
        self.profile = self._profile()
        watchdog.enter_phase(0, "looking for a checkpoint", 3600.0)
        newest = self._latest()
        if newest is not None:
            self._restore(newest)
            name = newest.path.name
            notes.note(f"resuming at step {self.step:,} of {self.steps:,} ({name})")
        options = self.options
        self.saver = Saver(
            self.run.checkpoints,
            options.checkpoint_url,
            world=self.world,
            barrier=lambda: barrier(self.world, self.backend, "checkpoint"),
            keep=options.keep_checkpoints,
            keep_every=options.keep_every,
            grace_s=options.grace or 0.0,
        )
        self.saver.best = self.best[1] if self.best else 0
        self.saved_at = time.monotonic()
        self.log = telemetry.RunLog(self.run.path, self.world.rank, self.step)
        try:
            # the first validation is of the initial model
            if self.step == 0:
                self._validate()
            self.meter.start()
            with (
                stop.polling("training"),
                self.objective.display(self.steps, self.step) as display,
            ):
                while self.step < self.steps:
                    self._one_step(display)
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
            if self.profile is not None:
                self.profile.close()
            if self.tracker is not None:
                self.tracker.close()
            self.log.close()
        best = {"best_step": self.best[1]} if self.best else {}
        totals = {"step": self.step, "tokens": self.tokens, "seconds": self._seconds()}
        return {**totals, **self.last, **best}

    # -- checkpoints

    def _latest(self) -> Checkpoint | None:
        url, agreed = self.options.checkpoint_url, partial(agree, self.world, self.backend)
        return latest(self.run.checkpoints, url, self.world, agreed)

    def _restore(self, saved: Checkpoint) -> None:
        manifest = saved.manifest
        location = self.options.checkpoint_url or str(saved.path)
        identity = manifest.get("identity", self.meta["identity"])  # absent in old ones of grpo
        refuse_another(location, identity, self.meta["identity"], "--checkpoint-url")
        if manifest["model"] != self.meta["model"]:
            raise BadData(f"checkpoint {saved.path.name} is of another model; --force starts over")
        self.source.load(saved.path.name, manifest, saved.step)
        self.stepper.load(Reader(saved).read)
        self.guard.load(manifest.get("guard", {}))
        if "best" in manifest:
            self.best = manifest["best"][0], manifest["best"][1]
        self.step = self.saved_step = saved.step
        self.tokens = int(manifest["data"].get("tokens", 0))
        self.working_s = float(manifest.get("working_s", 0.0))
        self.seconds_before = float(manifest["seconds"]) - (time.monotonic() - self.started)

    def _save(self) -> None:
        watchdog.enter_phase(self.step, "saving", 3600.0)
        self.log.sync()
        state = self.source.state(self.step)
        data = {**self.meta.get("data", {}), **state.pop("data"), "tokens": self.tokens}
        meta = self.meta | {"seconds": self._seconds(), "working_s": self.working_s}
        meta |= {"guard": self.guard.state(), "data": data, **state}
        meta |= {"best": self.best} if self.best else {}
        self.saver.save(self.step, self.stepper.pieces(), meta)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def _save_is_due(self) -> bool:
        """Whether to save after this step; only the leader decides."""
        if not self.world.leads:
            return False
        saver, waited = self.saver, time.monotonic() - self.saved_at
        return self.interval.due(self.step + 1, waited, saver.blocking_s, saver.upload_s)

    # -- steps

    def _one_step(self, display: Display) -> None:
        self.saver.poll()
        if self.source.new_stage(self.step):
            self.guard.reset()
        since = time.monotonic()
        if self.profile is not None:
            self.profile.before(self.step + 1)
        lr = learning_rate(self.step, self.schedule)
        results: list[StepResult] = []
        sums = np.zeros(0)
        for batch in self._batches():
            extra = None
            if not results:  # the sums are the same for all processes, so that all decide alike
                flags = np.array([stop.requested(), self._save_is_due()], np.float64)
                extra = np.concatenate((flags, self.source.sums()))
            watchdog.enter_phase(self.step + 1, "stepping")
            result = self.stepper.step(
                batch, lr, extra, limits=self.guard.limits(), number=self.step
            )
            if result.extra_sums is not None:
                sums = result.extra_sums
            # a batch without weight makes no update, but is no spike
            if result.weight > 0:
                if result.updated:
                    self.guard.accept(result.loss, result.grad_norm)
                elif self._repeats(result):
                    return
            results.append(result)
        self.working_s += time.monotonic() - since
        self.step += 1
        stopping, saving = sums[:2]
        if self.profile is not None:
            self.profile.after(self.step)
        self._report(results, sums[2:], lr, display)
        done, every = self.step == self.steps, self.options.eval_every
        is_best = False
        if done or (every and self.step % every == 0):
            is_best = self._validate()
        if done or saving or stopping or is_best:
            self._save()
        if stopping and not done:
            raise Interrupted(
                f"stopped at step {self.step:,} of {self.steps:,}; the state is saved: run the "
                "same command again to resume"
            )

    def _batches(self) -> Iterable[Batch]:
        watchdog.enter_phase(self.step + 1, "reading")
        try:
            yield from self.source.batches(self.step)
        except SabiaError:
            # the steps so far are not lost; several processes would have to agree to save
            if self.step > self.saved_step and self.world.size == 1:
                self._save()
            raise

    # -- refused steps

    def _repeats(self, result: StepResult) -> bool:
        """Handle an update that was refused; whether its step is repeated, without outlier rows."""
        config, step = self.guard_config, self.step
        max_loss, max_norm = self.guard.limits()
        limits_text = f"at most {max_loss:.4g} and {max_norm:.4g}"
        message = (
            f"step {step + 1}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g} "
            f"(expected {limits_text if np.isfinite(max_loss) else 'finite numbers'})"
        )
        if config.action == "skip":
            self._count_remedy(f"{message} after {config.rewinds} updates that were left out")
            notes.warn(f"{message}: the update is left out")
            return False
        if config.action != "rewind":
            raise self._failure(message)
        source = self.source
        assert isinstance(source, RowSource), "only rows can be left out"
        outliers = source.outliers(range(step, step + 1), config.row_sigmas)
        # no outliers, or more than half of the rows: the model itself has diverged
        if not 0 < len(outliers) <= source.batch_rows / 2:
            self._count_remedy(f"{message} after {config.rewinds} rewinds")
            if not self._rewind():
                raise self._failure(f"{message}, and no checkpoint to go back to")
            # the rows from the checkpoint to the refused step, judged by the restored model
            since = range(self.step, step + 1)
            outliers = source.outliers(since, config.row_sigmas) or source.all_rows(step)
        source.skip(outliers)
        notes.warn(
            f"{message}: on from step {self.step + 1:,} without {len(outliers)} rows: "
            + source.named([entry["row"] for entry in outliers])
        )
        if len(source.skipped) > config.max_skipped_share * len(source.rows):
            raise self._failure(f"{message}; {len(source.skipped):,} rows are left out by now")
        return True

    def _count_remedy(self, message: str) -> None:
        self.remedies += 1
        if self.remedies > self.guard_config.rewinds:
            raise self._failure(message)

    def _failure(self, message: str) -> Failed:
        return Failed(
            f"{message}; its rows: {self.source.describe(self.step)}. The step made no update; "
            "look at these rows, or try a lower --lr or another --on-spike"
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

    # -- metrics

    def _report(self, results: Results, sums: np.ndarray, lr: float, display: Display) -> None:
        every = self.options.log_every
        logged = self.step % every == 0 or self.step in (1, self.steps)
        trained, computed = self.objective.tokens(results, sums)
        self.tokens += trained
        self.meter.tokens += computed
        row = {"step": self.step, **self.objective.figures(results, sums, lr)}
        row["tokens"] = self.tokens
        if logged:
            row |= self.meter.read() | {"seconds": round(self._seconds(), 3)}
            row |= telemetry.memory_bytes(self.backend) | watchdog.figures()
            # seconds of the steps that count, as a share of all time since the first start
            row["goodput"] = self.working_s / max(time.time() - self.first_started, 1e-9)
            row |= self.objective.details(results, sums)
            self._write_metrics(row)
        display.show(row)
        self.last |= self.objective.summary(row)

    def _validate(self) -> bool:
        """Write the metrics on held-out data; whether they are the best so far."""
        since = time.monotonic()
        row = self.objective.validate(self.step)
        if row:
            self._write_metrics({"step": self.step, **row})
            self.last |= self.objective.summary(row)
        # validation is not training time
        self.meter.since += time.monotonic() - since
        figure = row.get(self.best_by)
        if figure is None or (self.best and figure <= self.best[0]):
            return False
        self.best = figure, self.step
        self.saver.best = self.step
        return True

    def _write_metrics(self, row: dict[str, Any]) -> None:
        self.log.write(row)
        if self.tracker is not None:
            self.tracker.write(row)

    def _profile(self) -> "Profile | None":
        if not self.options.profile:
            return None
        from sabia.core.train.profiling import Profile, parse_steps

        steps = parse_steps(self.options.profile)
        return Profile(steps, self.backend, self.run.path, self.world.rank)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started
