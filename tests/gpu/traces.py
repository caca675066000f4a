"""What a Chrome trace of torch's profiler says of one step: how long the device idles, and where.

The step is the interval of an annotation of the trace, within which the device was synchronized.
Without device events (a run on the CPU) the outermost operations of the thread with most of them
are read in their place, so that the same code runs. Times of the trace are microseconds.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
ON_HOST = frozenset(("cpu_op", "cuda_runtime", "cuda_driver"))
WAITS = ("synchronize", "cudamemcpy")  # calls in which the host waits; copies only if not Async
ANNOTATION = "measured step"
NAME_LENGTH = 90
Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """A complete event of a trace; start and end in microseconds."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start: float
    end: float


def read_trace(path: Path) -> list[Event]:
    """The complete events of a trace, gzipped or not, in the order of their starts."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        trace = json.load(file)
    rows = trace["traceEvents"] if isinstance(trace, dict) else trace
    events = [_event(row) for row in rows if row.get("ph") == "X" and "ts" in row]
    return sorted(events, key=lambda event: (event.start, -event.end))


def _event(row: dict[str, Any]) -> Event:
    start = float(row["ts"])
    thread = (row.get("pid"), row.get("tid"))
    category = str(row.get("cat", "")).lower()
    return Event(str(row["name"]), category, thread, start, start + float(row.get("dur", 0)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same points; touching ones are joined."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """The total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def without(intervals: Sequence[Interval], removed: Sequence[Interval]) -> float:
    """The length of disjoint intervals outside of other disjoint intervals."""
    return length(union([*intervals, *removed])) - length(removed)


def outermost(events: Sequence[Event]) -> list[Event]:
    """The events of one thread, ordered by start, that lie within no other."""
    kept: list[Event] = []
    for event in events:
        if not kept or event.start >= kept[-1].end:
            kept.append(event)
    return kept


def timeline(events: Sequence[Event]) -> tuple[list[Event], str]:
    """(what the device ran, `device`), or operations of one thread and `host`."""
    on_device = [event for event in events if event.category in ON_DEVICE]
    if on_device:
        return on_device, "device"
    operations = [event for event in events if event.category == "cpu_op"]
    threads = Counter(event.thread for event in operations)
    if not threads:
        return [], "host"
    busiest = threads.most_common(1)[0][0]
    return outermost([event for event in operations if event.thread == busiest]), "host"


def step_of(events: Sequence[Event], annotation: str = ANNOTATION) -> Interval:
    """The step's interval; without the annotation, that of all events. Raises ValueError."""
    marks = [e for e in events if e.name == annotation and not e.category.startswith("gpu")]
    if marks:
        return marks[0].start, marks[0].end
    if not events:
        raise ValueError("the trace has no events")
    return min(e.start for e in events), max(e.end for e in events)


def summarize(events: Sequence[Event], gaps: int = 5, kernels: int = 10) -> dict[str, Any]:
    """Figures of a step: step_s, idle_share, the widest gaps, the largest kernels, host_s.

    host_s: seconds in operations and calls of CUDA on any thread, without waiting for the device.
    Each gap has its begin within the step and its length in microseconds, and what ran around it.
    """
    begin, end = step_of(events)
    inside = [e for e in events if e.end > begin and e.start < end]
    ran, on = timeline(inside)
    busy = union((max(e.start, begin), min(e.end, end)) for e in ran)
    seconds = max(end - begin, 1e-9)
    host = union((e.start, e.end) for e in inside if e.category in ON_HOST)
    waiting = union((e.start, e.end) for e in inside if _waits(e))
    return {
        "traced_step_s": seconds / 1e6,
        "timeline": on,
        "idle_share": 1 - length(busy) / seconds,
        "launches": len(ran),
        "host_s": without(host, waiting) / 1e6 if waiting else length(host) / 1e6,
        "gaps": _gaps(ran, begin, end)[:gaps],
        "kernels": _largest(ran, seconds)[:kernels],
    }


def _waits(event: Event) -> bool:
    name = event.name.lower()
    if event.category not in ("cuda_runtime", "cuda_driver") or "async" in name:
        return False
    return any(word in name for word in WAITS)


def _gaps(ran: Sequence[Event], begin: float, end: float) -> list[dict[str, Any]]:
    """All gaps in which nothing ran, widest first."""
    gaps, last_end, last_name = [], begin, "begin of the step"
    for event in sorted(ran, key=lambda e: e.start):
        if event.start > last_end:
            gaps.append((event.start - last_end, last_end, last_name, event.name))
        if event.end > last_end:
            last_end, last_name = event.end, event.name
    if end > last_end:
        gaps.append((end - last_end, last_end, last_name, "end of the step"))
    gaps.sort(key=lambda gap: -gap[0])
    return [
        {"us": round(size, 1), "at_us": round(start - begin, 1),
         "after": after[:NAME_LENGTH], "before": before[:NAME_LENGTH]}
        for size, start, after, before in gaps
    ]  # fmt: skip


def _largest(ran: Sequence[Event], seconds: float) -> list[dict[str, Any]]:
    """Time and number of the events of each name, largest first."""
    times: dict[str, float] = defaultdict(float)
    counts = Counter(event.name for event in ran)
    for event in ran:
        times[event.name] += event.end - event.start
    ordered = sorted(times, key=lambda name: -times[name])
    return [{"name": name[:NAME_LENGTH], "count": counts[name], "ms": round(times[name] / 1e3, 3),
             "share": round(times[name] / seconds, 4)} for name in ordered]  # fmt: skip
