"""Waiting in tests: for what must happen, never for a time; a slow or busy machine changes nothing.

HANG_S is no measure of anything. It only ends a test that would otherwise never end.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HANG_S = 1800.0


def until(reached: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Return when `reached()` is true; fails if the process that should get there ends before."""
    hangs = time.monotonic() + HANG_S
    while not reached():
        if process is not None and process.poll() is not None:
            assert reached(), f"ended with {process.returncode} before it got there"
            return
        assert time.monotonic() < hangs, "hangs"
        time.sleep(0.005)


def run(*words: object, **settings: Any) -> subprocess.CompletedProcess:
    """`sabia WORDS` in a process of its own, as subprocess.run with captured output."""
    line = [sys.executable, "-m", "sabia.cli.main", *map(str, words)]
    return subprocess.run(line, capture_output=True, timeout=HANG_S, **settings)
