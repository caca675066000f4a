"""Run one function over many shards, in this process or in workers; and over items, on threads.

Results come back in the order of the tasks, whatever the order of the work. A stop signal or
Ctrl-C reaches the workers, which leave no half-written file; a task whose worker dies is run once
more. A Slurm array, or Ray, gives each of its tasks a slice of the shards before this.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from sabia.core import notes, stop
from sabia.core.digests import suppress_notes
from sabia.core.errors import ExitCode, Failed
from sabia.core.process_start import runs_a_command

A = TypeVar("A")
R = TypeVar("R")
LOOK_S = 0.2  # interval at which a waiting parent checks for a stop signal


def run_tasks(
    function: Callable[..., R],
    tasks: Sequence[tuple[Any, ...]],
    jobs: int = 1,
    lost: Callable[[int], R] | None = None,
) -> Iterator[R]:
    """Yield function(*task) for each task in order; `function` and tasks must be picklable.

    When a worker process dies, the tasks that were running are run once more, one at a time. A task
    whose worker dies again yields `lost(number)`; without `lost` that is Failed. Raises Interrupted
    on a stop signal.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for task in tasks:
            stop.check()
            yield function(*task)
        return
    done: dict[int, R] = {}
    first = 0  # the next task whose result is yielded
    while first < len(tasks):
        left = [number for number in range(first, len(tasks)) if number not in done]
        futures: dict[int, Future[R]] = {}
        try:
            with _pool(jobs) as pool:
                for number in left:
                    futures[number] = pool.submit(function, *tasks[number])
                while first < len(tasks):
                    result = done.pop(first) if first in done else _result(futures[first])
                    first += 1
                    yield result
        except BrokenProcessPool:
            for number, future in futures.items():
                if number >= first and not future.cancelled() and not future.exception():
                    done[number] = future.result()
            # workers take tasks in order, so the first ones without a result were running
            for number in [n for n in left if n >= first and n not in done][:jobs]:
                done[number] = _alone(function, tasks[number], number, lost)


def _alone(
    function: Callable[..., R],
    task: tuple[Any, ...],
    number: int,
    lost: Callable[[int], R] | None,
) -> R:
    """The result of a task in a worker of its own."""
    try:
        with _pool(1) as pool:
            return _result(pool.submit(function, *task))
    except BrokenProcessPool as error:
        if lost is None:
            message = "a worker process died twice (out of memory?); run again to resume"
            raise Failed(message) from error
        return lost(number)


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, which end when the context ends."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare_worker)
    try:
        yield pool
    except BrokenProcessPool:
        raise
    except BaseException:
        for worker in list((pool._processes or {}).values()):
            if worker.pid and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: Future[R]) -> R:
    while not future.done():
        stop.check()
        wait([future], LOOK_S)
    return future.result()


def _prepare_worker() -> None:
    runs_a_command()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C and ends its workers
    stop.install()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    notes.configure("worker", quiet=False)
    suppress_notes()


def _end_with_parent() -> None:
    """Exit if the parent was killed: an idle worker would wait for its next task forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(ExitCode.FAILED)


def map_threads(function: Callable[[A], R], items: Iterable[A], jobs: int) -> Iterator[R]:
    """function(item) for each item, in order, on `jobs` threads, a few items ahead."""
    return _map_ahead(ThreadPoolExecutor, function, items, jobs)


def map_processes(function: Callable[[A], R], items: Iterable[A], jobs: int) -> Iterator[R]:
    """Like `map_threads` in worker processes; a worker that dies is Failed."""
    try:
        yield from _map_ahead(_pool, function, items, jobs)
    except BrokenProcessPool as error:
        raise Failed("a worker process died (out of memory?); run again to resume") from error


def _map_ahead(
    pool_of: Callable[[int], Any], function: Callable[[A], R], items: Iterable[A], jobs: int
) -> Iterator[R]:
    if jobs <= 1:
        for item in items:
            stop.check()
            yield function(item)
        return
    waiting: deque[Future[R]] = deque()
    with pool_of(jobs) as pool:
        for item in items:
            stop.check()
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * jobs:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
