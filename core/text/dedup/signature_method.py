"""`dedup --method exact` and `minhash`: keep one document of each cluster of duplicates.

Exact duplicates have the same words and punctuation in the same order; white space, case and
accents are ignored. Near-duplicates are MinHash candidates over word n-grams; with verification a
pair counts only if the exact Jaccard similarity of its n-gram sets reaches the threshold. Broder
1997; Lee et al. 2021.

The first pass sketches every document, into unnamed files or into a scratch directory, where each
source has a segment of its own. Within a process the work is done by threads: the kernels release
the global interpreter lock, and rows keep their order.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.atomic import atomic_directory
from sabia.core.shards.job import Job, file_ending
from sabia.core.shards.outputs import open_file
from sabia.core.shards.sources import Source, rows_of
from sabia.core.shards.spools import release_memory
from sabia.core.text import removed_rows
from sabia.core.text.dedup import keep_rules, kept_index, lsh, phases, redis_index, signature_files
from sabia.core.text.dedup.clusters import Clusters, find_clusters
from sabia.core.text.dedup.first_pass import choose_engine, first_pass
from sabia.core.text.dedup.redis_index import RedisIndex
from sabia.core.text.dedup.removal_pass import RemovalPlan
from sabia.core.text.dedup.signature_files import Corpus, Segment, SegmentWriter, read_manifest
from sabia.core.text.recorded_rows import RowRecorder
from sabia.kernels.minhash.definitions import SketchConfig, Sketches
from sabia.kernels.minhash.interface import sketch as sketch_documents

CURVE = (0.5, 0.6, 0.7, 0.8, 0.9)


def run(job: Job, options: DedupOptions) -> None:
    """Deduplicate the job's inputs exactly or by MinHash, or do one phase of it."""
    removed_rows.check_path(job, options.replaced, "--replaced")
    if options.replaced and not file_ending(options.replaced):
        raise UsageError(f"--replaced: {options.replaced} (expected a file ending in .parquet)")
    phases.run(SignatureMethod(job, options))


