"""A progress bar on stderr, if that is a terminal; and a clock that excludes waiting for input.

In a pipeline a stage waits for the stage before it. `working_s` is paused while it waits, so that
seconds and rates measure the stage itself.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sabia.kernels.runtime.cache_folder import FUNCTIONS, compile_listeners, compiled_share

_waited = {"seconds": 0.0}


@contextmanager
def waiting() -> Iterator[None]:
    """Context in which the process is blocked until another process writes."""
    started = time.monotonic()
    try:
        yield
    finally:
        _waited["seconds"] += time.monotonic() - started


def waited_s() -> float:
    """Seconds that this process has waited for input."""
    return _waited["seconds"]


def working_s() -> float:
    """A clock in seconds that is paused while the process waits for input."""
    return time.monotonic() - waited_s()


class ProgressBar:
    """Shows completed units with rich; shows nothing if `display` is None."""

    def __init__(self, display: Any = None, task: Any = None) -> None:
        self.display, self.task = display, task

    def advance(self, n: float = 1, **figures: object) -> None:
        """Add n units; `figures` are printed next to the bar."""
        if self.display:
            text = " ".join(f"{name} {value}" for name, value in figures.items())
            self.display.update(self.task, advance=n, figures=text)


@contextmanager
def progress(
    total: float | None, label: str, unit: str = "rows", live: Callable[[], str] | None = None
) -> Iterator[ProgressBar]:
    """Context with a progress bar; `total` is None if it is not known. The text of `live` is shown
    beside it and is asked for several times a second."""
    if not sys.stderr.isatty():
        yield ProgressBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} " + unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    if live is not None:
        columns = (*columns, _live_column(live))
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(label, total=total, figures="")
        compiling = _show_compiling(display, task)
        compile_listeners.append(compiling)
        try:
            yield ProgressBar(display, task)
        finally:
            compile_listeners.remove(compiling)


def _live_column(live: Callable[[], str]) -> Any:
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Live(ProgressColumn):
        """A text that changes by itself."""

        def render(self, _: object) -> Text:
            return Text(live())

    return Live()


def _show_compiling(display: Any, task: object) -> Callable[[str], None]:
    """A listener that shows which kernel is compiled, how much of it, and the time that is left."""
    kernel, done, started = "", 0, time.monotonic()

    def compiling(function: str) -> None:
        nonlocal kernel, done, started
        name = function.partition(".")[0]
        if name != kernel and name in FUNCTIONS:  # others are functions that kernels share
            kernel, done, started = name, 0, time.monotonic()
        done += 1
        share = compiled_share(done, FUNCTIONS.get(kernel, done), time.monotonic() - started)
        text = f"compiling kernel {kernel}, once per machine: {share}"
        display.update(task, figures=text, refresh=True)

    return compiling
