"""A job: inputs, outputs and options of one call of a command.

The command line builds it and the stages read it. It holds the shared options and the command's own
resolved options, which are part of every fingerprint. Standard library only, so that `--help` stays
fast.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.shards.endings import file_ending, is_stream


@dataclass(frozen=True)
class Job:
    """One call of one command; field names are those of the options."""

    command: str
    inputs: tuple[str, ...] = ()
    out: str | None = None
    to: str = "parquet"  # format of streams: parquet, arrow or jsonl
    rejects: str | None = None
    max_rejects: float | None = None  # share of the rows
    jobs: int = 1
    shard: tuple[int, int] | None = None  # (index from 0, count)
    force: bool = False
    dry_run: bool = False
    stats: str | None = None
    seed: int = 0
    json: bool = False
    backend: str = "torch"
    mesh: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def to_stdout(self) -> bool:
        """True when rows go to stdout, or to another stream such as `-o >(…)`."""
        return self.out in (None, "-") or is_stream(str(self.out))

    @property
    def to_file(self) -> bool:
        """True when all rows go to one file, in the format of its ending."""
        return not self.to_stdout and bool(file_ending(str(self.out)))

    @property
    def to_directory(self) -> bool:
        """True when every input shard gives one output shard in a directory."""
        return not self.to_stdout and not self.to_file


def parse_shard(text: str) -> tuple[int, int]:
    """'3/8' → (3, 8): index from 0 to N-1."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UsageError(f"--shard: {text!r} (expected I/N with I from 0 to N-1, such as 0/4)")
    return int(index), int(count)


def slurm_slice(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(index, count) of this task in its Slurm array; None outside an array."""
    names = ("TASK_ID", "TASK_MIN", "TASK_STEP", "TASK_COUNT")
    values = [environment.get(f"SLURM_ARRAY_{name}", "") for name in names]
    if not all(value.isdigit() for value in values):
        return None
    task, first, step, count = map(int, values)
    return ((task - first) // max(step, 1), count) if count > 1 else None
