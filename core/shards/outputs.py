"""Outputs of rows: a file, a directory of Parquet shards, an fsspec URL, stdout or a terminal.

Files appear atomically, in the format of their ending; Parquet is zstd in row groups of bounded
size. stdout is one stream (Parquet, or Arrow IPC or JSON lines with `--to`), as is a FIFO or the
pipe of `-o >(…)`; a terminal gets a short table, never binary data. The schema metadata of each
Parquet or Arrow file holds its provenance under the key `sabia`. JSON lines have no place for it:
it is in a file `.NAME.sabia.json` beside them, with a hash of all bytes, so that it says nothing of
a file that was changed or replaced since.
"""

import base64
import contextlib
import gzip
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sabia.core import digests, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.file_hashes import CACHED_BYTES, content_hash, forget_objects, remembered
from sabia.core.shards import schemas
from sabia.core.shards.atomic import atomic_path, scratch_directory
from sabia.core.shards.inputs import open_binary
from sabia.core.shards.job import FORMATS, Job, file_ending
from sabia.core.shards.layout import MANIFEST
from sabia.core.shards.lineage import run_record
from sabia.core.shards.lineage.run_record import RUN, beside
from sabia.core.shards.sources import reading
from sabia.core.shards.stores import listed
from sabia.core.shards.stores.objects import NoObject, is_there, is_url, remove, upload

GROUP_ROWS = 10_000
GROUP_BYTES = 64 << 20
SAMPLE_ROWS = 1_000  # from which it is decided whether a text column gets a dictionary
TABLE_ROWS = 10
METADATA_KEY = b"sabia"
_PART = re.compile(r"part-\w+\.parquet\Z")

# Of an output. Where it is complete only when all rows have been written, a function of whether
# they have: called at the start for a format that has its metadata there.
Provenance = dict[str, Any] | Callable[[bool], dict[str, Any]]
Metadata = Provenance | None


class Writer(Protocol):
    """Takes batches of one schema, in order."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch."""


class ParquetRows:
    """Parquet with row groups of at most GROUP_ROWS rows and about GROUP_BYTES bytes.

    zstd at its fastest level, and no dictionary for text with few repetitions: on web text this
    takes 0.7 times the CPU time of level 3 with dictionaries, for 15 % more bytes.
    """

    def __init__(self, target: BinaryIO, schema: pa.Schema) -> None:
        self.target, self.schema = target, schema
        self.pending, self.rows = list[pa.RecordBatch](), 0
        self.metadata_at_end: Callable[[bool], dict[str, Any]] | None = None
        self.made: dict[str, Any] = {}
        self.run: dict[str, Any] | None = None  # see run_record, once the file is closed
        # opened with the first rows, which it depends on
        self.file: digests.ParquetWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, GROUP_ROWS):
            self._add(batch.slice(start, GROUP_ROWS))

    def _add(self, batch: pa.RecordBatch) -> None:
        full = sum(b.num_rows for b in self.pending) + batch.num_rows > GROUP_ROWS
        if full or sum(b.nbytes for b in self.pending) >= GROUP_BYTES:
            self.flush()
        self.pending.append(batch)
        self.rows += batch.num_rows

    def _opened(self, table: pa.Table) -> digests.ParquetWriter:
        if self.file is None:
            self.file = digests.ParquetWriter(
                self.target, self.schema, compression="zstd", compression_level=1,
                use_dictionary=_repeating(table), store_schema=self.metadata_at_end is None,
            )  # fmt: skip
        return self.file

    def flush(self) -> None:
        """Write what is pending as one row group."""
        if self.pending:
            table = pa.Table.from_batches(self.pending).replace_schema_metadata(
                self.schema.metadata
            )
            self._opened(table).write_table(table, row_group_size=max(1, table.num_rows))
            self.pending = []

    def close(self) -> None:
        """Write the rest and the footer."""
        self.flush()
        file = self._opened(self.schema.empty_table())
        try:
            if self.metadata_at_end is not None:  # as the writer stores a schema that has it
                self.made = self.metadata_at_end(True)
                schema = with_metadata(self.schema, self.made)
                stored = {b"ARROW:schema": base64.b64encode(schema.serialize().to_pybytes())}
                file.add_key_value_metadata(schema.metadata | stored)
            plain, run = run_record.split(self.made)
            if run is not None:
                self.run = run.ended(self.rows, beside="out" in plain)
                file.run = run_record.text(self.run)
        finally:
            file.close()


