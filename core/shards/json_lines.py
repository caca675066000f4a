"""JSON, plain, gzip or zstd: rows that fit a kind, and a reject for any other line.

The rows are objects on lines of their own, objects that follow each other in any layout, or the
elements of arrays. Nothing that a line holds ends the reading: one that is too long, nested too
deep or not JSON is rejected with its first bytes, and the rest is read. An array has no such lines,
so one that is damaged or cut short is BadData. A compressed file that grows beyond all measure
is BadData: it was made to fill a disk, and no text compresses so well.
"""

import codecs
import gzip
import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from sabia.core import stop, units
from sabia.core.errors import BadData
from sabia.core.shards import records
from sabia.core.shards.schemas import BATCH_BYTES, Reject

MAX_LINE_BYTES = 256 << 20
EXCERPT_BYTES = 64 << 10  # of a line that cannot be read
TYPING_LINES = 2_000  # lines of JSON that decide the types of extra columns
FREE_BYTES = 64 << 20  # that any compressed file may grow to
MOST_RATIO = 500  # bytes out for each byte in, beyond FREE_BYTES
_BLOCK_BYTES = 1 << 18
_BOM_AND_SPACE = codecs.BOM_UTF8 + b" \t\r\n"
_SEPARATORS = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()
TOO_DEEP = "JSON nested too deep"
# of the conversion of one row; ArrowInvalid and ArrowTypeError are among them
UNFIT = (ValueError, TypeError, OverflowError, NotImplementedError, RecursionError)


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
    for row, _ in objects(file, lambda _row, _reason: None, b'"scores"'):
        scores = row.get("scores")
        if isinstance(scores, dict) and records.unusable_names(scores) is None:
            names.update(name for name, number in scores.items() if number is not None)
    return names


def batches_of_json(
    file: BinaryIO, kind: str, rows: int, reject: Reject, text_column: str = ""
) -> Iterator[pa.RecordBatch]:
    """Batches of at most `rows` rows; the first TYPING_LINES decide the types of extra columns.

    text_column: the field that is read as `text`; '': that one.
    """
    extras: list[pa.Field] | None = None
    source = objects(file, reject)
    if text_column:
        source = renamed(source, text_column, reject)
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


def objects(
    file: BinaryIO, reject: Reject, wanted: bytes = b""
) -> Iterator[tuple[dict[str, Any], int]]:
    """(row, its bytes) of the objects in a file; what is between them is rejected.

    wanted: lines that hold one object without these bytes are not parsed.
    """
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]  # fsspec's files are raw
    while (head := buffered.peek(16)) and not head.lstrip(_BOM_AND_SPACE):
        buffered.read(len(head))
    if head.lstrip(_BOM_AND_SPACE)[:1] != b"[":
        yield from _Lines(buffered, reject, wanted).rows()
        return
    for value, size in _elements(buffered):
        if isinstance(value, dict):
            yield value, size
        else:
            reject({"value": value}, "not a JSON object")


