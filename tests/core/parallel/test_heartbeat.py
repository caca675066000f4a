"""Who hangs and who is slow, from heartbeats alone; and the marks they are made of."""

import time
from types import SimpleNamespace

import pytest

from sabia.core.parallel.health import progress_tracker
from sabia.core.parallel.health.heartbeat import Heartbeat, HeartbeatTable
from sabia.core.parallel.health.progress_tracker import ProgressTracker

HOSTS = {rank: f"h{rank}" for rank in range(4)}


def table_of(
    heartbeats: dict[int, Heartbeat], hang_s: float = 100.0, at: float = 0.0
) -> HeartbeatTable:
    table = HeartbeatTable(HOSTS, 100.0, 5.0)
    for rank, heartbeat in heartbeats.items():
        table.update(rank, heartbeat, at)
    return table


def test_no_rank_hangs_while_one_makes_progress() -> None:
    waiting = Heartbeat(9, "reduce", 3, idle_s=500)
    moving = Heartbeat(9, "backward", 2, idle_s=1)
    assert table_of({0: waiting, 1: moving, 2: waiting}).hung(0.0) == ""


def test_a_run_without_phases_never_hangs() -> None:
    heartbeats = {rank: Heartbeat(idle_s=10_000) for rank in range(4)}
    assert table_of(heartbeats).hung(0.0) == ""
    heartbeats[0] = Heartbeat(1, "step", 1, idle_s=9_000)
    assert (
        table_of(heartbeats)
        .hung(0.0)
        .startswith("ranks 1-3 (h1, h2, h3) have made no progress for 10,000 s")
    )


def test_the_rank_behind_is_named() -> None:
    waiting = Heartbeat(9, "reduce", 3, idle_s=150)
    stuck = Heartbeat(9, "read", 1, idle_s=160, frame="rows.py:7 batch")
    line = table_of({0: waiting, 1: stuck, 2: waiting, 3: waiting}).hung(1.0)
    assert line == (
        "rank 1 (h1) has made no progress for 161 s at step 9 (read) in rows.py:7 batch; "
        "the other 3 wait"
    )


def test_the_silent_rank_is_named() -> None:
    table = table_of({rank: Heartbeat(9, "reduce", 3, idle_s=150) for rank in range(3)}, at=100.0)
    table.update(3, Heartbeat(9, "reduce", 3, idle_s=50), 0.0)
    assert table.hung(101.0).startswith("rank 3 (h3) has made no progress for 151 s")


def test_the_rank_in_another_frame_is_named() -> None:
    there, here = "c10d.py:1 all_reduce", "x.py:3 read"
    heartbeats = {rank: Heartbeat(9, "step", 1, idle_s=150, frame=there) for rank in range(3)}
    heartbeats[3] = Heartbeat(9, "step", 1, idle_s=150, frame=here)
    assert table_of(heartbeats).hung(0.0).startswith("rank 3 (h3)")
    del heartbeats[3]
    assert table_of(heartbeats).hung(0.0).startswith("ranks 0-2 (h0, h1, h2) have made no progress")


def test_two_steps_behind_while_others_make_progress() -> None:
    heartbeats = {0: Heartbeat(9, "read", 1, idle_s=0), 1: Heartbeat(7, "read", 1, idle_s=101)}
    assert table_of(heartbeats).hung(0.0).startswith("rank 1 (h1)")


def test_the_limit_grows() -> None:
    assert table_of({0: Heartbeat(5)}).limit_s(0.0) == 100
    assert table_of({0: Heartbeat(1)}).limit_s(0.0) == 200  # compiling
    assert table_of({0: Heartbeat(5, longest_pause_s=90)}).limit_s(0.0) == 270
    assert table_of({0: Heartbeat(5, patience_s=1000), 1: Heartbeat(5)}).limit_s(0.0) == 1100


def test_a_silent_rank_gets_no_extra_time() -> None:
    waiting, stopped = Heartbeat(9, "reduce", 3, idle_s=101), Heartbeat(9, "grading", 2, 3, 0, 3600)
    table = table_of({0: waiting}, at=98.0)
    table.update(1, stopped, 98.0)
    assert table.limit_s(98.0) == 3700 and table.hung(98.0) == ""
    table.update(0, waiting, 119.0)
    assert table.hung(119.0) == ""  # it is idle for less than the limit
    table.update(0, waiting, 197.0)
    line = table.hung(197.0)
    assert line.startswith("rank 1 (h1) has made no progress for 102 s at step 9 (grading)")


def test_straggler_and_figures() -> None:
    heartbeats = {rank: Heartbeat(9, step_s=2.0, work_s=1.0) for rank in range(3)}
    assert table_of(heartbeats).straggler() == ""
    heartbeats[3] = Heartbeat(9, step_s=2.1, work_s=1.9)
    line = table_of(heartbeats).straggler()
    assert line.startswith(
        "rank 3 (h3) is slow: 1.9 s of its own work per step, where the median is"
    )
    assert table_of(heartbeats).figures() == {
        "step_s_median": 2.0, "step_s_max": 2.1, "work_s_median": 1.0, "work_s_max": 1.9,
        "slowest_rank": 3,
    }  # fmt: skip
    assert table_of({0: Heartbeat()}).figures() == {}


def test_work_is_distinguished_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_tracker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = ProgressTracker(5.0)
    for step in range(1, 5):
        progress.enter_phase(step, "work")
        now[0] += 0.25
        progress.enter_phase(step, "reduce")
        now[0] += 0.75
    heartbeat = progress.heartbeat()
    assert heartbeat.position == (4, 2)
    assert (heartbeat.work_s, heartbeat.step_s) == (0.25, 1.0)
    assert (heartbeat.idle_s, heartbeat.longest_pause_s) == (0.75, 0.75)
    assert heartbeat.frame == ""


def test_a_heartbeat_can_be_read_back() -> None:
    heartbeat = Heartbeat(3, "reduce", 2, 1.5, frame="a.py:1 f")
    assert Heartbeat.of_message({**heartbeat.__dict__, "new in a later version": 1}) == heartbeat


def test_a_phase_costs_microseconds() -> None:
    progress = ProgressTracker(5.0)
    since = time.process_time()
    for step in range(10_000):
        progress.enter_phase(step, "work")
    assert (time.process_time() - since) / 10_000 < 50e-6
