"""Digests by which flipped bits in Parquet files and Arrow streams are found.

Other programs read these files as they are. In Parquet every page has its CRC-32, and the bytes
between the last row group and the footer, which no reader looks at, hold: a 64-bit digest of each
BLOCK of all bytes before them (page headers, which the CRC leaves out, among them), the number of
these bytes (uint64, little-endian), MARK, and the 128-bit digest of the digests, the number and the
footer. Before these digests there may be a text about the run that wrote the file, with a digest of
its own; hashes of the content leave it out (`text_of_run`). In Arrow the custom metadata of each
record batch holds the digest of the schema, the rows before it and the batch; the last batch has no
rows and also holds the number of rows. Digests are XXH3 (xxhash.com; not cryptographic). Files
without digests, which other programs or earlier versions wrote, are read with a note. JSON objects
with a digest are in `atomic`.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64, xxh3_64_digest, xxh3_128, xxh3_128_digest

from sabia.core import notes
from sabia.core.errors import BadData

MARK = b"sabiaXXB"  # 8 bytes
RUN_MARK = b"sabiaRUN"  # 8 bytes, before the digest of a text about the run
BLOCK = 1 << 15
KEY, ROWS = b"sabia.xxh3", b"sabia.rows"
BUFFER_BYTES = 1 << 20  # of a column chunk that are read at once: it may have any size
_TAIL = 8  # bytes of a Parquet file after the footer: its length, PAR1
_seen = {"undigested": False}


def note_missing(name: str) -> None:
    """Say once in a run that a file has no digests."""
    if not _seen["undigested"]:
        _seen["undigested"] = True
        notes.note(f"{name} has no digests, as files of other programs: damaged bits may go unseen")


def suppress_notes() -> None:
    """Leave these notes to the parent process."""
    _seen["undigested"] = True


class ParquetWriter:
    """A `pyarrow.parquet.ParquetWriter` with checksums of pages and digests of all bytes.

    The target is open for writing; it need not be seekable and stays open.
    """

    def __init__(self, target: BinaryIO, schema: pa.Schema, **options: object) -> None:
        self._target = _Target(target)
        self._writer = pq.ParquetWriter(self._target, schema, write_page_checksum=True, **options)
        self.write_table = self._writer.write_table
        self.add_key_value_metadata = self._writer.add_key_value_metadata
        self.run = ""  # a text about the run that writes the file

    def close(self) -> None:
        """Write the digests and the footer."""
        target = self._target
        held = target.held = []
        self._writer.close()
        end, target.held = b"".join(held), None
        start = len(end) - _TAIL - int.from_bytes(end[-8:-4], "little")
        footer = end[start:]
        target.write(end[:start])
        count = target.count.to_bytes(8, "little")
        table = target.digests()
        digest = xxh3_128_digest(table + count + footer)
        if self.run:
            text = self.run.encode()
            target.file.write(RUN_MARK + xxh3_64_digest(text) + text)
        target.file.write(table + count + MARK + digest + footer)


class _Target:
    """Passes on what is written, with digests of its blocks, or holds it back."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.count = file, 0
        self.held: list[bytes] | None = None
        self._blocks, self._block, self._left = bytearray(), xxh3_64(), BLOCK

    def write(self, data: bytes) -> int:
        if self.held is not None:
            self.held.append(bytes(data))
            return len(data)
        self.file.write(data)
        self.count += len(data)
        rest = memoryview(data)
        while rest:
            self._block.update(rest[: self._left])
            rest, self._left = rest[self._left :], self._left - len(rest[: self._left])
            if not self._left:
                self._blocks += self._block.digest()
                self._block, self._left = xxh3_64(), BLOCK
        return len(data)

    def digests(self) -> bytes:
        """Those of all blocks, of which the last one may be shorter."""
        last = self._block.digest() if self._left < BLOCK else b""
        return bytes(self._blocks + last)

    def flush(self) -> None:
        """The owner of the file flushes it."""

    def close(self) -> None:
        """The owner of the file closes it."""


