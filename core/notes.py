"""Messages for the user on stderr, one line each, prefixed with the command.

stdout is for data only. Under Slurm a line also names the job, the array index and the restart
count, so that interleaved logs can be separated.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from sabia.kernels.runtime.cache_folder import choice_listeners

_state: dict[str, Any] = {"command": "sabia", "quiet": False, "json": False}
_named: dict[str, str] = {}  # local copy → URL that the user gave


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
