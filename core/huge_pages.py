"""Memory of a process in pages of 2 MiB, where Linux gives them only to those that ask.

With pages of 4 KiB a process that reads large matrices waits for the addresses of pages: a step of
training or of decoding on a virtual machine takes a fifth more time (tests/bench/RESULTS.md). glibc
asks for large ones if a setting of the environment says so, which it reads when a program starts.
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
