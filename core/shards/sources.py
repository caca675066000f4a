"""Sources: one input shard each, read batch by batch in bounded memory, as often as needed.

Formats: Parquet, Arrow IPC stream or file, JSON lines (plain, gzip, zstd). A source knows its
name and fingerprint and yields batches that conform to a kind; other rows are passed to
`reject(row, reason)`. A truncated stream is BadData, never a shorter result: pyarrow accepts an
Arrow stream without its end mark, so the last eight bytes are checked here.
"""

import contextlib
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_128

from sabia.core import stop
from sabia.core.digests import arrow_batches, is_damage, open_parquet
from sabia.core.errors import BadData
from sabia.core.file_hashes import content_hash
from sabia.core.shards import arrow_arrays, schemas
from sabia.core.shards.arrow_arrays import cast, plain, plain_schema
from sabia.core.shards.job import is_stream
from sabia.core.shards.schemas import ANSWERS, BATCH_BYTES, Reject

BATCH_ROWS = 2_000
DAMAGE = (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error)
SHOWN = 8  # columns in a message
TEXT, TEXT_HINT = "text", "; --text-column NAME reads another column"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
CUT_OFF = "Arrow stream without its end mark (the producer was cut off)"
_JOINED = b"ARROW1ARROW1\0\0"  # the end of an Arrow file and the start of another

Opener = Callable[[], BinaryIO]  # each call gives a fresh, seekable file at its start


def ignore_reject(_row: dict[str, Any], _reason: str) -> None:
    """Ignore rejects, for a pass over data whose rejects another pass writes."""


