"""Documents encoded and packed into rows of token ids; all output formats use these functions."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.shards.dry_run import DryRun, Sample, estimate, no_rejects
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.packing import make_packer, to_batch
from sabia.core.text.tokenize.source_buckets import Buckets
from sabia.core.text.tokenize.token_counts import Tally, coded


def pack_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    encoder: Encoder,
    length: int,
    packing: str,
    buckets: Buckets | None = None,
) -> Iterator[pa.RecordBatch]:
    """Encode and pack the documents of one shard: the transform of the map."""
    tally, names = Tally(), list[str | None]()
    packer = make_packer(packing, length, encoder.tokenizer.pad_id)
    for batch in batches:
        kept = prepare_documents(batch, context, buckets)
        tokens, lengths = encode_documents(encoder, kept, tally)
        for rows in packer.add(tokens, lengths, source_codes(kept, names)):
            yield to_batch(rows, names)
    for rows in packer.flush():
        yield to_batch(rows, names)
    for name, n in tally.counters().items():
        context.count(name, n)


def prepare_documents(
    batch: pa.RecordBatch, context: ShardContext, buckets: Buckets | None = None
) -> pa.RecordBatch:
    """Reject documents without text, and rename the sources of the others by their buckets."""
    empty = pc.equal(pc.binary_length(batch.column("text")), 0)
    if pc.any(empty).as_py():
        context.reject(batch.filter(empty), "empty text")
        batch = batch.filter(pc.invert(empty))
    return buckets.split(batch) if buckets else batch


def source_codes(batch: pa.RecordBatch, names: list[str | None]) -> np.ndarray:
    """int64[documents]: the index of each document's source in `names`; appends new names."""
    distinct, codes = coded(batch.column("source"))
    names += [name for name in distinct if name not in names]
    return np.array([names.index(name) for name in distinct], np.int64)[codes]


def encode_documents(
    encoder: Encoder, batch: pa.RecordBatch, tally: Tally
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32[Σ n], lengths int64[documents]) with the end-of-document token after each."""
    end = encoder.tokenizer.eos_id
    tokens, lengths = encoder.encode(batch.column("text"), -1 if end is None else end)
    tally.add(batch, lengths - 1)
    return tokens, lengths


def show_dry_run(
    shown: DryRun,
    job: Job,
    sources: Sequence[Source],
    pack: partial[Iterator[pa.RecordBatch]],
    bytes_per_id: int = 4,
    tokens: int | None = None,
) -> None:
    """Show the plan of a dry run, with estimates from packing a sample.

    Bytes are those of the ids before compression. pack: `pack_shard` with its encoder, which is
    None before a tokenizer is trained. tokens: how many are written, where not all are.
    """
    length = pack.keywords["length"]

    def packed(sample: Sample) -> Iterator[pa.RecordBatch]:
        return pack(sample.batches(), ShardContext(0, sample.name, no_rejects()))

    if pack.keywords["encoder"] is not None:
        row_bytes = length * bytes_per_id
        estimate(
            shown, sources, packed, job.jobs, lambda rows: sum(b.num_rows * row_bytes for b in rows)
        )
        if tokens is not None:
            shown.bytes_written = tokens // length * row_bytes
    shown.show(job)
