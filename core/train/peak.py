"""The measured speed of one device's matrix product, of which a run's `gemm_share` is a share.

A square product of random numbers (a GPU is faster on constants, which need less power), the best
of several; about a quarter of a second. It is in fp32 for the precision fp32 and in BF16 for all
others: precisions of 8 and 4 bits keep BF16 for attention and head. It is the speed that this
machine reaches now, not the data sheet's; it depends on the number of threads and on other load.
"""

import time
from collections.abc import Callable

SIZES = {"cpu": 1024}
DEFAULT_SIZE = 8192
ROUNDS = 12  # so that one of them is undisturbed on a busy machine


def measure_peak_flops(backend: str, precision: str) -> float:
    """Floating-point operations per second of one device in the dtype of a named precision."""
    return (_torch if backend == "torch" else _jax)(peak_dtype(precision))


def device_name(backend: str) -> str:
    """What the backend calls this process's device; `cpu` without an accelerator."""
    if backend == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    import jax

    return str(jax.local_devices()[0].device_kind)


def peak_dtype(precision: str) -> str:
    """float32 for fp32, else bfloat16."""
    return "float32" if precision == "fp32" else "bfloat16"


def peak_multiplier(backend: str, devices: int, processes: int) -> int:
    """By how much to multiply the measured peak: CPU devices of one process share its cores."""
    if backend == "torch":
        return devices
    import jax

    return processes if jax.local_devices()[0].platform == "cpu" else devices


def _best(product: Callable[[], None], size: int) -> float:
    # warm up: caches, compilation, clock
    product()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    # a multiplication and an addition per element of the sum
    return 2.0 * size**3 / best


def _torch(dtype: str) -> float:
    import torch

    from sabia.kernels.runtime.torch_fp32 import computed_in_fp32

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES.get(device_type, DEFAULT_SIZE)
    numbers = torch.Generator(device_type).manual_seed(0)
    square = torch.randn(size, size, generator=numbers, device=device_type).to(
        getattr(torch, dtype)
    )
    square = square.float() if computed_in_fp32(square) else square  # as in training

    def product() -> None:
        torch.mm(square, square)
        if device_type == "cuda":
            torch.cuda.synchronize()

    return _best(product, size)


def _jax(dtype: str) -> float:
    import jax
    import jax.numpy as jnp

    size = SIZES.get(jax.local_devices()[0].platform, DEFAULT_SIZE)
    numbers = jax.random.normal(jax.random.key(0), (size, size), dtype)
    square = jax.device_put(numbers, jax.local_devices()[0])
    multiply = jax.jit(jnp.matmul)

    def product() -> None:
        multiply(square, square).block_until_ready()

    return _best(product, size)
