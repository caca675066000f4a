"""Messages of Arrow files and streams: where the buffers of each record batch are in the file.

Only the metadata of messages is read (flatbuffers, of the Arrow columnar format 1.5), not their
bodies, so that the time grows with the record batches and not with their rows.

The bytes of a shard are read by pread(2). Nothing is mapped, so that a shard which is cut short
while a run reads it is an error with its name and not a SIGBUS. At most OPEN_FILES files are open
at a time.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData

OPEN_FILES = 64
Bytes = bytes | memoryview


class _Descriptor:
    """A file that is open for reading as long as this object is used."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)


@lru_cache(OPEN_FILES)
def _opened(path: str, version: tuple[int, ...]) -> _Descriptor:
    """An open file; BadData if it is another version than the one whose index was read."""
    try:
        descriptor = _Descriptor(path)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror or error}") from error
    if _version(os.fstat(descriptor.number)) != version:
        raise BadData(f"{path}: the file has changed since it was opened (expected the same file "
                      "during a run)")  # fmt: skip
    return descriptor


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_ino, status.st_dev


class FileBytes:
    """The bytes of a local file."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.name, self._version = path, _version(os.stat(path))
        self.size = self._version[0]

    def read(self, position: int, size: int) -> bytes:
        """`size` bytes; BadData if the file ends before."""
        data = self.read_some(position, size)
        if len(data) != size:
            raise BadData(
                f"{self.name}: cut short: it ends before byte {position + size:,} (of "
                f"{self.size:,} bytes when it was opened)"
            )
        return data

    def read_some(self, position: int, size: int) -> bytes:
        """At most `size` bytes, fewer at the end of the file."""
        if position < 0 or not 0 <= size <= self.size:
            raise BadData(f"{self.name}: {size} bytes at {position} (damaged bits)")
        try:
            return os.pread(self._file.number, size, position)
        except OSError as error:
            raise BadData(f"{self.name}: {error.strerror or error}") from error

    def is_current(self) -> bool:
        """Whether the path still names this file, of whatever size."""
        try:
            return _version(os.stat(self.name))[1:] == self._version[1:]
        except OSError:
            return False

    def will_need(self, position: int, size: int) -> None:
        """Let the system read in advance."""
        with contextlib.suppress(OSError, OverflowError):
            os.posix_fadvise(self._file.number, position, size, os.POSIX_FADV_WILLNEED)

    @property
    def _file(self) -> _Descriptor:
        return _opened(self.name, self._version)


class BufferBytes:
    """The bytes of a buffer in memory."""

    def __init__(self, buffer: pa.Buffer, name: str) -> None:
        self.name, self._buffer = name, memoryview(buffer)
        self.size = len(self._buffer)

    def read(self, position: int, size: int) -> memoryview:
        """`size` bytes; BadData if the buffer ends before."""
        data = self.read_some(position, size)
        if len(data) != size:
            raise BadData(f"{self.name}: ends before byte {position + size:,}")
        return data

    def read_some(self, position: int, size: int) -> memoryview:
        """At most `size` bytes, fewer at the end."""
        return self._buffer[position : position + size]

    def will_need(self, position: int, size: int) -> None:
        """The bytes are in memory."""


ShardBytes = FileBytes | BufferBytes


FILE_START = b"ARROW1\0\0"
SCHEMA, RECORD_BATCH = 1, 3  # of Message.header
MARKER = 0xFFFFFFFF
STREAM_END = MARKER.to_bytes(4, "little") + bytes(4)
FIRST_BYTES, LAST_BYTES = 1 << 16, 1 << 28  # read to find the last batch of a stream, at most
_FILE_TAIL = 10  # bytes after the footer of a file: its length, ARROW1
_READ_BYTES = 2048  # of metadata at once
_I16, _U16, _I32, _U32, _I64 = (struct.Struct(f"<{kind}").unpack_from for kind in "hHiIq")


class NotInPlace(Exception):
    """The ids cannot be read where they are."""


@dataclass(frozen=True)
class Message:
    """A message at byte `at`: its metadata, its kind, and where its body is."""

    at: int
    metadata: Bytes
    kind: int
    body: int
    end: int


@dataclass(frozen=True)
class BatchLayout:
    """Where a record batch of n rows is.

    nodes: (length, nulls) of each array, depth first; buffers: (position in the file, bytes).
    """

    rows: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    body: int

    def buffer(self, number: int) -> tuple[int, int]:
        """Position and size."""
        return self.body + self.buffers[2 * number], self.buffers[2 * number + 1]


@dataclass(frozen=True)
class Column:
    """A column of the schema: its type, and the numbers of its first node and its first buffer."""

    kind: pa.DataType
    node: int
    buffer: int


def columns_of(schema: pa.Schema) -> tuple[dict[str, Column], int, int]:
    """The columns by name, and how many nodes and buffers a batch has; NotInPlace for types whose
    number of buffers is not fixed."""
    columns, node, buffer = {}, 0, 0
    for field in schema:
        columns[field.name] = Column(field.type, node, buffer)
        nodes, buffers = _parts(field.type)
        node, buffer = node + nodes, buffer + buffers
    return columns, node, buffer


def _parts(kind: pa.DataType) -> tuple[int, int]:
    """Nodes and buffers of an array of this type."""
    types = pa.types
    if types.is_null(kind):
        return 1, 0
    if isinstance(kind, pa.BaseExtensionType):
        return _parts(kind.storage_type)
    if types.is_dictionary(kind) or types.is_primitive(kind) or types.is_fixed_size_binary(kind):
        return 1, 2
    if any(test(kind) for test in (types.is_string, types.is_binary, types.is_large_string,
                                   types.is_large_binary)):  # fmt: skip
        return 1, 3
    own = {types.is_list: 2, types.is_large_list: 2, types.is_map: 2, types.is_struct: 1,
           types.is_fixed_size_list: 1}  # fmt: skip
    count = next((count for test, count in own.items() if test(kind)), 0)
    if types.is_decimal(kind):
        return 1, 2
    if not count:
        raise NotInPlace
    parts = [_parts(kind.field(i).type) for i in range(kind.num_fields)]
    return 1 + sum(nodes for nodes, _ in parts), count + sum(buffers for _, buffers in parts)


def message_at(shard: ShardBytes, at: int) -> Message | None:
    """The message at a position; None for the end of a stream. BadData if there is none."""
    data = shard.read_some(at, min(_READ_BYTES, shard.size))
    if len(data) < 8:
        raise BadData(f"{shard.name}: Arrow stream without its end mark (the producer was cut off)")
    if _U32(data, 0)[0] != MARKER:
        raise NotInPlace  # of Arrow before 0.15, or something else
    size = _I32(data, 4)[0]
    if not size:
        return None
    if not 0 < size <= shard.size:
        raise BadData(f"{shard.name}: a message of {size} bytes (damaged bits)")
    metadata = data[8 : 8 + size] if len(data) >= 8 + size else shard.read(at + 8, size)
    try:
        root = _U32(metadata, 0)[0]
        kind = metadata[_field(metadata, root, 1)]
        length = _field(metadata, root, 3)
        body_size = _I64(metadata, length)[0] if length else 0
    except (struct.error, IndexError) as error:
        raise _damaged(shard) from error
    body = at + 8 + size
    if body_size < 0 or body + body_size > shard.size:
        raise BadData(f"{shard.name}: cut short in the message at byte {at:,} (of {shard.size:,})")
    return Message(at, metadata, kind, body, body + body_size)


def _batch_layout(shard: ShardBytes, message: Message, parts: tuple[int, int]) -> BatchLayout:
    """Where the buffers of a record batch of so many nodes and buffers are."""
    data = message.metadata
    try:
        if message.kind != RECORD_BATCH:
            raise _damaged(shard)
        batch = _reference(data, _U32(data, 0)[0], 2)
        if _field(data, batch, 3):
            raise NotInPlace  # compressed
        length = _field(data, batch, 0)
        rows = _I64(data, length)[0] if length else 0
        nodes, buffers = (_numbers(data, _reference(data, batch, number)) for number in (1, 2))
    except (struct.error, IndexError) as error:
        raise _damaged(shard) from error
    if rows < 0 or (len(nodes), len(buffers)) != (2 * parts[0], 2 * parts[1]):
        raise _damaged(shard)
    return BatchLayout(rows, nodes, buffers, message.body)


def custom_metadata(shard: ShardBytes, message: Message) -> dict[bytes, bytes]:
    """The keys and values of a message."""
    data = message.metadata
    try:
        vector = _reference(data, _U32(data, 0)[0], 4)
        if not vector:
            return {}
        entries = range(vector + 4, vector + 4 + 4 * _U32(data, vector)[0], 4)
        tables = [entry + _U32(data, entry)[0] for entry in entries]
        return {_text(data, table, 0): _text(data, table, 1) for table in tables}
    except (struct.error, IndexError) as error:
        raise _damaged(shard) from error


def _damaged(shard: ShardBytes) -> BadData:
    return BadData(f"{shard.name}: the metadata of a record batch is damaged (damaged bits)")


def _field(data: Bytes, table: int, number: int) -> int:
    """The position of a field of a table; 0 if it is absent."""
    vtable = table - _I32(data, table)[0]
    entry = 4 + 2 * number
    if entry >= _U16(data, vtable)[0]:
        return 0
    offset = int(_U16(data, vtable + entry)[0])
    return offset and table + offset


def _reference(data: Bytes, table: int, number: int) -> int:
    """The position of what a field refers to; 0 if it is absent."""
    at = _field(data, table, number)
    return at and at + int(_U32(data, at)[0])


def _text(data: Bytes, table: int, number: int) -> bytes:
    at = _reference(data, table, number)
    return bytes(data[at + 4 : at + 4 + _U32(data, at)[0]]) if at else b""


@cache
def _pairs(count: int) -> struct.Struct:
    return struct.Struct(f"<{2 * count}q")


def _numbers(data: Bytes, vector: int) -> tuple[int, ...]:
    """A vector of pairs of int64; its elements are aligned to 8 bytes."""
    if not vector:
        return ()
    return _pairs(min(_U32(data, vector)[0], 1 << 20)).unpack_from(data, vector + 4)


class ArrowShard:
    """The messages of a local Arrow file, or of streams that follow each other."""

    def __init__(self, shard: ShardBytes) -> None:
        """Raises NotInPlace for what is not read in place."""
        self.bytes = shard
        self.is_file = bytes(shard.read_some(0, len(FILE_START))) == FILE_START
        self.start = len(FILE_START) if self.is_file else 0
        self._first = self._message(self.start)
        self.schema = self._schema(self._first)
        self.columns, *parts = columns_of(self.schema)
        self._parts = parts[0], parts[1]

    def _message(self, at: int) -> Message:
        message = message_at(self.bytes, at)
        if message is None or message.kind != SCHEMA:
            raise BadData(f"{self.bytes.name}: an Arrow stream without a schema")
        return message

    def _schema(self, message: Message) -> pa.Schema:
        data = message.metadata
        endianness = _field(data, _reference(data, _U32(data, 0)[0], 2), 0)
        if endianness and _I16(data, endianness)[0]:
            raise NotInPlace
        head = np.array([MARKER, len(data)], "<u4").tobytes()
        return pa.ipc.read_schema(pa.py_buffer(head + bytes(data)))

    def batch(self, at: int) -> BatchLayout:
        """The record batch whose message is at a position."""
        message = message_at(self.bytes, at)
        if message is None:
            raise _damaged(self.bytes)
        return self.layout(message)

    def layout(self, message: Message) -> BatchLayout:
        """Where the buffers of a record batch are; NotInPlace if they are compressed."""
        return _batch_layout(self.bytes, message, self._parts)

    def batch_positions(self) -> np.ndarray:
        """The positions of all record batches of a file, int64[B], from its footer; none for a
        stream."""
        end = self.bytes.size - _FILE_TAIL
        if not self.is_file or end <= 0:
            return np.zeros(0, np.int64)
        tail = bytes(self.bytes.read(end, _FILE_TAIL))
        size = _I32(tail, 0)[0]
        if tail[4:] != FILE_START[:6] or not 0 < size < end:
            raise BadData(f"{self.bytes.name}: an Arrow file without its end (cut short?)")
        footer = self.bytes.read(end - size, size)
        try:
            blocks = _reference(footer, _U32(footer, 0)[0], 3)
            count = _U32(footer, blocks)[0] if blocks else 0
            numbers = np.frombuffer(footer, "<i8", 3 * count, blocks + 4)
        except (struct.error, ValueError) as error:
            raise _damaged(self.bytes) from error
        return numbers.reshape(-1, 3)[:, 0]

    def last_batch(self) -> Message | None:
        """The last record batch; None if there is none, or it is not within the last LAST_BYTES of
        a stream, which is read from its end."""
        if self.is_file:
            at = self.batch_positions()
            return message_at(self.bytes, int(at[-1])) if len(at) else None
        end, size = self.bytes.size - len(STREAM_END), FIRST_BYTES
        whole = end % 8 == 0 and bytes(self.bytes.read(end, len(STREAM_END))) == STREAM_END
        while whole and size <= LAST_BYTES:
            start = max(0, end - size)
            words = np.frombuffer(self.bytes.read(start, end - start), "<u4")
            for word in np.flatnonzero(words[::2] == MARKER)[::-1].tolist():
                with contextlib.suppress(BadData, NotInPlace):
                    message = message_at(self.bytes, start + 8 * word)
                    if message and message.end == end and message.kind == RECORD_BATCH:
                        return message
            if not start:
                break
            size *= 8
        return None

    def messages(self) -> Iterator[Message | None]:
        """The messages of record batches; None at the end of each stream. BadData unless the file
        ends there."""
        position, end = self._first.end, self.bytes.size
        if self.is_file:
            end -= _FILE_TAIL + _U32(self.bytes.read(end - _FILE_TAIL, 4), 0)[0]
        while True:
            message = message_at(self.bytes, position)
            if message is not None:
                if message.kind == RECORD_BATCH:
                    yield message
                position = message.end
                continue
            yield None
            position += 8
            if self.is_file or position >= end:
                break
            again = self._message(position)
            if bytes(again.metadata) != bytes(self._first.metadata) and not self._schema(
                again
            ).equals(self.schema):
                raise BadData(f"{self.bytes.name}: several Arrow streams with different columns")
            position = again.end
        if position != end:
            raise BadData(f"{self.bytes.name}: not one whole Arrow file (several files joined?)")
