"""A hundred real processes: all are released together, and the rank that fails is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

CROWD = Path(__file__).parents[2] / "support" / "rank_crowd.py"
SIZE = 100
NODES = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[001-025]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x25)", "SLURM_DISTRIBUTION": "block",
}  # fmt: skip


def crowd(folder: Path, scenario: str, size: int = SIZE) -> dict:
    """Run it; the ranks are numbers again, and what a rank wrote to stderr is added."""
    words = [sys.executable, str(CROWD), str(size), scenario, str(folder)]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | NODES, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    outcome["codes"] = {int(rank): code for rank, code in outcome["codes"].items()}
    facts = {int(rank): fact for rank, fact in outcome["facts"].items()}
    for rank, fact in facts.items():
        fact["line"] = fact.get("message", "") + (folder / str(rank)).read_text()
    return outcome | {"facts": facts}


def others(outcome: dict) -> dict[int, dict]:
    return {rank: fact for rank, fact in outcome["facts"].items() if rank != 17}


def test_all_are_released_together_over_one_connection_each(tmp_path: Path) -> None:
    outcome = crowd(tmp_path, "fine")
    assert set(outcome["codes"].values()) == {0}
    released = [fact["released"] for fact in outcome["facts"].values()]
    assert len(released) == SIZE
    assert min(released) >= max(fact["started"] for fact in outcome["facts"].values())
    assert outcome["facts"][0]["accepted"] == SIZE - 1
    assert not any(fact["line"] for fact in outcome["facts"].values())


def test_one_that_never_starts_is_named_with_its_host(tmp_path: Path) -> None:
    outcome = crowd(tmp_path, "absent")
    line = f"rank 17 (gpu005) did not report within {HANG_S:g} s (99 of 100 processes did)"
    assert {fact["line"].startswith(line) for fact in outcome["facts"].values()} == {True}
    assert set(outcome["codes"].values()) == {1}
    assert len(outcome["codes"]) == SIZE - 1


def test_one_that_is_killed_is_named(tmp_path: Path) -> None:
    outcome = crowd(tmp_path, "killed")
    host = os.uname().nodename
    for fact in others(outcome).values():
        assert fact["line"].count("\n") == 1
        assert f"rank 17 ({host}) died, last heartbeat at step 3 (backward); the " in fact["line"]
        assert fact["line"].endswith("run again to resume\n")
    assert outcome["codes"].pop(17) == -9
    assert set(outcome["codes"].values()) == {75}


def test_one_that_stops_is_named_after_the_hang_timeout(tmp_path: Path) -> None:
    outcome = crowd(tmp_path, "stopped")
    lines = {fact["line"].splitlines()[-1] for fact in others(outcome).values()}
    assert all("rank 17 (" in x and "at step 3 (backward)" in x for x in lines), lines
    assert all("the other 99 wait" in line and "run again to resume" in line for line in lines)
    assert outcome["codes"].pop(17) == -9  # by the test, at the end
    assert set(outcome["codes"].values()) == {75}
    assert "in live" in outcome["facts"][3]["line"]  # the stacks come before the line


def test_other_versions_are_named(tmp_path: Path) -> None:
    outcome = crowd(tmp_path, "other-version", 40)
    for fact in outcome["facts"].values():
        assert "sabia is 0.0.9 on rank 17 (" in fact["line"]
        assert fact["line"].endswith("on the other 39")
    assert set(outcome["codes"].values()) == {1}


@pytest.mark.parametrize(
    ("scenario", "code", "line"),
    [("twice", 1, "rank 17 was reported twice: by process "),
     ("fails", 65, ") failed: shard 5 is cut short")],
)  # fmt: skip
def test_a_mishap_ends_all_alike(tmp_path: Path, scenario: str, code: int, line: str) -> None:
    outcome = crowd(tmp_path, scenario, 40)
    assert set(outcome["codes"].values()) == {code}
    assert all(line in fact["line"] for fact in others(outcome).values())
