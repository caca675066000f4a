"""Token rows in an Arrow shard that is not compressed: where their ids and masks are in the file.

The shard is mapped, and only the headers of its record batches and the columns that are asked for
are read. The digests of record batches are not checked, because that would read all ids; rows with
a digest of their own are checked when they are read (`row_file`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from sabia.core.digests import KEY, ROWS, batches_with_metadata
from sabia.core.errors import BadData
from sabia.core.shards.arrow_arrays import int32s
from sabia.core.shards.token_rows.row_file import Positions, mapped

FILE_START, STREAM_END = b"ARROW1\0\0", b"\xff\xff\xff\xff\0\0\0\0"
_FILE_TAIL = 10  # bytes after the footer of a file: its length, ARROW1


class NotInPlace(Exception):
    """The ids cannot be read where they are."""


class MappedArrow:
    """An Arrow file, or streams that follow each other, mapped."""

    def __init__(self, path: str) -> None:
        """Raises BadData if it is cut short or several files are joined."""
        self.path, self.buffer = path, mapped(path)
        self.is_file = self.buffer[: len(FILE_START)] == FILE_START
        reader = pa.BufferReader(self.buffer)
        reader.seek(len(FILE_START) if self.is_file else 0)
        self.schema = pa.ipc.open_stream(reader).schema
        if not self.is_file and self.buffer[-len(STREAM_END) :] != STREAM_END:
            raise BadData(f"{path}: Arrow stream without its end mark (the producer was cut off)")

    @property
    def has_digests(self) -> bool:
        """Whether the record batches have digests."""
        return KEY in (self.schema.metadata or {})

    def batches(self) -> Iterator[tuple[pa.RecordBatch, dict[bytes, bytes]]]:
        """The record batches with their metadata; of those with digests, without the last one."""
        reader = pa.BufferReader(self.buffer)
        end = len(self.buffer)
        if self.is_file:
            reader.seek(len(FILE_START))
            footer = int.from_bytes(self.buffer[-_FILE_TAIL:-6], "little")
            end -= _FILE_TAIL + footer
        while reader.tell() < end:
            stream = pa.ipc.open_stream(reader)
            if not stream.schema.equals(self.schema):
                raise BadData(f"{self.path}: several Arrow streams with different columns")
            rows, ended = 0, not self.has_digests
            for batch, about in batches_with_metadata(stream):
                batch.validate()
                if self.has_digests and KEY not in (about or {}):
                    raise BadData(f"{self.path}: a record batch has no digest (damaged bits)")
                ended = ended or (about or {}).get(ROWS) == str(rows).encode()
                rows += batch.num_rows
                if batch.num_rows:
                    yield batch, about or {}
            if not ended:
                raise BadData(f"{self.path}: ends after {rows} rows, without its last batch")
            if self.is_file:
                break
        if reader.tell() != end:
            raise BadData(f"{self.path}: not one whole Arrow file (several files joined?)")

    def digest(self) -> str:
        """A hash of the digests of the record batches and of where they are; KeyError without
        digests."""
        total = xxh3_128(self.schema.serialize())
        for batch, about in self.batches():
            total.update(about[KEY])
            buffers = (b for column in batch.columns for b in column.buffers() if b is not None)
            places = [buffer.address - self.buffer.address for buffer in buffers]
            total.update(np.array([len(self.buffer), *places], "<i8").tobytes())
        return total.hexdigest()

    def token_batches(self, source: str | None) -> Iterator[tuple[pa.RecordBatch, Positions]]:
        """Batches of the columns of token rows, with the positions of ids and masks.

        source: that of rows without one. Raises NotInPlace where a column must be converted, and
        BadData where offsets are damaged.
        """
        schema = self.schema
        lists = {"input_ids": pa.list_(pa.int32()), "document_lengths": pa.list_(pa.int32()),
                 "loss_mask": pa.list_(pa.bool_())}  # fmt: skip
        for name, kind in lists.items():
            required = name != "loss_mask"
            if name in schema.names:
                stored = schema.field(name).type
                if not pa.types.is_list(stored) or stored.value_type != kind.value_type:
                    raise NotInPlace
            elif required:
                raise NotInPlace
        names = [name for name in (*lists, "id", "source") if name in schema.names]
        for batch, _ in self.batches():
            part = batch.select(names)
            if "loss_mask" in names and part.column("loss_mask").null_count == batch.num_rows:
                part = part.drop_columns(["loss_mask"])  # every token counts
            for name in filter(part.schema.names.__contains__, lists):
                self._check_offsets(part.column(name), name)
            yield _with_source(part, source), self._positions(part)

    def _check_offsets(self, column: pa.ListArray, name: str) -> None:
        if column.null_count or column.values.null_count:
            raise NotInPlace
        offsets = int32s(column.offsets)
        if offsets[0] < 0 or (np.diff(offsets) < 0).any() or offsets[-1] > len(column.values):
            raise BadData(f"{self.path}: offsets of {name} are damaged (damaged bits)")

    def _positions(self, batch: pa.RecordBatch) -> Positions:
        tokens = batch.column("input_ids")
        start, left_over = divmod(self._position(tokens.values), 4)
        if left_over:
            raise NotInPlace
        offsets = int32s(tokens.offsets)
        at = start + tokens.values.offset + offsets[:-1].astype(np.int64)
        if "loss_mask" not in batch.schema.names:
            return at, np.full(len(tokens), -1)
        mask = batch.column("loss_mask")
        bounds = int32s(mask.offsets)
        if (np.diff(bounds) != np.diff(offsets)).any():
            raise BadData("token rows: a loss_mask is not as long as its input_ids")
        first = 8 * self._position(mask.values) + mask.values.offset
        return at, first + bounds[:-1].astype(np.int64)

    def _position(self, values: pa.Array) -> int:
        """The position of an array's values in the file; NotInPlace if they are elsewhere."""
        buffer = values.buffers()[1]
        if buffer is None or not buffer.size:
            return 0  # no values
        position = buffer.address - self.buffer.address
        if not 0 <= position < len(self.buffer):
            raise NotInPlace  # they were decompressed
        return int(position)


def _with_source(batch: pa.RecordBatch, source: str | None) -> pa.RecordBatch:
    """The batch with this source where a row has none."""
    if source is None:
        return batch
    index = batch.schema.get_field_index("source")
    if index < 0:
        column: Any = pa.repeat(pa.scalar(source, pa.string()), batch.num_rows)
        return batch.append_column("source", column)
    filled = batch.column(index).cast(pa.string()).fill_null(source)
    return batch.set_column(index, "source", filled)
