"""What the parts of the GPU run share: the device, cases, comparisons, and the results on disk.

A part is a file of `parts/` with `cases(device)`, which yields `Case`s. `run_part.py` runs them in
a process and appends two rows to `results.jsonl`: one before a case, with the status `started`, and
one after it. So results are on disk after each case, and a case that ended its process is known.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Figures = dict[str, Any]
RESULTS = "results.jsonl"
ENDED = ("ok", "failed", "skipped", "crashed", "timeout")


@dataclass(frozen=True)
class Device:
    """The device of a run. memory: bytes. tiny: sizes that the interpreter can do, without a GPU.

    out: the folder of results. scratch: a folder for files of a part, removed after it.
    """

    cuda: bool
    name: str
    memory: int
    out: Path
    scratch: Path

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`, as torch calls it."""
        return "cuda" if self.cuda else "cpu"

    @property
    def tiny(self) -> bool:
        """Whether shapes must be tiny."""
        return not self.cuda


@dataclass(frozen=True)
class Case:
    """One thing to run. name: unique in the part, parts of it separated by ` / `.

    run returns figures to record; it raises Skipped or Failed, and any other error is a failure.
    """

    name: str
    run: Callable[[], Figures]


class Skipped(Exception):
    """The case cannot run here; the message gives the reason."""


class Failed(Exception):
    """The case ran and its result is wrong; figures: what was measured nevertheless."""

    def __init__(self, message: str, figures: Figures | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


@dataclass
class Comparison:
    """Largest relative differences of named arrays, each with what is allowed."""

    rows: list[tuple[str, float, float, tuple[int, ...]]] = field(default_factory=list)

    def add(self, name: str, actual: Any, expected: Any, allowed: float) -> None:
        """Compare two arrays or numbers: max |a - b| / max |b|; NaN and infinities must agree."""
        a, b = (_array(x) for x in (actual, expected))
        self.rows.append((name, difference(a, b), allowed, b.shape))

    def add_norm(self, name: str, actual: Any, expected: Any, allowed: float) -> None:
        """Compare by 2-norms: |a - b| / |b|, absolute where b is 0."""
        a, b = (_array(x) for x in (actual, expected))
        if a.shape != b.shape:
            found = math.inf
        else:
            found = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
        self.rows.append((name, math.inf if math.isnan(found) else found, allowed, b.shape))

    def figures(self) -> Figures:
        """The largest difference, and where it is."""
        if not self.rows:
            return {}
        name, found, _, _ = max(self.rows, key=lambda row: row[1] / row[2] if row[2] else row[1])
        return {"difference": found, "of": name}

    def check(self, more: Figures | None = None) -> Figures:
        """The figures (and `more`); raises Failed if a difference is larger than allowed."""
        figures = self.figures() | (more or {})
        wrong = [row for row in self.rows if not row[1] <= row[2]]
        if wrong:
            texts = [f"{name} {list(shape)} differs by {found:.3g} (allowed {allowed:.3g})"
                     for name, found, allowed, shape in wrong]  # fmt: skip
            raise Failed("; ".join(texts), figures)
        return figures


def _array(x: Any) -> np.ndarray:
    if hasattr(x, "detach"):
        x = x.detach().double().cpu().numpy()
    return np.asarray(x, np.float64)


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """max |a - b| / max |b| (absolute where b is 0); infinity if shapes or NaNs differ."""
    if actual.shape != expected.shape:
        return math.inf
    finite = np.isfinite(expected)
    same_kind = np.array_equal(np.isnan(actual), np.isnan(expected))
    if not same_kind or not np.array_equal(np.isfinite(actual), finite):
        return math.inf
    if not finite.any():
        return 0.0
    size = float(np.abs(expected[finite]).max()) or 1.0
    return float(np.abs(actual[finite] - expected[finite]).max()) / size


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a results file; a last line that was cut off is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def append_row(out: Path, row: Mapping[str, Any]) -> None:
    """Append a row to the results; it is on disk when this returns."""
    line = json.dumps(row, default=_plain) + "\n"
    with (out / RESULTS).open("ab", buffering=0) as file:  # a line at once: parts run side by side
        file.write(line.encode())
        os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def ended(rows: Iterable[Mapping[str, Any]], part: str) -> set[str]:
    """Names of the cases of a part that have a result."""
    return {row["case"] for row in rows if row["part"] == part and row["status"] in ENDED}


def in_progress(rows: Iterable[Mapping[str, Any]], part: str) -> tuple[str, int] | None:
    """The case of a part that was started and has no result, and how often it was started."""
    starts: dict[str, int] = {}
    for row in rows:
        if row["part"] != part:
            continue
        if row["status"] == "started":
            starts[row["case"]] = starts.get(row["case"], 0) + 1
        else:
            starts.pop(row["case"], None)
    return next(iter(starts.items()), None)


def best_seconds(call: Callable[[], Any], device: Device, rounds: int = 5, inner: int = 1) -> float:
    """The median of `rounds` times of a call (each of `inner` calls, on CUDA by events)."""
    import torch

    call()
    times = []
    for _ in range(rounds):
        if device.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / inner)
        else:
            start = time.perf_counter()
            for _ in range(inner):
                call()
            times.append((time.perf_counter() - start) / inner)
    return sorted(times)[len(times) // 2]
