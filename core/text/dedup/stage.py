"""`dedup --method exact` and `minhash`: keep one document of each cluster of duplicates.

Exact duplicates have the same words and punctuation in the same order; white space, case and
accents are ignored. Near-duplicates are MinHash candidates over word n-grams; with verification a
pair counts only if the exact Jaccard similarity of its n-gram sets reaches the threshold. There
are three passes over the inputs: sketch, compare, write. One job does all three; in a Slurm array,
with a scratch directory that all tasks share, `--phase sketch` and `--phase write` process a part
of the shards each, `--phase compare` is one job between them, and the output bytes are the same.
Broder 1997; Lee et al. 2021.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map
from sabia.core.shards.outputs import open_file
from sabia.core.shards.sources import Source
from sabia.core.text import removed_rows
from sabia.core.text.dedup import barrier, kept_index, lsh, redis_index, removal_pass
from sabia.core.text.dedup.clusters import KEPT, Clusters, find_clusters
from sabia.core.text.dedup.first_pass import choose_engine
from sabia.core.text.dedup.redis_index import RedisIndex
from sabia.core.text.dedup.signature_files import Corpus
from sabia.core.text.dedup.signature_pass import load_corpus, read_corpus, sketch_into

CURVE = (0.5, 0.6, 0.7, 0.8, 0.9)


def run(job: Job, options: DedupOptions) -> None:
    """Deduplicate the job's inputs exactly or by MinHash, or do one phase of it."""
    removed_rows.check_path(job, options.removed)
    removed_rows.check_path(job, options.replaced, "--replaced")
    work = _Work(job, options)
    phases = {"sketch": work.sketch, "compare": work.compare, "write": work.write}
    phases.get(options.phase, work.whole)()


@dataclass(frozen=True)
class _Work:
    job: Job
    options: DedupOptions

    def whole(self) -> None:
        """All three passes."""
        elsewhere = dict.fromkeys(("scratch", "index", "against", "replaced", "redis"), "")
        trial = _Work(self.job, self.options.replace(**elsewhere))
        barrier.run(self.job, self.options.removed, self._decide, self._salt, trial._decide)

    def sketch(self) -> None:
        """Sketch this task's part of the shards into the scratch directory."""
        sources = open_inputs(self.job, "document")
        index, count = self.job.shard or (0, 1)
        engine = self._engine()
        scratch = Path(self.options.scratch)
        sketch_into(scratch, sources[index::count], self.options, engine, self.job.seed,
                    self.job.jobs)  # fmt: skip

    def compare(self) -> None:
        """Compare all sketches and write the removal plan to the scratch directory."""
        sources = unified(open_inputs(self.job, "document"))
        corpus = load_corpus(Path(self.options.scratch), sources, self.options, self.job.seed)
        plan = self._plan(sources, corpus, self._plan_directory(sources))
        if self.options.removed:
            salt = barrier.salt_of(sources, self._salt(sources))
            made = removed_rows.provenance_of(self.job, sources, salt)
            dropped = removal_pass.decision(sources, plan).dropped
            removed_rows.write_removed(self.options.removed, dropped, made)

    def write(self) -> None:
        """Write this task's part of the shards according to the plan."""
        sources = open_inputs(self.job, "document")
        plan = removal_pass.RemovalPlan.open(self._plan_directory(sources))
        salt = barrier.salt_of(sources, self._salt(sources))
        run_map(self.job, partial(removal_pass.drop, plan=plan), sources=sources, salt=salt)

    def _plan_directory(self, sources: list[Source]) -> Path:
        return Path(self.options.scratch) / f"plan-{barrier.salt_of(sources, self._salt(sources))}"

    def _salt(self, sources: list[Source]) -> str:
        """What the decision depends on besides the inputs and the job's own options."""
        key = kept_index.run_key(sources, self.options, self.job.seed)
        if self.options.redis:
            return f"{key} {self._redis(key, make=not self.job.dry_run).print}"
        if not self.options.against:
            return key
        index = kept_index.open_index(self.options.against, self.options, self.job.seed, key)
        return f"{key} {index.print} {bool(self.options.replaced)}"

    def _redis(self, key: str, make: bool = True) -> RedisIndex:
        return RedisIndex(self.options.redis, self.options, self.job.seed, key, make)

    def _engine(self) -> str:
        engine = choose_engine(self.options.engine)
        sketch, bands = lsh.sketch_of(self.options, self.job.seed), ""
        if sketch.bands:
            hits = lsh.hit_probability(CURVE, sketch.bands, sketch.rows).tolist()
            curve = ", ".join(f"{p:.3f} at {s:g}" for s, p in zip(CURVE, hits, strict=True))
            bands = f", {sketch.bands} bands of {sketch.rows}; probability that a pair is found: "
            bands += curve
        notes.note(f"engine {engine}{bands}")
        return engine

    def _decide(self, sources: list[Source]) -> barrier.Decision:
        engine, seed, jobs = self._engine(), self.job.seed, self.job.jobs
        if self.options.scratch:
            scratch = Path(self.options.scratch)
            sketch_into(scratch, sources, self.options, engine, seed, jobs)
            corpus = load_corpus(scratch, sources, self.options, seed)
        else:
            corpus = read_corpus(sources, self.options, engine, seed, jobs)
        return removal_pass.decision(sources, self._plan(sources, corpus), self.options.decisions)

    def _plan(
        self, sources: list[Source], corpus: Corpus, directory: Path | None = None
    ) -> removal_pass.RemovalPlan:
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
            return removal_pass.RemovalPlan.write(corpus, clusters, directory)
        clusters = find_clusters(corpus, options, engine, prior)
        # rows of the index whose cluster keeps a new document
        replaced = np.flatnonzero(clusters.reason[:indexed] != KEPT)
        replaced = replaced[clusters.kept_row[clusters.of_row[replaced]] >= indexed]
        if options.replaced:
            _write_replaced(options.replaced, corpus, clusters, replaced)
        if options.index:
            rows = indexed + np.flatnonzero(clusters.reason[indexed:] == KEPT)
            same = (
                options.against and Path(options.index).resolve() == Path(options.against).resolve()
            )
            outdated = replaced if same and options.replaced else replaced[:0]
            kept_index.write_index(options.index, corpus, rows, outdated, options, seed, key)
        return removal_pass.RemovalPlan.write(corpus, clusters, directory)


def _write_replaced(path: str, corpus: Corpus, clusters: Clusters, rows: np.ndarray) -> None:
    kept = clusters.kept_row[clusters.of_row[rows]]
    ordered, position = np.unique(kept, return_inverse=True)
    similarity = clusters.similarity[rows]
    table = pa.table({
        "id": corpus.take(rows),
        "replaced_by": corpus.take(ordered).take(pa.array(position.ravel())),
        "similarity": pa.array(similarity, mask=np.isnan(similarity)),
    })  # fmt: skip
    with open_file(path, table.schema) as writer:
        for batch in table.to_batches():
            writer.write(batch)
