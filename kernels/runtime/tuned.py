"""Block sizes of Triton kernels that were measured on a device, in `kernels/tuned/DEVICE.json`.

`tests/gpu/run.py --only tuning` measures candidates and writes the file; a kernel asks for its
blocks when it is launched and keeps its defaults on a device without a file. A file is

    {"device": "NVIDIA H200", "triton": "3.6.0", "date": "2026-11-22",
     "blocks": {"attention.forward": {"128 bfloat16": {"blocks": [128, 64, 8, 2], "gain": 1.07}}}}

where the inner key says for which sizes and dtype the blocks are (each kernel defines it) and gain
is the time of the default blocks divided by the time of these.
"""

import functools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "tuned"


def file_name(device: str) -> str:
    """The file of a device: `NVIDIA H100 80GB HBM3` → `nvidia-h100-80gb-hbm3.json`."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json"


@functools.cache
def blocks_of(device: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Kernel → key → blocks of a device; empty without a file. Raises ValueError for a bad file."""
    path = FOLDER / file_name(device)
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())["blocks"]
        return {
            kernel: {key: tuple(map(int, row["blocks"])) for key, row in rows.items()}
            for kernel, rows in table.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error!r} (expected a file of kernels.runtime.tuned)") from error


@functools.cache
def _device_name(index: int | None) -> str:
    import torch

    return torch.cuda.get_device_name(index)


def tuned_blocks(kernel: str, key: str, x: Any, default: tuple[int, ...]) -> tuple[int, ...]:
    """The measured blocks of a kernel for tensor `x` on CUDA, else `default`.

    Raises ValueError if the file has another number of blocks than `default`.
    """
    if x.device.type != "cuda":
        return default
    blocks = blocks_of(_device_name(x.device.index)).get(kernel, {}).get(key, default)
    if len(blocks) != len(default):
        raise ValueError(f"{kernel}, {key}: {len(blocks)} tuned blocks (expected {len(default)})")
    return blocks
