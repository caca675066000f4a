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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.progress import progress
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text import barrier
from sabia.core.text.cuts import Cuts, Policy, decision
from sabia.core.text.hashed_files import HashedFiles, gathered, part_of
from sabia.core.text.repeats import ByDocument
from sabia.core.text.sketching import IdSpool, batches_of, choose_engine, in_order
from sabia.core.text.span_units import Bytes, SpanUnits, Tokens
from sabia.kernels import substring
from sabia.kernels.substring import RECORD, Repeats

_COPIES = 4  # of a file of records in memory while it is settled
_TABLE_BYTES = 64  # of a table for one window, while it grows


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied spans out of the job's documents."""
    units = Tokens.load(options.tokenizer) if options.tokenizer else Bytes()
    barrier.run(job, options.removed, partial(_decide, job, options, units), units.fingerprint)


def _decide(
    job: Job, options: DedupOptions, units: SpanUnits, sources: list[Source]
) -> barrier.Decision:
    engine = choose_engine(options.engine)
    notes.note(f"engine {engine}, spans of {options.span} {units.name}")
    laid = _lay_down(sources, units, options.span, engine, job.jobs)
    cuts = _find_cuts(laid, options, engine, job.jobs)
    return decision(sources, cuts, Policy(options.action, options.share, "substring"))


class _Laid(NamedTuple):
    """The corpus as units: `starts` int64[n + 1] of documents, row_starts int64[sources + 1]."""

    units: SpanUnits
    starts: np.ndarray
    row_starts: np.ndarray
    ids: IdSpool
    files: HashedFiles


def _lay_down(
    sources: Sequence[Source], units: SpanUnits, span: int, engine: str, jobs: int
) -> _Laid:
    """First pass: units on disk, windows filed by the hash of their least k-gram."""
    files, ids, base = HashedFiles(RECORD), IdSpool(), 0
    starts, rows = [np.zeros(1, np.int64)], np.zeros(len(sources) + 1, np.int64)

    def work(item: tuple[int, pa.RecordBatch]) -> tuple[int, pa.Array, Any, np.ndarray]:
        read = units.read(item[1].column("text"))
        records = substring.file_windows(read.values, read.offsets, span, engine)
        return item[0], item[1].column("id"), read, records

    with progress(None, "dedup: reading") as bar:
        for index, names, read, records in in_order(
            work, batches_of(sources, ("id", "text")), jobs
        ):
            units.keep(read)
            ids.append(names)
            records["start"] += base
            files.add(records)
            starts.append(read.offsets[1:] - read.offsets[0] + base)
            base = int(starts[-1][-1])
            rows[index + 1] += len(names)
            bar.advance(len(names))
    return _Laid(units, np.concatenate(starts), np.cumsum(rows), ids, files)


def _find_cuts(laid: _Laid, options: DedupOptions, engine: str, jobs: int) -> Cuts:
    """Settle file after file, then go through the documents in order."""
    values = laid.units.values(int(laid.starts[-1]))
    limit = part_of(options.mem // _COPIES, jobs)
    runs = ByDocument(laid.starts)

    def settle(item: tuple[np.ndarray, int]) -> Repeats:
        records, groups = gathered(*item)
        largest = np.add.reduceat(records["count"], groups[:-1]).max()
        passes = -(-int(largest) * _TABLE_BYTES * jobs // options.mem)
        return substring.find_repeats(values, records, groups, options.span, passes, engine)

    for repeats in in_order(settle, laid.files.files(limit), jobs):
        runs.add(repeats)
    spool, count = runs.cuts(laid.units, options.span)
    return Cuts.write(spool, count, laid.ids, laid.row_starts)
