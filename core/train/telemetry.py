"""What a run says of itself: metrics as JSON lines, one live line, the rows for stdout.

Each process that reports writes its own file in the run directory: `metrics.jsonl` for the first,
`metrics-0001.jsonl` and so on for the others, so nothing waits for a service. The file is one
linear history: what a killed run wrote past its last checkpoint is dropped when it resumes.

MFU = training operations per token (forward and backward, 6 per active matrix parameter plus the
attention scores a causal mask leaves; spec.count, convention `causal`) x tokens per second / peak;
mfu_6nd leaves the scores out. Goodput is the time of the steps that count (not those that a kill or
a rewind has undone) as a share of all time since the run was first started.
The peak is given (`--peak-flops`) or measured once by a short matrix product in the dtype of the
run, and then says how near training comes to what this machine's own GEMM reaches.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes, units
from sabia.core.progress import ProgressBar, progress
from sabia.core.shards.atomic import naming, write_atomic

NOTE_EVERY_S = 60.0
KIB = 1024
Row = dict[str, Any]


class RunLog:
    """The metrics file of one process; a row is a flat dictionary with at least `step`."""

    def __init__(self, directory: Path, rank: int = 0, resume_step: int = 0) -> None:
        """Opens the file and drops rows of steps after `resume_step` (all of them at 0)."""
        self.path = metrics_path(directory, rank)
        directory.mkdir(parents=True, exist_ok=True)
        kept = [r for r in read_rows(self.path) if resume_step and r["step"] <= resume_step]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, row: Row) -> None:
        """Append a row; it is in the file (not yet on the disk) when this returns."""
        with naming(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Make what was written durable; done before a checkpoint is committed."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def metrics_path(directory: Path, rank: int = 0) -> Path:
    """The metrics file of process number `rank`."""
    return directory / (f"metrics-{rank:04d}.jsonl" if rank else "metrics.jsonl")


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


@dataclass
class Meter:
    """Speed since the last look: tokens per second, MFU."""

    flops_per_token: float
    peak_flops_per_s: float
    flops_6nd: float = 0.0  # by the convention 6nd, which leaves attention scores out
    tokens: int = 0
    since: float = 0.0

    def start(self) -> None:
        """Begin to count now."""
        self.tokens, self.since = 0, time.monotonic()

    def read(self) -> Row:
        """tokens_per_s, mfu and mfu_6nd since the last reading, which ends here."""
        seconds = max(time.monotonic() - self.since, 1e-9)
        rate = self.tokens / seconds
        self.start()
        share = rate / self.peak_flops_per_s if self.peak_flops_per_s else 0.0
        found = {"tokens_per_s": rate, "mfu": share * self.flops_per_token}
        return found | ({"mfu_6nd": share * self.flops_6nd} if self.flops_6nd else {})


def memory_bytes(backend: str) -> Row:
    """memory_bytes, the most that this process has held; device_memory_bytes where there is one."""
    found: Row = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB}
    device = _torch_memory() if backend == "torch" else _jax_memory()
    return found | ({"device_memory_bytes": device} if device else {})


def _torch_memory() -> int:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def _jax_memory() -> int:
    import jax

    found = (device.memory_stats() or {} for device in jax.local_devices())
    return max((int(stats.get("peak_bytes_in_use", 0)) for stats in found), default=0)


def expert_figures(load: Any) -> Row:
    """Of token copies load[layers, E]: the fullest expert as a multiple of its layer's mean, by
    layer and at worst, and how many experts got nothing."""
    mean = np.maximum(load.mean(-1), 1e-30)
    fullest = load.max(-1) / mean
    return {
        "expert_load": float(fullest.max()),
        "experts_idle": int((load == 0).sum()),
        "expert_load_by_layer": [round(float(value), 4) for value in fullest],
    }


@contextmanager
def live_line(total: int, done: int, label: str) -> Iterator[Line]:
    """The one live line of a run on a terminal; elsewhere a note now and then."""
    with progress(total, label, f"of {total:,} steps") as bar:
        if done:
            bar.advance(done)
        yield Line(bar, total, time.monotonic(), done)


@dataclass
class Line:
    """Shows step, loss, speed, MFU and time left."""

    bar: ProgressBar
    total: int
    started: float
    done: int
    noted: float = 0.0
    here: int = 0

    def show(self, row: Row) -> None:
        """One more step is done; `row` holds its figures (some may be absent)."""
        self.here += 1
        shown = {"loss": f"{row['loss']:.4f}"}
        if "tokens_per_s" in row:
            shown["tok/s"] = units.format_count(row["tokens_per_s"])
            shown["MFU"] = f"{row['mfu']:.1%}"
        self.bar.advance(1, **shown)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - max(self.noted, self.started) >= NOTE_EVERY_S:
            self.noted = now
            step = self.done + self.here
            left = (now - self.started) / self.here * (self.total - step)
            text = " ".join(f"{name} {value}" for name, value in shown.items())
            notes.note(f"step {step:,}/{self.total:,} {text} ETA {units.format_duration(left)}")
