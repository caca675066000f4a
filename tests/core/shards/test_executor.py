"""Workers: order, errors, death, and no orphans when the parent is killed."""

import os
import subprocess
import sys
import time

import pytest
from waiting import until

from sabia.core.errors import BadData, Failed
from sabia.core.shards.executor import run_tasks


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


def test_a_dead_worker_is_one_clear_error() -> None:
    with pytest.raises(Failed, match="worker process died"):
        list(run_tasks(die, [(0,), (1,)], 2))


PARENT = """
import time
from sabia.core.shards.executor import run_tasks
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
