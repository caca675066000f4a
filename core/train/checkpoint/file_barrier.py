"""A barrier over small files in a shared directory, without collectives.

A checkpoint is saved in a thread while the main thread trains; a collective in that thread could be
interleaved with those of the steps. Each process writes a note with a name and its rank; the leader
waits for all notes. A process that fails writes the reason, so that the leader does not wait.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from sabia.core.errors import Failed
from sabia.core.parallel.world import World

_POLL_S, _SLOWEST_POLL_S = 0.01, 0.5


def write_note(
    directory: Path, kind: str, rank: int, content: object = None, error: str = ""
) -> None:
    """Write the note `kind` of process `rank`: its content, or why the process failed."""
    waiting = directory / f".{kind}-{rank:05d}.tmp"
    waiting.write_text(json.dumps({"said": content, "error": error}))
    # atomic, so that a note is never read half-written
    os.replace(waiting, directory / _name(kind, rank))


def read_notes(directory: Path, kind: str, world: World, timeout_s: float) -> list[Any]:
    """Wait for the notes of all processes but the first; removes them, returns them by rank.

    Raises Failed if one of them failed or has written no note in time.
    """
    deadline = time.monotonic() + timeout_s
    return [_wait(directory / _name(kind, r), r, deadline, timeout_s) for r in range(1, world.size)]


def _wait(path: Path, rank: int, deadline: float, timeout_s: float) -> Any:
    pause = _POLL_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise Failed(f"checkpoint: process {rank} has not answered within {timeout_s:.0f} s")
        time.sleep(pause)
        # poll with exponential backoff
        pause = min(pause * 1.5, _SLOWEST_POLL_S)
    note = json.loads(path.read_text())
    path.unlink()
    if note["error"]:
        raise Failed(f"checkpoint: process {rank} failed: {note['error']}")
    return note["said"]


def _name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.json"
