"""Rows that a trainer cannot use: stored with a reason by process 0, counted by all processes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sabia.core import notes
from sabia.core.parallel.world import World
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt_rejects
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.token_rows.row_store import RejectRow


@dataclass
class RejectCount:
    """Counts rejects in processes that do not write them."""

    count: int = 0

    def add(self, _row: dict[str, Any], _reason: str, _shard: str) -> None:
        """Count one more."""
        self.count += 1


@contextlib.contextmanager
def opened_rejects(job: Job, world: World, what: str) -> Iterator[Rejects | RejectCount]:
    """Yield what accepts rejects; prints at the end how many `what` were rejected, and the file."""
    path = reject_path(job)
    writes = world.leads and not job.dry_run
    if writes:
        adopt_rejects(job)
    with Rejects(path) if writes else contextlib.nullcontext(RejectCount()) as rejects:
        yield rejects
        if rejects.count:
            notes.note(f"{rejects.count:,} {what} rejected{f' → {path}' if writes else ''}")


def warn_of_rejects(what: str) -> RejectRow:
    """A function that names each rejected row on stderr, for small held-out sets."""

    def warn(_row: dict[str, Any], reason: str, shard: str) -> None:
        notes.warn(f"{shard}: {what} left out: {reason}")

    return warn
