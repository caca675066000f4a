"""What a command says on stderr: lines that start with its name, and a progress bar on a terminal.

stdout is for data only. Under Slurm a line also names the job, the array index and the restart
count, so that interleaved logs can be separated.

In a pipeline a stage waits for the stage before it. The clock `working_s` is paused while it waits,
so that seconds and rates measure the stage itself.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sabia.kernels.runtime.cache_folder import (
    FUNCTIONS,
    choice_listeners,
    compile_listeners,
    compiled_share,
)

_state: dict[str, Any] = {"command": "sabia", "quiet": False, "json": False}
_named: dict[str, str] = {}  # local copy → URL that the user gave
_waited = {"seconds": 0.0}


def configure(command: str, quiet: bool, as_json: bool = False) -> None:
    """Set the command that lines start with. `quiet` suppresses notes, but not warnings and errors;
    `as_json` prints summaries as JSON."""
    _state.update(command=f"sabia {command}".rstrip(), quiet=quiet, json=as_json)


def name_copy(path: str, url: str) -> None:
    """Write the URL in messages in place of the path of its local copy."""
    _named[path] = url


def slurm_mark(environment: Mapping[str, str]) -> str:
    """`[job 12_3 restart 1] ` from SLURM_* variables; empty outside Slurm."""
    job = environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID")
    if not job:
        return ""
    index = environment.get("SLURM_ARRAY_TASK_ID")
    restarts = environment.get("SLURM_RESTART_COUNT")
    return f"[job {job}{f'_{index}' if index else ''}{f' restart {restarts}' if restarts else ''}] "


def say(message: str) -> None:
    """Write one line to stderr; does nothing if stderr is closed."""
    for path, url in _named.items():
        message = message.replace(path, url)
    try:
        line = f"{slurm_mark(os.environ)}{_state['command']}: {message}"
        print(line, file=sys.stderr, flush=True)
    except (BrokenPipeError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open for the rest of the process


def note(message: str) -> None:
    """Write an informational line, which `--quiet` suppresses."""
    if not _state["quiet"]:
        say(message)


def summarize(line: str, figures: Mapping[str, Any]) -> None:
    """Report what was done on stderr: a line, or with `--json` the figures as one object."""
    if _state["json"]:
        import json

        summary = {"command": _state["command"].removeprefix("sabia "), **figures}
        print(json.dumps(summary), file=sys.stderr, flush=True)
    else:
        note(line)


def warn(message: str) -> None:
    """Write a warning, also with `--quiet`."""
    say(f"warning: {message}")


choice_listeners.append(note)


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
