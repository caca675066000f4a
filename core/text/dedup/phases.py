"""The phases of deduplication by any method: sketch each shard, compare all sketches, write.

A method reads each batch of documents to a sketch (hashes, units, vectors), and compares the
sketches of all shards, in their order, to a plan: the rows to remove, or the bytes to cut. One job
does all of it. In a Slurm array, with a scratch directory that all tasks share, `--phase sketch`
and `--phase write` process a part of the shards each, `--phase compare` is one job between them,
and the output bytes are the same. In the scratch directory each shard has a sketch of its own,
named by a hash of its bytes and of the options that the sketch depends on; it appears when it is
complete, and is not computed again, so a killed run resumes. Without that directory sketches and
plan are in unnamed temporary files: a killed run leaves nothing but finished output shards.

Every output shard depends on all inputs and their order, so its fingerprint includes all of them.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.results import result_version
from sabia.core.shards.columns import unified
from sabia.core.shards.dry_run import NoRejects, Sample
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import is_current, provenance, rows_finished, schema_of_all
from sabia.core.shards.mapping import ShardContext, Transform, run_map
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import release_memory
from sabia.core.text import removed_rows

VERSION = 1  # of sketches on disk


@dataclass(frozen=True)
class Decision:
    """The transform of the last pass (picklable), and the rows that it removes, by source."""

    transform: Transform
    dropped: Mapping[int, Iterable[pa.RecordBatch]] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None  # columns that the transform needs; None: all


class Plan(Protocol):
    """What is removed, readable by any process of a path."""

    def decision(self, sources: Sequence[Source]) -> Decision:
        """The transform of the documents, and the removed rows."""


class Method(ABC):
    """One way of finding duplicates, for one job."""

    def __init__(self, job: Job, options: DedupOptions) -> None:
        self.job, self.options = job, options

    def salt(self, sources: list[Source]) -> str:
        """What the plan depends on besides the inputs and the job's own options."""
        return ""

    def trial(self) -> "Method":
        """The same method without effects on other files, for a dry run."""
        return self

    @abstractmethod
    def sketch_key(self) -> Any:
        """What a sketch depends on besides its shard: values that JSON can hold."""

    @abstractmethod
    def has_sketch(self, path: Path) -> bool:
        """Whether there is a complete sketch at this path."""

    def is_intact(self, path: Path) -> bool:
        """Whether the sketch at this path can be read as it was written."""
        return True

    @abstractmethod
    def sketch(self, source: Source, path: Path) -> None:
        """Write the sketch of one shard, which appears when it is complete."""

    @abstractmethod
    def plan(
        self, sources: list[Source], sketches: Sequence[Path] | None, directory: Path | None = None
    ) -> Plan:
        """Compare all documents, by their sketches on disk or by reading them.

        The plan is written to the directory atomically, or to unnamed files.
        """

    def read_again(self, sources: list[Source]) -> list[Source]:
        """The sources for the last pass, once `plan` has read them: with the same rows."""
        return sources

    @abstractmethod
    def open_plan(self, directory: Path) -> Plan:
        """The plan that was written to a directory; raises FileNotFoundError if there is none."""


def run(method: Method) -> None:
    """Deduplicate the job's inputs, or do one phase of it."""
    removed_rows.check_path(method.job, method.options.removed)
    phases = {"sketch": _sketch_phase, "compare": _compare_phase, "write": _write_phase}
    phases.get(method.options.phase, _whole)(method)


