"""Metrics to wandb or TensorBoard, from one process and off the step path.

Rows are handed to a thread through a bounded queue. A service that is slow or refuses costs the
run nothing: rows that do not fit are counted and left out there (they are all in metrics.jsonl), a
failure is told once and ends the sending. wandb takes a row every MIN_INTERVAL_S at most, which
keeps hundreds of runs below its limits; it resumes the same run by an id made from the run's
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
    """Where rows go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Send what is left."""


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
    """A sink of a service for the run in `directory`; `identity` is a hash of what it is."""
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

        self.run = wandb.init(
            dir=str(directory), id=identity[:16], resume="allow", config=dict(config)
        )
        self.sent = 0.0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        wait = self.sent + MIN_INTERVAL_S - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self.run.log(dict(figures), step=step)
        self.sent = time.monotonic()

    def close(self) -> None:
        self.run.finish()


def flat(row: Row) -> dict[str, float]:
    """The numbers of a row; those of a nested one as NAME/KEY."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            found[name] = float(value)
    return found


class Tracker:
    """Sends rows to sinks in a thread; without sinks it does nothing."""

    def __init__(self, openers: Sequence[Callable[[], Sink]]) -> None:
        self.left_out = 0
        self._rows: queue.Queue[Row | None] = queue.Queue(WAITING_ROWS)
        self._threads = threading.Thread(target=self._send, args=(openers,), daemon=True)
        if openers:
            self._threads.start()
        self._open = bool(openers)

    def write(self, row: Row) -> None:
        """Hand over a row of metrics (with `step`); never waits."""
        if not self._open:
            return
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Wait a little for what is on its way."""
        if not self._open:
            return
        self._open = False
        try:
            self._rows.put(None, timeout=CLOSE_S)
            self._threads.join(CLOSE_S)
        except queue.Full:
            self.left_out += self._rows.qsize()
        if self.left_out:
            notes.warn(f"--track: {self.left_out:,} rows were not sent (metrics.jsonl has all)")

    def _send(self, openers: Sequence[Callable[[], Sink]]) -> None:
        sinks: list[Sink] = []
        try:
            sinks.extend(opener() for opener in openers)
            while (row := self._rows.get()) is not None:
                for sink in sinks:
                    sink.write(int(row["step"]), flat(row))
        except Exception as error:  # a service must not end a run
            self._open = False
            notes.warn(f"--track: {error} (no more is sent; metrics.jsonl has all)")
        finally:
            for sink in sinks:
                _close(sink)


def _close(sink: Sink) -> None:
    try:
        sink.close()
    except Exception as error:
        notes.warn(f"--track: {error}")
