"""`dedup --method line`: lines, paragraphs or runs of three sentences that occur before, cut.

Boilerplate repeats in pieces, not in documents: a piece with at least `min_copies` copies in the
corpus stays where it first stands and is cut everywhere else. Pieces are equal as documents are
for `--method exact` (the same words and marks in the same order; spacing, case and accents aside),
by 128 bits of hash. `line` and `paragraph`: CCNet (Wenzek et al. 2019, arXiv 1911.00359, section
3.1) and dolma; `sentences`: C4 (Raffel et al. 2020, section 2.2) cuts every run of three sentences
that occurs before; runs overlap, and a document of fewer has none.

Hashes are spread over files by value and settled file by file, so memory holds `mem` and 24 bytes
a document; on disk are 24 bytes for each piece, and 8 for its place.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.shards.text_buffers import text_buffers
from sabia.core.text.dedup import barrier
from sabia.core.text.dedup.first_pass import choose_engine, first_pass
from sabia.core.text.dedup.hash_partitions import part_of
from sabia.core.text.dedup.piece_bounds import BOUNDS
from sabia.core.text.dedup.repeated_spans import Laid, Places
from sabia.core.text.dedup.span_cuts import Policy, decision
from sabia.kernels import minhash
from sabia.kernels.minhash import SHINGLE_BASE, SketchConfig
from sabia.kernels.substring import Repeats

RUNS = {"line": 1, "paragraph": 1, "sentences": 3}  # pieces that have to repeat together
_PIECE = np.dtype([("value", "u8"), ("low", "u8"), ("start", "i8")])
_EXACT = SketchConfig(bands=0)
_COPIES = 8  # of a file of pieces in memory while it is settled


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied lines, paragraphs or runs of sentences out of the job's documents."""
    barrier.run(job, options.removed, partial(_decide, job, options))


def _decide(job: Job, options: DedupOptions, sources: list[Source]) -> barrier.Decision:
    engine = choose_engine(options.engine)
    notes.note(f"engine {engine}, {options.unit} pieces with {options.min_copies} copies or more")
    run = RUNS[options.unit]

    def settle(item: tuple[np.ndarray, int]) -> Repeats:
        return _copies(item[0], options.min_copies, run)

    laid = _lay_down(sources, options, engine, job.jobs)
    cuts = laid.cuts(settle, part_of(options.mem // _COPIES, job.jobs), run, job.jobs)
    return decision(sources, cuts, Policy(options.action, options.share, options.unit))


def _lay_down(sources: Sequence[Source], options: DedupOptions, engine: str, jobs: int) -> Laid:
    """First pass: the places of all pieces, and the hashes of those that count."""
    places = Places()
    laid = Laid(places, _PIECE, len(sources))

    work = partial(_pieces, options=options, engine=engine)
    for index, batch, found in first_pass(sources, ("id", "text"), work, jobs):
        pieces, counts, records = found
        places.add(pieces)
        laid.add(index, batch.column("id"), counts, records)
    return laid


def _pieces(
    batch: pa.RecordBatch, options: DedupOptions, engine: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(places uint32[m, 2], counts int64[rows], records _PIECE[r])."""
    texts = batch.column("text")
    data, bounds = text_buffers(texts)
    edges = BOUNDS[options.unit](texts)
    row = np.searchsorted(bounds, edges[:-1], side="right") - 1
    places = np.stack((edges[:-1], edges[1:]), axis=1) - bounds[row][:, None]
    counts = np.bincount(row, minlength=len(texts))
    sketches = minhash.sketch(data, edges, _EXACT, engine)
    counts_for = _counts(sketches, options.min_words, engine)
    run = RUNS[options.unit]
    heads = np.flatnonzero(_whole_runs(counts_for, row, run))
    records = np.empty(len(heads), _PIECE)
    records["start"] = heads
    for lane, name in enumerate(("value", "low")):
        records[name] = _combined(sketches.exact[:, lane], heads, run)
    return places.astype(np.uint32), counts, records


def _counts(sketches: minhash.Sketches, min_words: int, engine: str) -> np.ndarray:
    """bool[m]: pieces of enough words, and not of white space alone."""
    blank = minhash.sketch(np.zeros(0, np.uint8), np.zeros(2, np.int64), _EXACT, engine).exact[0]
    return (sketches.words >= min_words) & (sketches.exact != blank).any(axis=1)


def _whole_runs(counts_for: np.ndarray, row: np.ndarray, run: int) -> np.ndarray:
    """bool[m - run + 1]: `run` pieces of one document, from here on, all of which count."""
    m = max(len(row) - run + 1, 0)
    whole = np.ones(m, bool)
    for step in range(run):
        whole &= counts_for[step : step + m] & (row[step : step + m] == row[:m])
    return whole


def _combined(lane: np.ndarray, heads: np.ndarray, run: int) -> np.ndarray:
    """uint64[h]: one hash of the hashes of `run` pieces; that of a single piece is its own."""
    value = lane[heads]
    for step in range(1, run):
        value = (value ^ (value >> np.uint64(29))) * np.uint64(SHINGLE_BASE) + lane[heads + step]
    return value


def _copies(records: np.ndarray, min_copies: int, run: int) -> Repeats:
    """Pieces with enough copies that begin when the first has ended."""
    ordered = records[np.lexsort((records["low"], records["value"]))]  # stable: pieces ascend
    fresh = np.ones(len(ordered), bool)
    fresh[1:] = (ordered["value"][1:] != ordered["value"][:-1]) | (
        ordered["low"][1:] != ordered["low"][:-1]
    )
    heads = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    first = ordered["start"][heads][group]
    many = np.diff(np.append(heads, len(ordered)))[group] >= min_copies
    copies = many & (first + run <= ordered["start"])
    at = ordered["start"][copies]
    return Repeats(at, np.ones_like(at), first[copies])
