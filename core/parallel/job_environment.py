"""Environment of a job of many processes: libraries offline, compilation caches without contention.

Nothing is downloaded or installed inside a job. Inputs, models and tokenizers are paths; the
trainers open connections only among their own processes (and to a judge that the user named), and
libraries that could use the network are set to offline mode.

Compiled code is cached where it does not overload the shared file system:
- torch.compile (Inductor), Triton, CUDA and numba: a directory on the node itself, shared by its
  processes, named by user and job. Each node compiles once for itself; 100 nodes do not write the
  same files to one file system. (One process per host cannot compile for the others first: a
  compiled step may contain collectives, which need all processes.)
- JAX: only process 0 writes its persistent cache, so it must be where all hosts can read it: in
  the run's directory. A restarted run then reads what was compiled before.
A run of one process uses the user's cache folder (sabia.kernels.runtime.cache_folder).

A variable that the user has set is not changed.
"""

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a later fork
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
    folder = "".join(letter if letter.isalnum() else "-" for letter in job)
    return Path(root) / f"sabia-{os.getuid()}" / folder


def keep_offline(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set libraries that could use the network (for models, telemetry) to offline mode."""
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)


def limit_jax_threads(environment: MutableMapping[str, str] = os.environ, devices: int = 1) -> None:
    """Let XLA start OMP_NUM_THREADS threads on a CPU, as torch does; NPROC is its own variable.

    At least two for each of several virtual `devices`: one that waits in a collective holds its
    thread, and with fewer all wait for ever. XLA reads it when JAX's first computation starts.
    """
    threads = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if threads.isdecimal() and int(threads):
        least = 2 * devices if devices > 1 else 1
        environment.setdefault("NPROC", str(max(int(threads), least)))


def keep_caches_apart(
    run_directory: Path | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the directories of compiled code (see above) before the backends read them."""
    root = node_directory(environment)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, folder in ON_THE_NODE.items():
        environment.setdefault(name, str(root / folder))
    if run_directory:
        environment.setdefault(JAX_CACHE, str(run_directory.absolute() / ".cache" / "jax"))
