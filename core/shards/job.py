"""A job: inputs, outputs and options of one call of a command, and what its paths mean.

The command line builds it and the stages read it. It holds the shared options and the command's own
resolved options, which are part of every fingerprint. The format of an output file follows from the
ending of its path; any other path is a directory. Standard library only, so that `--help` stays
fast and options are checked before anything heavy is imported.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sabia.core.errors import UsageError

# ending → format of the rows
FORMATS = {".parquet": "parquet", ".arrow": "arrow",
           ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl"}  # fmt: skip
EXPECTED = ".parquet, .arrow, .jsonl, .jsonl.gz or .jsonl.zst"
# endings of other data formats, for which a directory would be a surprise
_OTHER = (".arrows", ".avro", ".bz2", ".csv", ".db", ".duckdb", ".feather", ".gz", ".h5", ".html",
          ".ipc", ".json", ".lance", ".lz4", ".md", ".ndjson", ".npy", ".npz", ".orc", ".pickle",
          ".pkl", ".pq", ".sqlite", ".tar", ".tsv", ".txt", ".warc", ".xlsx", ".xml", ".xz",
          ".yaml", ".zip", ".zst")  # fmt: skip


def file_ending(path: str) -> str:
    """The ending in FORMATS of a path of a file, in lower case; '' for any other path."""
    return max((end for end in FORMATS if path.lower().endswith(end)), key=len, default="")


def without_ending(path: str) -> str:
    """The path of a file without its ending."""
    return path[: len(path) - len(file_ending(path))]


def check_ending(path: str | None, flag: str) -> None:
    """Raise UsageError for the path of an output whose ending names a format that is not written.

    A path that ends with / is a directory, whatever its name.
    """
    if not path or is_stream(path):
        return
    if file_ending(path) and os.path.isdir(path):
        raise UsageError(f"{flag}: {path} is a directory; write {path}/ for shards in it")
    if not file_ending(path) and path.lower().endswith(_OTHER):
        raise UsageError(f"{flag}: {path} (expected a file ending in {EXPECTED}, or a directory)")


def is_stream(path: str) -> bool:
    """Whether a path is written or read only once, in order: a FIFO, the end of a pipe (as bash
    passes `>(…)` and `<(…)`), a socket or a character device."""
    if re.match(r"/dev/(fd/|std)|/proc/[^/]+/fd/", path):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


@dataclass(frozen=True)
class Job:
    """One call of one command; field names are those of the options."""

    command: str
    inputs: tuple[str, ...] = ()
    out: str | None = None
    text_column: str = ""  # the column that has the text of documents; '': text
    to: str = "parquet"  # format of streams: parquet, arrow or jsonl
    rejects: str | None = None
    max_rejects: float | None = None  # share of the rows
    jobs: int = 1
    shard: tuple[int, int] | None = None  # (index from 0, count)
    executor: str = "local"  # or ray, ray=ADDRESS
    force: bool = False
    append: bool | None = None  # None: the command has no such option
    part_names: tuple[str, ...] = ()  # of the parts in the directory; empty: by their numbers
    dry_run: bool = False
    stats: str | None = None
    scratch: str | None = None  # directory of intermediate results
    seed: int = 0
    json: bool = False
    backend: str = "torch"
    mesh: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)  # see run_record.call_of

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

    def part_name(self, part: int) -> str:
        """The name of the files of a part, without an ending."""
        return self.part_names[part] if self.part_names else f"part-{part:05d}"


def chosen_shard(
    text: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[int, int] | None:
    """(index, count) of the slice that `--shard` asks for; None: all shards.

    Raises UsageError where there are several tasks and `text` is None: neither the same slice for
    all nor a guess would be right, since each task may have been given inputs of its own.
    """
    if text == "all":
        return None
    if text == "auto":
        return slurm_slice(environment)
    if text is None:
        if tasks := several_tasks(environment):
            raise UsageError(
                f"this is one of the tasks of a Slurm {tasks}; give --shard auto (its slice of the"
                " inputs), --shard all (the inputs are its own) or --shard I/N"
            )
        return None
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UsageError(
            f"--shard: {text!r} (expected auto, all, or I/N with I from 0 to N-1, such as 0/4)"
        )
    return int(index), int(count)


def several_tasks(environment: Mapping[str, str] = os.environ) -> str:
    """'array' or 'step' if Slurm has started several tasks for this command, else ''."""
    if environment.get("SLURM_ARRAY_TASK_COUNT", "1") != "1":
        return "array"
    return "step" if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" else ""


def slurm_slice(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(index, count) of this task among those of its Slurm array and of its step; None for one."""

    def values(*names: str) -> list[int]:
        texts = [environment.get(f"SLURM_{name}", "") for name in names]
        return [int(text) for text in texts] if all(text.isdigit() for text in texts) else []

    index, count = 0, 1
    if array := values("ARRAY_TASK_ID", "ARRAY_TASK_MIN", "ARRAY_TASK_STEP", "ARRAY_TASK_COUNT"):
        index, count = (array[0] - array[1]) // max(array[2], 1), array[3]
    if step := values("PROCID", "STEP_NUM_TASKS"):
        index, count = index * step[1] + step[0], count * step[1]
    return (index, count) if count > 1 else None
