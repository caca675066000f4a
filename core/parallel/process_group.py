"""Join the processes of a run, over torch.distributed or JAX, with the same flags everywhere.

`join_torch` and `join_jax` first register all ranks (`health.rendezvous`): that waits longer the
more processes there are, because a cold start of many hosts outlasts fixed barriers, and it names
the ranks that are missing. Then the backend's own rendezvous follows; then, until the end of the
block, the watchdog runs (`health.watchdog`).

`keep_offline`, `keep_caches_apart`: the environment of a job of many processes. Nothing is
downloaded or installed inside a job. Inputs, models and tokenizers are paths; the trainers open
connections only among their own processes (and to a judge that the user named), and libraries that
could use the network are set to offline mode.

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

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from sabia.core.errors import Failed, Interrupted, UsageError
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.world import World
from sabia.kernels.runtime.cache_folder import name_compilers_folders

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


LONGEST = timedelta(days=30)  # that a process waits where others may have far more to do


@contextlib.contextmanager
def library_output_to_stderr(world: World) -> Iterator[None]:
    """Redirect what libraries print on stdout while processes are joined (gloo does) to stderr."""
    if world.size == 1:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # C's buffers, too, while they still go to stderr
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def _watched(world: World, config: WatchdogConfig) -> Iterator[contextlib.ExitStack]:
    """Register the ranks and run the watchdog; callbacks on the stack run before it ends."""
    keep_offline()
    if world.launcher == "torchrun" and sys.platform == "linux":
        from sabia.core.sandbox.kernel import end_with_parent

        # without its agent nothing would end a rank, and a restart would run beside it
        end_with_parent(signal.SIGTERM)
    if world.size > 1:
        keep_caches_apart(config.directory)
    else:
        name_compilers_folders()
    with watchdog.opened(world, config), contextlib.ExitStack() as stack:
        yield stack


def _unless_failed(shut_down: Callable[[], None]) -> Callable[..., None]:
    """A backend's shutdown, which waits for all processes; skipped when one has failed.

    Its clean-up at the interpreter's exit must not run then either: JAX's waits for processes that
    have ended, and aborts.
    """

    def on_exit(_kind: object, error: BaseException | None, _trace: object) -> None:
        # after a signal all processes stop at the same step, so no rank waits for another
        if error is None or (isinstance(error, Interrupted) and not watchdog.terminated()):
            shut_down()
        else:
            from sabia.core.parallel.health.shutdown import exit_code

            # handlers run last-in first-out: this one comes before the backend's
            atexit.register(_exit_now, exit_code(error))

    return on_exit


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def join_torch(world: World, config: WatchdogConfig | None = None) -> Iterator[Any]:
    """Yield the torch device of this process, with the others joined over NCCL or gloo."""
    import torch

    with _watched(world, config or WatchdogConfig()) as stack:
        device = _torch_device(world)
        if world.size > 1:
            # torchrun has a store of its own, which env:// knows how to reach
            torchrun = world.launcher == "torchrun"
            try:
                torch.distributed.init_process_group(
                    "gloo" if device.type == "cpu" else "nccl",
                    init_method="env://" if torchrun else f"tcp://{world.host}:{world.port}",
                    rank=world.rank,
                    world_size=world.size,
                    timeout=timedelta(seconds=world.timeout_s),
                )
            except (RuntimeError, ValueError) as error:
                raise _unreachable(world, error) from error
            stack.push(_unless_failed(torch.distributed.destroy_process_group))
        with watchdog.reporting_errors():
            yield device


def _torch_device(world: World) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {world.local_rank} on this host has no GPU of its own "
            f"({torch.cuda.device_count()} visible); start one process per GPU"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def _unreachable(world: World, error: Exception) -> Failed:
    reason = str(error).partition("\n")[0]
    return Failed(
        f"process {world.rank} of {world.size} could not join {world.host}:{world.port} within "
        f"{world.timeout_s} s: {reason}"
    )


@contextlib.contextmanager
def join_jax(
    world: World, devices: int = 0, config: WatchdogConfig | None = None
) -> Iterator[None]:
    """Join the other JAX processes; `devices` > 1 makes a CPU offer that many in this process."""
    import jax

    if devices > 1 and world.size == 1 and _is_cpu():
        with contextlib.suppress(RuntimeError):  # JAX is initialised; its devices stay
            jax.config.update("jax_num_cpu_devices", devices)
    limit_jax_threads(devices=devices if world.size == 1 else 1)
    with _watched(world, config or WatchdogConfig()) as stack:
        # JAX read the environment when it was imported
        jax.config.update("jax_compilation_cache_dir", os.environ.get(JAX_CACHE))
        if world.size > 1:
            _initialise_jax(world)
            stack.push(_unless_failed(jax.distributed.shutdown))
        with watchdog.reporting_errors():
            yield


def _initialise_jax(world: World) -> None:
    import jax

    if _is_cpu():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # torchrun's own store uses its port
    port = world.port + (1 if world.launcher == "torchrun" else 0)
    try:
        jax.distributed.initialize(
            f"{world.host}:{port}",
            world.size,
            world.rank,
            initialization_timeout=world.timeout_s,
            local_device_ids=None if _is_cpu() or world.launcher == "pod" else [world.local_rank],
        )
    except (RuntimeError, ValueError) as error:
        raise _unreachable(world, error) from error


def _is_cpu() -> bool:
    """Whether JAX will run on the CPU, by variable or for lack of a plugin.

    To ask JAX itself would initialise it, and then it could not be joined any more.
    """
    from importlib.util import find_spec

    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(find_spec(name) for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))


def barrier(world: World, backend: str, name: str) -> None:
    """Wait until every process has reached the point called `name`."""
    if world.size == 1:
        return
    if backend == "torch":
        import torch

        torch.distributed.barrier()
        return
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def broadcaster() -> Callable[[object], Any]:
    """A function by which torch process 0 gives the others an object: each calls it, and gets that
    of process 0, for which it may have to wait for days. Every process calls `broadcaster`."""
    import torch

    group = torch.distributed.new_group(timeout=LONGEST, backend="gloo")

    def given(value: object = None) -> Any:
        values = [value]
        torch.distributed.broadcast_object_list(values, 0, group)
        return values[0]

    return given


def gather_objects(world: World, value: object) -> list[Any]:
    """The values of all torch processes, in rank order; every process calls it."""
    if world.size == 1:
        return [value]
    import torch

    values: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(values, value)
    return values


def agree(world: World, backend: str, flag: bool) -> bool:
    """The logical and of all processes' flags; every process calls it."""
    if world.size == 1:
        return flag
    if backend == "torch":
        import torch

        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        lowest = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(lowest, torch.distributed.ReduceOp.MIN)
        return bool(lowest)
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(int(flag)).all())