class ArrowStream(io.RawIOBase):
    """An Arrow stream that is read once, while another process writes it.

    read_some(limit) gives at most so many bytes as soon as there are any, b"" at the end.
    """

    def __init__(self, read_some: Callable[[int], bytes]) -> None:
        self._read_some, self._digest, self._end = read_some, xxh3_128(), b""
        self._ended = False
        self._file = io.BufferedReader(self, 1 << 16)
        self._reader = pa.ipc.open_stream(self._file)
        self.schema = self._reader.schema

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._read_some(len(buffer))
        buffer[: len(block)] = block
        self._digest.update(block)
        self._end = (self._end + block)[-len(END_OF_STREAM) :]
        return len(block)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The batches, also of streams of the same columns that follow; BadData without the end
        mark."""
        reader = self._reader
        while True:
            yield from arrow_batches(reader, "<stdin>")
            if not self._file.peek(1):
                break
            reader = pa.ipc.open_stream(self._file)
            _check_columns(reader.schema, self.schema)
        if self._end != END_OF_STREAM:
            raise BadData(CUT_OFF)
        self._ended = True

    def content_hash(self) -> str:
        """As that of a file of the same bytes; ValueError before the end."""
        if not self._ended:
            raise ValueError("the hash of a stream is known at its end")
        return self._digest.hexdigest()


def _check_columns(schema: pa.Schema, first: pa.Schema) -> None:
    if not schema.equals(first):
        raise BadData("several Arrow streams with different columns joined into one")


@dataclass(frozen=True)
class Source:
    """One input shard. `open` gives a fresh binary file; `form` is parquet, arrow or jsonl.

    keys: columns and values from the names of its folders (language=pt/), used where a row has no
    value of its own. schema: the columns of all batches where it is set (by `unified`);
    else each batch has those that the shard has. columns: those that are read where a call of
    `batches` names none; None: all. groups: the row groups of a Parquet file that are read; None:
    all.
    """

    name: str
    kind: str
    form: str
    open: Opener
    keys: tuple[tuple[str, str | None], ...] = ()
    schema: pa.Schema | None = None
    columns: tuple[str, ...] | None = None
    groups: tuple[int, ...] | None = None
    text_column: str = ""  # the column that is read as `text`; '': that one
    stream: ArrowStream | None = None  # read instead of a file: once, as it arrives

    def fingerprint(self) -> str:
        """A hash of all bytes, the format, and what decides how they are read; that of a stream is
        known once all of it has been read."""
        stream = self.stream
        content = stream.content_hash() if stream else content_hash(self.name, self.open)
        about = repr((self.form, self.keys, self.text_column, content))
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()

    @property
    def origin(self) -> str:
        """A hash of the absolute path; '' for a stream, whose name says nothing of its content."""
        return origin_of(self.name)

    def size(self) -> int:
        """Bytes of the shard; OSError if it is unknown."""
        with self.open() as file:
            return file.seek(0, io.SEEK_END)

    def rows(self) -> int | None:
        """The number of rows if the format states it (Parquet), else None."""
        if self.form != "parquet":
            return None
        with self.reading(), self.open() as file:
            return int(open_parquet(file, self.name).metadata.num_rows)

    def decoded_bytes(self) -> int | None:
        """Bytes of all values, if the format states them (Parquet), else None."""
        if self.form != "parquet":
            return None
        with self.reading(), self.open() as file:
            metadata = open_parquet(file, self.name).metadata
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        return sum(group.total_byte_size for group in groups)

    def stored_schema(self) -> pa.Schema:
        """The columns and metadata of a Parquet or Arrow shard, in the types of `raw`."""
        if self.form == "parquet":
            with self.open() as file:
                return plain_schema(open_parquet(file, self.name).schema_arrow)
        with self.open_arrow() as (schema, _):
            return plain_schema(schema)

    def batches(
        self,
        columns: Sequence[str] | None = None,
        rows: int = BATCH_ROWS,
        reject: Reject = ignore_reject,
    ) -> Iterator[pa.RecordBatch]:
        """Conforming batches of at most `rows` rows; `columns` limits what is read and yielded.

        Raises BadData if the shard is corrupt or truncated.
        """
        columns = columns or self.columns
        with self.reading():
            for batch in self.raw(columns, rows, reject):
                whole = self._conform(batch, columns, reject)
                if whole.num_rows:
                    yield whole

    def raw(
        self,
        columns: Sequence[str] | None = None,
        rows: int = BATCH_ROWS,
        reject: Reject = ignore_reject,
    ) -> Iterator[pa.RecordBatch]:
        """The batches before they are made to conform; raises what the libraries raise."""
        readers = {"parquet": self._parquet, "arrow": self._arrow, "jsonl": self._jsonl}
        return readers[self.form](columns, rows, reject)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """See the function `reading`."""
        return reading(self.name)

    def _conform(
        self, batch: pa.RecordBatch, columns: Sequence[str] | None, reject: Reject
    ) -> pa.RecordBatch:
        from sabia.core.shards.records import with_json

        batch = with_json(batch, self.kind)
        for name, value in self.keys:
            index = batch.schema.get_field_index(name)
            column = pa.repeat(pa.scalar(value, pa.string()), batch.num_rows)
            if index < 0:
                batch = batch.append_column(name, column)
            elif batch.column(index).null_count:
                kind = batch.schema.field(index).type
                value_of = cast(column, kind, f"folder {name}={value}: the column", f"a {kind}")
                filled = pc.coalesce(batch.column(index), value_of)
                batch = batch.set_column(index, batch.schema.field(index), filled)
        needed = [n for n in schemas.REQUIRED[self.kind] if columns is None or n in columns]
        there = [n for n in needed if n in batch.schema.names]
        whole = _drop_broken(batch, there, reject)
        names = None  # each batch has scores of its own names
        if self.schema is not None and schemas.is_scores(self.kind, "scores"):
            names = arrow_arrays.names_of(self.schema.field("scores").type)
        if columns is None:
            full = schemas.conform(whole, self.kind, names)
            return full if self.schema is None else schemas.fit(full, self.schema)
        for name in schemas.REQUIRED[self.kind]:
            if name not in whole.schema.names:  # it was not requested, but `conform` expects it
                wanted = schemas.KINDS[self.kind].field(name)
                whole = whole.append_column(wanted, pa.nulls(whole.num_rows, wanted.type))
        full = schemas.conform(whole, self.kind, names)
        return full.select([name for name in columns if name in full.schema.names])

    def _parquet(
        self, columns: Sequence[str] | None, rows: int, _reject: Reject
    ) -> Iterator[pa.RecordBatch]:
        with self.open() as file:
            parquet = open_parquet(file, self.name)
            check_single_parquet(file, parquet.metadata)
            stored = parquet.schema_arrow.names
            names = self.named(stored)
            wanted = columns
            if columns and "id" in columns and may_lack_ids(parquet.metadata):
                # ids are made of them
                wanted = [*columns, schemas.REQUIRED[self.kind][0], "source", *ANSWERS]
            if wanted is not None:
                wanted = [old for old, new in zip(stored, names, strict=True) if new in wanted]
            for group in range(parquet.num_row_groups) if self.groups is None else self.groups:
                for batch in parquet.iter_batches(rows, row_groups=[group], columns=wanted):
                    yield from _small(plain(self._renamed(batch)))

    def _arrow(
        self, columns: Sequence[str] | None, rows: int, _reject: Reject
    ) -> Iterator[pa.RecordBatch]:
        with self.open_arrow() as (schema, stream):
            self.named(schema.names)
            for batch in map(self._renamed, stream):
                names = [n for n in columns or () if n in batch.schema.names]
                kept = batch if columns is None else batch.select(names)
                for start in range(0, kept.num_rows, rows):
                    yield from _small(plain(kept.slice(start, rows)))

    def _jsonl(
        self, _columns: Sequence[str] | None, rows: int, reject: Reject
    ) -> Iterator[pa.RecordBatch]:
        from sabia.core.shards.json_lines import batches_of_json, decompressed

        with self.open() as raw:
            file, text = decompressed(raw), self.text_column  # a line is parsed whole
            yield from batches_of_json(file, self.kind, rows, reject, text)

    @contextlib.contextmanager
    def open_arrow(self) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """The schema and the batches, see `open_arrow`."""
        if self.stream is not None:
            yield self.stream.schema, self.stream.batches()
            return
        with self.open() as file:
            yield open_arrow(file, self.name)

    def named(self, stored: Sequence[str]) -> list[str]:
        """The names of a shard's columns, with that of the text. Raises BadData if one is missing,
        or if there is another column of that name."""
        names = [TEXT if name == self.text_column else name for name in stored]
        for name in schemas.REQUIRED[self.kind]:
            name = self.text_column or name
            if name not in stored and not (name == "prompt" and set(ANSWERS) & {*stored}):
                others = ", ".join(stored[:SHOWN]) + ", …" * (len(stored) > SHOWN)
                raise BadData(f"no column {name!r} among {others} (expected {self.kind} records)"
                              + TEXT_HINT * (self.kind == "document"))  # fmt: skip
        if names.count(TEXT) > 1 and self.text_column:
            raise BadData(f"columns {self.text_column!r} and 'text' (expected one of them)")
        return names

    def _renamed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.text_column not in batch.schema.names:
            return batch
        names = [TEXT if name == self.text_column else name for name in batch.schema.names]
        return batch.rename_columns(names)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """A context that converts errors of libraries on a bad shard to BadData with its name."""
    try:
        yield
    except BadData as error:
        if str(error).startswith(name):
            raise
        raise BadData(f"{name}: {error}") from error
    except Exception as error:
        damaged = is_damage(error) or isinstance(error, DAMAGE)
        if not damaged and type(error).__name__ != "ZstdError":
            raise
        reason = str(error).partition("\n")[0]
        raise BadData(f"{name}: corrupt or cut short ({reason})") from error


def origin_of(name: str) -> str:
    """A hash of an absolute path or a URL; '' for a stream."""
    if name == "<stdin>" or is_stream(name):
        return ""
    path = name if "://" in name else os.path.abspath(name)
    return hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def rows_of(sources: Sequence[Source]) -> int | None:
    """Rows of all sources if every format states them, else None."""
    counts = [source.rows() for source in sources]
    return None if None in counts else sum(filter(None, counts))


def bytes_of(sources: Sequence[Source]) -> int | None:
    """Bytes of all values; None where they are not known without reading: in streams and in
    compressed JSON lines."""
    total = 0
    for source in sources:
        if source.stream is not None:
            return None
        plain = source.name.endswith((".jsonl", ".arrow"))
        size = source.size() if plain else source.decoded_bytes()
        if size is None:
            return None
        total += size
    return total


def batches_of(
    sources: Sequence[Source], columns: Sequence[str] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(source number, batch) of all sources in order; raises Interrupted on a stop signal."""
    for index, source in enumerate(sources):
        for batch in source.batches(columns):
            stop.check()
            yield index, batch


