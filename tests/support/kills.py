"""A command that is killed at random moments and run again, until it may end."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def through_kills(
    words: Sequence[object], kills: int, draw: random.Random, longest_s: float, scratch: Path
) -> None:
    """Every fifth time with SIGTERM, which ends with 75; the folder `scratch` is for temporary
    files, and holds none when the command has ended."""
    scratch.mkdir(exist_ok=True)
    line, environment = list(map(str, words)), os.environ | {"TMPDIR": str(scratch)}
    for number in range(kills):
        sent = signal.SIGTERM if number % 5 == 4 else signal.SIGKILL
        process = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        time.sleep(draw.uniform(0.2, 1.0) * longest_s)
        process.send_signal(sent)
        message = process.communicate()[1]
        # -15: it came before the handler was there
        assert process.returncode in (0, -sent, *([75] if sent == signal.SIGTERM else [])), message
    done = subprocess.run(line, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert not list(scratch.iterdir())


def left_over(*folders: Path) -> list[str]:
    """Temporary files in these folders."""
    names = [path.name for folder in folders for path in folder.rglob("*")]
    return [name for name in names if name.endswith(".tmp") or name.startswith(".sabia")]
