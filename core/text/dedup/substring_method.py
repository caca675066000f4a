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

from functools import partial

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.dedup import barrier
from sabia.core.text.dedup.first_pass import choose_engine, first_pass
from sabia.core.text.dedup.hash_partitions import group_by_value, partition_bytes
from sabia.core.text.dedup.repeated_spans import UnitCorpus
from sabia.core.text.dedup.span_cuts import CutPolicy, decision
from sabia.core.text.dedup.span_units import ByteUnits, SpanUnits, TokenUnits, UnitsOfTexts
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.kernels.substring.definitions import RECORD, Repeats
from sabia.kernels.substring.interface import file_windows
from sabia.kernels.substring.interface import find_repeats as find_substring_repeats

_COPIES = 4  # of a partition of records in memory while it is processed
_TABLE_BYTES = 64  # per window of a hash table, while it grows


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied spans out of the job's documents."""
    units: SpanUnits = ByteUnits()
    if options.tokenizer:
        units = TokenUnits(load_tokenizer(options.tokenizer, "--tokenizer"))
    barrier.run(job, options.removed, partial(_decide, job, options, units), units.fingerprint)


def _decide(
    job: Job, options: DedupOptions, units: SpanUnits, sources: list[Source]
) -> barrier.Decision:
    engine = choose_engine(options.engine)
    notes.note(f"engine {engine}, spans of {options.span} {units.name}")
    corpus = UnitCorpus(units, RECORD, len(sources))

    def work(batch: pa.RecordBatch) -> tuple[UnitsOfTexts, np.ndarray]:
        read = units.read(batch.column("text"))
        return read, file_windows(read.values, read.offsets, options.span, engine)

    # first pass: units to disk, windows partitioned by the hash of their least k-gram
    for index, batch, (read, records) in first_pass(sources, ("id", "text"), work, job.jobs):
        units.keep(read)
        corpus.add(index, batch.column("id"), np.diff(read.offsets), records)
    values = units.values(int(corpus.starts[-1]))

    def find_repeats(item: tuple[np.ndarray, int]) -> Repeats:
        records, groups = group_by_value(*item)
        largest = np.add.reduceat(records["count"], groups[:-1]).max()
        passes = -(-int(largest) * _TABLE_BYTES * job.jobs // options.mem)
        return find_substring_repeats(values, records, groups, options.span, passes, engine)

    limit = partition_bytes(options.mem // _COPIES, job.jobs)
    cuts = corpus.cuts(find_repeats, limit, options.span, job.jobs)
    return decision(sources, cuts, CutPolicy(options.action, options.share, "substring"))
