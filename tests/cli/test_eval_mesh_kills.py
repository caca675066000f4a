"""`sabia eval --mesh` over processes that share a model, through kills of one and of all."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from training_cases import torchrun
from waiting import HANG_S, until

from .test_eval_kills import ITEMS, folder, keys  # noqa: F401

pytest.importorskip("torch")
TASKS = {"fsdp=2": ("mc", "prose"), "tensor=2": ("mc", "said")}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def ranks(launcher: int) -> list[int]:
    """The processes that a launcher has started."""
    return list(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


def alive(process: int) -> bool:
    """Whether it runs: a process that has ended and that nobody waits for has no command line."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    return False


def killed(line: list[str], cache: Path, total: int, draw: random.Random) -> Counter[str]:
    """How often each way of ending a start met it: kill -9 of a rank, of the launcher with all its
    ranks or alone, or SIGTERM to all as a scheduler sends it; then the last start ends itself."""
    met, ways = Counter[str](), ["one"] * 4 + ["all"] * 2 + ["launcher"] * 2 + ["term"] * 2
    draw.shuffle(ways)
    for number, way in enumerate(ways):
        process = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=ENVIRONMENT,
        )  # fmt: skip
        before = len(keys(cache))
        step = max(1, (total - before) // (len(ways) - number))
        goal = min(before + draw.randint(0, step), total)
        until(lambda goal=goal: len(keys(cache)) >= goal, process)
        time.sleep(draw.random() / 4)
        of_ranks = [] if process.poll() is not None else ranks(process.pid)
        # the launcher gives each rank a session of its own
        every = [draw.choice(of_ranks)] if way == "one" and of_ranks else [process.pid, *of_ranks]
        every = every[:1] if way == "launcher" else every
        for one in every:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGTERM if way == "term" else signal.SIGKILL)
        process.wait(HANG_S)
        until(lambda left=of_ranks: not any(map(alive, left)))
        met[way] += process.returncode != 0
    done = subprocess.run(line, capture_output=True, timeout=HANG_S, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr.decode()
    return met


@pytest.mark.slow
@pytest.mark.parametrize("mesh", TASKS)
def test_a_mesh_goes_on_where_it_was_killed(mesh: str, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    given = [part for task in TASKS[mesh] for part in ("--task", folder / f"{task}.toml")]
    given += ["--model", folder / "slow", "--mesh", mesh]

    def line(name: str) -> list[str]:
        paths = ("-o", tmp_path / f"{name}.parquet", "--judge-cache", tmp_path / name)
        return [*map(str, (*torchrun(2), "eval", *given, *paths))]

    whole = subprocess.run(line("whole"), capture_output=True, timeout=HANG_S, env=ENVIRONMENT)
    assert whole.returncode == 0, whole.stderr.decode()
    total = len(keys(tmp_path / "whole"))
    assert total == len(set(keys(tmp_path / "whole"))) > ITEMS
    met = killed(line("s"), tmp_path / "s", total, random.Random(11))
    assert met["one"] >= 2 and met["all"] >= 2, met
    print(mesh, dict(met))
    written = keys(tmp_path / "s")
    assert len(written) == len(set(written)) == total, "a finished result was computed again"
    assert pq.read_table(tmp_path / "s.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
