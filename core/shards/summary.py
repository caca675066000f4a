"""The statistics of a data stage: the last line on stderr, and JSON for `--stats`."""

import json
import os
import sys
from dataclasses import asdict, dataclass, field

from sabia.core import notes, units
from sabia.core.errors import BadData, Infeasible
from sabia.core.notes import waited_s
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job


@dataclass
class Summary:
    """Rows in, out and rejected, named counters, and shards done, skipped
    and lost (names: their worker process died twice). `seconds` is
    working time, `waited_seconds` the time in which the process waited for its input.

    Counters of a group, `name[group]`, are only in `--stats`.
    """

    rows_in: int = 0
    rows_out: int = 0
    rejected: int = 0
    shards_done: int = 0
    shards_skipped: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    reject_path: str | None = None
    shards_lost: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)  # counters computed from the others

    def add(self, other: "Summary") -> None:
        """Add the statistics of another shard."""
        for name in ("rows_in", "rows_out", "rejected", "shards_done", "shards_skipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, value in other.counters.items():
            if name not in other.derived:
                self.counters[name] = self.counters.get(name, 0) + value
        self.shards_lost += other.shards_lost
        self.reject_path = self.reject_path or other.reject_path

    def check_rejects(self) -> None:
        """Raise BadData if every row was rejected: the input is not what the stage reads."""
        if self.rejected and self.rejected == self.rows_in and not self.rows_out:
            raise BadData(
                f"all {self.rows_in:,} rows were rejected; the reasons are in {self.reject_path}"
            )

    def report(self, job: Job, next_step: str = "") -> None:
        """Print the statistics, write them to `--stats`; Infeasible past --max-rejects."""
        parts = [f"{self.rows_in:,} rows in", f"{self.rows_out:,} out"]
        shown = sorted(item for item in self.counters.items() if "[" not in item[0])
        for name, value in shown:  # counts in full
            parts.append(f"{name} {value:,{'.0f' if float(value).is_integer() else '.6g'}}")
        if self.rejected:
            parts.append(f"{self.rejected:,} rejected → {self.reject_path}")
        if self.shards_skipped:
            parts.append(f"{self.shards_skipped} shards already done")
        if self.shards_lost:
            parts.append(f"{len(self.shards_lost)} shards lost")
        self.waited_seconds = waited_s()
        line = ", ".join(parts) + f" ({units.format_duration(self.seconds)}"
        if self.waited_seconds >= 1:
            line += f", and {units.format_duration(self.waited_seconds)} waiting for input"
        line += f"); next: {next_step}" if next_step else ")"
        notes.summarize(line, asdict(self))
        nothing_done = self.shards_skipped > 0 and not self.shards_done
        if job.stats and not (nothing_done and os.path.exists(job.stats)):  # else keep the old ones
            text = json.dumps({"command": job.command} | asdict(self)) + "\n"
            sys.stderr.write(text) if job.stats == "-" else write_atomic(job.stats, text)

        allowed = None if job.max_rejects is None else job.max_rejects * self.rows_in
        if allowed is not None and self.rejected > allowed:
            raise Infeasible(
                f"--max-rejects: {self.rejected:,} of {self.rows_in:,} rows were rejected "
                f"(expected at most {job.max_rejects:.2%}); the reasons are in {self.reject_path}"
            )
