"""Memory that keys and values may take where no option says so."""

from pathlib import Path

from sabia.core.ops.product import Array

HOST_SHARE, DEVICE_SHARE = 0.25, 0.5  # of what is free
CGROUPS = (("memory.max", "memory.current"),
           ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))  # fmt: skip


def cache_memory(array: Array) -> int:
    """Bytes for caches on the device of an array: a quarter of the free memory of the host, half of
    that of an accelerator."""
    free = _device_free(array)
    return int(_host_free() * HOST_SHARE if free is None else free * DEVICE_SHARE)


def _device_free(array: Array) -> int | None:
    """Free bytes of the array's accelerator; None: it is in the host's memory."""
    if hasattr(array, "devices"):  # JAX
        stats = next(iter(array.devices())).memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None
    if array.device.type != "cuda":
        return None
    import torch

    free: int = torch.cuda.mem_get_info(array.device)[0]
    return free


def _host_free(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of the host or, if that is less, of the control group."""
    lines = (proc / "meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    for limit, used in CGROUPS:
        try:
            most, now = (int((cgroup / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # another version, or no limit
            continue
        free = min(free, max(most - now, 0))
    return free
