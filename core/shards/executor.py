"""Run one function over many shards, in this process or in workers; and over items, on threads.

Results come back in the order of the tasks, whatever the order of the work. A stop signal or
Ctrl-C reaches the workers, which leave no half-written file; a worker that dies gives one clear
error. Larger executors (a Slurm array slices its shards before this, Ray) serve the same call.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from sabia.core import notes, stop
from sabia.core.errors import ExitCode, Failed

A = TypeVar("A")
R = TypeVar("R")
LOOK_S = 0.2  # interval at which a waiting parent checks for a stop signal


def run_tasks(
    function: Callable[..., R], tasks: Sequence[tuple[Any, ...]], jobs: int = 1
) -> Iterator[R]:
    """Yield function(*task) for each task in order; `function` and tasks must be picklable.

    Raises Interrupted on a stop signal and Failed when a worker process dies.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for task in tasks:
            stop.check()
            yield function(*task)
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare_worker)
    try:
        futures = [pool.submit(function, *task) for task in tasks]
        for future in futures:
            while not future.done():
                stop.check()
                wait([future], LOOK_S)
            yield future.result()
    except BrokenProcessPool as error:
        raise Failed("a worker process died (out of memory?); run again to resume") from error
    except BaseException:
        for worker in list((pool._processes or {}).values()):
            if worker.pid and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C and ends its workers
    stop.install()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    notes.configure("worker", quiet=False)


def _end_with_parent() -> None:
    """Exit if the parent was killed: an idle worker would wait for its next task forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(ExitCode.FAILED)


def map_threads(function: Callable[[A], R], items: Iterable[A], jobs: int) -> Iterator[R]:
    """function(item) for each item, in order, on `jobs` threads, a few items ahead."""
    if jobs <= 1:
        for item in items:
            stop.check()
            yield function(item)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(jobs) as pool:
        for item in items:
            stop.check()
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
