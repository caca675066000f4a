"""Exact and near-duplicate removal: keep one document of each cluster, say what went and why.

Exact duplicates have the same words and marks in the same order (spacing, case and accents
aside). Near-duplicates: MinHash candidates over word n-grams; with verification a pair counts
only if the exact Jaccard similarity of its n-gram sets reaches the threshold. Three passes over
replayable inputs: sketch, compare candidates, write. Broder 1997; Lee et al. 2021.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sabia.core import notes
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import holds, is_current, provenance
from sabia.core.shards.mapping import run_map
from sabia.core.shards.sources import Source
from sabia.core.text import lsh, removal, removed
from sabia.core.text.clusters import find_clusters
from sabia.core.text.dedup_config import DedupConfig
from sabia.core.text.sketching import choose_engine, read_corpus

CURVE = (0.5, 0.6, 0.7, 0.8, 0.9)


def run_method(job: Job, options: Mapping[str, Any]) -> None:
    """`--method minhash` and `exact` with the command's options."""
    run(job, DedupConfig.of(options), options["removed"])


def run(job: Job, config: DedupConfig, removed_path: str = "") -> None:
    """Deduplicate the job's inputs; `removed_path` is a Parquet file for the rows that went."""
    config.check()
    removed.check_path(removed_path)
    sources = open_inputs(job, "document")
    salt = _salt(sources)
    prints = [source.fingerprint() for source in sources]
    made = provenance(job, "removed", prints, salt)
    written = not removed_path or (not job.force and holds(removed_path, made))
    if job.dry_run or (written and is_current(job, sources, salt)):
        run_map(job, partial(removal.drop, plan=None), sources=sources, salt=salt)
        return
    plan = _decide(job, config, sources)
    if removed_path:
        removal.write_dropped(removed_path, sources, plan, made)
    transform = partial(removal.drop, plan=plan)
    run_map(job, transform, sources=sources, salt=salt, next_step="sabia tokenize")


def _salt(sources: Sequence[Source]) -> str:
    """Every output shard depends on all inputs and their order."""
    text = " ".join(source.fingerprint() for source in sources)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _decide(job: Job, config: DedupConfig, sources: Sequence[Source]) -> removal.Plan:
    engine, sketch = choose_engine(config.engine), config.sketch(job.seed)
    said = f"engine {engine}"
    if sketch.bands:
        hits = lsh.hit_probability(CURVE, sketch.bands, sketch.rows).tolist()
        curve = ", ".join(f"{p:.3f} at {s:g}" for s, p in zip(CURVE, hits, strict=True))
        said += f", {sketch.bands} bands of {sketch.rows}; chance to find a pair: {curve}"
    notes.note(said)
    corpus = read_corpus(sources, sketch, engine, job.jobs, config.score)
    found = find_clusters(corpus, sources, config, engine, job.jobs)
    return removal.Plan.write(corpus.starts, corpus.ids, found)