def salt_of(method: Method, sources: list[Source]) -> str:
    """A hash of all inputs in order and of everything else that a plan depends on."""
    extra = method.salt(sources)
    prints = [source.fingerprint() for source in sources]
    text = " ".join([*prints, extra] if extra else prints)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _whole(method: Method) -> None:
    """All phases, unless the outputs exist and were made from the same inputs."""
    job, removed = method.job, method.options.removed
    sources = open_inputs(job, "document")
    removed_rows.check_outputs(job, sources, removed)
    salt = salt_of(method, sources)
    if not removed and rows_finished(job, "document", sources, salt) is not None:
        run_map(job, _nothing, sources=sources, salt=salt)
        return
    sources = unified(sources)
    schema = schema_of_all(sources)
    made = removed_rows.provenance_of(job, sources, salt)
    written = not removed or (not job.force and removed_rows.is_written(removed, made))
    if job.dry_run or (written and is_current(job, sources, salt)):
        sampled = partial(_sampled, method.trial())
        run_map(job, _nothing, sources=sources, salt=salt, schema=schema, sampled=sampled)
        return
    plan = _plan(method, sources)
    sources = method.read_again(sources)
    decision = plan.decision(sources)
    if removed:
        removed_rows.write_removed(removed, decision.dropped, made)
    release_memory()
    read = [replace(source, columns=decision.columns) for source in sources]
    run_map(
        job, decision.transform, sources=read, salt=salt, next_step="sabia tokenize", schema=schema
    )


def _sampled(method: Method, sample: Sample) -> Iterator[pa.RecordBatch]:
    """The output for a sample, as if it were the whole input."""
    sources: Any = [sample]  # a sample reads as a source does
    decision = method.plan(sources, None).decision(sources)
    context = ShardContext(0, sample.name, NoRejects(""))
    return iter(decision.transform(sample.batches(decision.columns), context))


def _nothing(_batches: object, _context: object) -> Iterator[pa.RecordBatch]:
    """The transform for runs in which no shard is written."""
    return iter(())


def _plan(method: Method, sources: list[Source]) -> Plan:
    if not method.options.scratch:
        return method.plan(sources, None)
    _sketch(method, sources)
    return method.plan(sources, _sketches(method, sources))


def _sketch_phase(method: Method) -> None:
    index, count = method.job.shard or (0, 1)
    _sketch(method, open_inputs(method.job, "document")[index::count])


def _sketch(method: Method, sources: Sequence[Source]) -> None:
    """Sketch the shards that have no sketch in the scratch directory yet."""
    done = 0
    for source in sources:
        path = _sketch_path(method, source)
        if method.has_sketch(path) and method.is_intact(path):
            done += 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            method.sketch(source, path)
    if done:
        scratch = method.options.scratch
        notes.note(f"{done} of {len(sources)} shards already sketched in {scratch}")


def _sketch_path(method: Method, source: Source) -> Path:
    key = [VERSION, method.options.method, source.fingerprint(), method.sketch_key()]
    if (result := result_version(method.job.command)) != 1:
        key.append(result)
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    return Path(method.options.scratch) / f"sketch-{digest}"


def _sketches(method: Method, sources: Sequence[Source]) -> list[Path]:
    paths = [_sketch_path(method, source) for source in sources]
    for source, path in zip(sources, paths, strict=True):
        if not method.has_sketch(path):
            raise UsageError(
                f"{source.name}: no sketches in {method.options.scratch} (computed from other bytes"
                " or with other options?); run --phase sketch over all inputs first"
            )
    return paths


def _plan_directory(method: Method, salt: str) -> Path:
    """Named by the inputs and all options that decide the plan."""
    made = provenance(method.job, "plan", [], salt)
    return Path(method.options.scratch) / f"plan-{made['fingerprint']}"


def _compare_phase(method: Method) -> None:
    sources = unified(open_inputs(method.job, "document"))
    removed_rows.check_outputs(method.job, sources, method.options.removed)
    salt = salt_of(method, sources)
    sketches, directory = _sketches(method, sources), _plan_directory(method, salt)
    plan = method.plan(sources, sketches, directory)
    if method.options.removed:
        made = removed_rows.provenance_of(method.job, sources, salt)
        removed_rows.write_removed(method.options.removed, plan.decision(sources).dropped, made)


def _write_phase(method: Method) -> None:
    sources = open_inputs(method.job, "document")
    salt = salt_of(method, sources)
    try:
        plan = method.open_plan(_plan_directory(method, salt))
    except FileNotFoundError as error:
        raise UsageError(
            f"{method.options.scratch}: no plan for these inputs and options; run --phase compare"
        ) from error
    run_map(method.job, plan.decision(sources).transform, sources=sources, salt=salt)