def open_arrow(file: BinaryIO, name: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema and the batches of an Arrow IPC file, or of streams that follow each other.

    Raises BadData for a stream without its end mark, for streams with different columns, and for
    several files in one: the last one's footer describes only that one.
    """
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(file)
        return reader.schema, _batches_of_file(file, reader, name)
    _check_end_of_stream(file, name)
    schema = pa.ipc.open_stream(file).schema
    file.seek(0)
    return schema, _batches_of_streams(file, schema, name)


def _batches_of_file(
    file: BinaryIO, reader: pa.ipc.RecordBatchFileReader, name: str
) -> Iterator[pa.RecordBatch]:
    yield from arrow_batches(reader, name)
    file.seek(0)
    before = b""
    while block := file.read(1 << 20):
        if _JOINED in before + block:
            raise BadData("several Arrow files joined into one; pass their paths instead")
        before = block[-len(_JOINED) :]


def _batches_of_streams(file: BinaryIO, schema: pa.Schema, name: str) -> Iterator[pa.RecordBatch]:
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    while file.tell() < end:
        stream = pa.ipc.open_stream(file)
        _check_columns(stream.schema, schema)
        yield from arrow_batches(stream, name)


def _check_end_of_stream(file: BinaryIO, name: str) -> None:
    """Raise BadData unless the Arrow stream ends with its end mark; rewinds the file."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 8))
    ends = file.read(8) == END_OF_STREAM
    file.seek(0)
    if not ends:
        raise BadData(f"{name}: {CUT_OFF}")


def check_single_parquet(file: BinaryIO, metadata: pq.FileMetaData) -> None:
    """Raise BadData if several Parquet files were concatenated; only one would be read."""
    end = 4
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            end = max(end, start + chunk.total_compressed_size)
    footer = file.seek(0, io.SEEK_END) - 8 - metadata.serialized_size
    file.seek(end)
    if footer > end and b"PAR1PAR1" in file.read(footer - end):
        raise BadData("several Parquet files joined into one stream; pass their paths instead")
    file.seek(0)


def may_lack_ids(metadata: pq.FileMetaData) -> bool:
    """Whether some rows of a Parquet file may have no id, by its statistics."""
    for group in range(metadata.num_row_groups):
        chunks = (metadata.row_group(group).column(c) for c in range(metadata.num_columns))
        ids = [chunk for chunk in chunks if chunk.path_in_schema == "id"]
        if not ids or ids[0].statistics is None or ids[0].statistics.null_count:
            return True
    return False


def _drop_broken(batch: pa.RecordBatch, names: Sequence[str], reject: Reject) -> pa.RecordBatch:
    """Without rows that have null in a required column, or text that is not UTF-8, which Parquet
    and Arrow files may hold unchecked."""
    for name in names:
        column = batch.column(name)
        if column.null_count:
            for row in batch.filter(column.is_null()).to_pylist():
                reject(row, f"{name} is null")
            batch = batch.filter(column.is_valid())
    for name in names:
        index = batch.schema.get_field_index(name)
        column = batch.column(index)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            texts = column.cast(pa.binary()).to_pylist()
            mended = [text.decode("utf-8", "replace") for text in texts]
            whole = pa.array([new.encode() == old for new, old in zip(mended, texts, strict=True)])
            field = batch.schema.field(index)
            fixed = batch.set_column(index, field, pa.array(mended, column.type))
            for row in fixed.filter(pc.invert(whole)).to_pylist():
                reject(row, f"{name} is not UTF-8")
            batch = fixed.filter(whole)
    return batch


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch until each piece holds at most BATCH_BYTES (or one row)."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows <= 1:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _small(batch.slice(0, middle))
    yield from _small(batch.slice(middle))
