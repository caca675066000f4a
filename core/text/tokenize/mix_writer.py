"""Write a mix: pack each source into a spool on disk, then draw rows as `mix_plan` says.

The spools are unnamed files (a killed process leaves nothing behind) that are read through memory
maps, so memory holds a few numbers per row and not the rows. The output is one file, stdout, or
parts of PART_ROWS rows in a directory; the metadata of each file holds the plan.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.shards import manifest, outputs, schemas
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.slices import slurm_slice
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import Spool
from sabia.core.shards.summary import Summary
from sabia.core.text.tokenize.document_encoding import encode_documents, prepare_documents
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.mix_plan import Share, interleave, parse_mix, passes, plan_mix
from sabia.core.text.tokenize.packing import Rows, make_packer, to_batch
from sabia.core.text.tokenize.source_buckets import Buckets
from sabia.core.text.tokenize.token_counts import Tally, report_bytes_per_token

PART_ROWS = 65_536
BATCH_ROWS = 512


class RowSpool:
    """Packed rows of one source on disk: append all, `seal`, then read in any order."""

    def __init__(self, length: int, directory: str | None) -> None:
        self.length, self._ends = length, [0]
        self._ids, self._pieces = Spool(directory=directory), Spool(directory=directory)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, rows: Rows) -> None:
        """Append packed rows."""
        self._ids.append(rows.ids.astype("<i4"))
        self._pieces.append(rows.piece_lengths.astype("<i4"))
        counts = np.bincount(rows.piece_rows, minlength=len(rows))
        self._ends += (np.cumsum(counts) + self._ends[-1]).tolist()

    def seal(self) -> None:
        """Finish writing; call it before `read`."""
        self._all_ids = self._ids.array("<i4", (len(self), self.length))
        self._all_pieces = self._pieces.array("<i4", (self._ends[-1],))

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids[T], lengths of its documents) of one row."""
        return self._all_ids[row], self._all_pieces[self._ends[row] : self._ends[row + 1]]

    def close(self) -> None:
        """Release the disk space."""
        self._ids.file.close()
        self._pieces.file.close()


