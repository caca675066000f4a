"""The index of a shard of token rows: what its record batches hold, without their rows.

An entry is the rows of one source in one chunk, at most CHUNK rows of a record batch that follow
each other, so that little is read to locate a row and the index stays small. It is
written with the shard, in the metadata of its last batch (`IndexWriter`), or else made from the
metadata, offsets and sources of the batches (`scan`), of which nothing but the last few bytes per
row is read. Rows are resolved, and checked, where a batch reads them (`row_file`).
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from sabia.core import stop
from sabia.core.digests import KEY, ROWS
from sabia.core.errors import BadData
from sabia.core.shards.arrow_arrays import int32s
from sabia.core.shards.atomic import sealed, unsealed
from sabia.core.shards.token_rows.arrow_messages import (
    ArrowShard,
    BatchLayout,
    Message,
    NotInPlace,
    ShardBytes,
    custom_metadata,
)

INDEX = b"sabia.row-index"
CHUNK = 1024  # rows; a multiple of 8
LISTS = {"input_ids": pa.int32(), "document_lengths": pa.int32(), "loss_mask": pa.bool_()}


@dataclass(frozen=True)
class RowIndex:
    """entries int64[E, 4]: position of a batch's message, number of the chunk's first row in the
    batch, number of a source, rows; chunk by chunk, in a chunk by the first rows of the sources.

    sources: their names, None for rows without one. row_length: tokens of the longest row.
    single: no row holds more than one document. largest_id: None if it is not known. content: a
    hash of the digests of the record batches, '' without them. padding: every mask leaves out what
    follows the documents of its row, and nothing else. hashes: the first id of every batch is the
    `row_hash` of its row, so that all ids are.
    """

    entries: np.ndarray
    sources: tuple[str | None, ...]
    tokens: int
    row_length: int
    single: bool
    largest_id: int | None = None
    content: str = ""
    padding: bool = False
    hashes: bool = False
    rejected: Sequence[Any] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """As JSON with a digest."""
        entries = base64.b64encode(self.entries.astype("<i8").tobytes()).decode()
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return json.dumps(sealed(parts | {"entries": entries}))

    @classmethod
    def from_text(cls, text: str | bytes) -> "RowIndex":
        """What `to_text` gave; BadData if it is not as it was written."""
        try:
            parts = unsealed(json.loads(text))
        except ValueError as error:
            raise BadData("the index of rows is not as it was written (damaged bits)") from error
        entries = np.frombuffer(base64.b64decode(parts["entries"]), "<i8").reshape(-1, 4)
        return cls(**parts | {"entries": entries, "sources": tuple(parts["sources"])})

    @cached_property
    def chunk_of_entry(self) -> np.ndarray:
        """The number of each entry's chunk, int64[E]."""
        at = self.entries[:, :2]
        return np.cumsum(np.concatenate([[0], (at[1:] != at[:-1]).any(1)]))[: len(at)]

    @cached_property
    def first_entry(self) -> np.ndarray:
        """The number of the first entry of each chunk, and of all entries, int64[chunks + 1]."""
        chunk = self.chunk_of_entry
        first = np.flatnonzero(np.concatenate([[True], chunk[1:] != chunk[:-1]])[: len(chunk)])
        return np.concatenate([first, [len(chunk)]])

    @cached_property
    def first_row(self) -> np.ndarray:
        """The number of the first row of each chunk, and of all rows, int64[chunks + 1]."""
        rows = np.concatenate([[0], np.cumsum(self.entries[:, 3])])
        return rows[self.first_entry]


@dataclass
class IndexBuilder:
    """Collects the index of chunks; `at` of an entry is a position, or the number of its batch."""

    tokens: int = 0
    longest: int = 0
    single: bool = True
    entries: list[tuple[int, int, int, int]] = field(default_factory=list)
    sources: dict[str | None, int] = field(default_factory=dict)

    def add(
        self, at: int, start: int, sizes: tuple[int, int], single: bool,
        counts: Mapping[str | None, int],
    ) -> None:  # fmt: skip
        """Add a chunk: tokens of all rows and of the longest one, whether no row has several
        documents, and the rows of each source."""
        self.single = self.single and single
        self.tokens += sizes[0]
        self.longest = max(self.longest, sizes[1])
        for name, rows in counts.items():
            code = self.sources.setdefault(name, len(self.sources))
            self.entries.append((at, start, code, rows))

    def index(self, **more: Any) -> RowIndex:
        """The index of all batches."""
        entries = np.array(self.entries, np.int64).reshape(-1, 4)
        return RowIndex(
            entries, tuple(self.sources), self.tokens, self.longest, self.single, **more
        )


