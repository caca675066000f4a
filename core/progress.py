"""Progress with rate and time left, drawn on stderr when it is a terminal and nowhere else."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Bar:
    """Counts; subclasses draw."""

    def __init__(self) -> None:
        self.done = 0.0
        self.started = time.monotonic()

    def advance(self, n: float = 1, **shown: Any) -> None:
        """Add n units; `shown` are figures to display beside the bar."""
        self.done += n

    @property
    def rate_per_s(self) -> float:
        """Units per second since the start."""
        return self.done / max(time.monotonic() - self.started, 1e-9)


class _RichBar(Bar):
    def __init__(self, drawing: Any, task: Any) -> None:
        super().__init__()
        self.drawing, self.task = drawing, task

    def advance(self, n: float = 1, **shown: Any) -> None:
        super().advance(n)
        text = " ".join(f"{name} {value}" for name, value in shown.items())
        self.drawing.update(self.task, advance=n, shown=text)


@contextmanager
def progress(total: float | None, label: str, unit: str = "rows") -> Iterator[Bar]:
    """Yield a bar; `total` None when it is not known."""
    if not sys.stderr.isatty():
        yield Bar()
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
