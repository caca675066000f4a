"""The shards of this process: `--shard I/N`, or its index in a Slurm array."""

import os
from collections.abc import Mapping

from sabia.core.errors import UsageError


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
