"""Untrusted programs, tested in processes that the kernel isolates.

A `Box` is a server process that has read Python and the usual modules of its standard library once.
For each program it forks two processes: one runs the program, the other runs the tests, calls the
program's functions (`remote_calls`) and gives the verdict. The program thus never sees the tests,
its objects never reach them, and nothing that it prints, raises or exits with is a verdict.

Around both, by the first way that the kernel permits:
  namespaces   user, mount, process, network, IPC and host name spaces; a root of Python's files and
               libraries, read-only, without /proc; for the program a folder in memory, /tmp,
               of 16 MiB, which it loses when it ends
  landlock     files of Python and libraries can be read; nothing can be written
and in both a filter of system calls (`call_filter`): one thread, no sockets, no signals to others;
limits of CPU time, address space, files and their size; no capabilities; an empty environment, and
no other open file. When a program has ended, all that the box has left of it is killed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import MissingBackend
from sabia.core.sandbox.limits import Child, PastLimitError, Pool

METHODS = ("namespaces", "landlock")
CPU_S = 3  # of a program; its tests may take as much again
MEMORY_BYTES = 1 << 29  # of address space, for each of the two
WAIT_S = 30.0  # by the clock, for both together
OUTPUT = 8000  # characters of what a program prints
_GRACE_S = 10.0
_REQUESTS = 2000
_KEPT = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")  # the interpreter may need them
_PLAIN = {
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "HOME": "/tmp",
    "TMPDIR": "/tmp",
}  # fmt: skip

_PRINTING = """
import contextlib, io, traceback
_text = io.StringIO()
with contextlib.redirect_stdout(_text), contextlib.redirect_stderr(_text):
    try:
        exec(compile({source!r}, "program", "exec"), {{"__name__": "__main__"}})
    except BaseException as error:
        _lines = traceback.TracebackException.from_exception(error)
        _lines.stack = traceback.StackSummary.from_list(
            [frame for frame in _lines.stack if frame.filename == "program"])
        print("".join(_lines.format()), end="")
def printed(text=_text.getvalue()[:{most}]):
    return text
"""


@dataclass(frozen=True)
class Tested:
    """Whether a program passed (None: no verdict), and why not."""

    passed: bool | None
    detail: str = ""


class Box(Child):
    """One server process; `test` may be called from one thread at a time."""

    def __init__(
        self, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES, wait_s: float = WAIT_S,
        methods: Sequence[str] = METHODS,
    ) -> None:  # fmt: skip
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        super().__init__(
            "sabia.core.sandbox.server", cpu_s, memory_bytes, wait_s + _GRACE_S, _REQUESTS,
            [str(cpu_s), *methods], _PLAIN | kept,
        )  # fmt: skip
        self.clock_s = wait_s

    def check(self) -> None:
        """Raises MissingBackend where the kernel permits no isolation."""
        self.running()
        if self.state["method"] is None:
            self.close()
            reasons = "; ".join(f"{method}: {why}" for method, why in self.state["refused"].items())
            raise MissingBackend(
                f"this system permits no isolation of programs ({reasons}); expected user "
                "namespaces and Linux 5.12, or Landlock, and seccomp"
            )

    def test(self, program: str, tests: Mapping[str, Any]) -> Tested:
        """Run the tests on a program; see `server.run_tests`. Raises MissingBackend."""
        self.check()
        try:
            answer = self.ask({"program": program, "clock_s": self.clock_s, **tests})
        except PastLimitError as error:
            return Tested(None, f"the tests: {error}")
        return Tested(answer["passed"], answer["detail"])

    def output(self, source: str) -> Tested:
        """Run a program; passed with what it prints as detail, at most OUTPUT characters. The error
        that ends it is a part of that. Raises MissingBackend."""
        program = _PRINTING.format(source=source, most=OUTPUT)
        tests = {"setup": "", "tests": "printed = str(printed())", "entry_point": "",
                 "names": ["printed"], "result": "printed"}  # fmt: skip
        return self.test(program, tests)


boxes = Pool(Box, max(len(os.sched_getaffinity(0)), 1))
