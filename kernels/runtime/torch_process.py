"""Settings of a process that runs torch: compilations of a function, memory that is kept."""

import ctypes
import functools
import os
import sys

COMPILATIONS = 64  # of a function for arrays of other sizes, in a process; torch's default is 8


def allow_compilations() -> None:
    """Let torch compile a function COMPILATIONS times; then it runs eagerly, or fails."""
    import torch._dynamo

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILATIONS)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt(3)
LARGEST_KEPT = 1 << 30, 32 << 20  # bytes of an allocation; the second is the most of old versions
PRODUCTS_KEPT = 64  # a decoding step has 5, a batch of prompts 10


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for later allocations; whether this process does.

    By default glibc returns large blocks to the system, which fills them with zeros again, page by
    page: 3 to 8 % of a step (tests/bench/RESULTS.md). Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    kept = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT)
    return bool(kept and mallopt(TRIM_THRESHOLD, 2**31 - 1))


def keep_few_products() -> None:
    """Let oneDNN keep what it compiled for its last 64 sizes of products, not for 1,024.

    Texts of many lengths leave .7 MiB for each size (tests/bench/RESULTS.md). It is read at the
    first product, later calls do nothing; what the environment says stays.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE", "LRU_CACHE"):  # its own, and that of torch before it
        os.environ.setdefault(f"{cache}_CAPACITY", str(PRODUCTS_KEPT))
