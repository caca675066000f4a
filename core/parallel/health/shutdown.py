"""How a run of several processes ends everywhere when it cannot continue, and with which exit code.

After a process that died or hangs, all end with 75 (interrupted; run again to resume from the last
checkpoint). After one that failed by its own error, all end with that error's code. A main thread
inside a collective that never returns cannot raise an exception; then another thread ends the
process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sabia.core import notes
from sabia.core.errors import ExitCode, Failed, Interrupted, SabiaError
from sabia.core.parallel.health.connection import Message

RESUME_HINT = "the state is that of the last checkpoint: run again to resume"
MAX_REASON_CHARS = 2000


@dataclass(frozen=True)
class Termination:
    """Why all processes end; with `hung` each of them writes its stacks."""

    code: int
    reason: str
    hung: bool = False

    def message(self) -> Message:
        """The message that is sent to the other processes."""
        return {"end": self.code, "reason": self.reason[:MAX_REASON_CHARS], "hung": self.hung}

    @classmethod
    def of_message(cls, message: Message) -> Termination:
        """The termination in a message; a malformed code counts as a failure."""
        code = message.get("end")
        code = code if isinstance(code, int) and 0 < code < 256 else 1
        return cls(code, str(message.get("reason")), bool(message.get("hung")))

    def error(self) -> SabiaError:
        """The exception for the main thread."""
        kind = Interrupted if self.code == ExitCode.INTERRUPTED else Failed
        error = kind(self.reason)
        with contextlib.suppress(ValueError):
            error.exit_code = ExitCode(self.code)
        return error


def exit_code(error: BaseException) -> int:
    """The code that a process ends with because of this exception."""
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.SIGINT)
    return int(getattr(error, "exit_code", ExitCode.FAILED))


def terminate_process(termination: Termination, rank: int, directory: Path | None) -> NoReturn:
    """Write the stacks of all threads, print the reason, and end this process at once.

    The stacks are written to stacks-NNNN.txt in the run's directory; without a directory, to
    stderr if the run hangs.
    """
    with contextlib.suppress(OSError, ValueError):
        if directory and directory.is_dir():
            with open(directory / f"stacks-{rank:04d}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        elif termination.hung:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    prefix = "" if termination.code == ExitCode.INTERRUPTED else "error: "
    notes.say(" ".join(f"{prefix}{termination.reason}".split()))
    # not sys.exit: the main thread is inside a collective and would never handle it
    os._exit(termination.code)
