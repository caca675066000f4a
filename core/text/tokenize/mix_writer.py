"""Write a mix: pack each source into a spool on disk, then draw rows as planned.

The spools are unnamed files (a killed process leaves nothing behind) that are read through memory
maps, so memory holds a few numbers per row and not the rows. The output is one file, stdout, or
parts of PART_ROWS rows in a directory; the metadata of each file holds the plan.

The plan is the number of rows of each source, and their order. The budget is split by the weights.
No source gives more than `max_repeat` times its rows; the others share what is missing in
proportion to their weights. The order is a deterministic weighted interleave: the k-th of a
source's n rows is at position (k + 1/2)/n of the output, so every section of the output has the
proportions of the whole. The seed shuffles each pass over a source.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.shards import manifest, outputs, schemas
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ParquetSink, run_map
from sabia.core.shards.order import Permutation, apportion, fill, key64
from sabia.core.shards.outputs import Provenance
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import Spool
from sabia.core.shards.summary import Summary
from sabia.core.text.tokenize.document_encoding import Buckets, encode_shard, tokens_of
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.packing import PackedRows, make_packer, to_batch
from sabia.core.text.tokenize.token_counts import coded

PART_ROWS = 65_536
BATCH_ROWS = 512
CHUNK = 4096  # rows whose order is computed at once


@dataclass(frozen=True)
class Share:
    """The planned and the actual number of rows of one source."""

    source: str
    weight: float  # of all weights; they sum to 1
    available: int  # rows
    planned: int  # rows by weight alone
    rows: int  # rows within max_repeat

    @property
    def repeats(self) -> float:
        """How often each row is read, on average."""
        return self.rows / self.available if self.available else 0.0


def parse_mix(text: str) -> dict[str, float]:
    """'web=0.6,edu=0.4' → weights that sum to 1; raises UsageError."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not sign or not name or name in weights or not 0 < weight < float("inf"):
            raise UsageError(f"--mix: {part!r} (expected SOURCE=WEIGHT,… each once, weights > 0)")
        weights[name] = weight
    if not weights:
        raise UsageError(f"--mix: {text!r} (expected SOURCE=WEIGHT,…)")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def plan_mix(
    weights: Mapping[str, float], available: Mapping[str, int], rows: int | None, max_repeat: float
) -> list[Share]:
    """Rows to take of each source for a budget of `rows` (None: as many as there are).

    Raises UsageError for a source that has no rows.
    """
    empty = [name for name in weights if not available.get(name)]
    if empty:
        known = ", ".join(sorted(name for name, n in available.items() if n)) or "none"
        raise UsageError(f"--mix: no documents of source {empty[0]!r} (sources found: {known})")
    budget = sum(available[name] for name in weights) if rows is None else rows
    caps = {name: int(max_repeat * available[name]) for name in weights}
    planned = apportion(weights, budget)
    taken = fill(weights, caps, budget)
    return [
        Share(name, weight, available[name], planned[name], taken[name])
        for name, weight in weights.items()
    ]


def interleave(counts: list[int]) -> np.ndarray:
    """int64[Σ counts]: the source of each row of the output; source s has counts[s] evenly spread
    rows."""
    positions = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.empty(0)])
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources[np.argsort(positions, kind="stable")]


def passes(source: str, available: int, rows: int, seed: int) -> Iterator[int]:
    """Row numbers to read: passes over all rows of the source, each in another order."""
    name = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "little")
    for start in range(0, rows, CHUNK):
        numbers, index = np.divmod(np.arange(start, min(rows, start + CHUNK)), available)
        for number in np.unique(numbers):
            order = Permutation(available, key64(seed, name, int(number)))
            yield from order(index[numbers == number]).tolist()


class RowSpool:
    """Packed rows of one source on disk: append all, `seal`, then read in any order."""

    def __init__(self, length: int, directory: str | None) -> None:
        self.length, self._ends = length, [0]
        self._ids, self._pieces, self._names = (Spool(directory=directory) for _ in range(3))
        self._name_bytes = 0

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, rows: PackedRows) -> None:
        """Add packed rows."""
        self._ids.append(rows.ids.astype("<i4"))
        names = rows.piece_documents.cast(pa.large_binary())
        ends = np.cumsum(pc.binary_length(names).to_numpy()) + self._name_bytes
        pieces = np.stack([rows.piece_lengths, rows.piece_offsets, ends], 1)
        self._pieces.append(pieces.astype("<i8"))
        self._names.append(np.frombuffer(b"".join(names.to_pylist()), np.uint8))
        self._name_bytes = int(ends[-1])
        counts = np.bincount(rows.piece_rows, minlength=len(rows))
        self._ends += (np.cumsum(counts) + self._ends[-1]).tolist()

    def seal(self) -> None:
        """End writing; `read` works from here on."""
        self._all_ids = self._ids.array("<i4", (len(self), self.length))
        self._all_pieces = self._pieces.array("<i8", (self._ends[-1], 3))
        self._all_names = self._names.array(np.uint8, (self._name_bytes,))

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray, list[str], np.ndarray]:
        """(ids[T]; lengths, ids and offsets of its pieces of documents) of one row."""
        first, last = self._ends[row], self._ends[row + 1]
        lengths, offsets, ends = self._all_pieces[first:last].T
        start = int(self._all_pieces[first - 1, 2]) if first else 0
        text = self._all_names[start : int(ends[-1])].tobytes()
        bounds = [0, *(ends - start).tolist()]
        names = [text[a:b].decode() for a, b in pairwise(bounds)]
        return self._all_ids[row], lengths, names, offsets

    def close(self) -> None:
        """Free the disk space."""
        for spool in (self._ids, self._pieces, self._names):
            spool.file.close()