def _repeating(table: pa.Table) -> list[str]:
    """Paths of the Parquet columns that get a dictionary: all except texts and lists of texts with
    few repetitions, and lists of integers: zstd makes token ids smaller without one."""
    sample = table.slice(0, SAMPLE_ROWS)
    distinct = {
        field.name
        for field, column in zip(sample.schema, sample.columns, strict=True)
        if (pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type))
        or _is_distinct(pc.list_flatten(column) if pa.types.is_list(field.type) else column)
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table.schema.empty_table(), sink)
    parquet_schema = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    paths = [parquet_schema.column(i).path for i in range(len(parquet_schema))]
    return [path for path in paths if path.partition(".")[0] not in distinct]


def _is_distinct(column: pa.ChunkedArray) -> bool:
    """Whether a column is of texts with few repetitions."""
    return pa.types.is_string(column.type) and pc.count_distinct(column).as_py() * 2 > len(column)


class JsonRows:
    """JSON lines."""

    def __init__(self, target: BinaryIO, _schema: pa.Schema) -> None:
        self.target, self.rows = target, 0

    def write(self, batch: pa.RecordBatch) -> None:
        from sabia.core.shards.records import to_json

        self.rows += batch.num_rows
        lines = "".join(to_json(row) + "\n" for row in batch.to_pylist())
        self.target.write(lines.encode("utf-8", "replace"))

    def close(self) -> None:
        """Nothing is pending."""


class ArrowRows(digests.ArrowRows):
    """An Arrow stream; each batch can be read as soon as it is written."""

    def __init__(self, target: BinaryIO, schema: pa.Schema) -> None:
        super().__init__(target, schema)
        self.target = target

    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        self.target.flush()


def arrow_stream(target: BinaryIO, schema: pa.Schema) -> digests.ArrowRows:
    """An Arrow stream; one of token rows has an index of them."""
    return _indexed(target, schema, pa.ipc.new_stream) or ArrowRows(target, schema)


def arrow_file(target: BinaryIO, schema: pa.Schema) -> digests.ArrowRows:
    """An Arrow file; one of token rows has an index of them."""
    new_file = pa.ipc.new_file
    return _indexed(target, schema, new_file) or digests.ArrowRows(target, schema, new_file)


def _indexed(target: BinaryIO, schema: pa.Schema, create: Any) -> digests.ArrowRows | None:
    if not schema.remove_metadata().equals(schemas.KINDS["tokens"]):
        return None
    from sabia.core.shards.token_rows.row_writer import IndexedRows

    return IndexedRows(target, schema, create)


class TableRows:
    """The first rows as a table for a terminal, and a count of all."""

    def __init__(self, _target: BinaryIO, schema: pa.Schema) -> None:
        self.shown, self.rows, self.schema = list[dict[str, Any]](), 0, schema

    def write(self, batch: pa.RecordBatch) -> None:
        self.shown += batch.slice(0, max(0, TABLE_ROWS - len(self.shown))).to_pylist()
        self.rows += batch.num_rows

    def close(self) -> None:
        """Draw the table."""
        from rich.console import Console
        from rich.table import Table

        names = [n for n in self.schema.names if any(r.get(n) is not None for r in self.shown)]
        table = Table(*names, caption=f"{self.rows:,} rows; -o FILE.parquet or a pipe keeps them")
        for row in self.shown:
            table.add_row(*(_cell(row.get(name)) for name in names))
        Console().print(table)


def _cell(value: object, width: int = 40) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


STREAMS: dict[str, Callable[[BinaryIO, pa.Schema], Any]] = {
    "parquet": ParquetRows, "arrow": arrow_stream, "jsonl": JsonRows,
}  # fmt: skip
FILES = STREAMS | {"arrow": arrow_file}


def with_metadata(schema: pa.Schema, metadata: dict[str, Any] | None) -> pa.Schema:
    """The schema with our metadata instead of its own."""
    plain = run_record.split(metadata)[0]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, default=str)
    return schema.with_metadata({METADATA_KEY: text.encode()})


def read_metadata(path: str) -> dict[str, Any] | None:
    """What `open_file` recorded in a file or, of JSON lines, beside it, or of a shard at a URL in
    the manifest; None if unreadable or not ours."""
    try:
        if _is_json(path):
            return dict(_record(path)["made"])
        if known := _listed(path):
            return dict(known["made"])
        return provenance_in(_schema_of(path))
    except (BadData, NoObject, OSError, KeyError, ValueError, pa.ArrowException):
        return None