def scan(shard: ShardBytes, source: str) -> RowIndex:
    """The index of an Arrow shard that has none; NotInPlace if it is not read in place, and
    BadData if it is cut short. source: that of rows without one."""
    arrow, sums = ArrowShard(shard), IndexBuilder()
    for name, values in LISTS.items():
        kind = arrow.columns[name].kind if name in arrow.columns else pa.null()
        is_list = pa.types.is_list(kind) and kind.value_type == values
        if not is_list and not (name == "loss_mask" and pa.types.is_null(kind)):
            raise NotInPlace
    seen: dict[str, tuple[Any, Any]] = {}  # name of a column → its bytes in the batch before

    def once(name: str, parts: Any, compute: Any) -> Any:
        if name not in seen or seen[name][0] != parts:
            seen[name] = parts, compute(*parts)
        return seen[name][1]

    ends = _Ends(arrow)
    for message in arrow.messages():
        stop.check()
        layout = None if message is None else arrow.layout(message)
        ends.add(message, layout)
        if message is None or layout is None or not layout.rows:
            continue
        check_lists(arrow, layout)
        for start in range(0, layout.rows, CHUNK):
            chunk = layout, start, min(CHUNK, layout.rows - start)
            sizes = once("input_ids", (_offsets(arrow, "input_ids", *chunk),), _total_and_largest)
            single = sums.single
            if single:
                counts = _offsets(arrow, "document_lengths", *chunk)
                single = once("document_lengths", (counts,), _total_and_largest)[1] <= 1
            names = once("source", (chunk[2], source, *_source_bytes(arrow, *chunk)), _counts)
            sums.add(message.at, start, sizes, single, names)
    return sums.index(content=ends.content)


def digest_of_batches(shard: ShardBytes) -> str:
    """`RowIndex.content` of a shard that need not be read in place; NotInPlace if the record
    batches are compressed."""
    arrow = ArrowShard(shard)
    ends = _Ends(arrow)
    for message in arrow.messages() if ends.has_digests else ():
        ends.add(message, None if message is None else arrow.layout(message))
    return ends.content


def stored_index(shard: ShardBytes) -> RowIndex | None:
    """The index in the metadata of the last batch of an Arrow file or stream; None if there is
    none, or if it is that of the last of several streams.

    Raises BadData where it is damaged.
    """
    arrow = ArrowShard(shard)
    has_digests = KEY in (arrow.schema.metadata or {})  # streams of other programs are not searched
    message = arrow.last_batch() if arrow.is_file or has_digests else None
    text = None if message is None else custom_metadata(shard, message).get(INDEX)
    if message is None or text is None:
        return None
    index = RowIndex.from_text(text)
    if not arrow.is_file:
        return index if index.about.get("position") == message.at else None
    number, *rest = index.entries.T
    at = arrow.batch_positions()
    if number.max(initial=0) >= len(at):
        raise BadData(f"{shard.name}: record batches are missing (damaged bits)")
    return replace(index, entries=np.stack([at[number], *rest], 1))


class _Ends:
    """Checks that streams with digests have all of their batches, and hashes the digests."""

    def __init__(self, arrow: ArrowShard) -> None:
        self.arrow, self.rows = arrow, 0
        self.has_digests = KEY in (arrow.schema.metadata or {})
        self._hash = xxh3_128(arrow.schema.serialize())
        self.ended = not self.has_digests

    def add(self, message: Message | None, layout: BatchLayout | None) -> None:
        """A batch, or None at the end of a stream."""
        if not self.has_digests:
            return
        name = self.arrow.bytes.name
        if message is None or layout is None:
            if not self.ended:
                raise BadData(f"{name}: ends after {self.rows} rows, without its last batch")
            self.rows, self.ended = 0, False
            return
        about = custom_metadata(self.arrow.bytes, message)
        if KEY not in about:
            raise BadData(f"{name}: a record batch has no digest (damaged bits)")
        self.ended = self.ended or about.get(ROWS) == str(self.rows).encode()
        self.rows += layout.rows
        if layout.rows:
            self._hash.update(about[KEY])
            self._hash.update(_positions(self.arrow, layout))

    @property
    def content(self) -> str:
        """The hash of all digests and of where the batches are."""
        return str(self._hash.hexdigest()) if self.has_digests else ""


