"""`dedup --method url`: one document of each canonical URL.

URLs are compared in canonical form (sabia.core.urls: no fragment, no tracking or session
parameters, normalized escapes), by 128 bits of BLAKE2b. Documents without an http(s) URL are never
duplicates. In memory: 32 bytes per document.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import IdSpool
from sabia.core.text.dedup import keep_rules, phases
from sabia.core.text.dedup.clusters import URL, choose_kept, first_of_equal
from sabia.core.text.dedup.phases import Arrays, Sketched, StreamMethod
from sabia.core.text.dedup.removal_pass import RemovalPlan
from sabia.core.urls import canonical, comparison_key


def run(job: Job, options: DedupOptions) -> None:
    """Keep one document of each canonical URL."""
    phases.run(UrlMethod(job, options))


class UrlMethod(StreamMethod):
    """The sketch: a hash of the URL, whether there is one, and the priority of each document."""

    def salt(self, sources: list[Source]) -> str:
        """See phases.Method."""
        return f"keep {keep_rules.MEASURE}"

    def sketch_key(self) -> Any:
        """See phases.Method."""
        return [self.options.keep, keep_rules.MEASURE]

    def columns(self) -> list[str]:
        """See StreamMethod."""
        return ["url", *keep_rules.columns(self.options.keep)]

    def read(self, batch: pa.RecordBatch, name: str) -> Arrays:
        """See StreamMethod."""
        return *_url_keys(batch), keep_rules.priorities(batch, self.options.keep)

    def compare(
        self, sources: list[Source], sketches: Iterator[Sketched], directory: Path | None
    ) -> RemovalPlan:
        """See StreamMethod."""
        ids = IdSpool(sources=len(sources))
        parts: list[Arrays] = [(np.empty((0, 2), np.uint64), np.empty(0, bool), np.empty(0))]
        for index, ids_of_batch, arrays in sketches:
            ids.append(ids_of_batch, index)
            parts.append(arrays)
        keys, known, priority = (np.concatenate(column) for column in zip(*parts, strict=True))
        rows = np.flatnonzero(known)
        if len(known) and not len(rows):
            raise BadData("--method url: no document has an http(s) url")
        if len(rows) < len(known):
            notes.note(f"{len(known) - len(rows):,} documents without a URL are kept")
        component = np.arange(len(known))
        component[rows] = rows[first_of_equal(keys[rows])]
        keep_rules.check_some([priority], self.options.keep)
        clusters = choose_kept(component, lambda: iter([(0, priority)]), _by_url)
        return RemovalPlan.write(ids, clusters, directory)

    def open_plan(self, directory: Path) -> RemovalPlan:
        """See phases.Method."""
        return RemovalPlan.open(directory)


def _by_url(_removed: np.ndarray, _kept: np.ndarray) -> tuple[int, float]:
    """The reason and the similarity, which is unknown, of all removed rows."""
    return URL, np.nan


def _url_keys(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """(uint64[n, 2] of canonical URLs, bool[n] where there is one)."""
    forms = [None if url is None else canonical(url) for url in batch.column("url").to_pylist()]
    known = np.array([form is not None for form in forms], bool)
    keys = (comparison_key(form or "") for form in forms)
    hashed = (hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys)
    return np.frombuffer(b"".join(hashed), np.uint64).reshape(-1, 2), known
