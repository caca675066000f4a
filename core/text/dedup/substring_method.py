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

Units, and the conversion of spans of units to byte ranges. Bytes: the UTF-8 text itself. Tokens:
ids of a tokenizer, special tokens encoded as ordinary text; the bytes of a token are those of the
characters that no other token covers. A cut never splits a character.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import Spool
from sabia.core.text.dedup import phases
from sabia.core.text.dedup.first_pass import choose_engine
from sabia.core.text.dedup.phases import Arrays, Sketched, StreamMethod
from sabia.core.text.dedup.piece_bounds import byte_positions
from sabia.core.text.dedup.repeated_spans import (
    UnitBounds,
    UnitCorpus,
    group_by_value,
    partition_bytes,
)
from sabia.core.text.dedup.span_cuts import CutPolicy, Cuts
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.kernels.substring.definitions import RECORD, Repeats
from sabia.kernels.substring.interface import file_windows
from sabia.kernels.substring.interface import find_repeats as find_substring_repeats

_COPIES = 4  # of a partition of records in memory while it is processed
_TABLE_BYTES = 64  # per window of a hash table, while it grows
_LEAST_TABLE = 1 << 20  # bytes: smaller tables need more passes, each of which takes memory too


class UnitsOfTexts(NamedTuple):
    """Units of some texts: values[offsets[i]:offsets[i + 1]], where offsets[0] is 0."""

    values: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray  # uint32[units, 2]: byte range of each token in its text; none of bytes


class ByteUnits:
    """Units are bytes."""

    name, fingerprint = "bytes", ""

    def __init__(self) -> None:
        self.spool, self.array = Spool(), np.empty(0, np.uint8)

    def read(self, texts: pa.Array) -> UnitsOfTexts:
        """The units of texts; safe to call from several threads."""
        data, offsets = text_buffers(texts)
        none = np.empty((0, 2), np.uint32)
        return UnitsOfTexts(data[offsets[0] : offsets[-1]], offsets - offsets[0], none)

    def keep(self, values: np.ndarray, bounds: np.ndarray) -> None:
        """Append units to those on disk."""
        self.spool.append(values)

    def values(self, count: int) -> np.ndarray:
        """All `count` units on disk."""
        self.array = self.spool.array(np.uint8, (count,))
        return self.array

    def bytes_of(
        self, starts: np.ndarray, first: np.ndarray, last: np.ndarray, joined: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See repeated_spans.Units: spans shrink to whole characters."""
        low, high = self._moved(first, 1), self._moved(last, -1)
        high[:-1][joined] = low[1:][joined]
        return low - starts, np.maximum(high, low) - starts

    def _moved(self, positions: np.ndarray, step: int) -> np.ndarray:
        """Positions moved to the next boundary of characters, forwards or backwards."""
        positions = positions.copy()
        for _ in range(3):
            inside = positions < len(self.array)
            inside[inside] = (self.array[positions[inside]] & 0xC0) == 0x80
            positions[inside] += step
        return positions


class TokenUnits(UnitBounds):
    """Units are tokens, stored with the byte range of each."""

    name = "tokens"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer, self.fingerprint, self.spool = tokenizer, tokenizer.fingerprint, Spool()

    def read(self, texts: pa.Array) -> UnitsOfTexts:
        """See ByteUnits."""
        listed = texts.to_pylist()
        ids, spans = self.tokenizer.encode_ordinary_with_offsets(listed)
        bounds = [_own_bytes(text, pairs) for text, pairs in zip(listed, spans, strict=True)]
        all_bounds = np.concatenate([np.empty((0, 2), np.uint32), *bounds])
        values = [np.asarray(each, np.int32) for each in ids]
        offsets = np.cumsum([0, *map(len, values)])
        return UnitsOfTexts(np.concatenate([np.empty(0, np.int32), *values]), offsets, all_bounds)

    def keep(self, values: np.ndarray, bounds: np.ndarray) -> None:
        """See ByteUnits."""
        self.spool.append(values)
        self.add(bounds)

    def values(self, count: int) -> np.ndarray:
        """See ByteUnits."""
        return self.spool.array(np.int32, (count,))


def _own_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """uint32[t, 2]: the bytes of characters that no other token shares, for spans of characters."""
    own = np.array(spans, np.int64).reshape(-1, 2)
    low, high = own[:, 0].copy(), own[:, 1].copy()
    low[1:] = np.maximum(low[1:], own[:-1, 1])
    high[:-1] = np.minimum(high[:-1], own[1:, 0])
    own = np.stack((low, np.maximum(high, low)), axis=1)
    return (own if text.isascii() else byte_positions(text)[own]).astype(np.uint32)


def run(job: Job, options: DedupOptions) -> None:
    """Cut copied spans out of the job's documents."""
    phases.run(SubstringMethod(job, options))


class SubstringMethod(StreamMethod):
    """The sketch: units, their number in each document, byte ranges of tokens, window records."""

    def __init__(self, job: Job, options: DedupOptions) -> None:
        super().__init__(job, options)
        self.units: ByteUnits | TokenUnits = ByteUnits()
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