class _Checked:
    """A file of which each block that is read is compared with its digest."""

    closed = False

    def __init__(self, file: BinaryIO, name: str, count: int, table: bytes, digest: bytes) -> None:
        self._file, self._name, self._count, self._table = file, name, count, table
        self.digest = digest  # of the table and the footer
        self.seek, self.tell = file.seek, file.tell

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> memoryview | bytes:
        """As that of a file. Raises BadData where a block is not as it was written."""
        start = self._file.tell()
        if start >= self._count or size < 0:
            return self._file.read(size)
        end = start + size
        low, high = start // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, self._count)
        self._file.seek(low)
        data = memoryview(self._file.read(max(high, end) - low))
        for first in range(low, high, BLOCK):
            block, at = data[first - low : min(first + BLOCK, high) - low], first // BLOCK * 8
            if xxh3_64_digest(block) != self._table[at : at + 8]:
                what = f"{self._name}: bytes from {first} on"
                raise BadData(f"{what} are not as they were written (damaged bits)")
        part = data[start - low : end - low]
        self._file.seek(start + len(part))
        return part

    def check(self) -> None:
        """Raise BadData unless all blocks are as they were written."""
        for first in range(0, self._count, 32 * BLOCK):
            self._file.seek(first)
            self.read(min(32 * BLOCK, self._count - first))

    def close(self) -> None:
        """The owner of the file closes it."""


def open_parquet(file: BinaryIO, name: str, say: bool = True) -> pq.ParquetFile:
    """A Parquet file whose footer is as it was written and whose bytes are checked when they are
    read. Raises BadData, and what pyarrow raises for a file that is not Parquet. say: note that
    there are no digests."""
    checked = _checked(file, name)
    file.seek(0)
    native = _native(file)
    local = {"pre_buffer": False, "buffer_size": BUFFER_BYTES}  # a store's are requested ahead
    opened = pq.ParquetFile(
        checked or native or file, page_checksum_verification=checked is None,
        **({} if native is None else local),
    )  # fmt: skip
    if checked is None and say:
        note_missing(name)
    return opened


def _native(file: BinaryIO) -> Any:
    """A local file as pyarrow's own, which reads without the interpreter; None for others."""
    if isinstance(file, io.BufferedReader) and isinstance(file.raw, io.FileIO):
        with contextlib.suppress(OSError):  # no /dev/fd here
            return pa.OSFile(f"/dev/fd/{file.fileno()}")
    return None


def _checked(file: BinaryIO, name: str) -> _Checked | None:
    """A Parquet file with its digests, which are compared with those of the footer; None if it has
    none."""
    if not (span := _table_at(file)):
        return None
    count, start, end = span
    digest, footer = file.read(16), file.read()
    table = b""
    if count <= start:
        file.seek(start)
        table = file.read(end - start)
    if xxh3_128_digest(table + count.to_bytes(8, "little") + footer) != digest:
        raise BadData(f"{name}: the footer is not as it was written (damaged bits)")
    return _Checked(file, name, count, table, digest)


