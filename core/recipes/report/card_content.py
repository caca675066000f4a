"""What the documents of a training contain: one pass over them, for a model card.

Of each document only the columns COLUMNS are read, and of the text only the number of its bytes.
The pass decompresses all texts, batch by batch; memory grows with the number of domains alone.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import stop
from sabia.core.recipes.report.given_outputs import Output

LICENCES = ("license", "licence")  # names of columns and of entries of `meta`
COLUMNS = ("id", "text", "url", "source", "language", "crawl_time", "meta", "contamination",
           "rewritten", "rewrite_model", *LICENCES)  # fmt: skip
MERGED_ROWS = 1_000_000  # of domains that are summed at a time
# the host of a URL, without user, port and www.
_HOST = r"^(?i:[a-z][a-z0-9+.-]*)://(?:[^/?#@]*@)?(?i:www\.)?(?P<host>\[[^\]]*\]|[^/?#:]+)"


@dataclass
class Amount:
    """Documents and the bytes of their texts (UTF-8)."""

    documents: int = 0
    size: int = 0

    def add(self, documents: int, size: int) -> None:
        """Add to both."""
        self.documents += documents
        self.size += size


Shares = dict[str, Amount]  # by name; '': not recorded


@dataclass
class Content:
    """Amounts of documents. first, last: the times of fetching; undated: documents without one;
    contaminated: documents in which items of benchmarks were found."""

    total: Amount = field(default_factory=Amount)
    domains: Shares = field(default_factory=dict)
    languages: Shares = field(default_factory=dict)
    sources: Shares = field(default_factory=dict)
    licences: Shares = field(default_factory=dict)
    synthetic: Shares = field(default_factory=dict)  # documents that a model has rewritten
    first: datetime | None = None
    last: datetime | None = None
    undated: int = 0
    contaminated: int = 0


def largest_first(shares: Shares) -> list[tuple[str, Amount]]:
    """Names by descending size."""
    return sorted(shares.items(), key=lambda item: (-item[1].size, item[0]))


def content_of(outputs: Sequence[Output], ids: pa.Array | None = None) -> Content:
    """Sum the documents of outputs; ids: of those that count, None: all."""
    content = Content()
    domains = _Sums()
    for batch in _batches(outputs, ids):
        sizes = pc.fill_null(pc.cast(pc.binary_length(batch.column("text")), pa.int64()), 0)
        content.total.add(batch.num_rows, pc.sum(sizes).as_py() or 0)
        domains.add(_hosts(_column(batch, "url")), sizes)
        for name, shares in (("language", content.languages), ("source", content.sources)):
            _add(shares, _column(batch, name), sizes)
        _add(content.licences, _licences(batch), sizes)
        _add_times(content, _column(batch, "crawl_time"))
        content.contaminated += len(batch) - _column(batch, "contamination").null_count
        if "rewrite_model" in batch.schema.names and "rewritten" in batch.schema.names:
            model = batch.column("rewrite_model")
            of_model = pc.and_(pc.fill_null(batch.column("rewritten"), False), model.is_valid())
            _add(content.synthetic, model.filter(of_model), sizes.filter(of_model))
    content.domains = domains.shares()
    return content


def _batches(outputs: Sequence[Output], ids: pa.Array | None) -> Iterator[pa.RecordBatch]:
    for output in outputs:
        for source in output.sources:
            for batch in source.batches(COLUMNS):
                stop.check()
                if ids is not None:
                    batch = batch.filter(pc.is_in(batch.column("id"), ids))
                if batch.num_rows:
                    yield batch


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows)


def _hosts(urls: pa.Array) -> pa.Array:
    """The host of each URL in lower case; null where there is none."""
    if pa.types.is_null(urls.type):
        return pa.nulls(len(urls), pa.string())
    return pc.utf8_lower(pc.struct_field(pc.extract_regex(urls, _HOST), "host"))


def _grouped(names: pa.Array, sizes: pa.Array) -> pa.Table:
    """(name, documents, size) of each name; '' where it is null."""
    texts = pc.fill_null(pc.cast(names, pa.string()), "")
    table = pa.table({"name": texts, "size": sizes})
    summed = table.group_by("name").aggregate([("size", "count"), ("size", "sum")])
    return summed.rename_columns(["name", "documents", "size"])


def _add(shares: Shares, names: pa.Array, sizes: pa.Array) -> None:
    for row in _grouped(names, sizes).to_pylist():
        shares.setdefault(row["name"], Amount()).add(row["documents"], row["size"])


class _Sums:
    """Sums by name for many names, as tables."""

    def __init__(self) -> None:
        self.tables: list[pa.Table] = []
        self.rows = 0

    def add(self, names: pa.Array, sizes: pa.Array) -> None:
        """Add the documents of a batch."""
        self.tables.append(_grouped(names, sizes))
        self.rows += self.tables[-1].num_rows
        if self.rows > MERGED_ROWS + 2 * self.tables[0].num_rows:
            self._merge()

    def _merge(self) -> None:
        grouped = pa.concat_tables(self.tables).group_by("name")
        merged = grouped.aggregate([("documents", "sum"), ("size", "sum")])
        self.tables = [merged.rename_columns(["name", "documents", "size"])]
        self.rows = self.tables[0].num_rows

    def shares(self) -> Shares:
        """All sums."""
        if not self.tables:
            return {}
        self._merge()
        names, *counts = (self.tables[0].column(name).to_pylist() for name in
                          ("name", "documents", "size"))  # fmt: skip
        return {name: Amount(*both) for name, *both in zip(names, *counts, strict=True)}


def _licences(batch: pa.RecordBatch) -> pa.Array:
    """The licence of each document: of a column, or of an entry of `meta`; null if none."""
    columns = [batch.column(name) for name in LICENCES if name in batch.schema.names]
    texts = [pc.cast(one, pa.string()) for one in columns]
    known = pc.coalesce(*texts) if texts else pa.nulls(batch.num_rows, pa.string())
    meta = _column(batch, "meta")
    if pa.types.is_null(meta.type):
        return known
    named = pc.fill_null(pc.match_substring(meta, "licen"), False)
    if not pc.any(named).as_py():
        return known
    parsed = [_licence_in(text) if has else None
              for text, has in zip(meta.to_pylist(), named.to_pylist(), strict=True)]  # fmt: skip
    return pc.coalesce(known, pa.array(parsed, pa.string()))


def _licence_in(meta: str) -> str | None:
    """The licence that the JSON of a document's `meta` names."""
    try:
        entries: Any = json.loads(meta)
    except ValueError:
        return None
    names = LICENCES if isinstance(entries, dict) else ()
    return next((str(entries[name]) for name in names if entries.get(name)), None)


def _add_times(content: Content, times: pa.Array) -> None:
    content.undated += times.null_count
    if times.null_count < len(times):
        first, last = pc.min_max(times).as_py().values()
        content.first = min(content.first or first, first)
        content.last = max(content.last or last, last)


def tokens_in(outputs: Sequence[Output]) -> int:
    """The tokens of documents in token rows, without padding."""
    lists = _lists(outputs, "document_lengths")
    return sum(pc.sum(one).as_py() or 0 for one in lists if one is not None)


def ids_in(outputs: Sequence[Output]) -> pa.Array | None:
    """The ids of the documents in token rows; None if some rows have none."""
    ids = [one if one is None else pc.unique(one) for one in _lists(outputs, "document_ids")]
    known = [pc.cast(one, pa.string()) for one in ids if one is not None]
    return pc.unique(pa.concat_arrays(known)) if known and len(known) == len(ids) else None


def _lists(outputs: Sequence[Output], column: str) -> Iterator[pa.Array | None]:
    """The elements of a column of lists, batch by batch; None where there is no such column."""
    for output in outputs:
        for source in output.sources:
            for batch in source.raw([column]):
                stop.check()
                there = column in batch.schema.names
                yield pc.list_flatten(batch.column(column)) if there else None