def write(
    job: Job, options: TokenizeOptions, encoder: Encoder, sources: Sequence[Source], salt: str
) -> Summary:
    """Mix the documents of `sources` into the job's output, unless it is already complete."""
    if job.shard:
        raise UsageError(
            "--mix needs the token counts of all shards, so it does not run in slices; run it as "
            "one job, or tokenize in slices and mix when training"
        )
    weights = parse_mix(options.mix)
    buckets = Buckets.parse(options.by)
    transform = partial(encode_shard, encoder=encoder, sources=tuple(weights), buckets=buckets)
    sink = MixSink(job, options, weights, encoder.tokenizer.pad_id)
    return run_map(
        job, transform, kind_out="tokens", sources=sources, salt=salt, sink=sink,
        conclude=sink.report_shares,
    )  # fmt: skip


@dataclass(frozen=True)
class MixSink(ParquetSink):
    """Packs the encoded documents of all shards, then draws the rows of the mix."""

    options: TokenizeOptions
    weights: Mapping[str, float]
    pad_id: int
    shares: list[Share] = field(default_factory=list)  # as planned, known after `write`
    per_shard = False

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        """Rows of all parts of the output, whose number the first part names."""
        if self.job.to_stdout:
            return None
        parts = (outputs.read_metadata(self.path(0)) or {}).get("parts", 1)
        rows = [manifest.rows_made(self.path(p), provenance) for p in range(parts)]
        return None if None in rows else sum(filter(None, rows))

    def write(
        self, part: int, schema: pa.Schema, provenance: Provenance,
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        """Pack all batches of encoded documents, plan the mix, and write its parts."""
        length, budget = self.options.length, self.options.tokens
        made = provenance(True) if callable(provenance) else provenance
        with ExitStack() as stack:
            spools = {name: RowSpool(length, self._spool_directory()) for name in self.weights}
            for spool in spools.values():
                stack.callback(spool.close)
            self._fill(spools, batches)
            available = {name: len(spool) for name, spool in spools.items()}
            most_rows = None if budget is None else budget // length
            self.shares[:] = plan_mix(self.weights, available, most_rows, self.options.max_repeat)
            rows = sum(share.rows for share in self.shares)
            parts = -(-rows // PART_ROWS) if self.job.to_directory else 1
            metadata = {"parts": parts, "mix": [asdict(share) for share in self.shares]}
            manifest.write_parts(
                self.job, schemas.KINDS["tokens"], made | metadata,
                _draw(spools, self.shares, self.job.seed), parts, PART_ROWS,
            )  # fmt: skip
        return rows

    def finish(self, parts: int) -> None:
        """The parts are those of the mix, which `write` has completed."""

    def _fill(self, spools: Mapping[str, RowSpool], batches: Iterator[pa.RecordBatch]) -> None:
        """Pack the documents of each source into its spool."""
        packing, length = self.options.packing, self.options.length
        packers = {name: make_packer(packing, length, self.pad_id) for name in spools}
        for batch in batches:
            tokens, lengths = tokens_of(batch)
            names, codes = coded(batch.column("source"))
            for code, name in enumerate(map(str, names)):
                chosen = codes == code
                ids, sizes = tokens[np.repeat(chosen, lengths)], lengths[chosen]
                documents = batch.column("id").filter(pa.array(chosen))
                no_codes = np.zeros(len(sizes), np.int64)  # all are of one source
                for rows in packers[name].add(ids, sizes, no_codes, documents):
                    spools[name].append(rows)
        for name, packer in packers.items():
            for rows in packer.flush():
                spools[name].append(rows)
            spools[name].seal()

    def _spool_directory(self) -> str | None:
        """Beside the output, which has room for rows; None: the temporary directory."""
        if self.job.to_stdout or "://" in str(self.job.out):
            return None
        path = os.path.abspath(str(self.job.out))
        directory = os.path.dirname(path) if self.job.to_file else path
        os.makedirs(directory, exist_ok=True)
        return directory

    def report_shares(self, summary: Summary) -> None:
        """Print the planned and the achieved share of each source and add them to the summary."""
        total = max(1, sum(share.rows for share in self.shares))
        for share in self.shares:
            name, length, achieved = share.source, self.options.length, share.rows / total
            notes.note(
                f"mix {name}: planned {share.weight:.2%} = {share.planned * length:,} tokens; "
                f"achieved {achieved:.2%} = {share.rows * length:,} tokens, "
                f"{share.repeats:.2f} passes"
            )
            summary.counters[f"planned_share[{name}]"] = round(share.weight, 6)
            summary.counters[f"achieved_share[{name}]"] = round(achieved, 6)
            summary.counters[f"passes[{name}]"] = round(share.repeats, 6)


def _draw(
    spools: Mapping[str, RowSpool], shares: Sequence[Share], seed: int
) -> Iterator[pa.RecordBatch]:
    """The rows in the order of the mix, in batches."""
    names = [share.source for share in shares]
    readers = [passes(s.source, s.available, s.rows, seed) for s in shares]
    order = interleave([share.rows for share in shares])
    for start in range(0, len(order), BATCH_ROWS):
        stop.check()
        codes = order[start : start + BATCH_ROWS].tolist()
        drawn = [spools[names[code]].read(next(readers[code])) for code in codes]
        ids, lengths, documents, offsets = zip(*drawn, strict=True)
        counts = [len(pieces) for pieces in lengths]
        rows = PackedRows(
            np.stack(ids).astype(np.int32),
            np.repeat(np.arange(len(drawn)), counts),
            np.concatenate(lengths).astype(np.int64),
            np.repeat(np.array(codes), counts),
            pa.array([name for names in documents for name in names], pa.string()),
            np.concatenate(offsets),
        )
        yield to_batch(rows, names)
