"""`dedup --method substring`: spans of text that occur before, found exactly and cut.

A span of N units (tokens of a tokenizer, or bytes) is a copy where the same units stand earlier in
the corpus, ending before it begins; a position is cut if any copy covers it. So the first
occurrence stays, whatever the shards or workers, and every byte cut has an earlier one that stays.
sabia.kernels.substring defines repeats and proves that filing windows by their least k-gram loses
none. Passes: lay the units down in a temporary file and file their windows by hash; settle the
files, a bounded part at a time; order what was found by document; write. Lee et al. 2021,
"Deduplicating training data makes language models better" (arXiv 2107.06499), section 4.1.

On disk: the units, and 24 bytes for about 4 / N of them. In memory: `mem` for files and tables (a
file of windows that share one k-gram is read whole), and 24 bytes a document.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.dedup import barrier
from sabia.core.text.dedup.first_pass import choose_engine, first_pass
from sabia.core.text.dedup.hash_partitions import gathered, part_of
from sabia.core.text.dedup.repeated_spans import Laid
from sabia.core.text.dedup.span_cuts import Policy, decision
from sabia.core.text.dedup.span_units import Bytes, Read, SpanUnits, Tokens
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.kernels import substring
from sabia.kernels.substring import RECORD, Repeats

_COPIES = 4  # of a file of records in memory while it is settled
_TABLE_BYTES = 64  # of a table for one window, while it grows


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied spans out of the job's documents."""
    units: SpanUnits = Bytes()
    if options.tokenizer:
        units = Tokens(load_tokenizer(options.tokenizer, "--tokenizer"))
    barrier.run(job, options.removed, partial(_decide, job, options, units), units.fingerprint)


def _decide(
    job: Job, options: DedupOptions, units: SpanUnits, sources: list[Source]
) -> barrier.Decision:
    engine = choose_engine(options.engine)
    notes.note(f"engine {engine}, spans of {options.span} {units.name}")
    laid = _lay_down(sources, units, options.span, engine, job.jobs)
    values = units.values(int(laid.starts[-1]))

    def settle(item: tuple[np.ndarray, int]) -> Repeats:
        records, groups = gathered(*item)
        largest = np.add.reduceat(records["count"], groups[:-1]).max()
        passes = -(-int(largest) * _TABLE_BYTES * job.jobs // options.mem)
        return substring.find_repeats(values, records, groups, options.span, passes, engine)

    cuts = laid.cuts(settle, part_of(options.mem // _COPIES, job.jobs), options.span, job.jobs)
    return decision(sources, cuts, Policy(options.action, options.share, "substring"))


def _lay_down(
    sources: Sequence[Source], units: SpanUnits, span: int, engine: str, jobs: int
) -> Laid:
    """First pass: units on disk, windows filed by the hash of their least k-gram."""
    laid = Laid(units, RECORD, len(sources))

    def work(batch: pa.RecordBatch) -> tuple[Read, np.ndarray]:
        read = units.read(batch.column("text"))
        return read, substring.file_windows(read.values, read.offsets, span, engine)

    for index, batch, (read, records) in first_pass(sources, ("id", "text"), work, jobs):
        units.keep(read)
        laid.add(index, batch.column("id"), np.diff(read.offsets), records)
    return laid
