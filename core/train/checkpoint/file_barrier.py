"""Processes meet over small files in the directory they share, so no collective is needed.

Saving goes on in a thread while the main thread trains; a collective there would get between the
collectives of the steps. A process leaves a note of its own under a name and its rank; the leader
waits for all of them. A process that fails leaves the reason, so that nobody waits in vain.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from sabia.core.errors import Failed
from sabia.core.parallel.world import World

_POLL_S, _SLOWEST_POLL_S = 0.01, 0.5


def leave(place: Path, kind: str, rank: int, said: Any = None, error: str = "") -> None:
    """Leave a note `kind` of process `rank`: what it has to say, or why it failed."""
    waiting = place / f".{kind}-{rank:05d}.tmp"
    waiting.write_text(json.dumps({"said": said, "error": error}))
    os.replace(waiting, place / _name(kind, rank))


def gather(place: Path, kind: str, world: World, timeout_s: float) -> list[Any]:
    """What all processes but the first said, by rank, once all have; removes their notes.

    Raises Failed when one of them failed or does not answer in time.
    """
    until = time.monotonic() + timeout_s
    return [_wait(place / _name(kind, r), r, until, timeout_s) for r in range(1, world.size)]


def _wait(path: Path, rank: int, until: float, timeout_s: float) -> Any:
    pause = _POLL_S
    while not path.exists():
        if time.monotonic() > until:
            raise Failed(f"checkpoint: process {rank} has not answered within {timeout_s:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, _SLOWEST_POLL_S)
    found = json.loads(path.read_text())
    path.unlink()
    if found["error"]:
        raise Failed(f"checkpoint: process {rank}: {found['error']}")
    return found["said"]


def _name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.json"
