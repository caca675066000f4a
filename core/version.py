"""The installed packages and the machine, for `sabia --version --verbose`."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "jax", "jaxlib", "flax", "numpy", "pyarrow", "tokenizers",
            "safetensors", "numba", "typer", "rich", "wandb", "tensorboard")  # fmt: skip


def print_version(verbose: bool) -> None:
    """`sabia 0.1.0`, and with `verbose` packages, devices of both backends and Slurm's state."""
    print(f"sabia {version('sabia')}")
    if not verbose:
        return
    cpus = len(os.sched_getaffinity(0))
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    rows = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cpu": f"{cpus} CPUs, {memory_gb:.0f} GB memory",
    }
    for name in PACKAGES:
        try:
            rows[name] = version(name)
        except PackageNotFoundError:
            rows[name] = "not installed"
    rows |= {"torch devices": _torch_devices(), "jax devices": _jax_devices(), "slurm": _slurm()}
    for name, value in rows.items():
        print(f"{name:14} {value}")


def _torch_devices() -> str:
    try:
        import torch
    except ImportError as error:
        return f"none ({error})"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(names)
    return f"CPU only, {torch.get_num_threads()} threads"


def _jax_devices() -> str:
    try:
        import jax

        return ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices())
    except (ImportError, RuntimeError) as error:
        return f"none ({error})"


def _slurm() -> str:
    """The SLURM_* variables of a job, else whether Slurm is installed."""
    inside = {k: v for k, v in sorted(os.environ.items()) if k.startswith("SLURM_")}
    if inside:
        return " ".join(f"{k}={v}" for k, v in inside.items())
    return f"sbatch {'found' if shutil.which('sbatch') else 'not found'}, not in a job"