def _positions(arrow: ArrowShard, layout: BatchLayout) -> bytes:
    """The size of the shard and the positions of a batch's buffers, without those of validity
    where there are no nulls."""
    left_out = {c.buffer for c in arrow.columns.values() if not layout.nodes[2 * c.node + 1]}
    for name in LISTS.keys() & arrow.columns.keys():
        child = arrow.columns[name]
        if not layout.nodes[2 * child.node + 3]:
            left_out.add(child.buffer + 2)
    count = len(layout.buffers) // 2
    places = [layout.buffer(i)[0] for i in range(count) if i not in left_out]
    return np.array([arrow.bytes.size, *places], "<i8").tobytes()


def check_lists(arrow: ArrowShard, layout: BatchLayout) -> None:
    """NotInPlace where a list or a number in it is null, or some rows have no mask."""
    nodes = layout.nodes
    for name in LISTS:
        if (column := arrow.columns.get(name)) is not None:
            nulls, inside = nodes[2 * column.node + 1], nodes[2 * column.node + 3]
            if (nulls or inside) and not (name == "loss_mask" and nulls == layout.rows):
                raise NotInPlace
            if nodes[2 * column.node] != layout.rows:
                raise BadData(f"{arrow.bytes.name}: columns of different lengths (damaged bits)")


def _offsets(arrow: ArrowShard, name: str, layout: BatchLayout, start: int, rows: int) -> bytes:
    position, _ = layout.buffer(arrow.columns[name].buffer + 1)
    return bytes(arrow.bytes.read(position + 4 * start, 4 * (rows + 1)))


def _total_and_largest(offsets: bytes) -> tuple[int, int]:
    sizes = np.diff(np.frombuffer(offsets, "<i4"))
    if sizes.min() < 0:
        raise BadData("offsets of a list are damaged (damaged bits)")
    return int(sizes.sum()), int(sizes.max())


def _source_bytes(
    arrow: ArrowShard, layout: BatchLayout, start: int, rows: int
) -> tuple[bytes, ...]:
    """The buffers of the source of each row, the text from its first byte on; none if there is no
    such column."""
    column = arrow.columns.get("source")
    if column is None or pa.types.is_null(column.kind):
        return ()
    if column.kind != pa.string():
        raise NotInPlace
    validity = b""
    if layout.nodes[2 * column.node + 1]:
        position, _ = layout.buffer(column.buffer)
        validity = bytes(arrow.bytes.read(position + start // 8, (rows + 7) // 8))
    offsets = _offsets(arrow, "source", layout, start, rows)
    bounds = np.frombuffer(offsets, "<i4")
    first, last = int(bounds[0]), int(bounds[-1])
    text = arrow.bytes.read(layout.buffer(column.buffer + 2)[0] + first, last - first)
    return validity, (bounds - first).tobytes() if first else offsets, bytes(text)


def source_array(rows: int, default: str, buffers: tuple[bytes, ...]) -> pa.Array:
    """The sources of the rows of a batch."""
    if not buffers:
        return pa.repeat(pa.scalar(default, pa.string()), rows)
    validity, *text = map(pa.py_buffer, buffers)
    names = pa.Array.from_buffers(pa.string(), rows, [validity if buffers[0] else None, *text])
    names.validate(full=True)
    return names.fill_null(default) if names.null_count else names


def sources_of(
    arrow: ArrowShard, layout: BatchLayout, start: int, rows: int, default: str
) -> tuple[np.ndarray, list[str | None]]:
    """(number of each row's source int64[n], the names in the order of their first rows)."""
    return encoded(source_array(rows, default, _source_bytes(arrow, layout, start, rows)))


def encoded(names: pa.Array) -> tuple[np.ndarray, list[str | None]]:
    """(number of each name int64[n], the names in the order of their first rows)."""
    encoded = names.dictionary_encode(null_encoding="encode")
    return int32s(encoded.indices).astype(np.int64), encoded.dictionary.to_pylist()


def _counts(rows: int, default: str, *buffers: bytes) -> dict[str | None, int]:
    codes, names = encoded(source_array(rows, default, buffers))
    return dict(zip(names, np.bincount(codes, minlength=len(names)).tolist(), strict=True))
