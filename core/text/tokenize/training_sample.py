"""A deterministic sample of bounded size for training a tokenizer, balanced over the sources.

Each source (column `source`) gives an equal number of bytes; where a small source has fewer, the
others give more. The sampled documents of a source are evenly spread over it, in input order.
"""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes
from sabia.core.shards.sources import Source, batches_of
from sabia.core.text.tokenize.token_counts import sums_by_name

Name = str | None


def sampled_texts(sources: Sequence[Source], max_bytes: int) -> Iterator[str]:
    """Sampled texts, about `max_bytes` at most; all texts where there are no more."""
    for batch in sampled_batches(sources, max_bytes, ["text", "source"]):
        yield from batch.column("text").to_pylist()


def sampled_batches(
    sources: Sequence[Source], max_bytes: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Batches of the sampled documents; `columns` must hold text and source."""
    totals = bytes_by_source(sources)
    shares = {
        name: taken / max(totals[name], 1) for name, taken in even_split(totals, max_bytes).items()
    }
    if sum(totals.values()) > max_bytes:
        parts = ", ".join(f"{name or 'unnamed'} {share:.1%}" for name, share in shares.items())
        notes.note(f"sampling {max_bytes / 1e6:,.0f} MB of documents: {parts}")
    seen, taken = dict.fromkeys(totals, 0), dict.fromkeys(totals, 0)
    for _, batch in batches_of(sources, columns):
        keep = _chosen(batch, shares, seen, taken)
        yield batch if all(keep) else batch.filter(pa.array(keep))


def even_split(available: Mapping[Name, int], budget: int) -> dict[Name, int]:
    """An equal part of the budget for each, at most what it has; others get the remainder."""
    parts = dict.fromkeys(available, 0)
    for number, (name, size) in enumerate(sorted(available.items(), key=lambda item: item[1])):
        parts[name] = min(size, budget // (len(available) - number))
        budget -= parts[name]
    return parts


def bytes_by_source(sources: Sequence[Source]) -> dict[Name, int]:
    """Bytes of text of each source, in order of appearance."""
    totals: dict[Name, int] = {}
    for _, batch in batches_of(sources, ["text", "source"]):
        sizes = pc.binary_length(batch.column("text")).to_numpy()
        for name, (size,) in sums_by_name(batch.column("source"), sizes):
            totals[name] = totals.get(name, 0) + size
    return totals


def _chosen(
    batch: pa.RecordBatch,
    shares: Mapping[Name, float],
    seen: dict[Name, int],
    taken: dict[Name, int],
) -> list[bool]:
    """Take a document if half of it still fits into the share of its source so far."""
    keep = []
    names = batch.column("source").to_pylist()
    sizes = pc.binary_length(batch.column("text")).to_pylist()
    for name, size in zip(names, sizes, strict=True):
        seen[name] += size
        share = shares[name]
        fits = share >= 1 or taken[name] + size / 2 <= seen[name] * share
        taken[name] += size if fits else 0
        keep.append(fits)
    return keep
