"""Driver, CUDA, packages, memory, clocks and power limit; measured rates of copies and products."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator

from cases import Case, Device, Figures, Skipped, best_seconds

PACKAGES = ("torch", "triton", "jax", "numpy", "transformers", "safetensors", "tokenizers")
QUERY = {
    "driver": "driver_version", "power_limit": "power.limit", "power": "power.draw",
    "sm_clock": "clocks.sm", "sm_clock_max": "clocks.max.sm", "memory_clock": "clocks.mem",
    "temperature": "temperature.gpu", "persistence": "persistence_mode", "ecc": "ecc.mode.current",
}  # fmt: skip


def cases(device: Device) -> Iterator[Case]:
    """The machine, its software, and what it reaches in plain operations."""
    yield Case("machine", lambda: machine(device))
    yield Case("driver", driver)
    yield Case("jax", jax_devices)
    yield Case("copy", lambda: copy_rate(device))
    for dtype in ("bfloat16", "float32"):
        yield Case(f"product / {dtype}", lambda dtype=dtype: product_rate(device, dtype))


def machine(device: Device) -> Figures:
    """Device, CUDA and package versions."""
    import torch

    figures: Figures = {"device": device.name, "python": platform.python_version()}
    figures["cuda"] = torch.version.cuda or "none"
    if device.cuda:
        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "l2_mib": properties.L2_cache_size >> 20,
            "cudnn": torch.backends.cudnn.version(),
        }
        if torch.distributed.is_nccl_available():
            figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in PACKAGES:
        try:
            figures[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            figures[package] = "not installed"
    return figures


def driver() -> Figures:
    """What nvidia-smi reports of the first device."""
    if shutil.which("nvidia-smi") is None:
        raise Skipped("nvidia-smi is not installed")
    words = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(QUERY, values, strict=True))


def jax_devices() -> Figures:
    """JAX's platform; its GPU build preallocates memory, so this is a process of its own."""
    import sys

    code = "import jax; print(jax.__version__, jax.default_backend(), len(jax.devices()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise Skipped(f"JAX does not start: {reason[0]}")
    version, platform_name, count = done.stdout.split()
    return {"version": version, "platform": platform_name, "devices": int(count)}


def copy_rate(device: Device) -> Figures:
    """Bytes read and written a second by a copy within the device's memory."""
    import torch

    count = (1 << 20) if device.tiny else (2 << 30)
    source = torch.zeros(count, dtype=torch.uint8, device=device.kind)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device)
    return {"gb_per_s": 2 * count / seconds / 1e9}


def product_rate(device: Device, dtype: str) -> Figures:
    """TFLOP/s of a square product of random numbers (zeros are faster: they need less power)."""
    import torch

    size = 128 if device.tiny else 8192
    a, b = (torch.randn(size, size, device=device.kind).to(getattr(torch, dtype)) for _ in range(2))
    seconds = best_seconds(lambda: a @ b, device, inner=1 if device.tiny else 10)
    return {"tflops": 2 * size**3 / seconds / 1e12}
