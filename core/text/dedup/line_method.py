"""`dedup --method line`: cut lines, paragraphs or runs of three sentences that occurred before.

Boilerplate repeats in pieces, not in whole documents: a piece with at least `min_copies` copies in
the corpus is kept where it occurs first and cut everywhere else. Pieces are equal as documents are
for `--method exact` (the same words and punctuation in the same order; white space, case and
accents ignored), by 128 bits of hash. `line` and `paragraph`: CCNet (Wenzek et al. 2019,
arXiv 1911.00359, section 3.1) and dolma; `sentences`: C4 (Raffel et al. 2020,
section 2.2) cuts every run of three sentences that occurred before; runs overlap, and a shorter
document has none.

Hashes are partitioned into files by value and processed file by file. In memory: `mem`, and 24
bytes per document. On disk: 24 bytes for the hash of each piece, and 8 for its byte range.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.dedup import phases
from sabia.core.text.dedup.first_pass import choose_engine
from sabia.core.text.dedup.phases import Arrays, Sketched, StreamMethod
from sabia.core.text.dedup.piece_bounds import BOUNDS
from sabia.core.text.dedup.repeated_spans import UnitBounds, UnitCorpus, partition_bytes
from sabia.core.text.dedup.span_cuts import CutPolicy, Cuts
from sabia.kernels.minhash.definitions import SHINGLE_BASE, SketchConfig
from sabia.kernels.minhash.interface import sketch
from sabia.kernels.substring.definitions import Repeats

RUNS = {"line": 1, "paragraph": 1, "sentences": 3}  # pieces that have to repeat together
_PIECE = np.dtype([("value", "u8"), ("low", "u8"), ("start", "i8")])
_EXACT = SketchConfig(bands=0)
_COPIES = 8  # of a partition of pieces in memory while it is processed


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied lines, paragraphs or runs of sentences out of the job's documents."""
    phases.run(LineMethod(job, options))


class LineMethod(StreamMethod):
    """The sketch: byte ranges of pieces, their number in each document, hashes of those that are
    compared."""

    def __init__(self, job: Job, options: DedupOptions) -> None:
        super().__init__(job, options)
        self.policy = CutPolicy(options.action, options.share, options.unit)

    def sketch_key(self) -> Any:
        """See phases.Method."""
        return [self.options.unit, self.options.min_words]

    def columns(self) -> list[str]:
        """See StreamMethod."""
        return ["text"]

    @cached_property
    def engine(self) -> str:
        """The implementation of the kernel, which is announced."""
        engine, copies = choose_engine(self.options.engine), self.options.min_copies
        notes.note(f"engine {engine}, {self.options.unit} pieces with {copies} copies or more")
        return engine

    def read(self, batch: pa.RecordBatch, name: str) -> Arrays:
        """See StreamMethod."""
        return _pieces(batch, self.options, self.engine)

    def compare(
        self, sources: list[Source], sketches: Iterator[Sketched], directory: Path | None
    ) -> Cuts:
        """See StreamMethod."""
        options, jobs, run = self.options, self.job.jobs, RUNS[self.options.unit]
        unit_bounds = UnitBounds()
        corpus = UnitCorpus(unit_bounds, _PIECE, len(sources))
        for index, ids, (pieces, counts, records) in sketches:
            unit_bounds.add(pieces)
            corpus.add(index, ids, counts, records)

        def find_repeats(item: tuple[np.ndarray, int]) -> Repeats:
            return _copies(item[0], options.min_copies, run)

        limit = partition_bytes(options.mem // _COPIES, jobs)
        return corpus.cuts(find_repeats, limit, run, jobs, self.policy, directory)

    def open_plan(self, directory: Path) -> Cuts:
        """See phases.Method."""
        return Cuts.open(directory, self.policy)


def _pieces(
    batch: pa.RecordBatch, options: DedupOptions, engine: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(byte ranges uint32[m, 2], counts int64[rows], records _PIECE[r])."""
    texts = batch.column("text")
    data, bounds = text_buffers(texts)
    edges = BOUNDS[options.unit](texts)
    row = np.searchsorted(bounds, edges[:-1], side="right") - 1
    unit_bounds = np.stack((edges[:-1], edges[1:]), axis=1) - bounds[row][:, None]
    counts = np.bincount(row, minlength=len(texts))
    sketches = sketch(data, edges, _EXACT, engine)
    blank = sketch(np.zeros(0, np.uint8), np.zeros(2, np.int64), _EXACT, engine).exact[0]
    # pieces of enough words that are not only white space
    compared = (sketches.words >= options.min_words) & (sketches.exact != blank).any(axis=1)
    run = RUNS[options.unit]
    # a run is `run` pieces of one document that are all compared
    m = max(len(row) - run + 1, 0)
    whole = np.ones(m, bool)
    for step in range(run):
        whole &= compared[step : step + m] & (row[step : step + m] == row[:m])
    heads = np.flatnonzero(whole)
    records = np.empty(len(heads), _PIECE)
    records["start"] = heads
    for lane, name in enumerate(("value", "low")):
        records[name] = _combined(sketches.exact[:, lane], heads, run)
    return unit_bounds.astype(np.uint32), counts, records


def _combined(lane: np.ndarray, heads: np.ndarray, run: int) -> np.ndarray:
    """uint64[h]: one hash of the hashes of `run` pieces; that of a single piece is its own."""
    value = lane[heads]
    for step in range(1, run):
        value = (value ^ (value >> np.uint64(29))) * np.uint64(SHINGLE_BASE) + lane[heads + step]
    return value


def _copies(records: np.ndarray, min_copies: int, run: int) -> Repeats:
    """Pieces with enough copies that start after the end of the first."""
    ordered = records[np.lexsort((records["low"], records["value"]))]  # stable: pieces ascend
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered["value"][1:] != ordered["value"][:-1]
    is_first[1:] |= ordered["low"][1:] != ordered["low"][:-1]
    heads = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    first = ordered["start"][heads][group]
    repeated = np.diff(np.append(heads, len(ordered)))[group] >= min_copies
    copies = repeated & (first + run <= ordered["start"])
    at = ordered["start"][copies]
    return Repeats(at, np.ones_like(at), first[copies])
