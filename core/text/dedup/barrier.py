"""A stage with a barrier: read all inputs, decide, write the removed rows, write the kept rows.

Every output shard depends on all inputs and their order, so its fingerprint includes all of them.
Decisions are stored in unnamed temporary files: a killed run leaves nothing but finished output
shards, and the next run starts from the beginning.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from sabia.core.shards.columns import unified
from sabia.core.shards.dry_run import NoRejects, Sample
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import holds, is_current, schema_of_all
from sabia.core.shards.mapping import ShardContext, Transform, run_map
from sabia.core.shards.sources import Source
from sabia.core.text import removed_rows


@dataclass(frozen=True)
class Decision:
    """The transform of the last pass (picklable), and the rows that it removes, by source."""

    transform: Transform
    dropped: Sequence[Iterable[pa.RecordBatch]] = field(default=())
    columns: tuple[str, ...] | None = None  # columns that the transform needs; None: all


Salt = str | Callable[[list[Source]], str]


def salt_of(sources: list[Source], salt: Salt = "") -> str:
    """A hash of all inputs in order and of everything else that a decision depends on."""
    extra = salt if isinstance(salt, str) else salt(sources)
    prints = [source.fingerprint() for source in sources]
    text = " ".join([*prints, extra] if extra else prints)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def run(
    job: Job,
    removed_path: str,
    decide: Callable[[list[Source]], Decision],
    salt: Salt = "",
    try_out: Callable[[list[Source]], Decision] | None = None,
) -> None:
    """Decide and write, unless the outputs exist and were made from the same inputs.

    `salt`: what else the decision depends on, such as a tokenizer's fingerprint, or a function
    that computes it from the inputs. `try_out` decides on the sample of a dry run, if `decide`
    changes files.
    """
    removed_rows.check_path(job, removed_path)
    sources = unified(open_inputs(job, "document"))
    removed_rows.check_outputs(job, sources, removed_path)
    salt, schema = salt_of(sources, salt), schema_of_all(sources)
    made = removed_rows.provenance_of(job, sources, salt)
    written = not removed_path or (not job.force and holds(removed_path, made))
    if job.dry_run or (written and is_current(job, sources, salt)):
        sampled = partial(_sampled, try_out or decide)
        run_map(job, _nothing, sources=sources, salt=salt, schema=schema, sampled=sampled)
        return
    decision = decide(sources)
    if removed_path:
        removed_rows.write_removed(removed_path, decision.dropped, made)
    read = [replace(source, columns=decision.columns) for source in sources]
    run_map(
        job, decision.transform, sources=read, salt=salt, next_step="sabia tokenize", schema=schema
    )


def _sampled(
    decide: Callable[[list[Source]], Decision], sample: Sample
) -> Iterator[pa.RecordBatch]:
    """The output for a sample, as if it were the whole input."""
    decision = decide([sample])  # type: ignore[list-item]  # a sample reads as a source does
    context = ShardContext(0, sample.name, NoRejects(""))
    return iter(decision.transform(sample.batches(decision.columns), context))


def _nothing(_batches: object, _context: object) -> Iterator[pa.RecordBatch]:
    """The transform for runs in which no shard is written."""
    return iter(())
