"""How a run of several processes ends for all when it cannot go on, and with which exit code.

A process that died or hangs: 75 (interrupted; run again to resume from the last checkpoint). One
that failed by its own error: that error's code, everywhere. A main thread that sits in a
collective that never returns cannot raise anything; then a thread ends the process.
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

AGAIN = "the state is that of the last checkpoint: run again to resume"
MOST_WORDS = 2000


@dataclass(frozen=True)
class End:
    """Why all end; `hangs` asks every process for its stacks."""

    code: int
    why: str
    hangs: bool = False

    def message(self) -> Message:
        """As sent."""
        return {"end": self.code, "why": self.why[:MOST_WORDS], "hangs": self.hangs}

    @classmethod
    def of_message(cls, message: Message) -> End:
        """As received; a broken one means a failure."""
        code = message.get("end")
        code = code if isinstance(code, int) and 0 < code < 256 else 1
        return cls(code, str(message.get("why")), bool(message.get("hangs")))

    def error(self) -> SabiaError:
        """As an exception."""
        found = Interrupted(self.why) if self.code == ExitCode.INTERRUPTED else Failed(self.why)
        with contextlib.suppress(ValueError):
            found.exit_code = ExitCode(self.code)
        return found


def exit_code(error: BaseException) -> int:
    """The code that a process ends with because of this exception."""
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.SIGINT)
    return int(getattr(error, "exit_code", ExitCode.FAILED))


def end_process(end: End, rank: int, directory: Path | None) -> NoReturn:
    """Write the stacks of all threads, say why, and end this process.

    The stacks go to stacks-NNNN.txt in the run's directory; without one, to stderr if it hangs.
    """
    with contextlib.suppress(OSError, ValueError):
        if directory and directory.is_dir():
            with open(directory / f"stacks-{rank:04d}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        elif end.hangs:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    prefix = "" if end.code == ExitCode.INTERRUPTED else "error: "
    notes.say(" ".join(f"{prefix}{end.why}".split()))
    os._exit(end.code)