class SignatureMethod(phases.Method):
    """Signatures in segments, clusters, and an index of earlier runs."""

    _again: RowRecorder | None = None  # what the first pass has read

    def trial(self) -> "SignatureMethod":
        """See phases.Method."""
        elsewhere = dict.fromkeys(("scratch", "index", "against", "replaced", "redis"), "")
        return SignatureMethod(self.job, self.options.replace(**elsewhere))

    def sketch_key(self) -> Any:
        """See phases.Method."""
        made = asdict(self._sketch), self.options.keep, self.options.verify
        return [signature_files.VERSION, keep_rules.MEASURE, *made]

    def has_sketch(self, path: Path) -> bool:
        """See phases.Method."""
        return read_manifest(path) is not None

    def check_sketch(self, path: Path) -> None:
        """See phases.Method."""
        Segment.open(path)

    def sketch(self, source: Source, path: Path) -> None:
        """See phases.Method."""
        with atomic_directory(path) as temporary:
            writer = self._writer(temporary)
            self._fill(writer, [source])
            writer.close({"source": source.name})

    def plan(
        self, sources: list[Source], sketches: Sequence[Path] | None, directory: Path | None = None
    ) -> RemovalPlan:
        """See phases.Method."""
        if sketches is None:
            corpus = self._read_corpus(sources)
            release_memory()
        else:
            segments = [Segment.open(path) for path in sketches]
            ends = np.cumsum([segment.rows for segment in segments])
            corpus = Corpus(segments, np.concatenate(([0], ends)).astype(np.int64))
        return self._plan(sources, corpus, directory)

    def _read_corpus(self, sources: list[Source]) -> Corpus:
        """Sketch all sources into unnamed files, and keep what was read for the last pass, unless
        that needs only the ids."""
        read: Sequence[Source] = sources
        if not self.options.decisions and all(isinstance(source, Source) for source in sources):
            self._again = RowRecorder(sources, self._columns())
            read = self._again.first_pass
        writer = self._writer()
        rows = self._fill(writer, read)
        return Corpus([writer.close()], np.concatenate(([0], np.cumsum(rows))))

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(["id", "text", *keep_rules.columns(self.options.keep)]))

    def _writer(self, directory: Path | None = None) -> SegmentWriter:
        return SegmentWriter(self._sketch.bands, self.options.with_shingles, directory)

    def _fill(self, writer: SegmentWriter, sources: Sequence[Source]) -> np.ndarray:
        """Sketch all documents of the sources; returns the rows of each, int64[sources]."""
        rows, engine = np.zeros(len(sources), np.int64), self._engine

        def work(batch: pa.RecordBatch, _name: str) -> tuple[Sketches, np.ndarray]:
            sketches = sketch_documents(*text_buffers(batch.column("text")), self._sketch, engine)
            return sketches, keep_rules.priorities(batch, self.options.keep, sketches.characters)

        items = first_pass(sources, self._columns(), work, self.job.jobs, rows_of(sources))
        for index, batch, worked in items:
            writer.add(*worked, batch.column("id"))
            rows[index] += batch.num_rows
        return rows

    def read_again(self, sources: list[Source]) -> list[Source]:
        """See phases.Method."""
        return self._again.again() if self._again else sources

    def open_plan(self, directory: Path) -> RemovalPlan:
        """See phases.Method."""
        return RemovalPlan.open(directory, self.options.decisions)

    def salt(self, sources: list[Source]) -> str:
        """See phases.Method."""
        key = kept_index.run_key(sources, self.options, self.job.seed)
        if self.options.redis:
            return f"{key} {self._redis(key, make=not self.job.dry_run).print}"
        if not self.options.against:
            return key
        index = kept_index.open_index(self.options.against, self.options, self.job.seed, key)
        return f"{key} {index.print} {bool(self.options.replaced)}"

    def _redis(self, key: str, make: bool = True) -> RedisIndex:
        return RedisIndex(self.options.redis, self.options, self.job.seed, key, make)

    @cached_property
    def _sketch(self) -> SketchConfig:
        return lsh.sketch_of(self.options, self.job.seed)

    @cached_property
    def _engine(self) -> str:
        """The MinHash implementation, which is announced with the bands."""
        engine = choose_engine(self.options.engine)
        sketch, bands = self._sketch, ""
        if sketch.bands:
            hits = lsh.hit_probability(CURVE, sketch.bands, sketch.rows).tolist()
            curve = ", ".join(f"{p:.3f} at {s:g}" for s, p in zip(CURVE, hits, strict=True))
            bands = f", {sketch.bands} bands of {sketch.rows}; probability that a pair is found: "
            bands += curve
        notes.note(f"engine {engine}{bands}")
        return engine

    def _plan(self, sources: list[Source], corpus: Corpus, directory: Path | None) -> RemovalPlan:
        """Compare, extend the index, report replaced documents, and write the plan."""
        options, seed, indexed = self.options, self.job.seed, 0
        key = kept_index.run_key(sources, options, seed)
        if options.against:
            index = kept_index.open_index(options.against, options, seed, key)
            corpus, indexed = kept_index.load(index, corpus), index.rows
        prior = 0 if options.replaced else indexed
        engine = choose_engine(options.engine)
        if options.redis:
            clusters, corpus = redis_index.find_and_insert(
                self._redis(key), sources, corpus, engine, self.job.jobs
            )
            return RemovalPlan.write(corpus, clusters, directory, options.decisions)
        clusters = find_clusters(corpus, options, engine, prior)
        release_memory()
        # rows of the index whose cluster keeps a new document
        replaced = clusters.rows(kept=False, last=indexed)
        replaced = replaced[clusters.kept_row[clusters.at(replaced)["cluster"]] >= indexed]
        if options.replaced:
            _write_replaced(options.replaced, corpus, clusters, replaced)
        if options.index:
            rows = clusters.rows(kept=True, first=indexed)
            same = (
                options.against and Path(options.index).resolve() == Path(options.against).resolve()
            )
            outdated = replaced if same and options.replaced else replaced[:0]
            kept_index.write_index(options.index, corpus, rows, outdated, options, seed, key)
        return RemovalPlan.write(corpus, clusters, directory, options.decisions)


def _write_replaced(path: str, corpus: Corpus, clusters: Clusters, rows: np.ndarray) -> None:
    decided = clusters.at(rows)
    kept, similarity = clusters.kept_row[decided["cluster"]], decided["similarity"]
    ordered, position = np.unique(kept, return_inverse=True)
    table = pa.table({
        "id": corpus.take(rows),
        "replaced_by": corpus.take(ordered).take(pa.array(position.ravel())),
        "similarity": pa.array(similarity, mask=np.isnan(similarity)),
    })  # fmt: skip
    with open_file(path, table.schema) as writer:
        for batch in table.to_batches():
            writer.write(batch)
