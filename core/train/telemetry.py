"""Metrics of a run as JSON lines, its speed, and a progress line on the terminal.

Each process writes its own file in the run directory: the first `metrics.jsonl`, the others
`metrics-0001.jsonl` and so on. A file is one linear history: rows that a killed run wrote after its
last checkpoint are removed when it resumes.

MFU = FLOPs per token (forward and backward, 6 per active matrix parameter plus the attention scores
inside a causal mask; spec.model, convention `causal`) x tokens per second / the given or published
peak; mfu_6nd does not count the scores. gemm_share divides by the measured peak
(core.recipes.machine.peaks). Goodput is the time of the steps that count (not undone by a kill or a
rewind) as a share of all time since the run was first started.
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
from sabia.core.notes import ProgressBar, progress
from sabia.core.ops.product import Array
from sabia.core.shards.atomic import naming, write_atomic

NOTE_EVERY_S = 60.0
KIB = 1024
Row = dict[str, Any]


class RunLog:
    """The metrics file of one process; a row is a flat dictionary with at least `step`."""

    def __init__(self, directory: Path, rank: int = 0, resume_step: int = 0) -> None:
        """Open the file and remove rows of steps after `resume_step` (0: all rows)."""
        self.path = metrics_path(directory, rank)
        directory.mkdir(parents=True, exist_ok=True)
        # rows after the checkpoint were written by a killed run
        kept = [r for r in read_rows(self.path) if resume_step and r["step"] <= resume_step]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, row: Row) -> None:
        """Append a row; it is in the file, but not yet synced to disk, when this returns."""
        with naming(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Sync the file to disk; called before a checkpoint is committed."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def metrics_path(directory: Path, rank: int = 0) -> Path:
    """The metrics file of process number `rank`."""
    return directory / (f"metrics-{rank:04d}.jsonl" if rank else "metrics.jsonl")


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file; lines that are not JSON (cut off by a kill) are skipped."""
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
    """Speed since the last reading: tokens per second, MFU, share of a measured product's speed.

    flops_per_token counts causal attention scores, flops_6nd none. Peaks are FLOP/s of all devices;
    0 where there is none.
    """

    flops_per_token: float
    flops_6nd: float
    published_peak: float = 0.0
    measured_peak: float = 0.0
    tokens: int = 0
    since: float = 0.0
    warned: bool = False

    def start(self) -> None:
        """Start counting from now."""
        self.tokens, self.since = 0, time.monotonic()

    def read(self) -> Row:
        """tokens_per_s, mfu and mfu_6nd, gemm_share since the last reading; counts again from 0.

        Warns once if gemm_share exceeds 1.
        """
        rate = self.tokens / max(time.monotonic() - self.since, 1e-9)
        self.start()
        row: Row = {"tokens_per_s": rate}
        if peak := self.published_peak:
            row |= {
                "mfu": rate * self.flops_per_token / peak,
                "mfu_6nd": rate * self.flops_6nd / peak,
            }
        if self.measured_peak:
            row["gemm_share"] = share = rate * self.flops_per_token / self.measured_peak
            if share > 1 and not self.warned:
                self.warned = True
                notes.warn(
                    f"gemm_share is {share:.2f}: steps are faster than the matrix product that was "
                    "timed at the start. Other load slowed it, or training uses units of 8 or 4 "
                    "bits; disregard gemm_share"
                )
        return row


def memory_bytes(backend: str) -> Row:
    """memory_bytes: peak of this process; device_memory_bytes: peak of its device, if any."""
    metrics: Row = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB}
    if backend == "torch":
        import torch

        peak = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
    else:
        import jax

        stats = (device.memory_stats() or {} for device in jax.local_devices())
        peak = max((int(of_device.get("peak_bytes_in_use", 0)) for of_device in stats), default=0)
    return metrics | ({"device_memory_bytes": peak} if peak else {})


def expert_metrics(load: Array) -> Row:
    """Metrics of expert loads [layers, E]: the largest load as a multiple of its layer's mean, by
    layer and over all layers, and the number of experts without tokens."""
    mean = np.maximum(load.mean(-1), 1e-30)  # [layers]
    fullest = load.max(-1) / mean  # [layers]
    return {
        "expert_load": float(fullest.max()),
        "experts_idle": int((load == 0).sum()),
        "expert_load_by_layer": [round(float(value), 4) for value in fullest],
    }


@contextmanager
def progress_line(total: int, done: int, label: str) -> Iterator[ProgressLine]:
    """A progress line on a terminal; otherwise a note every NOTE_EVERY_S seconds."""
    with progress(total, label, f"of {total:,} steps") as bar:
        if done:
            bar.advance(done)
        yield ProgressLine(bar, total, time.monotonic(), done)


@dataclass
class ProgressLine:
    """Shows step, loss, speed, MFU (else gemm_share) and time left."""

    bar: ProgressBar
    total: int
    started: float
    done: int
    noted: float = 0.0
    steps_shown: int = 0

    def show(self, row: Row) -> None:
        """Show the metrics `row` of one more step (some may be absent)."""
        self.steps_shown += 1
        shown = {"loss": f"{row['loss']:.4f}"}
        if "tokens_per_s" in row:
            shown["tok/s"] = units.format_count(row["tokens_per_s"])
            known = [name for name in ("mfu", "gemm_share") if name in row][:1]
            shown |= {name: f"{row[name]:.1%}" for name in known}
        self.bar.advance(1, **shown)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - max(self.noted, self.started) >= NOTE_EVERY_S:
            self.noted = now
            step = self.done + self.steps_shown
            # seconds per step of this process · remaining steps
            left = (now - self.started) / self.steps_shown * (self.total - step)
            text = " ".join(f"{name} {value}" for name, value in shown.items())
            notes.note(f"step {step:,}/{self.total:,} {text} ETA {units.format_duration(left)}")