def _table_at(file: BinaryIO) -> tuple[int, int, int] | None:
    """The number of bytes with digests in a Parquet file, and the first byte of their table and the
    first after it; None without them. The file is left at the digest of the table."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL))
    length = int.from_bytes(file.read(4), "little")
    end = size - _TAIL - length - 32
    if end < 4 or file.read(4) != b"PAR1":
        return None
    file.seek(end)
    count, mark = int.from_bytes(file.read(8), "little"), file.read(8)
    return (count, end - -(-count // BLOCK) * 8, end) if mark == MARK else None


def run_span(file: BinaryIO) -> tuple[int, int]:
    """The first byte of the text about the run in a Parquet file, with its mark, and the first
    after it; (0, 0) if there is none."""
    count, start, _ = _table_at(file) or (0, 0, 0)
    if not 4 <= count <= start - 16:
        return 0, 0
    file.seek(count)
    return (count, start) if file.read(8) == RUN_MARK else (0, 0)


def text_of_run(file: BinaryIO) -> str:
    """The text about the run that wrote a Parquet file; '' if it has none, or a damaged one."""
    start, end = run_span(file)
    file.seek(start)
    stored = file.read(end - start)
    text = stored[16:]
    return text.decode() if stored and xxh3_64_digest(text) == stored[8:16] else ""


def footer_digest(file: BinaryIO, name: str) -> str:
    """The digest of the digests of all bytes of a Parquet file; '' if it has none."""
    checked = _checked(file, name)
    return checked.digest.hex() if checked else ""


def check_parquet(path: str) -> None:
    """Read a local file; raise BadData if it has digests and is not as it was written."""
    with open(path, "rb") as file:
        if (checked := _checked(file, path)) is not None:
            checked.check()


@contextlib.contextmanager
def parquet_at(path: str | Path) -> Iterator[pq.ParquetFile]:
    """`open_parquet` of a local file; errors of damaged pages are BadData with its name."""
    try:
        with open(path, "rb") as file:
            yield open_parquet(file, str(path))
    except Exception as error:
        if not is_damage(error):
            raise
        reason = str(error).partition("\n")[0]
        raise BadData(f"{path}: corrupt or cut short ({reason})") from error


def is_damage(error: Exception) -> bool:
    """Whether pyarrow raises this for the content of a file: OSError itself, without a number."""
    content = type(error) is OSError and error.errno is None
    return content or isinstance(error, pa.ArrowException)


class ArrowRows:
    """An Arrow IPC stream, or a file with `pa.ipc.new_file`, with a digest for each batch."""

    def __init__(
        self, target: object, schema: pa.Schema,
        new: Callable[[Any, pa.Schema], Any] = pa.ipc.new_stream,
    ) -> None:  # fmt: skip
        self.schema = schema.with_metadata((schema.metadata or {}) | {KEY: b"1"})
        self.rows, self._file = 0, new(target, self.schema)
        columns = [pa.nulls(0, field.type) for field in schema]
        self._empty = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        self._head = self.schema.serialize()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch."""
        self._write(batch, {})

    def _write(self, batch: pa.RecordBatch, about: dict[bytes, bytes]) -> bytes:
        """Write a batch with its metadata; returns its digest."""
        digest = _batch_digest(self._head, self.rows, batch, about.get(ROWS, b""))
        self._file.write_batch(batch, custom_metadata=about | {KEY: digest})
        self.rows += batch.num_rows
        self._empty = batch.slice(0, 0)  # with the same dictionaries
        return digest

    def close(self) -> None:
        """Write the last batch, which has no rows, and the end."""
        self._write(self._empty, {ROWS: str(self.rows).encode()})
        self._file.close()


def _batch_digest(head: pa.Buffer, row: int, batch: pa.RecordBatch, rows: bytes) -> bytes:
    digest = xxh3_128(head, seed=row)
    digest.update(rows)
    digest.update(batch.serialize())
    for column in batch.columns:  # a dictionary is a message of its own
        if pa.types.is_dictionary(column.type):
            values = pa.RecordBatch.from_arrays([column.dictionary], names=[""])
            digest.update(values.serialize())
    return digest.hexdigest().encode()


def arrow_batches(reader: pa.RecordBatchReader, name: str) -> Iterator[pa.RecordBatch]:
    """The batches of `pa.ipc.open_stream` or `open_file`; BadData where one is not as written."""
    pairs = batches_with_metadata(reader)
    if KEY not in (reader.schema.metadata or {}):
        note_missing(name)
        for batch, about in pairs:
            if KEY in (about or {}):
                raise BadData(f"{name}: the schema is not as it was written (damaged bits)")
            yield batch
        return
    head, row, ended = reader.schema.serialize(), 0, False
    for batch, about in pairs:
        batch.validate()  # before lengths are used
        about = about or {}
        rows = about.get(ROWS, b"")
        if ended or about.get(KEY) != _batch_digest(head, row, batch, rows):
            raise BadData(f"{name}: rows from {row} on are not as they were written (damaged bits)")
        row += batch.num_rows
        ended = rows == str(row).encode()
        if not ended:
            yield batch
    if not ended:
        raise BadData(f"{name}: ends after {row} rows, without its last batch (damaged bits)")


def batches_with_metadata(
    reader: pa.RecordBatchReader,
) -> Iterator[tuple[pa.RecordBatch, dict[bytes, bytes] | None]]:
    """Batches with their custom metadata, unchecked."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from map(reader.get_batch_with_custom_metadata, range(reader.num_record_batches))
        return
    with contextlib.suppress(StopIteration):
        while True:
            yield reader.read_next_batch_with_custom_metadata()
