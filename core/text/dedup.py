"""Exact and near-duplicate removal: keep one document of each cluster, say what went and why.

Exact duplicates have the same words and marks in the same order (spacing, case and accents
aside). Near-duplicates: MinHash candidates over word n-grams; with verification a pair counts
only if the exact Jaccard similarity of its n-gram sets reaches the threshold. Three passes over
replayable inputs: sketch, compare, write. One job does all three; in a Slurm array, with a scratch
directory that all tasks see, `--phase sketch` and `--phase write` do a slice of the shards and
`--phase compare` is one job between them, and the output is the same bytes.
Broder 1997; Lee et al. 2021.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map
from sabia.core.shards.outputs import open_file
from sabia.core.shards.slices import slurm_slice
from sabia.core.shards.sources import Source
from sabia.core.text import barrier, dedup_index, lsh, redis_index, removal, removed
from sabia.core.text.clusters import KEPT, Clusters, find_clusters
from sabia.core.text.dedup_config import DedupConfig
from sabia.core.text.redis_index import RedisIndex
from sabia.core.text.sketch_files import Corpus
from sabia.core.text.sketch_pass import load_corpus, read_corpus, sketch_into
from sabia.core.text.sketching import choose_engine

CURVE = (0.5, 0.6, 0.7, 0.8, 0.9)
PHASES = ("sketch", "compare", "write")
_HOW = ("engine", "mem", "scratch", "phase", "removed", "index", "against", "replaced", "redis")


@dataclass(frozen=True)
class Places:
    """Where things are, beside inputs and output; an empty string is nowhere.

    removed: rows that went, Parquet; scratch: sketches, for phases and going on; against, index:
    the index that is read and the one that is written; replaced: indexed documents that better new
    ones replace, Parquet; redis: the URL of an index in Redis, read and written.
    """

    removed: str = ""
    scratch: str = ""
    phase: str = ""
    against: str = ""
    index: str = ""
    replaced: str = ""
    redis: str = ""

    def check(self, job: Job) -> None:
        """Raise UsageError for what does not go together."""
        if self.phase and self.phase not in PHASES:
            raise UsageError(f"--phase: {self.phase!r} (expected {', '.join(PHASES)})")
        if self.phase and not self.scratch:
            raise UsageError(f"--phase {self.phase}: give --scratch DIR, which all tasks see")
        if job.shard and self.phase not in ("sketch", "write"):
            raise UsageError("--shard: dedup compares all shards; give --phase sketch or write")
        if self.phase and job.options.get("decisions"):
            raise UsageError("--decisions: goes without --phase (run it as one job)")
        if self.replaced and not self.against:
            raise UsageError("--replaced: give the index with --against DIR")
        if self.redis and (self.against or self.index):
            raise UsageError(
                "--redis: reads and extends its index; not beside --against or --index"
            )
        removed.check_path(job, self.removed)
        removed.check_path(job, self.replaced, "--replaced")


def run_method(job: Job, options: Mapping[str, Any]) -> None:
    """`--method minhash` and `exact` with the command's options."""
    places = Places(**{name: options[name] for name in Places.__dataclass_fields__})
    run(job, DedupConfig.of(options), places)


def run(job: Job, config: DedupConfig, places: Places | None = None) -> None:
    """Deduplicate the job's inputs, or do one phase of it."""
    places = places or Places()
    config.check()
    places.check(job)
    if places.redis and (config.method, config.signatures) != ("minhash", "datasketch"):
        raise UsageError("--redis: its index is datasketch's; give --signatures datasketch")
    options = {name: value for name, value in job.options.items() if name not in _HOW}
    options |= {
        n: getattr(config, n) for n, v in options.items() if v is None and hasattr(config, n)
    }
    work = _Work(replace(job, options=options), config, places)
    phases = {"sketch": work.sketch, "compare": work.compare, "write": work.write}
    phases.get(places.phase, work.whole)()


