"""The reading of profiler traces, on traces made by hand and by a simple count of microseconds."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from traces import ANNOTATION, Event, read_trace, summarize, timeline, union, without


def row(name: str, category: str, start: float, size: float, thread: int = 1) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": size,
            "pid": 0, "tid": thread, "args": {}}  # fmt: skip


MADE = [
    row(ANNOTATION, "user_annotation", 1000, 100),
    row(ANNOTATION, "gpu_user_annotation", 1005, 80, 7),
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "i", "name": "a mark without a length", "ts": 1001, "pid": 0, "tid": 1, "s": "t"},
    row("before the step", "kernel", 900, 50, 7),
    row("matmul", "kernel", 1010, 20, 7),
    row("softmax", "kernel", 1020, 20, 8),  # on another stream, half of it beside the first
    row("matmul", "Kernel", 1060, 10, 7),  # the spelling of older versions
    row("Memcpy HtoD", "gpu_memcpy", 1070, 5, 7),
    row("aten::mm", "cpu_op", 1000, 12),
    row("aten::mm inner", "cpu_op", 1002, 5),
    row("cudaLaunchKernel", "cuda_runtime", 1008, 2),
    row("aten::item", "cpu_op", 1050, 40),
    row("cudaStreamSynchronize", "cuda_runtime", 1055, 30),
    row("cudaMemcpyAsync", "cuda_runtime", 1052, 2),
]


def write(path: Path, rows: list[dict], whole: bool = True) -> Path:
    data = json.dumps({"schemaVersion": 1, "traceEvents": rows} if whole else rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data.encode()))
    else:
        path.write_text(data)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_trace_made_by_hand(tmp_path: Path, name: str, whole: bool) -> None:
    """Idle time, gaps, kernels and host time are those that were written down."""
    figures = summarize(read_trace(write(tmp_path / name, MADE, whole)))
    assert figures["traced_step_s"] == pytest.approx(100e-6)
    # busy 1010..1040 and 1060..1075
    assert figures["idle_share"] == pytest.approx(0.55)
    assert (figures["timeline"], figures["launches"]) == ("device", 4)
    # operations 1000..1012 and 1050..1090, of which 1055..1085 is waiting
    assert figures["host_s"] == pytest.approx(22e-6)
    assert figures["gaps"] == [
        {"us": 25.0, "at_us": 75.0, "after": "Memcpy HtoD", "before": "end of the step"},
        {"us": 20.0, "at_us": 40.0, "after": "softmax", "before": "matmul"},
        {"us": 10.0, "at_us": 0.0, "after": "begin of the step", "before": "matmul"},
    ]
    assert figures["kernels"][0] == {"name": "matmul", "count": 2, "ms": 0.03, "share": 0.3}
    assert [kernel["name"] for kernel in figures["kernels"]] == ["matmul", "softmax", "Memcpy HtoD"]


def test_operations_of_one_thread_stand_for_kernels(tmp_path: Path) -> None:
    """Without device events: the outermost operations of the thread that has most of them."""
    device = ("kernel", "Kernel", "gpu_memcpy")
    rows = [one for one in MADE if one.get("cat") not in device]
    rows.append(row("another thread", "cpu_op", 1000, 100, 3))
    figures = summarize(read_trace(write(tmp_path / "trace.json", rows)))
    assert figures["timeline"] == "host"
    assert [kernel["name"] for kernel in figures["kernels"]] == ["aten::item", "aten::mm"]
    assert figures["idle_share"] == pytest.approx(0.48)


def test_a_trace_without_annotation_or_events(tmp_path: Path) -> None:
    """The step is then that of all events; without any there is an error."""
    rows = [row("a", "kernel", 10, 5), row("b", "kernel", 20, 10)]
    figures = summarize(read_trace(write(tmp_path / "trace.json", rows)))
    assert figures["idle_share"] == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no events"):
        summarize(read_trace(write(tmp_path / "empty.json", [])))
    marked = [row(ANNOTATION, "user_annotation", 0, 10)]
    assert summarize(read_trace(write(tmp_path / "marked.json", marked)))["idle_share"] == 1


@pytest.mark.parametrize("seed", range(50))
def test_random_traces_against_a_count(seed: int) -> None:
    """Intervals of whole microseconds: each microsecond is counted by itself."""
    pick = random.Random(seed)
    size = 400
    events = [Event(ANNOTATION, "user_annotation", (0, 1), 100, 300)]
    for number in range(pick.randrange(1, 40)):
        start = pick.randrange(size)
        name = f"kernel {number % 7}"
        events.append(Event(name, "kernel", (0, 7), start, start + pick.randrange(0, 30)))
    covered = [any(e.start <= t < e.end for e in events[1:]) for t in range(size + 30)]
    figures = summarize(sorted(events, key=lambda e: e.start), gaps=1000, kernels=1000)
    idle = covered[100:300].count(False)
    assert figures["idle_share"] == pytest.approx(idle / 200)
    assert sum(gap["us"] for gap in figures["gaps"]) == pytest.approx(idle)
    assert [g["us"] for g in figures["gaps"]] == sorted(g["us"] for g in figures["gaps"])[::-1]
    for gap in figures["gaps"]:
        begin = int(100 + gap["at_us"])
        assert not any(covered[begin : int(begin + gap["us"])])
    inside = [e for e in events[1:] if e.end > 100 and e.start < 300]
    assert figures["launches"] == len(inside)
    total = sum(e.end - e.start for e in inside)
    assert sum(k["share"] for k in figures["kernels"]) == pytest.approx(total / 200, abs=1e-3)


@pytest.mark.parametrize("seed", range(30))
def test_union_and_difference_against_sets(seed: int) -> None:
    """Sets of whole numbers are the reference."""
    pick = random.Random(seed)

    def some() -> list[tuple[int, int]]:
        starts = [pick.randrange(100) for _ in range(pick.randrange(12))]
        return [(start, start + pick.randrange(1, 15)) for start in starts]

    def points(intervals: list) -> set[int]:
        return {t for start, end in intervals for t in range(int(start), int(end))}

    a, b = some(), some()
    assert points(union(a)) == points(a)
    assert all(x[1] < y[0] for x, y in zip(union(a), union(a)[1:], strict=False))
    assert without(union(a), union(b)) == len(points(a) - points(b))


def test_a_real_trace_of_this_machine(tmp_path: Path) -> None:
    """Two products and a pause, as torch exports them."""
    import time

    import torch
    from torch import profiler

    matrix = torch.ones(200, 200)
    with (
        profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile,
        profiler.record_function(ANNOTATION),
    ):
        torch.mm(matrix, matrix)
        time.sleep(0.02)
        torch.mm(matrix, matrix)
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    events = read_trace(path)
    figures = summarize(events)
    assert timeline(events)[1] == "host" and figures["idle_share"] > 0.3
    assert figures["gaps"][0]["us"] >= 20_000
    assert [kernel["count"] for kernel in figures["kernels"] if kernel["name"] == "aten::mm"] == [2]
