"""Exact and near-duplicate removal: keep one document of each cluster, say what went and why.

Exact duplicates have the same words and marks in the same order (spacing, case and accents
aside). Near-duplicates: MinHash candidates over word n-grams; with verification a pair counts
only if the exact Jaccard similarity of its n-gram sets reaches the threshold. Three passes over
replayable inputs: sketch, compare candidates, write. Broder 1997; Lee et al. 2021.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from sabia.core import notes
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text import barrier, lsh, removal
from sabia.core.text.clusters import find_clusters
from sabia.core.text.dedup_config import DedupConfig
from sabia.core.text.sketch_pass import read_corpus
from sabia.core.text.sketching import choose_engine

CURVE = (0.5, 0.6, 0.7, 0.8, 0.9)


def run_method(job: Job, options: Mapping[str, Any]) -> None:
    """`--method minhash` and `exact` with the command's options."""
    run(job, DedupConfig.of(options), options["removed"])


def run(job: Job, config: DedupConfig, removed_path: str = "") -> None:
    """Deduplicate the job's inputs; `removed_path` is a Parquet file for the rows that went."""
    config.check()
    barrier.run(job, removed_path, partial(_decide, job, config))


def _decide(job: Job, config: DedupConfig, sources: list[Source]) -> barrier.Decision:
    engine, sketch = choose_engine(config.engine), config.sketch(job.seed)
    said = f"engine {engine}"
    if sketch.bands:
        hits = lsh.hit_probability(CURVE, sketch.bands, sketch.rows).tolist()
        curve = ", ".join(f"{p:.3f} at {s:g}" for s, p in zip(CURVE, hits, strict=True))
        said += f", {sketch.bands} bands of {sketch.rows}; chance to find a pair: {curve}"
    notes.note(said)
    corpus = read_corpus(sources, config, engine, job.seed, job.jobs)
    plan = removal.Plan.write(corpus.starts, corpus, find_clusters(corpus, config, engine))
    return removal.decision(sources, plan)
