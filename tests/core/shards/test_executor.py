"""Workers: order, errors, death, and no orphans when the parent is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import until

from sabia.core.errors import BadData, Failed
from sabia.core.shards.executors.processes import run_tasks


def square(n: int) -> int:
    time.sleep(0.01 * (5 - n))  # later tasks end first
    return n * n


def refuse(n: int) -> int:
    raise BadData(f"shard {n}: no")


def die(_n: int) -> int:
    os._exit(9)


def test_results_come_in_the_order_of_the_tasks() -> None:
    tasks = [(n,) for n in range(5)]
    assert list(run_tasks(square, tasks, 2)) == [0, 1, 4, 9, 16]
    assert list(run_tasks(square, tasks, 1)) == [0, 1, 4, 9, 16]


def test_an_error_of_a_worker_is_the_error_of_the_run() -> None:
    with pytest.raises(BadData, match="shard 0: no"):
        list(run_tasks(refuse, [(0,), (1,)], 2))


def test_a_worker_that_dies_again_is_one_clear_error() -> None:
    with pytest.raises(Failed, match="worker process died"):
        list(run_tasks(die, [(0,), (1,)], 2))


def kill_at(n: int, fatal: tuple[int, ...], once: str) -> int:
    """n; the process kills itself at the numbers of `fatal`, and once for all at n = 3."""
    time.sleep(0.02)
    first = n == 3 and not os.path.exists(once)
    if first:
        open(once, "w").close()
    if first or n in fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


SLOW = [pytest.param(fatal, marks=pytest.mark.slow) for fatal in [(0,), (6,), (1, 2), (0, 5, 11)]]


@pytest.mark.parametrize("fatal", [(), *SLOW])
def test_only_the_tasks_that_kill_their_worker_are_lost(tmp_path, fatal: tuple[int, ...]) -> None:
    tasks = [(n, fatal, str(tmp_path / "once")) for n in range(12)]
    results = list(run_tasks(kill_at, tasks, 3, lambda number: -number - 1))
    assert results == [-n - 1 if n in fatal else n for n in range(12)]


PARENT = """
import time
from sabia.core.shards.executors.processes import run_tasks
if __name__ == "__main__":
    done = run_tasks(time.sleep, [(0.01,), (0.01,), (3600,)], 2)
    next(done), next(done)
    print("working", flush=True)
    next(done)
"""


def test_workers_end_when_the_parent_is_killed(tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE)
    parent.stdout.readline()
    children = _children(parent.pid)
    assert len(children) >= 2
    parent.kill()
    parent.wait()
    until(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
