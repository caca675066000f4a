"""What kernels share in torch: the context of autograd functions with types, tensors as arrays, and
settings of the process: compilations of a function, memory that is kept."""

import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

COMPILATIONS = 64  # of a function for arrays of other sizes, in a process; torch's default is 8

FEW_THREADS = 2  # loops over arrays are faster with them; torch's own products use more


class Context(FunctionCtx):
    """What torch gives to `forward` and `backward`; a function adds attributes of its own."""

    saved_tensors: tuple[Any, ...]  # a tensor or None each
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


def numbers(x: torch.Tensor) -> np.ndarray:
    """A view of a contiguous tensor; bfloat16 as bits."""
    return (x if x.dtype == torch.float32 else x.view(torch.uint16)).numpy()


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
