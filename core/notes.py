"""Words for people, on stderr: one line each, marked with the command and the Slurm job.

stdout carries data only. Under Slurm a line names job, array index and restart count, so that
the interleaved logs of an array can be told apart.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

_state: dict[str, Any] = {"command": "sabia", "quiet": False, "json": False}


def configure(command: str, quiet: bool, as_json: bool = False) -> None:
    """Set the name that lines start with; `quiet` drops notes (warnings and errors stay), `as_json`
    makes summaries objects."""
    _state.update(command=f"sabia {command}".rstrip(), quiet=quiet, json=as_json)


def slurm_mark(environment: Mapping[str, str]) -> str:
    """`[job 12_3 restart 1] ` from SLURM_* variables; empty outside Slurm."""
    job = environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID")
    if not job:
        return ""
    index = environment.get("SLURM_ARRAY_TASK_ID")
    restarts = environment.get("SLURM_RESTART_COUNT")
    return f"[job {job}{f'_{index}' if index else ''}{f' restart {restarts}' if restarts else ''}] "


def say(message: str) -> None:
    """Write one line to stderr; a closed stderr is not an error."""
    try:
        print(
            f"{slurm_mark(os.environ)}{_state['command']}: {message}", file=sys.stderr, flush=True
        )
    except (BrokenPipeError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open for the rest of the process


def note(message: str) -> None:
    """A line that `--quiet` drops."""
    if not _state["quiet"]:
        say(message)


def summarize(line: str, figures: Mapping[str, Any]) -> None:
    """What was done: a line, or with `--json` one object of figures, on stderr."""
    if _state["json"]:
        import json

        print(json.dumps({"command": _state["command"].removeprefix("sabia "), **figures}),
              file=sys.stderr, flush=True)  # fmt: skip
    else:
        note(line)


def warn(message: str) -> None:
    """A line that is always written."""
    say(f"warning: {message}")
