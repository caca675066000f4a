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

The sketch of a shard may be a stream: some arrays for each batch of its documents. The comparison
reads the stream of all shards, in order: computed as the documents are read, or from files that
`--phase sketch` wrote. Such a file is an Arrow file with one row for each batch: the ids of its
documents, and its arrays in NumPy's format.
"""

import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.digests import ArrowRows, arrow_batches
from sabia.core.errors import BadData, UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.results import result_version
from sabia.core.shards.atomic import atomic_path
from sabia.core.shards.columns import unified
from sabia.core.shards.dry_run import NoRejects, Sample
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import is_current, provenance, rows_finished, schema_of_all
from sabia.core.shards.mapping import ShardContext, Transform, run_map
from sabia.core.shards.sources import Source, rows_of
from sabia.core.shards.spools import release_memory
from sabia.core.text import removed_rows
from sabia.core.text.dedup.first_pass import first_pass

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

    @abstractmethod
    def check_sketch(self, path: Path) -> None:
        """Read the sketch at this path; raises BadData if it is not as it was written."""

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
        with suppress(BadData):
            if method.has_sketch(path):
                method.check_sketch(path)
                done += 1
                continue
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


Arrays = tuple[np.ndarray, ...]
_SCHEMA = pa.schema([("ids", pa.list_(pa.string())), ("arrays", pa.list_(pa.large_binary()))])


class Sketched(NamedTuple):
    """The sketch of one batch: the number of its shard, the ids of the documents, the arrays."""

    source: int
    ids: pa.Array
    arrays: Arrays


class StreamMethod(Method):
    """A method that says what arrays a batch gives, and how the stream of all is compared."""

    @abstractmethod
    def columns(self) -> list[str]:
        """The columns that are read besides `id`."""

    @abstractmethod
    def read(self, batch: pa.RecordBatch, name: str) -> Arrays:
        """The arrays of a batch of a shard of this name; called from several threads."""

    @abstractmethod
    def compare(
        self, sources: list[Source], sketches: Iterator[Sketched], directory: Path | None
    ) -> Plan:
        """The plan from the sketches of all documents; see Method.plan."""

    def has_sketch(self, path: Path) -> bool:
        """See Method."""
        return path.exists()

    def check_sketch(self, path: Path) -> None:
        """See Method."""
        for _ in _stored([path]):
            pass

    def sketch(self, source: Source, path: Path) -> None:
        """See Method."""
        with (
            atomic_path(path) as temporary,
            open(temporary, "wb") as file,
            closing(ArrowRows(file, _SCHEMA, pa.ipc.new_file)) as writer,
        ):
            for _, ids, arrays in self._read_all([source]):
                blobs = [_to_bytes(array) for array in arrays]
                row = {"ids": [ids], "arrays": [blobs]}
                writer.write(pa.RecordBatch.from_pydict(row, _SCHEMA))

    def plan(
        self, sources: list[Source], sketches: Sequence[Path] | None, directory: Path | None = None
    ) -> Plan:
        """See Method."""
        stream = self._read_all(sources) if sketches is None else _stored(sketches)
        return self.compare(sources, stream, directory)

    def _read_all(self, sources: Sequence[Source]) -> Iterator[Sketched]:
        columns = list(dict.fromkeys(["id", *self.columns()]))
        threads, rows = self.threads(), rows_of(sources)
        for index, batch, arrays in first_pass(sources, columns, self.read, threads, rows):
            yield Sketched(index, batch.column("id"), arrays)

    def threads(self) -> int:
        """Threads that call `read`."""
        return self.job.jobs


def _to_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _stored(paths: Sequence[Path]) -> Iterator[Sketched]:
    """The stream of sketches that were written before."""
    for source, path in enumerate(paths):
        try:
            with pa.memory_map(str(path)) as file:
                for row in arrow_batches(pa.ipc.open_file(file), str(path)):
                    stop.check()
                    blobs = row.column("arrays").flatten()
                    arrays = (np.load(io.BytesIO(blob.as_buffer())) for blob in blobs)
                    yield Sketched(source, row.column("ids").flatten(), tuple(arrays))
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise BadData(f"{path}: not a sketch ({reason}); delete it and run again") from error
