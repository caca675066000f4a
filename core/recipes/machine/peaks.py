"""The peaks that the speed of a run is compared with, in FLOP/s of one device.

MFU is a share of a peak that is given (`--peak-flops`) or the dense BF16 peak of the data sheet;
there is no MFU where neither is known, as on CPUs. gemm_share is a share of the speed of a matrix
product that is measured at the start: a square product of random numbers (a GPU is faster on
constants, which need less power), the best of several, in about a quarter of a second; in fp32 for
the precision fp32 and in BF16 for all others, since precisions of 8 and 4 bits keep BF16 for
attention and head. It is the speed that this machine reaches now, not the data sheet's, and depends
on the number of threads and on other load.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sabia.core import notes, units

PRODUCT_SIZES = {"cpu": 1024}
ACCELERATOR_SIZE = 8192
PRODUCT_ROUNDS = 12  # so that one of them is undisturbed on a busy machine


def measure_peak_flops(backend: str, precision: str) -> float:
    """Floating-point operations per second of one device in the dtype of a named precision."""
    return (_torch_peak if backend == "torch" else _jax_peak)(peak_dtype(precision))


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


def best_seconds(work: Callable[[], None], rounds: int) -> float:
    """The shortest time of some rounds, after one to warm up (caches, compilation, clock)."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _rate(product: Callable[[], None], size: int) -> float:
    # a multiplication and an addition per element of the sum
    return 2.0 * size**3 / best_seconds(product, PRODUCT_ROUNDS)


def _torch_peak(dtype: str) -> float:
    import torch

    from sabia.kernels.runtime.torch_fp32 import computed_in_fp32

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    size = PRODUCT_SIZES.get(device_type, ACCELERATOR_SIZE)
    numbers = torch.Generator(device_type).manual_seed(0)
    square = torch.randn(size, size, generator=numbers, device=device_type).to(
        getattr(torch, dtype)
    )
    square = square.float() if computed_in_fp32(square) else square  # as in training

    def product() -> None:
        torch.mm(square, square)
        if device_type == "cuda":
            torch.cuda.synchronize()

    return _rate(product, size)


def _jax_peak(dtype: str) -> float:
    import jax
    import jax.numpy as jnp

    size = PRODUCT_SIZES.get(jax.local_devices()[0].platform, ACCELERATOR_SIZE)
    numbers = jax.random.normal(jax.random.key(0), (size, size), dtype)
    square = jax.device_put(numbers, jax.local_devices()[0])
    multiply = jax.jit(jnp.matmul)

    def product() -> None:
        multiply(square, square).block_until_ready()

    return _rate(product, size)


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of one device: given or of its data sheet, and of a measured product; 0: none."""

    published: float
    measured: float
    description: str


def find_peaks(backend: str, precision: str, given: float, *, warns: bool = True) -> Peaks:
    """The peaks for a precision's name; a `given` one replaces both, so that nothing is measured.

    Warns if the measured peak is above the data sheet's.
    """
    if given:
        return Peaks(given, 0.0, f"MFU is of {units.format_count(given)}FLOP/s per device (given)")
    name = device_name(backend)
    measured, chip = measure_peak_flops(backend, precision), None
    if name != "cpu":
        from sabia.core.plan.chips import chip_of_device

        chip = chip_of_device(name)
    share = (
        f"gemm_share is of {units.format_count(measured)}FLOP/s per device (measured by a matrix "
        "product here)"
    )
    if chip is None:
        why = f"no MFU, because no data sheet of {name} is on file (--peak-flops gives its peak)"
        return Peaks(0.0, measured, f"{share}; {why}")
    published = chip.bf16_flops_per_s / chip.devices
    peak = f"{units.format_count(published)}FLOP/s per device (BF16 peak of {chip.name})"
    if warns and measured > published:
        notes.warn(
            f"{name}: a matrix product was measured at {units.format_count(measured)}FLOP/s, "
            f"expected at most {peak}; disregard gemm_share, and give --peak-flops if the device "
            "is not this chip"
        )
    return Peaks(published, measured, f"MFU is of {peak}, {share}")
