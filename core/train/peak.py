"""The peak that MFU is relative to, where none is given: one device's own matrix product.

A square product, the best of a few; about a quarter of a second. It is in fp32 for the precision of
that name and in BF16 for all others: also those that round to 8 and 4 bits keep BF16 for attention
and head, so their MFU is of BF16's peak and may pass 1 where the units of FP8 and FP4 are used. It
is what the machine reaches, not what its maker promises, and depends on the threads in use.
"""

import time
from collections.abc import Callable

SIZES = {"cpu": 1024}
DEFAULT_SIZE = 8192
ROUNDS = 12  # enough that one of them has the core to itself on a busy machine


def measure_peak_flops(backend: str, precision: str) -> float:
    """Operations per second of one device in the dtype that belongs to a named precision."""
    return (_torch if backend == "torch" else _jax)(peak_dtype(precision))


def peak_dtype(precision: str) -> str:
    """float32 for fp32, else bfloat16."""
    return "float32" if precision == "fp32" else "bfloat16"


def devices_at_peak(backend: str, devices: int, processes: int) -> int:
    """How many times the measured peak there is: CPU devices of one process share its cores."""
    if backend == "torch":
        return devices
    import jax

    return processes if jax.local_devices()[0].platform == "cpu" else devices


def _best(product: Callable[[], None], size: int) -> float:
    product()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def _torch(dtype: str) -> float:
    import torch

    from sabia.core.model.ops_torch_wide import widened

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES.get(kind, DEFAULT_SIZE)
    square = torch.ones(size, size, device=kind, dtype=getattr(torch, dtype))
    square = square.float() if widened(square) else square  # as the products of a run are

    def product() -> None:
        torch.mm(square, square)
        if kind == "cuda":
            torch.cuda.synchronize()

    return _best(product, size)


def _jax(dtype: str) -> float:
    import jax
    import jax.numpy as jnp

    size = SIZES.get(jax.local_devices()[0].platform, DEFAULT_SIZE)
    square = jax.device_put(jnp.ones((size, size), dtype), jax.local_devices()[0])
    multiply = jax.jit(jnp.matmul)

    def product() -> None:
        multiply(square, square).block_until_ready()

    return _best(product, size)
