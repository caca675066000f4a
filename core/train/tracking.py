"""Metrics to wandb or TensorBoard, from one process, in a background thread.

Rows are passed to a thread through a bounded queue. A slow or failing service does not delay the
run: rows that do not fit in the queue are dropped and counted (all are in metrics.jsonl), and an
error is reported once and ends the sending. wandb gets at most one row per MIN_INTERVAL_S, so that
hundreds of runs stay below its limits; it resumes the same run by an id derived from the run's
directory and identity. Both are optional packages: `pip install 'sabia[track]'`.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sabia.core import notes
from sabia.core.errors import MissingBackend, UsageError

SERVICES = ("wandb", "tensorboard")
WAITING_ROWS = 1000
MIN_INTERVAL_S = 2.0
CLOSE_S = 30.0
Row = Mapping[str, Any]


class Sink(Protocol):
    """A service that receives metrics."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the metrics of a step."""

    def close(self) -> None:
        """Send the remaining metrics."""


def parse_services(text: str) -> tuple[str, ...]:
    """'wandb,tensorboard' → their names; raises UsageError, MissingBackend."""
    names = tuple(filter(None, (piece.strip() for piece in text.split(","))))
    for name in names:
        if name not in SERVICES:
            raise UsageError(f"--track: {name!r} (expected some of {', '.join(SERVICES)})")
        if find_spec(name) is None:
            raise MissingBackend(
                f"--track {name}: the package is not installed (pip install 'sabia[track]')"
            )
    return names


def open_sink(name: str, directory: Path, identity: str, config: Row) -> Sink:
    """The sink of a service for the run in `directory`; `identity`: hash of the run's identity."""
    if name == "tensorboard":
        return _TensorBoard(directory)
    return _Wandb(directory, identity, config)


class _TensorBoard:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, directory: Path, identity: str, config: Row) -> None:
        import wandb

        settings: Any = {"id": identity[:16], "resume": "allow", "config": dict(config)}
        self.run = wandb.init(dir=str(directory), **settings)
        self.sent = 0.0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        # in this thread, so that the training does not wait
        wait = self.sent + MIN_INTERVAL_S - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self.run.log(dict(figures), step=step)
        self.sent = time.monotonic()

    def close(self) -> None:
        self.run.finish()


def flattened(row: Row) -> dict[str, float]:
    """The numbers of a row; those of a nested mapping as NAME/KEY."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{key}": number for key, number in flattened(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            numbers[name] = float(value)
    return numbers


class Tracker:
    """Sends rows to sinks in a thread."""

    def __init__(self, openers: Sequence[Callable[[], Sink]]) -> None:
        self.not_sent = 0
        self._rows: queue.Queue[Row | None] = queue.Queue(WAITING_ROWS)
        self._threads = threading.Thread(target=self._send, args=(openers,), daemon=True)
        self._threads.start()
        self._open = True

    def write(self, row: Row) -> None:
        """Send a row of metrics (with `step`) in the background; never waits."""
        if not self._open:
            return
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            self.not_sent += 1

    def close(self) -> None:
        """Wait up to CLOSE_S for rows that are being sent."""
        if not self._open:
            return
        self._open = False
        try:
            # the end of the queue
            self._rows.put(None, timeout=CLOSE_S)
            self._threads.join(CLOSE_S)
        except queue.Full:
            self.not_sent += self._rows.qsize()
        if self.not_sent:
            notes.warn(f"--track: {self.not_sent:,} rows were not sent (metrics.jsonl has all)")

    def _send(self, openers: Sequence[Callable[[], Sink]]) -> None:
        sinks: list[Sink] = []
        try:
            sinks.extend(opener() for opener in openers)
            while (row := self._rows.get()) is not None:
                for sink in sinks:
                    sink.write(int(row["step"]), flattened(row))
        except Exception as error:  # a service must not end a run
            self._open = False
            notes.warn(f"--track: {error} (no more rows are sent; metrics.jsonl has all)")
        finally:
            for sink in sinks:
                try:
                    sink.close()
                except Exception as error:
                    notes.warn(f"--track: {error}")
