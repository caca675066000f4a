"""The transforms of tokenize: documents of a shard → packed rows, or encoded documents.

Sources may be split by a score, so that a mix can weight good and poor documents differently. With
the edges 1 and 3 of the score edu, a document of the source web gets the source web/edu0 (below 1),
web/edu1 (from 1 to below 3), web/edu2 (3 and more), or web/edu-none (no such score). Mix weights,
repeat limits and the stages of a run apply to these names as to any others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import UsageError
from sabia.core.shards.mapping import ShardContext
from sabia.core.text.removed_rows import put_column
from sabia.core.text.score_column import score_values
from sabia.core.text.tokenize.encoders import Encoder
from sabia.core.text.tokenize.packing import make_packer, to_batch
from sabia.core.text.tokenize.token_counts import Tally, coded

# an encoded document: its id, its source, and its token ids with the end-of-document token
ENCODED = pa.schema(
    [("id", pa.string()), ("source", pa.string()), ("tokens", pa.list_(pa.int32()))]
)


@dataclass(frozen=True)
class Buckets:
    """A score's name, and its edges in ascending order."""

    score: str
    edges: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Buckets | None":
        """'edu=1,3' → buckets, '' → None; raises UsageError."""
        if not text:
            return None
        name, sign, numbers = text.partition("=")
        try:
            edges = tuple(float(part) for part in numbers.split(","))
        except ValueError:
            edges = ()
        ascending = all(a < b for a, b in pairwise(edges))
        if not (name and sign and edges and ascending):
            raise UsageError(f"--by: {text!r} (expected SCORE=EDGE,… with ascending edges)")
        return cls(name, edges)

    def split(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the bucket appended to `source`."""
        values = score_values(batch.column("scores"), self.score)
        bucket = np.searchsorted(np.array(self.edges), values, side="right")
        names = np.array([*(f"/{self.score}{i}" for i in range(len(self.edges) + 1)),
                          f"/{self.score}-none"], object)  # fmt: skip
        suffixes = names[np.where(np.isnan(values), len(names) - 1, bucket)]
        sources = batch.column("source").to_pylist()
        split = [
            f"{source or ''}{suffix}" for source, suffix in zip(sources, suffixes, strict=True)
        ]
        return put_column(batch, "source", pa.array(split, pa.string()))


def pack_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    encoder: Encoder,
    length: int,
    packing: str,
    buckets: Buckets | None = None,
) -> Iterator[pa.RecordBatch]:
    """The transform: documents of one shard → token rows."""
    tally, names = Tally(), list[str | None]()
    packer = make_packer(packing, length, encoder.tokenizer.pad_id)
    for batch in batches:
        documents = prepare_documents(batch, context, buckets)
        documents, tokens, lengths = encode_documents(encoder, documents, context, tally)
        distinct, codes = coded(documents.column("source"))
        names += [name for name in distinct if name not in names]
        sources = np.array([names.index(name) for name in distinct], np.int64)[codes]
        for rows in packer.add(tokens, lengths, sources, documents.column("id")):
            yield to_batch(rows, names)
    for rows in packer.flush():
        yield to_batch(rows, names)
    for name, n in tally.counters().items():
        context.count(name, n)


def encode_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    encoder: Encoder,
    sources: Sequence[str] = (),
    buckets: Buckets | None = None,
) -> Iterator[pa.RecordBatch]:
    """The transform: documents of one shard, of these sources only if any are given → ENCODED."""
    tally = Tally()
    for batch in batches:
        documents = prepare_documents(batch, context, buckets)
        if sources:
            documents = documents.filter(pc.is_in(documents.column("source"), pa.array(sources)))
            if unused := batch.num_rows - documents.num_rows:
                context.count("documents of other sources or empty", unused)
        documents, tokens, lengths = encode_documents(encoder, documents, context, tally)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(ends, pa.array(tokens, pa.int32()))
        columns = [documents.column("id"), documents.column("source"), lists]
        yield pa.RecordBatch.from_arrays(columns, schema=ENCODED)
    for name, n in tally.counters().items():
        context.count(name, n)


def tokens_of(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32[Σ n], lengths int64[documents]) of a batch of ENCODED."""
    lists = batch.column("tokens")
    return lists.values.to_numpy(), np.diff(lists.offsets.to_numpy()).astype(np.int64)


def prepare_documents(
    batch: pa.RecordBatch, context: ShardContext, buckets: Buckets | None
) -> pa.RecordBatch:
    """Reject documents without text, and rename the sources of the others by their buckets."""
    empty = pc.equal(pc.binary_length(batch.column("text")), 0)
    if pc.any(empty).as_py():
        context.reject(batch.filter(empty), "empty text")
        batch = batch.filter(pc.invert(empty))
    return buckets.split(batch) if buckets else batch


def encode_documents(
    encoder: Encoder, batch: pa.RecordBatch, context: ShardContext, tally: Tally
) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
    """(documents, tokens int32[Σ n], lengths int64[documents]) with the end-of-document token after
    each, without those that the tokenizer cannot encode, which are rejected."""
    end, kept = encoder.tokenizer.eos_id, np.ones(batch.num_rows, bool)

    def refuse(row: int, reason: str) -> None:
        kept[row] = False
        context.reject(batch.slice(row, 1), reason)

    texts = batch.column("text")
    tokens, lengths = encoder.encode_each(texts, -1 if end is None else end, refuse)
    batch = batch if kept.all() else batch.filter(pa.array(kept))
    tally.add(batch, lengths - 1)
    return batch, tokens, lengths
