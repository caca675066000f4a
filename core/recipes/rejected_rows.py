"""Rows that a trainer cannot use: stored with a reason by process 0, counted by all processes."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sabia.core import notes
from sabia.core.parallel.world import World
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt_rejects
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.token_rows.row_store import RejectRow


@dataclass
class RejectCount:
    """Counts rejects and their reasons, and writes them in the leading process."""

    rejects: Rejects | None
    reasons: Counter[str] = field(default_factory=Counter)  # with N for each number
    examples: dict[str, str] = field(default_factory=dict)  # the first of each kind

    @property
    def count(self) -> int:
        """How many there are."""
        return self.reasons.total()

    def add(self, row: dict[str, Any], reason: str, shard: str) -> None:
        """Count one more."""
        kind = re.sub(r"\d+", "N", reason)
        self.reasons[kind] += 1
        self.examples.setdefault(kind, reason)
        if self.rejects is not None:
            self.rejects.add(row, reason, shard)

    def describe(self) -> str:
        """How many there are, and the most frequent reason with its number."""
        if not self.reasons:
            return "none rejected"
        kind, times = self.reasons.most_common(1)[0]
        return f"{self.count:,} rejected; {times:,} of them: {self.examples[kind]}"


@contextlib.contextmanager
def opened_rejects(job: Job, world: World, what: str) -> Iterator[RejectCount]:
    """Yield what accepts rejects; prints at the end how many `what` were rejected, and the file."""
    path = reject_path(job)
    writes = world.leads and not job.dry_run
    if writes:
        adopt_rejects(job)
    with Rejects(path) if writes else contextlib.nullcontext() as rejects:
        counted = RejectCount(rejects)
        yield counted
        if counted.count:
            notes.note(f"{counted.count:,} {what} rejected{f' → {path}' if writes else ''}")


def warn_of_rejects(what: str) -> RejectRow:
    """A function that names each rejected row on stderr, for small held-out sets."""

    def warn(_row: dict[str, Any], reason: str, shard: str) -> None:
        notes.warn(f"{shard}: {what} left out: {reason}")

    return warn
