"""Who hangs and who is slow, from beats alone; and the marks they are made of."""

import time
from types import SimpleNamespace

import pytest

from sabia.core.parallel.health import progress_tracker as marks_module
from sabia.core.parallel.health.heartbeat import Beat, Board, read_beat
from sabia.core.parallel.health.progress_tracker import Marks

HOSTS = {rank: f"h{rank}" for rank in range(4)}


def board(beats: dict[int, Beat], hang_s: float = 100.0, at: float = 0.0) -> Board:
    found = Board(HOSTS, hang_s, 5.0)
    for rank, beat in beats.items():
        found.hear(rank, beat, at)
    return found


def test_nothing_to_say_while_anybody_moves() -> None:
    waiting = Beat(9, "reduce", 3, idle=500)
    moving = Beat(9, "backward", 2, idle=1)
    assert board({0: waiting, 1: moving, 2: waiting}).hung(0.0) == ""


def test_a_run_that_marks_nothing_is_not_judged() -> None:
    beats = {rank: Beat(idle=10_000) for rank in range(4)}
    assert board(beats).hung(0.0) == ""
    beats[0] = Beat(1, "step", 1, idle=9_000)
    assert board(beats).hung(0.0).startswith("ranks 1-3 (h1, h2, h3) have not moved for 10,000 s")


def test_the_one_behind_is_named() -> None:
    waiting = Beat(9, "reduce", 3, idle=150)
    stuck = Beat(9, "read", 1, idle=160, frame="rows.py:7 batch")
    said = board({0: waiting, 1: stuck, 2: waiting, 3: waiting}).hung(1.0)
    assert said == (
        "rank 1 (h1) has not moved for 161 s at step 9 (read) in rows.py:7 batch; the other 3 wait"
    )


def test_the_silent_one_is_named() -> None:
    found = board({rank: Beat(9, "reduce", 3, idle=150) for rank in range(3)}, at=100.0)
    found.hear(3, Beat(9, "reduce", 3, idle=50), 0.0)
    assert found.hung(101.0).startswith("rank 3 (h3) has not moved for 151 s")


def test_the_frame_tells_who_is_elsewhere() -> None:
    there, here = "c10d.py:1 all_reduce", "x.py:3 read"
    beats = {rank: Beat(9, "step", 1, idle=150, frame=there) for rank in range(3)}
    beats[3] = Beat(9, "step", 1, idle=150, frame=here)
    assert board(beats).hung(0.0).startswith("rank 3 (h3)")
    del beats[3]
    assert board(beats).hung(0.0).startswith("ranks 0-2 (h0, h1, h2) have not moved")


def test_two_steps_behind_while_others_move() -> None:
    beats = {0: Beat(9, "read", 1, idle=0), 1: Beat(7, "read", 1, idle=101)}
    assert board(beats).hung(0.0).startswith("rank 1 (h1)")


def test_the_limit_grows() -> None:
    assert board({0: Beat(5)}).limit_s() == 100
    assert board({0: Beat(1)}).limit_s() == 200  # compiling
    assert board({0: Beat(5, longest=90)}).limit_s() == 270
    assert board({0: Beat(5, patience=1000), 1: Beat(5)}).limit_s() == 1100


def test_a_straggler_and_the_figures() -> None:
    beats = {rank: Beat(9, step_s=2.0, work_s=1.0) for rank in range(3)}
    assert board(beats).straggler() == ""
    beats[3] = Beat(9, step_s=2.1, work_s=1.9)
    said = board(beats).straggler()
    assert said.startswith("rank 3 (h3) is slow: 1.9 s of its own work a step, where the median is")
    assert board(beats).figures() == {
        "step_s_median": 2.0, "step_s_max": 2.1, "work_s_median": 1.0, "work_s_max": 1.9,
        "slowest_rank": 3,
    }  # fmt: skip
    assert board({0: Beat()}).figures() == {}


def test_marks_tell_work_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(marks_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    marks = Marks(5.0)
    for step in range(1, 5):
        marks.at(step, "work")
        now[0] += 0.25
        marks.phase("reduce")
        now[0] += 0.75
    beat = marks.beat()
    assert beat.position == (4, 2)
    assert (beat.work_s, beat.step_s) == (0.25, 1.0)
    assert (beat.idle, beat.longest) == (0.75, 0.75)
    assert beat.frame == ""


def test_a_beat_survives_the_wire() -> None:
    beat = Beat(3, "reduce", 2, 1.5, frame="a.py:1 f")
    assert read_beat({**beat.__dict__, "new in a later version": 1}) == beat


def test_a_mark_costs_microseconds() -> None:
    marks = Marks(5.0)
    since = time.process_time()
    for step in range(10_000):
        marks.at(step, "work")
    assert (time.process_time() - since) / 10_000 < 50e-6
