"""How a process of a command begins: with memory in large pages, and without pandas.

Linux gives pages of 2 MiB only to programs that ask, on many machines. With pages of 4 KiB a
process that reads large matrices waits for the addresses of pages: a step of training or of
decoding on a virtual machine takes a fifth more time (tests/bench/RESULTS.md). glibc asks for large
ones if a setting of the environment says so, which it reads when a program starts.

pyarrow imports pandas, where it is installed, with the first array that it makes, to recognise its
objects: 0.3 CPU seconds of every process. A process that runs a command has pyarrow look once while
pandas cannot be imported; from then on it does without. Programs that import sabia are left alone.
"""

import contextlib
import os
import sys
from pathlib import Path

SETTING = "glibc.malloc.hugetlb"  # of glibc 2.35
FIRST_GLIBC = (2, 35)
_ON_REQUEST = "[madvise]"
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def start_with_huge_pages() -> None:
    """Start this program once more in the same process, with the setting.

    Nothing happens where it is set, where the kernel has no such pages or gives them to all, with
    other C libraries, and in a process that was not started with the arguments of the program, such
    as a forked one. Called before the program does anything else.
    """
    tunables, words = os.environ.get("GLIBC_TUNABLES", ""), sys.argv[1:]
    started = bool(sys.executable) and sys.orig_argv[len(sys.orig_argv) - len(words) :] == words
    if SETTING in tunables or not started or not _gains():
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{SETTING}=1")))
    with contextlib.suppress(OSError):  # such as a limit of arguments: as the program was started
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _gains() -> bool:
    if sys.platform != "linux":
        return False
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = map(int, version.split(".")[:2])
        asked = name == "glibc" and (major, minor) >= FIRST_GLIBC
        return asked and _ON_REQUEST in _KERNEL.read_text()
    except (OSError, ValueError):
        return False


_process = {"ours": False}


def runs_a_command() -> None:
    """Say that this process runs a command; called before it imports pyarrow."""
    _process["ours"] = True


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=name)


def leave_out_pandas() -> None:
    """Have pyarrow do without pandas in a process that runs a command."""
    if _process["ours"] and "pandas" not in sys.modules:
        import pyarrow as pa

        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([0])
        finally:
            sys.meta_path.remove(_NoPandas)
