"""Join the processes of a run, over torch.distributed or JAX, with the same flags everywhere.

`join_torch` and `join_jax` first register all ranks (`health.rendezvous`): that waits longer the
more processes there are, because a cold start of many hosts outlasts fixed barriers, and it names
the ranks that are missing. Then the backend's own rendezvous follows; then, until the end of the
block, the watchdog runs (`health.watchdog`).
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from sabia.core.errors import Failed, Interrupted, UsageError
from sabia.core.parallel import job_environment
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.world import World
from sabia.kernels.runtime.cache_folder import name_compilers_folders

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
    job_environment.keep_offline()
    if world.launcher == "torchrun" and sys.platform == "linux":
        from sabia.core.sandbox.kernel import end_with_parent

        # without its agent nothing would end a rank, and a restart would run beside it
        end_with_parent(signal.SIGTERM)
    if world.size > 1:
        job_environment.keep_caches_apart(config.directory)
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
    job_environment.limit_jax_threads(devices=devices if world.size == 1 else 1)
    with _watched(world, config or WatchdogConfig()) as stack:
        # JAX read the environment when it was imported
        jax.config.update("jax_compilation_cache_dir", os.environ.get(job_environment.JAX_CACHE))
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