def write(
    job: Job, options: TokenizeOptions, encoder: Encoder, sources: Sequence[Source], salt: str
) -> None:
    """Mix the documents of `sources` into the job's output, unless it is there already."""
    _refuse_slices(job)
    adopt(job)
    started = time.monotonic()
    fingerprints = [source.fingerprint() for source in sources]
    provenance = manifest.provenance(job, "tokens", fingerprints, salt)
    if not job.force and _is_current(job, provenance):
        Summary(shards_skipped=len(sources)).report(job)
        return
    summary = Summary(shards_done=len(sources))
    weights = parse_mix(options.mix)
    with ExitStack() as stack:
        rejects = stack.enter_context(Rejects(reject_path(job)))
        spools = {name: RowSpool(options.length, _spool_directory(job)) for name in weights}
        for spool in spools.values():
            stack.callback(spool.close)
        _fill(spools, options, encoder, sources, rejects, summary)
        budget = None if options.tokens is None else options.tokens // options.length
        available = {name: len(spool) for name, spool in spools.items()}
        shares = plan_mix(weights, available, budget, options.max_repeat)
        rows = sum(share.rows for share in shares)
        parts = -(-rows // PART_ROWS) if job.to_directory else 1
        metadata = {**provenance, "parts": parts, "mix": [asdict(share) for share in shares]}
        batches = _mixed(spools, shares, job.seed)
        manifest.write_parts(job, schemas.KINDS["tokens"], metadata, batches, parts, PART_ROWS)
    summary.rows_out = rows
    summary.rejected = rejects.count
    summary.reject_path = rejects.path if rejects.count else None
    summary.seconds = time.monotonic() - started
    _report_shares(shares, options.length, summary)
    summary.report(job)
    report_bytes_per_token(job, summary)


def _refuse_slices(job: Job) -> None:
    if job.shard or slurm_slice():
        raise UsageError(
            "--mix needs the token counts of all shards, so it does not run in slices; run it as "
            "one job, or tokenize in slices and mix when training"
        )


def _spool_directory(job: Job) -> str | None:
    """The output's directory, whose disk holds the rows; None: the temporary directory."""
    if job.to_stdout or "://" in str(job.out):
        return None
    directory = os.path.abspath(str(job.out))
    directory = os.path.dirname(directory) if job.to_file else directory
    os.makedirs(directory, exist_ok=True)
    return directory


def _is_current(job: Job, provenance: Mapping[str, Any]) -> bool:
    if job.to_stdout:
        return False
    parts = (outputs.read_metadata(outputs.output_path(job)) or {}).get("parts", 1)
    paths = [outputs.output_path(job, part) for part in range(max(1, parts))]
    return all(manifest.holds(path, dict(provenance)) for path in paths)


def _fill(
    spools: Mapping[str, RowSpool],
    options: TokenizeOptions,
    encoder: Encoder,
    sources: Sequence[Source],
    rejects: Any,
    summary: Summary,
) -> None:
    """Pack the documents of each source into its spool; count those of other sources."""
    packers = {
        name: make_packer(options.packing, options.length, encoder.tokenizer.pad_id)
        for name in spools
    }
    tally, unused, buckets = Tally(), 0, Buckets.parse(options.by)
    for index, source in enumerate(sources):
        context = ShardContext(index, source.name, rejects)
        for batch in source.batches(reject=context.reject):
            stop.check()
            summary.rows_in += batch.num_rows
            kept = _by_source(prepare_documents(batch, context, buckets), set(spools))
            unused += batch.num_rows - sum(part.num_rows for part in kept.values())
            for name, part in kept.items():
                _add(packers[name], spools[name], encoder, part, tally)
    for name, packer in packers.items():
        for rows in packer.flush():
            spools[name].append(rows)
        spools[name].seal()
    summary.counters.update(tally.counters())
    if unused:
        summary.counters["documents of other sources or empty"] = unused


def _by_source(batch: pa.RecordBatch, names: set[str]) -> dict[str, pa.RecordBatch]:
    column = batch.column("source")
    present = names & set(pc.unique(column).to_pylist())
    return {name: batch.filter(pc.equal(column, pa.scalar(name))) for name in sorted(present)}


def _add(
    packer: Any, spool: RowSpool, encoder: Encoder, batch: pa.RecordBatch, tally: Tally
) -> None:
    tokens, lengths = encode_documents(encoder, batch, tally)
    for rows in packer.add(tokens, lengths, np.zeros(len(lengths), np.int64)):
        spool.append(rows)


def _mixed(
    spools: Mapping[str, RowSpool], shares: Sequence[Share], seed: int
) -> Iterator[pa.RecordBatch]:
    """Batches of rows in the order of the mix."""
    names = [share.source for share in shares]
    readers = [passes(s.source, s.available, s.rows, seed) for s in shares]
    order = interleave([share.rows for share in shares])
    for start in range(0, len(order), BATCH_ROWS):
        stop.check()
        codes = order[start : start + BATCH_ROWS].tolist()
        drawn = [spools[names[code]].read(next(readers[code])) for code in codes]
        yield to_batch(_joined(drawn, codes), names)


def _joined(drawn: list[tuple[np.ndarray, np.ndarray]], codes: list[int]) -> Rows:
    counts = [len(lengths) for _, lengths in drawn]
    return Rows(
        np.stack([ids for ids, _ in drawn]).astype(np.int32),
        np.repeat(np.arange(len(drawn)), counts),
        np.concatenate([lengths for _, lengths in drawn]).astype(np.int64),
        np.repeat(np.array(codes), counts),
    )


def _report_shares(shares: Sequence[Share], length: int, summary: Summary) -> None:
    total = max(1, sum(share.rows for share in shares))
    for share in shares:
        achieved = share.rows / total
        notes.note(
            f"mix {share.source}: planned {share.weight:.2%} = {share.planned * length:,} tokens; "
            f"achieved {achieved:.2%} = {share.rows * length:,} tokens, {share.repeats:.2f} passes"
        )
        summary.counters[f"planned_share[{share.source}]"] = round(share.weight, 6)
        summary.counters[f"achieved_share[{share.source}]"] = round(achieved, 6)
        summary.counters[f"passes[{share.source}]"] = round(share.repeats, 6)
