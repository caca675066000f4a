"""`dedup --method substring`: find spans of text that occurred before, exactly, and cut them.

A span of N units (tokens of a tokenizer, or bytes) is a copy if the same units occur earlier in
the corpus and end before it starts; a position is cut if any copy covers it. So the first
occurrence is kept, whatever the shards or workers, and every byte that is cut occurs earlier.
The substring kernel defines repeats and proves that partitioning windows by their least k-gram
loses none. Passes: write the units to a temporary file and partition their windows by hash; find
repeats, one partition of bounded size at a time; order them by document; write. Lee et al. 2021,
"Deduplicating training data makes language models better" (arXiv 2107.06499), section 4.1.

On disk: the units, and 24 bytes for about 4 / N of them. In memory: `mem` for partitions and tables
(windows that share one k-gram are read together), and 24 bytes per document.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.dedup import phases
from sabia.core.text.dedup.first_pass import choose_engine
from sabia.core.text.dedup.hash_partitions import group_by_value, partition_bytes
from sabia.core.text.dedup.repeated_spans import UnitCorpus
from sabia.core.text.dedup.sketch_stream import Arrays, Sketched, StreamMethod
from sabia.core.text.dedup.span_cuts import CutPolicy, Cuts
from sabia.core.text.dedup.span_units import ByteUnits, SpanUnits, TokenUnits
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.kernels.substring.definitions import RECORD, Repeats
from sabia.kernels.substring.interface import file_windows
from sabia.kernels.substring.interface import find_repeats as find_substring_repeats

_COPIES = 4  # of a partition of records in memory while it is processed
_TABLE_BYTES = 64  # per window of a hash table, while it grows
_LEAST_TABLE = 1 << 20  # bytes: smaller tables need more passes, each of which takes memory too


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied spans out of the job's documents."""
    phases.run(SubstringMethod(job, options))


class SubstringMethod(StreamMethod):
    """The sketch: units, their number in each document, byte ranges of tokens, window records."""

    def __init__(self, job: Job, options: DedupOptions) -> None:
        super().__init__(job, options)
        self.units: SpanUnits = ByteUnits()
        if options.tokenizer:
            self.units = TokenUnits(load_tokenizer(options.tokenizer, "--tokenizer"))
        self.policy = CutPolicy(options.action, options.share, "substring")

    def salt(self, sources: list[Source]) -> str:
        """See phases.Method."""
        return self.units.fingerprint

    def sketch_key(self) -> Any:
        """See phases.Method."""
        return [self.units.fingerprint, self.options.span]

    def columns(self) -> list[str]:
        """See StreamMethod."""
        return ["text"]

    @cached_property
    def engine(self) -> str:
        """The implementation of the kernel, which is announced."""
        engine = choose_engine(self.options.engine)
        notes.note(f"engine {engine}, spans of {self.options.span} {self.units.name}")
        return engine

    def read(self, batch: pa.RecordBatch, name: str) -> Arrays:
        """See StreamMethod."""
        values, offsets, bounds = self.units.read(batch.column("text"))
        records = file_windows(values, offsets, self.options.span, self.engine)
        return values, np.diff(offsets), bounds, records

    def compare(
        self, sources: list[Source], sketches: Iterator[Sketched], directory: Path | None
    ) -> Cuts:
        """See StreamMethod."""
        options, jobs, engine = self.options, self.job.jobs, self.engine
        # units to disk, windows partitioned by the hash of their least k-gram
        corpus = UnitCorpus(self.units, RECORD, len(sources))
        for index, ids, (values, counts, bounds, records) in sketches:
            self.units.keep(values, bounds)
            corpus.add(index, ids, counts, records)
        units = self.units.values(int(corpus.starts[-1]))

        def find_repeats(item: tuple[np.ndarray, int]) -> Repeats:
            records, groups = group_by_value(*item)
            largest = np.add.reduceat(records["count"], groups[:-1]).max()
            passes = -(-int(largest) * _TABLE_BYTES // max(options.mem // jobs, _LEAST_TABLE))
            return find_substring_repeats(units, records, groups, options.span, passes, engine)

        limit = partition_bytes(options.mem // _COPIES, jobs)
        return corpus.cuts(find_repeats, limit, options.span, jobs, self.policy, directory)

    def open_plan(self, directory: Path) -> Cuts:
        """See phases.Method."""
        return Cuts.open(directory, self.policy)
