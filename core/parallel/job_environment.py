"""What a job of many processes may touch: no network but its own, no cache that all fight over.

Nothing is downloaded or installed inside a job. Inputs, models and tokenizers are paths; our
trainers open no connection but those among their own processes (and to a judge that the user
named), and for libraries that might we set the switches that keep them offline.

Compiled code is cached where it is of use without a storm on the shared file system:
- torch.compile (Inductor), Triton, CUDA and numba: a directory on the node itself, shared by its
  processes, named by user and job. Each node compiles once for itself; 100 nodes do not write the
  same files over one file system. (One process per host cannot compile for the others first: a
  compiled step may hold collectives, which need all.)
- JAX: only process 0 writes its persistent cache, so it is worth something only where all hosts
  see it: in the run's directory. A restarted run then reads what was compiled before.
A process alone keeps them in the user's folder of caches (sabia.kernels.cache_folder).

A variable that the user has set is left alone.
"""

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",  # its threads and a later fork do not go together
}
ON_THE_NODE = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
}
JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"


def node_directory(environment: MutableMapping[str, str]) -> Path:
    """A directory on this node for this user and job: under SLURM_TMPDIR, TMPDIR or /tmp."""
    root = environment.get("SLURM_TMPDIR") or environment.get("TMPDIR") or tempfile.gettempdir()
    job = environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID") or "run"
    safe = "".join(letter if letter.isalnum() else "-" for letter in job)
    return Path(root) / f"sabia-{os.getuid()}" / safe


def keep_offline(environment: MutableMapping[str, str] = os.environ) -> None:
    """Libraries that could ask the network (for models, telemetry) are told not to."""
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)


def keep_caches_apart(
    run_directory: Path | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Name the directories of compiled code (see above) before the backends look for them."""
    root = node_directory(environment)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, folder in ON_THE_NODE.items():
        environment.setdefault(name, str(root / folder))
    if run_directory:
        environment.setdefault(JAX_CACHE, str(run_directory.absolute() / ".cache" / "jax"))
