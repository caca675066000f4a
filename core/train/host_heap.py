"""Return freed memory to the system, for runs on a CPU that must save memory.

glibc keeps freed blocks below a dynamic threshold (up to 32 MiB) in its heap, which becomes
fragmented by gradients and activations of many sizes: a run with recomputation then holds twice the
memory in use. With a fixed threshold (mallopt(3)) every tensor of a MiB or more is a memory mapping
of its own, which is unmapped when it is freed. The system must clear its pages each time, about a
tenth of a step's time; so runs in fp32 with whole batches keep the default.
"""

import ctypes

M_MMAP_THRESHOLD = -3
BLOCK_BYTES = 1 << 20


def return_freed_memory() -> bool:
    """Map each later block of BLOCK_BYTES or more; False if the C library cannot do this."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES) == 1
