"""JSON lines, plain, gzip or zstd: rows that fit a kind, and a reject for any other line.

Nothing that a line holds ends the reading: one that is too long, nested too deep or not JSON is
rejected with its first bytes, and the rest is read. A compressed file that grows beyond all measure
is BadData: it was made to fill a disk, and no text compresses so well.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from sabia.core import stop, units
from sabia.core.errors import BadData
from sabia.core.shards import records

BATCH_BYTES = 8 << 20
MAX_LINE_BYTES = 256 << 20
EXCERPT_BYTES = 64 << 10  # of a line that cannot be read
TYPING_LINES = 2_000  # lines of JSON that decide the types of extra columns
FREE_BYTES = 64 << 20  # that any compressed file may grow to
MOST_RATIO = 500  # bytes out for each byte in, beyond FREE_BYTES
_BLOCK_BYTES = 1 << 18
TOO_DEEP = "JSON nested too deep"
# of the conversion of one row; ArrowInvalid and ArrowTypeError are among them
UNFIT = (ValueError, TypeError, OverflowError, NotImplementedError, RecursionError)

Reject = Callable[[dict[str, Any], str], None]


class _Decompressed(io.RawIOBase):
    """The output of a decompressor, within the budgets."""

    def __init__(self, raw: BinaryIO, reader: Any) -> None:
        self.raw, self.reader, self.size = raw, reader, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stop.check()
        count = int(self.reader.readinto(buffer))
        self.size += count
        if self.size > FREE_BYTES and self.size > MOST_RATIO * self.raw.tell():
            raise BadData(
                f"its first {units.format_bytes(self.raw.tell())} decompress to more than "
                f"{units.format_bytes(self.size)} (expected at most {MOST_RATIO} bytes for each); "
                "decompress it yourself if this is not an attack"
            )
        return count


def decompressed(raw: BinaryIO) -> BinaryIO:
    """Decompress gzip or zstd, recognised by the first bytes; return other files unchanged.

    Reading the result raises BadData beyond FREE_BYTES and MOST_RATIO, Interrupted on a stop
    signal, and what the libraries raise on damage.
    """
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(_Decompressed(raw, gzip.GzipFile(fileobj=raw)), _BLOCK_BYTES)
    if magic == b"\x28\xb5\x2f\xfd":
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(_Decompressed(raw, reader), _BLOCK_BYTES)
    return raw


def json_score_names(file: BinaryIO) -> set[str]:
    """The names of all scores in a file of JSON lines; lines without any are not parsed."""
    names: set[str] = set()
    for _, line, _ in _lines(file):
        if b'"scores"' not in line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the line is rejected when it is read
        scores = row.get("scores") if isinstance(row, dict) else None
        if isinstance(scores, dict) and records.unusable_names(scores) is None:
            names.update(name for name, number in scores.items() if number is not None)
    return names


def batches_of_json(
    file: BinaryIO, kind: str, rows: int, reject: Reject
) -> Iterator[pa.RecordBatch]:
    """Batches of at most `rows` rows; the first TYPING_LINES decide the types of extra columns."""
    extras: list[pa.Field] | None = None
    source = _rows(file, reject)
    while True:
        pending, size = [], 0
        for row, row_bytes in source:
            pending.append(row)
            size += row_bytes
            if len(pending) >= (TYPING_LINES if extras is None else rows) or size >= BATCH_BYTES:
                break
        if not pending:
            return
        extras = records.extra_fields(pending, kind) if extras is None else extras
        yield from _rows_to_batches(pending, kind, extras, rows, reject)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, its bytes); of a line beyond MAX_LINE_BYTES only the first EXCERPT_BYTES."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number % TYPING_LINES == 0:
            stop.check()
        size = len(line)
        if size > MAX_LINE_BYTES:
            end, line = line[-1:], line[:EXCERPT_BYTES]
            while end != b"\n" and (more := file.readline(_BLOCK_BYTES)):
                stop.check()
                end, size = more[-1:], size + len(more)
        yield number, line, size


def _rows(file: BinaryIO, reject: Reject) -> Iterator[tuple[dict[str, Any], int]]:
    """(row, bytes of its line) of the lines that hold an object; the others are rejected."""
    for number, line, size in _lines(file):
        reason = ""
        if size > MAX_LINE_BYTES:
            reason = f"longer than {MAX_LINE_BYTES >> 20} MiB"
        elif not line.strip():
            continue
        else:
            try:
                row = json.loads(line)
                reason = "" if isinstance(row, dict) else "not a JSON object"
            except ValueError as error:  # invalid JSON or invalid UTF-8
                reason = f"not JSON: {error}"
            except RecursionError:
                reason = TOO_DEEP
        if not reason:
            yield row, size
            continue
        excerpt = {"line": number, "bytes": line[:EXCERPT_BYTES].decode("utf-8", "replace")}
        reject(excerpt | ({"size": size} if size > EXCERPT_BYTES else {}), reason)


def _rows_to_batches(
    rows: list[dict[str, Any]], kind: str, extras: list[pa.Field], limit: int, reject: Reject
) -> Iterator[pa.RecordBatch]:
    pairs = []  # row, fitted row
    for row in rows:
        try:
            pairs.append((row, records.fit_row(row, kind, extras)))
        except UNFIT as error:
            reject(row, _reason(error))
    for start in range(0, len(pairs), limit):
        yield from _pairs_to_batches(pairs[start : start + limit], kind, extras, reject)


def _pairs_to_batches(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]], kind: str, extras: list[pa.Field],
    reject: Reject,
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """One batch; if Arrow refuses a value, the batches around its row, which is rejected."""
    try:
        yield records.to_batch([fitted for _, fitted in pairs], kind, extras)
    except UNFIT as error:
        if len(pairs) == 1:
            reject(pairs[0][0], _reason(error))
            return
        middle = len(pairs) // 2
        for half in (pairs[:middle], pairs[middle:]):
            yield from _pairs_to_batches(half, kind, extras, reject)


def _reason(error: Exception) -> str:
    return TOO_DEEP if isinstance(error, RecursionError) else str(error)
