"""What is installed and what it runs on, for `sabia --version --verbose`."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "jax", "jaxlib", "flax", "optax", "numpy", "pyarrow", "tokenizers",
            "safetensors", "numba", "typer", "rich", "wandb", "tensorboard")  # fmt: skip


def print_version(verbose: bool) -> None:
    """`sabia 0.1.0`, and with `verbose` packages, devices of both backends and Slurm's state."""
    print(f"sabia {version('sabia')}")
    if verbose:
        for name, value in [*_machine(), *_packages(), *_devices(), *_slurm()]:
            print(f"{name:12} {value}")


def _machine() -> list[tuple[str, str]]:
    cpus = len(os.sched_getaffinity(0))
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    python = f"{platform.python_version()} on {platform.platform()}"
    return [("python", python), ("cpu", f"{cpus} CPUs, {memory_gb:.0f} GB memory")]


def _packages() -> list[tuple[str, str]]:
    return [(name, _version(name)) for name in PACKAGES]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    return [("torch sees", _torch_devices()), ("jax sees", _jax_devices())]


def _torch_devices() -> str:
    try:
        import torch
    except ImportError as error:
        return f"nothing ({error})"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(names)
    return f"CPU only, {torch.get_num_threads()} threads"


def _jax_devices() -> str:
    try:
        import jax

        return ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices())
    except (ImportError, RuntimeError) as error:
        return f"nothing ({error})"


def _slurm() -> list[tuple[str, str]]:
    inside = {k: v for k, v in sorted(os.environ.items()) if k.startswith("SLURM_")}
    if inside:
        return [("slurm", " ".join(f"{k}={v}" for k, v in inside.items()))]
    return [("slurm", f"sbatch {'found' if shutil.which('sbatch') else 'not found'}, not in a job")]
