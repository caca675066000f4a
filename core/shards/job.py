"""A job: inputs, outputs and options of one call of a command.

The command line builds it and the stages read it. It holds the shared options and the command's own
resolved options, which are part of every fingerprint. Standard library only, so that `--help` stays
fast.
"""

from dataclasses import dataclass, field
from typing import Any

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
