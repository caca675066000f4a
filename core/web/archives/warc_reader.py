"""Reading pages from WARC 1.0 and 1.1 (ISO 28500); `warc_writer` writes them.

Reading uses fastwarc. Of a file that is cut short or damaged, everything readable is returned,
including the incomplete record at its end; then BadData is raised.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO

import zstandard
from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

from sabia.core.errors import BadData
from sabia.core.shards.json_lines import decompressed

PAGES = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
_PACKED_BYTES = 64 << 10
ENDINGS = (".warc", ".warc.gz", ".warc.zst", ".wet", ".wet.gz")


@dataclass(frozen=True)
class Archived:
    """An archived page; transfer and content encodings of `body` are removed.

    `refused` is the reason why a record is not a page (another status, too large); `cut` is true
    where the end is missing; `record` is the WARC-Record-ID as in the file.
    """

    url: str
    content_type: str = ""
    body: bytes = b""
    time: datetime | None = None
    refused: str = ""
    cut: bool = False
    record: str = ""


def read_pages(file: BinaryIO, max_bytes: int) -> Iterator[Archived]:
    """Pages of response, resource and conversion records, in order.

    Raises BadData where the file is cut short or damaged, after everything that could be read.
    """
    stream: Any = Decompressed(file)
    records = 0
    try:
        for record in ArchiveIterator(stream, parse_http=False):
            records += 1
            promised = record.content_length
            if record.record_type & PAGES and promised > 4 * max_bytes:
                yield Archived(url_of(record), refused=f"larger than {4 * max_bytes} bytes")
                continue
            raw = record.reader.read()
            cut = len(raw) < promised
            if record.record_type & PAGES:
                yield _page(record, raw, max_bytes, cut)
            if cut:
                raise BadData(f"cut short in record {records}: {len(raw)} of {promised} bytes")
    except (OSError, ValueError, EOFError) as error:
        raise BadData(f"damaged after {records} records ({error})") from error
    if not records:
        raise BadData("no WARC record in it")
    if stream.damaged or not stream.tail.endswith(b"\r\n\r\n"):
        raise BadData(f"cut short after {records} records")


class Decompressed:
    """The decompressed stream, up to the first damage; `tail` holds its last bytes.

    Python's gzip loses data before the damage, so it is not used. `tail` is needed because fastwarc
    treats a truncated header as the end of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        magic = file.read(2)
        file.seek(0)
        self.file = _Gunzip(file) if magic == b"\x1f\x8b" else decompressed(file)
        self.tail, self.damaged, self.position = b"", False, 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the stream."""
        try:
            block = b"" if self.damaged else self.file.read(size)
        except (EOFError, OSError, zlib.error, zstandard.ZstdError):
            self.damaged, block = True, b""
        self.tail = (self.tail + block[-4:])[-4:]
        self.position += len(block)
        return block

    def tell(self) -> int:
        """The position in the decompressed stream."""
        return self.position


class _Gunzip:
    """gzip with many members; raises EOFError or zlib.error after all data that can be decoded."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.member, self.packed = file, zlib.decompressobj(31), b""
        self.inside = False  # of a member that is not complete

    def read(self, size: int = -1) -> bytes:
        """At least one byte, unless the file has ended."""
        while True:
            fresh = self.packed or self.file.read(_PACKED_BYTES)
            if not fresh:
                if self.inside:
                    raise EOFError("the last gzip member is cut short")
                return b""
            data = self.member.decompress(fresh, max(size, 0))
            self.packed, self.inside = self.member.unconsumed_tail, not self.member.eof
            if self.member.eof:
                self.packed, self.member = self.member.unused_data, zlib.decompressobj(31)
            if data:
                return data


def url_of(record: WarcRecord) -> str:
    """The URL that a record of fastwarc is about."""
    return str(record.headers.get("WARC-Target-URI") or "").strip("<>")


def _page(record: WarcRecord, raw: bytes, max_bytes: int, cut: bool) -> Archived:
    url, time, name = url_of(record), record.record_date, str(record.record_id or "")
    if not record.is_http:
        kind = record.headers.get("Content-Type") or "text/plain"
        return Archived(url, kind, raw[:max_bytes], time, cut=cut, record=name)
    try:
        record.set_bytes_content(raw)
        record.parse_http(auto_decode="all")
        body = record.reader.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        return Archived(url, refused=f"HTTP body cannot be decoded ({error})")
    status = str(record.http_headers.status_code)
    if status != "200":
        return Archived(url, refused=f"HTTP {status}")
    if len(body) > max_bytes:
        return Archived(url, refused=f"larger than {max_bytes} bytes")
    kind = record.http_headers.get("Content-Type") or ""
    cut = cut or bool(record.headers.get("WARC-Truncated"))
    return Archived(url, kind, body, time, cut=cut, record=name)