def renamed(
    rows: Iterator[tuple[dict[str, Any], int]], text_column: str, reject: Reject
) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows with the field `text_column` as `text`; a row without it is rejected."""
    for row, size in rows:
        if text_column not in row or ("text" in row and text_column != "text"):
            others = "and text" if text_column in row else "in the row"
            reject(row, f"{'both' if text_column in row else 'no'} {text_column} {others}")
        else:
            yield {"text" if k == text_column else k: v for k, v in row.items()}, size


def _elements(file: BinaryIO) -> Iterator[tuple[Any, int]]:
    """(value, about its bytes) of the elements of all arrays in a file, and of the values between
    them; in memory there is one value. Raises BadData if it is damaged or cut short."""
    decoder, text, at, inside, before = codecs.getincrementaldecoder("utf-8-sig")(), "", 0, False, 0
    more = _BLOCK_BYTES
    while True:
        at = _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]  # it matches ''
        if at < len(text) and text[at] == "[]"[inside]:
            at, inside = at + 1, not inside
            continue
        error = None
        if at < len(text):
            try:
                value, end = _DECODER.raw_decode(text, at)
            except json.JSONDecodeError as damage:
                error = damage
            except RecursionError:
                raise BadData(f"{TOO_DEEP} at character {before + at}") from None
            else:
                yield value, end - at
                at, more = end, _BLOCK_BYTES
                continue
        stop.check()
        block = file.read(more)
        cut = error and (error.msg.startswith("Unterminated") or error.pos > len(text) - 16)
        if error and not (cut and block and len(text) - at < MAX_LINE_BYTES):
            raise BadData(f"not JSON at character {before + error.pos}: {error.msg}")
        if not block:
            if inside:
                raise BadData("the JSON array has no end (its producer was cut off)")
            return
        try:
            before, text, at = before + at, text[at:] + decoder.decode(block), 0
        except UnicodeDecodeError as damage:
            raise BadData(f"not UTF-8 after character {before + len(text)}") from damage
        more *= 2  # a long value is parsed again only so often


class _Lines:
    """The objects of a file that is read line by line. An object may take several lines, and a line
    may hold several objects."""

    def __init__(self, file: BinaryIO, reject: Reject, wanted: bytes) -> None:
        self.lines, self.reject_row, self.wanted = _lines(file), reject, wanted
        self.pushed: list[tuple[int, bytes, int]] = []  # lines to read again, the next one last

    def next_line(self) -> tuple[int, bytes, int] | None:
        return self.pushed.pop() if self.pushed else next(self.lines, None)

    def rows(self) -> Iterator[tuple[dict[str, Any], int]]:
        while (read := self.next_line()) is not None:
            _, line, size = read
            if size > MAX_LINE_BYTES:
                self.reject(read, f"longer than {MAX_LINE_BYTES >> 20} MiB")
                continue
            bare = line.strip()
            if not bare or (
                self.wanted and self.wanted not in line and bare[:1] == b"{" and bare[-1:] == b"}"
            ):
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield from self.sequence(read, f"not JSON: {error}")
            except ValueError as error:  # invalid UTF-8
                self.reject(read, f"not JSON: {error}")
            except RecursionError:
                self.reject(read, TOO_DEEP)
            else:
                if isinstance(row, dict):
                    yield row, size
                else:
                    self.reject(read, "not a JSON object")

    def sequence(
        self, read: tuple[int, bytes, int], reason: str
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """The objects that begin in a line which is not one of them. If it is damaged, it is
        rejected alone, and the lines after it are read again."""
        number, line, size = read
        taken, ahead = [line], 1
        while True:
            try:
                rows, at, error = _objects(text := b"".join(taken).decode("utf-8-sig"))
            except (UnicodeDecodeError, RecursionError):
                rows, at, error = [], 0, None
                break
            if at == len(text):
                yield from rows
                return
            if error is None or error.pos < len(text.rstrip()) or size > MAX_LINE_BYTES:
                break
            more = [one for _ in range(ahead) if (one := self.next_line())]
            if not more:
                break
            taken += [line for _, line, _ in more]
            size, ahead = size + sum(size for _, _, size in more), 2 * ahead
        start = text.rfind("\n", 0, at) + 1 if at else 0  # of the line in which the damage is
        rest = text[:start].count("\n") if start else 0
        if at == 0 or (error is None and not start):
            self.reject(read, reason)
            rest = 1
        else:
            yield from rows
            if not start or text[start:at].strip(" \t,"):  # objects end in that line
                damaged = text[at:].partition("\n")[0].encode("utf-8", "replace")
                what = f"not JSON: {error or 'not an object'}"
                self.reject((number + rest, damaged, len(damaged)), what)
                rest += 1
        self.pushed += [(number + i, taken[i], len(taken[i]))
                        for i in range(len(taken) - 1, rest - 1, -1)]  # fmt: skip

    def reject(self, read: tuple[int, bytes, int], reason: str) -> None:
        number, line, size = read
        excerpt = {"line": number, "bytes": line[:EXCERPT_BYTES].decode("utf-8", "replace")}
        self.reject_row(excerpt | ({"size": size} if size > EXCERPT_BYTES else {}), reason)


def _objects(
    text: str,
) -> tuple[list[tuple[dict[str, Any], int]], int, json.JSONDecodeError | None]:
    """(object, its length) of those that follow each other in a text, where they end, and the error
    of one that does not; if anything else follows, there is no error but an end before that."""
    rows: list[tuple[dict[str, Any], int]] = []
    at = 0
    while (at := _SEPARATORS.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        if text[at] != "{":
            return rows, at, None
        try:
            row, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            return rows, at, error
        rows.append((row, end - at))
        at = end
    return rows, at, None


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
