"""Regular expressions on text of a model, with a limit of CPU time.

A pattern such as `(a+)+$` takes time exponential in the text, and a process cannot interrupt its
own match in every thread. Matches therefore run in one child process per process, which answers
in about 0.1 ms and ends a match after CPU_S seconds of its CPU time: the result does not depend on
how busy the machine is.
"""

import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

from sabia.core.errors import BadData

CPU_S = 1.0
WALL_S = 60.0  # a child that does not answer by then is killed
MEMORY_BYTES = 2 << 30
CHILD = Path(__file__).with_name("regex_child.py")
_lock = threading.Lock()
_children: dict[int, subprocess.Popen[str]] = {}  # by process: a forked one starts its own


class PastLimitError(Exception):
    """A match took longer than CPU_S seconds, or needed more than MEMORY_BYTES."""


def find(
    pattern: str, text: str, pick: Literal["first", "last"] = "first"
) -> tuple[str, str | None] | None:
    """(match, its group 1 or None) of the first or last match (MULTILINE); None without one.

    Raises BadData if the pattern is invalid, PastLimitError past the limits.
    """
    with _lock:
        reply = _asked(json.dumps([pattern, text, pick]))
    if reply == "limit":
        raise PastLimitError
    if isinstance(reply, dict):
        raise BadData(f"not a regular expression: {pattern!r} ({reply['error']})")
    return (reply[0], reply[1]) if reply else None


def _asked(line: str) -> list[str] | dict[str, str] | str:
    child = _children.get(os.getpid())
    if child is None or child.poll() is not None:
        child = _started()
    assert child.stdin is not None and child.stdout is not None, "both are pipes"
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
        if select.select([child.stdout], [], [], WALL_S)[0] and (reply := child.stdout.readline()):
            return json.loads(reply)
    except OSError:
        pass  # the child ended, as at a lack of memory
    except BaseException:
        child.kill()  # interrupted between request and reply
        raise
    child.kill()
    child.wait()
    return "limit"


def _started() -> subprocess.Popen[str]:
    _children.clear()
    command = [sys.executable, "-I", "-S", str(CHILD), str(CPU_S), str(MEMORY_BYTES)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, encoding="utf-8", start_new_session=True,
    )  # fmt: skip
    _children[os.getpid()] = child
    return child
