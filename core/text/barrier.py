"""A stage with a barrier: read everything, decide, write down what goes, write what stays.

Every output shard depends on all inputs and their order, so all of them enter its fingerprint.
What is decided lies in unnamed temporary files: a killed run leaves nothing behind but finished
output shards, and runs again from the start.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import holds, is_current, provenance
from sabia.core.shards.mapping import Transform, run_map
from sabia.core.shards.sources import Reject, Source, ignore_reject
from sabia.core.text import removed


@dataclass(frozen=True)
class Decision:
    """The transform of the last pass (picklable), and the rows it takes out, by source."""

    transform: Transform
    dropped: Sequence[Iterable[pa.RecordBatch]] = field(default=())
    columns: tuple[str, ...] | None = None  # that the transform needs; None: all


Salt = str | Callable[[list[Source]], str]


def salt_of(sources: list[Source], salt: Salt = "") -> str:
    """A hash of all inputs in order and of what else a decision depends on."""
    said = salt if isinstance(salt, str) else salt(sources)
    prints = [source.fingerprint() for source in sources]
    text = " ".join([*prints, said] if said else prints)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def removed_provenance(job: Job, sources: list[Source], salt: Salt = "") -> dict[str, Any]:
    """What made the file of removed rows."""
    prints = [source.fingerprint() for source in sources]
    return provenance(job, "removed", prints, salt_of(sources, salt))


def run(
    job: Job, removed_path: str, decide: Callable[[list[Source]], Decision], salt: Salt = ""
) -> None:
    """Decide and write, unless the outputs are there and made from the same.

    `salt`: what else the decision depends on, such as a tokenizer's fingerprint, or how to tell it
    from the inputs.
    """
    removed.check_path(removed_path)
    sources = open_inputs(job, "document")
    salt = salt_of(sources, salt)
    made = provenance(job, "removed", [source.fingerprint() for source in sources], salt)
    written = not removed_path or (not job.force and holds(removed_path, made))
    if job.dry_run or (written and is_current(job, sources, salt)):
        run_map(job, _nothing, sources=sources, salt=salt)
        return
    decision = decide(sources)
    if removed_path:
        removed.write_removed(removed_path, decision.dropped, made)
    if decision.columns is not None:
        read: Any = [_Columns(source, decision.columns) for source in sources]
        sources = read
    run_map(job, decision.transform, sources=sources, salt=salt, next_step="sabia tokenize")


@dataclass(frozen=True)
class _Columns:
    """A source of which only some columns are read."""

    source: Source
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.source.name

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def rows(self) -> int | None:
        return self.source.rows()

    def batches(
        self, columns: Sequence[str] | None = None, reject: Reject = ignore_reject
    ) -> Iterator[pa.RecordBatch]:
        return self.source.batches(columns or self.columns, reject=reject)


def _nothing(_batches: object, _context: object) -> Iterator[pa.RecordBatch]:
    """Stands in for the transform where no shard is going to be made."""
    return iter(())