@dataclass(frozen=True)
class _Work:
    job: Job  # its options are those that the output depends on
    config: DedupConfig
    places: Places

    def whole(self) -> None:
        """All three passes."""
        barrier.run(self.job, self.places.removed, self._decide, self._salt)

    def sketch(self) -> None:
        """Sketch our slice of the shards into the scratch directory."""
        sources = open_inputs(self.job, "document")
        index, count = self.job.shard or slurm_slice() or (0, 1)
        engine = self._engine()
        place = Path(self.places.scratch)
        sketch_into(place, sources[index::count], self.config, engine, self.job.seed,
                    self.job.jobs)  # fmt: skip

    def compare(self) -> None:
        """Decide from all sketches; the plan goes to the scratch directory."""
        sources = unified(open_inputs(self.job, "document"))
        corpus = load_corpus(Path(self.places.scratch), sources, self.config, self.job.seed)
        plan = self._plan(sources, corpus, self._plan_place(sources))
        if self.places.removed:
            made = barrier.removed_provenance(self.job, sources, self._salt(sources))
            removed.write_removed(
                self.places.removed, removal.decision(sources, plan).dropped, made
            )

    def write(self) -> None:
        """Write our slice of the shards by the plan."""
        sources = open_inputs(self.job, "document")
        plan = removal.Plan.open(self._plan_place(sources))
        salt = barrier.salt_of(sources, self._salt(sources))
        run_map(self.job, partial(removal.drop, plan=plan), sources=sources, salt=salt)

    def _plan_place(self, sources: list[Source]) -> Path:
        return Path(self.places.scratch) / f"plan-{barrier.salt_of(sources, self._salt(sources))}"

    def _salt(self, sources: list[Source]) -> str:
        """All that the decision depends on beside the inputs and the job's own options."""
        key = dedup_index.run_key(sources, self.config, self.job.seed)
        if self.places.redis:
            return f"{key} {self._redis(key, make=not self.job.dry_run).print}"
        if not self.places.against:
            return key
        index = dedup_index.open_index(self.places.against, self.config, self.job.seed, key)
        return f"{key} {index.print} {bool(self.places.replaced)}"

    def _redis(self, key: str, make: bool = True) -> RedisIndex:
        return RedisIndex(self.places.redis, self.config, self.job.seed, key, make)

    def _engine(self) -> str:
        engine = choose_engine(self.config.engine)
        notes.note(f"engine {engine}{_said_of_bands(self.config, self.job.seed)}")
        return engine

    def _decide(self, sources: list[Source]) -> barrier.Decision:
        engine, seed, jobs = self._engine(), self.job.seed, self.job.jobs
        if self.places.scratch:
            place = Path(self.places.scratch)
            sketch_into(place, sources, self.config, engine, seed, jobs)
            corpus = load_corpus(place, sources, self.config, seed)
        else:
            corpus = read_corpus(sources, self.config, engine, seed, jobs)
        told = bool(self.job.options.get("decisions"))
        return removal.decision(sources, self._plan(sources, corpus), told)

    def _plan(
        self, sources: list[Source], corpus: Corpus, place: Path | None = None
    ) -> removal.Plan:
        """Compare, extend the index, report what is replaced, and write the plan down."""
        key = dedup_index.run_key(sources, self.config, self.job.seed)
        indexed = 0
        if self.places.against:
            index = dedup_index.open_index(self.places.against, self.config, self.job.seed, key)
            corpus, indexed = dedup_index.load(index, corpus), index.rows
        prior = 0 if self.places.replaced else indexed
        engine = choose_engine(self.config.engine)
        if self.places.redis:
            found, corpus = redis_index.take_out(
                self._redis(key), sources, corpus, engine, self.job.jobs
            )
            return removal.Plan.write(corpus.starts, corpus, found, place)
        found = find_clusters(corpus, self.config, engine, prior)
        replaced = _replaced(found, indexed)
        if self.places.replaced:
            _write_replaced(self.places.replaced, corpus, found, replaced)
        if self.places.index:
            rows = indexed + np.flatnonzero(found.reason[indexed:] == KEPT)
            same = self.places.against and _same(self.places.index, self.places.against)
            gone = replaced if same and self.places.replaced else replaced[:0]
            dedup_index.write_index(
                self.places.index, corpus, rows, gone, self.config, self.job.seed, key
            )
        return removal.Plan.write(corpus.starts, corpus, found, place)


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _replaced(found: Clusters, indexed: int) -> np.ndarray:
    """Rows of the index whose cluster keeps a new document."""
    gone = np.flatnonzero(found.reason[:indexed] != KEPT)
    return gone[found.kept_row[found.of_row[gone]] >= indexed]


def _write_replaced(path: str, corpus: Corpus, found: Clusters, rows: np.ndarray) -> None:
    kept = found.kept_row[found.of_row[rows]]
    ordered, place = np.unique(kept, return_inverse=True)
    similarity = found.similarity[rows]
    table = pa.table({
        "id": corpus.take(rows),
        "replaced_by": corpus.take(ordered).take(pa.array(place.ravel())),
        "similarity": pa.array(similarity, mask=np.isnan(similarity)),
    })  # fmt: skip
    with open_file(path, table.schema) as writer:
        for batch in table.to_batches():
            writer.write(batch)


def _said_of_bands(config: DedupConfig, seed: int) -> str:
    sketch = config.sketch(seed)
    if not sketch.bands:
        return ""
    hits = lsh.hit_probability(CURVE, sketch.bands, sketch.rows).tolist()
    curve = ", ".join(f"{p:.3f} at {s:g}" for s, p in zip(CURVE, hits, strict=True))
    return f", {sketch.bands} bands of {sketch.rows}; chance to find a pair: {curve}"
