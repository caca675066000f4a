"""Freed memory back to the system, where a run asks for little of it on a CPU.

glibc keeps freed blocks below a moving threshold (up to 32 MiB) in its heap, where gradients and
activations of all sizes leave holes that the next ones do not fit: a run with recomputation then
holds twice what is alive. A fixed threshold (mallopt(3)) makes every tensor of a MiB or more a
mapping of its own, which is gone when it is freed. Its pages are cleared by the system again each
time, about a tenth of a step's time; so a run that trains all in fp32, a batch at once, stays with
the heap.
"""

import ctypes

M_MMAP_THRESHOLD = -3
BLOCK_BYTES = 1 << 20


def return_freed() -> bool:
    """Map blocks of BLOCK_BYTES and more from now on; False where the C library cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES) == 1
