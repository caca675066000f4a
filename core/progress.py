"""Progress with time left, drawn on stderr when it is a terminal and nowhere else; a clock of work.

In a pipeline a stage waits for the one before it. `working_s` does not run while it does, so that
seconds and rates are those of the stage itself.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_waited = {"seconds": 0.0}


@contextmanager
def waiting() -> Iterator[None]:
    """Around what is blocked until another process writes."""
    started = time.monotonic()
    try:
        yield
    finally:
        _waited["seconds"] += time.monotonic() - started


def waited_s() -> float:
    """Seconds in which this process has waited for its input."""
    return _waited["seconds"]


def working_s() -> float:
    """A clock in seconds that stands still while input is waited for."""
    return time.monotonic() - waited_s()


class ProgressBar:
    """Counts; subclasses draw."""

    def __init__(self) -> None:
        self.done = 0.0

    def advance(self, n: float = 1, **shown: Any) -> None:
        """Add n units; `shown` are figures to display beside the bar."""
        self.done += n


class _RichBar(ProgressBar):
    def __init__(self, drawing: Any, task: Any) -> None:
        super().__init__()
        self.drawing, self.task = drawing, task

    def advance(self, n: float = 1, **shown: Any) -> None:
        super().advance(n)
        text = " ".join(f"{name} {value}" for name, value in shown.items())
        self.drawing.update(self.task, advance=n, shown=text)


@contextmanager
def progress(total: float | None, label: str, unit: str = "rows") -> Iterator[ProgressBar]:
    """Yield a bar; `total` None when it is not known."""
    if not sys.stderr.isatty():
        yield ProgressBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} " + unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawing:
        yield _RichBar(drawing, drawing.add_task(label, total=total, shown=""))
