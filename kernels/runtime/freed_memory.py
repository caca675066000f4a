"""Memory that a training process on a CPU frees and needs again in the next step."""

import ctypes
import functools
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt(3)
LARGEST_KEPT = 32 << 20  # bytes of an allocation; glibc takes no larger threshold


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for later allocations; whether this process does.

    By default glibc returns large blocks to the system, which fills them with zeros again, page by
    page: 3 to 8 % of a step (tests/bench/RESULTS.md). Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(TRIM_THRESHOLD, 2**31 - 1))