def provenance_in(schema: pa.Schema) -> dict[str, Any]:
    """How a file was made, from its schema; KeyError or ValueError if it does not say."""
    return dict(json.loads((schema.metadata or {})[METADATA_KEY]))


def _listed(path: str) -> dict[str, Any] | None:
    """What the manifest tells of a shard at a URL, see `stores.listed`."""
    return listed.entry_of(path, MANIFEST) if is_url(path) and _PART.search(path) else None


def readable(path: str) -> bool:
    """Whether a file is a complete Parquet or Arrow file."""
    try:
        return bool(_schema_of(path))
    except (BadData, NoObject, OSError, ValueError, pa.ArrowException):
        return False


def _is_json(path: str) -> bool:
    return FORMATS.get(file_ending(path)) == "jsonl"


def _record(path: str) -> dict[str, Any]:
    """`rows` and `made` of a file of JSON lines; ValueError or OSError if its bytes are not those
    of the record."""
    record = listed.read_json(beside(path))
    if record.get("content") != content_hash(path):
        raise ValueError("not the bytes that were recorded")
    return record


def _schema_of(path: str) -> pa.Schema:
    with open_binary(path) as file:
        arrow = file_ending(path) == ".arrow"
        opened = pa.ipc.open_file(file) if arrow else digests.open_parquet(file, path, False)
        return opened.schema if arrow else opened.schema_arrow


def rows_in(path: str) -> int:
    """The number of rows of a file that `read_metadata` could read."""
    if _is_json(path):
        return int(_record(path)["rows"])
    if (known := _listed(path)) and "rows" in known:
        return int(known["rows"])
    with reading(path), open_binary(path) as file:
        if file_ending(path) != ".arrow":
            return int(digests.open_parquet(file, path).metadata.num_rows)
        reader = pa.ipc.open_file(file)
        return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


def is_intact(path: str) -> bool:
    """Whether all bytes of a local file are as they were written; of a large one this is remembered
    until it changes (see core.digests). An object of a store is taken as it is."""
    if is_url(path):
        return True
    try:
        if _is_json(path):
            _record(path)
        elif os.path.getsize(path) < CACHED_BYTES:
            _checked(path)
        else:
            remembered(os.path.realpath(path), "intact", _checked)
    except (BadData, OSError, ValueError, pa.ArrowException):
        return False
    return True


def _checked(path: str) -> str:
    """Read a file; raise what `open_parquet` and `arrow_batches` raise for damaged bits."""
    if file_ending(path) == ".arrow":
        with pa.memory_map(path) as file:
            for _ in digests.arrow_batches(pa.ipc.open_file(file), path):
                stop.check()
    else:
        digests.check_parquet(path)
    return "intact"


@contextlib.contextmanager
def open_file(
    path: str, schema: pa.Schema, metadata: Metadata = None, new: bool = False
) -> Iterator[Writer]:
    """Write one file atomically, on a local path or an fsspec URL, in the format of its ending
    (Parquet if it has none). new: FileExistsError if there is such a local file by then."""
    ending = file_ending(path) or ".parquet"
    content, run = "", None
    if is_url(path) and new and is_there(path):
        raise FileExistsError(path)
    with _url_path(path) if is_url(path) else atomic_path(path, new) as temporary:
        with open(temporary, "wb") as plain, _compressed(plain, ending) as file:
            writer = _opened(FILES[FORMATS[ending]], file, schema, metadata)
            try:
                yield writer
            except BaseException:
                with contextlib.suppress(Exception):  # the file is removed
                    writer.close()
                raise
            writer.close()
        if metadata:
            made, run = _run_of(writer, metadata)
            content = content_hash(str(temporary)) if _is_json(path) else ""
    if is_url(path):
        forget_objects(path)
        listed.forget(path)
    if content:
        content = content_hash(path) if is_url(path) else content
        record = {"content": content, "rows": writer.rows, "made": made}
        record |= {} if run is None else {RUN: run}
        listed.write_json(beside(path), record)
    elif run is not None and not is_url(path) and not _PART.match(os.path.basename(path)):
        run_record.keep_beside(path, run)


