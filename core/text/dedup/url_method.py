"""`dedup --method url`: one document of each canonical URL.

URLs are compared in canonical form (sabia.core.urls: no fragment, no tracking or session
parameters, normalized escapes), by 128 bits of BLAKE2b. Documents without an http(s) URL are never
duplicates. In memory: 32 bytes per document.
"""

import hashlib
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
from sabia.core.urls import canonical, comparison_key


def run(job: Job, options: DedupOptions) -> None:
    """Keep one document of each canonical URL."""
    barrier.run(job, options.removed, partial(_decide, job, options.keep))


def _decide(job: Job, rule: str, sources: list[Source]) -> barrier.Decision:
    ids = IdSpool(sources=len(sources))
    key_parts, known_parts = [np.empty((0, 2), np.uint64)], [np.empty(0, bool)]
    priorities = list[np.ndarray]()
    columns = list(dict.fromkeys(["id", "url", *keep_rules.columns(rule)]))
    for index, batch, (key, has_url) in first_pass(sources, columns, _url_keys, job.jobs):
        ids.append(batch.column("id"), index)
        key_parts.append(key)
        known_parts.append(has_url)
        priorities.append(keep_rules.priorities(batch, rule))
    keys, known = np.concatenate(key_parts), np.concatenate(known_parts)
    rows = np.flatnonzero(known)
    if len(known) and not len(rows):
        raise BadData("--method url: no document has an http(s) url")
    notes.note(f"{len(known) - len(rows):,} documents without a URL are kept")
    component = np.arange(len(known))
    component[rows] = rows[first_of_equal(keys[rows])]
    clusters = choose_kept(component, keep_rules.all_priorities(priorities, rule), URL)
    return removal_pass.decision(sources, removal_pass.RemovalPlan.write(ids, clusters))


def _url_keys(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """(uint64[n, 2] of canonical URLs, bool[n] where there is one)."""
    forms = [None if url is None else canonical(url) for url in batch.column("url").to_pylist()]
    known = np.array([form is not None for form in forms], bool)
    keys = (comparison_key(form or "") for form in forms)
    hashed = (hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys)
    return np.frombuffer(b"".join(hashed), np.uint64).reshape(-1, 2), known
