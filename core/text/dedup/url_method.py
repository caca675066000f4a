"""`dedup --method url`: one document of each canonical URL.

URLs are compared in canonical form (sabia.core.urls: no fragment, no tracking or session
parameters, normalized escapes), by 128 bits of BLAKE2b. Documents without an http(s) URL are never
duplicates. In memory: 32 bytes per document.
"""

import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import IdSpool
from sabia.core.text.dedup import barrier, keep_rules, removal_pass
from sabia.core.text.dedup.clusters import URL, choose_kept, first_of_equal
from sabia.core.text.dedup.first_pass import first_pass
from sabia.core.urls import canonical


def run(job: Job, options: DedupOptions) -> None:
    """Keep one document of each canonical URL."""
    barrier.run(job, options.removed, partial(_decide, job, options.keep))


def _decide(job: Job, rule: str, sources: list[Source]) -> barrier.Decision:
    keys, known, priority, ids = _read(sources, rule, job.jobs)
    rows = np.flatnonzero(known)
    if len(known) and not len(rows):
        raise BadData("--method url: no document has an http(s) url")
    notes.note(f"{len(known) - len(rows):,} documents without a URL are kept")
    component = np.arange(len(known))
    component[rows] = rows[first_of_equal(keys[rows])]
    clusters = choose_kept(component, priority, URL)
    return removal_pass.decision(sources, removal_pass.RemovalPlan.write(ids, clusters))


def _read(
    sources: Sequence[Source], rule: str, jobs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, IdSpool]:
    """Of n rows: (keys uint64[n, 2], whether known bool[n], priority float64[n], ids)."""
    ids = IdSpool(sources=len(sources))
    keys, known, priority = [np.empty((0, 2), np.uint64)], [np.empty(0, bool)], []
    columns = list(dict.fromkeys(["id", "url", *keep_rules.columns(rule)]))

    for index, batch, (key, known_part) in first_pass(sources, columns, _url_keys, jobs):
        ids.append(batch.column("id"), index)
        keys.append(key)
        known.append(known_part)
        priority.append(keep_rules.priorities(batch, rule))
    return (
        np.concatenate(keys),
        np.concatenate(known),
        keep_rules.all_priorities(priority, rule),
        ids,
    )


def _url_keys(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """(uint64[n, 2] of canonical URLs, bool[n] where there is one)."""
    forms = [None if url is None else canonical(url) for url in batch.column("url").to_pylist()]
    known = np.array([form is not None for form in forms], bool)
    hashed = (hashlib.blake2b((form or "").encode(), digest_size=16).digest() for form in forms)
    return np.frombuffer(b"".join(hashed), np.uint64).reshape(-1, 2), known