def _run_of(writer: Any, metadata: Provenance) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The provenance of a file that is written, and the record of its run."""
    if isinstance(writer, ParquetRows):
        return run_record.split(writer.made)[0], writer.run
    made, run = run_record.split(metadata(True) if callable(metadata) else metadata)
    return made, None if run is None else run.ended(writer.rows, beside="out" in made)


def _opened(kind: Any, file: BinaryIO, schema: pa.Schema, metadata: Metadata) -> Any:
    if callable(metadata) and kind is ParquetRows:
        writer = ParquetRows(file, schema.remove_metadata())
        writer.metadata_at_end = metadata
        return writer
    made = metadata(False) if callable(metadata) else metadata
    schema = with_metadata(schema, made)
    if kind is arrow_stream and (run := run_record.split(made)[1]) is not None:
        schema = schema.with_metadata(
            {**(schema.metadata or {}), run_record.KEY: run_record.text(run.stable()).encode()}
        )
    opened = kind(file, schema)
    if kind is ParquetRows:
        opened.made = dict(made or {})
    return opened


@contextlib.contextmanager
def _compressed(file: BinaryIO, ending: str) -> Iterator[BinaryIO]:
    """What is written to this file is compressed as the ending says; the same bytes each time."""
    if ending.endswith(".gz"):
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
            yield compressed  # type: ignore[misc]  # typeshed has it as another base class
    elif ending.endswith(".zst"):
        import zstandard

        compressor = zstandard.ZstdCompressor(write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as compressed:
            yield compressed
    else:
        yield file


class RowsIfAny:
    """A file that appears only if it gets rows; else that of an earlier run is removed."""

    def __init__(self, path: str, metadata: Metadata = None) -> None:
        self.path, self._metadata, self._stack = path, metadata, contextlib.ExitStack()
        self._writer: Writer | None = None

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append rows; the file is opened with the first."""
        if self._writer is None:
            file = open_file(self.path, batch.schema, self._metadata)
            self._writer = self._stack.enter_context(file)
        self._writer.write(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if self._writer is None and error is None and is_there(self.path):
            self.remove()

    def remove(self) -> None:
        """Remove the file of an earlier run with other data or settings."""
        remove(self.path)
        remove(beside(self.path))


@contextlib.contextmanager
def _url_path(url: str) -> Iterator[Path]:
    """Write a local file, then upload it."""
    with scratch_directory("sabia-upload") as scratch:
        local = scratch / "shard"
        yield local
        upload(local, url)


@contextlib.contextmanager
def open_stream(job: Job, schema: pa.Schema, metadata: Metadata) -> Iterator[Writer]:
    """Stdout, or the stream of -o, in the format of its ending, else that of `--to`; a table if a
    terminal would get binary data."""
    stdout = job.out in (None, "-")
    with contextlib.nullcontext(sys.stdout.buffer) if stdout else open(str(job.out), "wb") as out:
        ending = "" if stdout else file_ending(str(job.out))
        form = FORMATS.get(ending, job.to)
        with _compressed(out, ending) as file:
            kind = TableRows if out.isatty() and form != "jsonl" else STREAMS[form]
            writer = _opened(kind, file, schema, metadata)
            yield writer
            writer.close()
        out.flush()
        if stdout and metadata and kind is not TableRows and (path := _redirected(out)):
            run = _run_of(writer, metadata)[1]
            if run is not None:
                run_record.keep_beside(path, run, stdout=True)


def _redirected(out: BinaryIO) -> str:
    """The path of the file to which stdout is redirected; '' for a pipe, or if it has none."""
    with contextlib.suppress(OSError, ValueError):
        path = os.readlink(f"/proc/self/fd/{out.fileno()}")
        if stat.S_ISREG(os.fstat(out.fileno()).st_mode) and os.path.isfile(path):
            return path
    return ""


def open_stdout(
    job: Job, schema: pa.Schema, metadata: Metadata
) -> contextlib.AbstractContextManager[Writer]:
    """Stdout, also for a job whose -o is something else, such as a run directory."""
    return open_stream(replace(job, out=None), schema, metadata)


def open_output(
    job: Job, schema: pa.Schema, metadata: Metadata = None, part: int = 0,
    new: bool = False,
) -> contextlib.AbstractContextManager[Writer]:  # fmt: skip
    """The job's output: its file, part number `part` of its directory, or stdout; see open_file."""
    if job.to_stdout:
        return open_stream(job, schema, metadata)
    return open_file(output_path(job, part), schema, metadata, new)


def output_path(job: Job, part: int = 0) -> str:
    """The path of part number `part`; raises UsageError for a stream, which has none."""
    if job.out is None or job.to_stdout:
        raise UsageError("stdout has no path; give -o PATH")
    return job.out if job.to_file else f"{job.out.rstrip('/')}/{job.part_name(part)}.parquet"
