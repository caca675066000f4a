"""Who we are among the processes of a run: bare python, torchrun, srun or a TPU pod, same flags.

torchrun is recognised by RANK and WORLD_SIZE, srun by SLURM_PROCID with more than one task and a
step id (a batch script has a SLURM_PROCID too, but no step and no company), a TPU pod by
TPU_WORKER_HOSTNAMES with more than one name (one process a host). `detect` reads the environment
only; `join_torch` and `join_jax` meet the other processes: first the roll call (`rollcall`), which
waits longer the more processes there are, because a cold start of many hosts outlasts fixed
barriers, and says who is missing; then the backend's own rendezvous; then, until the end of the
block, the watch over the processes (`watch`).
"""

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import Failed, Interrupted, UsageError
from sabia.core.parallel import launch_environment, watch
from sabia.core.parallel.ending import exit_code
from sabia.core.parallel.launch_hosts import expand_hosts
from sabia.core.parallel.watch import Guard
from sabia.kernels.cache_folder import name_compilers_folders

BASE_TIMEOUT_S = 300
TIMEOUT_S_PER_PROCESS = 2
POD_PORT = 28476


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, its number on this host, where rank 0 is reached."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = "bare"  # bare, torchrun, srun or pod
    host: str = ""
    port: int = 0

    @property
    def leads(self) -> bool:
        """True for the one process that writes checkpoints and rows."""
        return self.rank == 0

    @property
    def timeout_s(self) -> int:
        """How long to wait for the others."""
        return BASE_TIMEOUT_S + TIMEOUT_S_PER_PROCESS * self.size


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """The world that the launcher's variables describe; raises UsageError when they are broken."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if int(environment.get("SLURM_NTASKS") or 1) > 1 and "SLURM_STEP_ID" in environment:
        return _from_slurm(environment)
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") and "TPU_WORKER_ID" in environment:
        return _from_pod(environment)
    return World()


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = environment.get(name, default)
    if value is None or not value.isdigit():
        raise UsageError(f"{name}: {value!r} in the environment (expected a number)")
    return int(value)


def _from_torchrun(environment: Mapping[str, str]) -> World:
    return World(
        rank=_number(environment, "RANK"),
        size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", "0"),
        launcher="torchrun",
        host=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environment, "MASTER_PORT", "29500"),
    )


def _from_slurm(environment: Mapping[str, str]) -> World:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return World(
        rank=_number(environment, "SLURM_PROCID"),
        size=_number(environment, "SLURM_NTASKS"),
        local_rank=_number(environment, "SLURM_LOCALID", "0"),
        launcher="srun",
        host=environment.get("SABIA_COORDINATOR") or first_host(nodes),
        # below the kernel's range of ephemeral ports, and different for each job and step
        port=20000 + (job * 64 + step % 64) % 12000,
    )


def _from_pod(environment: Mapping[str, str]) -> World:
    hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
    rank = _number(environment, "TPU_WORKER_ID")
    host = environment.get("SABIA_COORDINATOR") or hosts[0]
    return World(rank=rank, size=len(hosts), launcher="pod", host=host, port=POD_PORT)


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list: 'gpu[003-006,9],x' → 'gpu003'."""
    return expand_hosts(nodes)[0]


@contextlib.contextmanager
def stdout_kept_clean(world: World) -> Iterator[None]:
    """Let what libraries print on stdout while processes are joined (gloo does) go to stderr."""
    if world.size == 1:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # theirs, too, while it still goes to stderr
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _together(world: World, guard: Guard) -> Iterator[contextlib.ExitStack]:
    """Meet the other processes and watch over them; what is put on the stack ends before."""
    launch_environment.keep_offline()
    if world.size > 1:
        launch_environment.keep_caches_apart(guard.directory)
    else:
        name_compilers_folders()
    with watch.opened(world, guard), contextlib.ExitStack() as stack:
        yield stack


def _leaving(leave: Callable[[], None]) -> Callable[..., None]:
    """A backend's farewell, which waits for all processes; without it where one has failed.

    Then its clean-up at the interpreter's exit must not run either: JAX's waits for those who are
    gone, and aborts.
    """

    def on_exit(_kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or (isinstance(error, Interrupted) and not watch.ended()):
            leave()
        else:
            atexit.register(_exit_now, exit_code(error))

    return on_exit


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def join_torch(world: World, guard: Guard | None = None) -> Iterator[Any]:
    """Yield the torch device of this process, with the others joined over NCCL or gloo."""
    import torch

    with _together(world, guard or Guard()) as stack:
        device = _torch_device(world)
        if world.size > 1:
            _initialise_torch(world, "gloo" if device.type == "cpu" else "nccl")
            stack.push(_leaving(torch.distributed.destroy_process_group))
        with watch.parting():
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


def _initialise_torch(world: World, transport: str) -> None:
    from datetime import timedelta

    import torch

    # torchrun has a store of its own that env:// knows how to reach
    method = "env://" if world.launcher == "torchrun" else f"tcp://{world.host}:{world.port}"
    try:
        torch.distributed.init_process_group(
            transport,
            init_method=method,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise Failed(_unreachable(world, error)) from error


def _unreachable(world: World, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return (
        f"process {world.rank} of {world.size} could not join {world.host}:{world.port} within "
        f"{world.timeout_s} s: {reason}"
    )


@contextlib.contextmanager
def join_jax(world: World, devices: int = 0, guard: Guard | None = None) -> Iterator[None]:
    """Join the other JAX processes; `devices` > 1 asks a CPU for that many in this process."""
    import jax

    if devices > 1 and world.size == 1 and _is_cpu():
        with contextlib.suppress(RuntimeError):  # JAX is up already, with what devices it has
            jax.config.update("jax_num_cpu_devices", devices)
    with _together(world, guard or Guard()) as stack:
        if world.size > 1:
            _initialise_jax(world)
            stack.push(_leaving(jax.distributed.shutdown))
        with watch.parting():
            yield


def _initialise_jax(world: World) -> None:
    import jax

    cache = os.environ.get(launch_environment.JAX_CACHE)
    if cache:  # JAX has read the environment before we wrote there
        jax.config.update("jax_compilation_cache_dir", cache)
    if _is_cpu():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # the port of torchrun itself is taken by its store
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
        raise Failed(_unreachable(world, error)) from error


def _is_cpu() -> bool:
    """Whether JAX was told, or has no choice but, to run on the CPU (asking would start it)."""
    from importlib.util import find_spec

    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(find_spec(name) for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))


def barrier(world: World, backend: str, name: str) -> None:
    """Wait until every process has come to the point called `name`."""
    if world.size == 1:
        return
    if backend == "torch":
        import torch

        torch.distributed.barrier()
        return
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def agree(world: World, backend: str, flag: bool) -> bool:
    """The logical and of all processes' flags; every process calls it."""
    if world.size == 1:
        return flag
    if backend == "torch":
        import torch

        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        found = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
        return bool(found)
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(int(flag)).all())
