"""Writing WARC 1.1 (ISO 28500): requests and responses, one gzip member per record.

A fetch is written as a response (or as a revisit if the page has not changed since an earlier
fetch), its request, and metadata, linked by WARC-Concurrent-To. Payloads are stored without
transfer and content encodings; the headers that describe those are renamed to X-Crawl-…, as Common
Crawl does. A new file is started at a given size. The caller stores the position up to which the
files are complete, and a resumed crawl truncates what was written after it.
"""

import hashlib
import os
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from sabia.core.web.fetch import Response
from sabia.core.web.frontier import Visit

_LEVEL = 4
_UNPACKED = ("content-encoding", "transfer-encoding", "content-length")
_PROFILE = "http://netpreserve.org/warc/1.1/revisit/"
_RECORDS = "application/http; msgtype="
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = [first + second for first in _LETTERS for second in _LETTERS]


@dataclass(frozen=True)
class Position:
    """The number of a file in the folder, and the number of its bytes that are complete."""

    file: int = 0
    offset: int = 0

    @staticmethod
    def parse(text: str | None) -> "Position":
        """The inverse of `str`; None is the beginning."""
        file, _, offset = (text or "0 0").partition(" ")
        return Position(int(file), int(offset))

    def __str__(self) -> str:
        return f"{self.file} {self.offset}"


@dataclass(frozen=True)
class RecordLocation:
    """Id and date of the record of a fetch, and the position after it."""

    record: str
    date: str
    position: Position


class Archive:
    """Appends to `DIR/pages-NNNNN.warc.gz`, from a given position on."""

    def __init__(self, directory: str, position: Position, software: str, max_bytes: int) -> None:
        self.directory, self.software, self.max_bytes = Path(directory), software, max_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        for later in self.directory.glob("pages-*.warc.gz"):
            if int(later.name[6:-8]) > position.file:
                later.unlink()  # a crash came before its position was stored
        self._open(position)

    def _open(self, position: Position) -> None:
        self.number = position.file
        self.file = open(self.path(self.number), "ab")  # noqa: SIM115 - closed by `close`
        if self.file.tell() > position.offset:
            os.truncate(self.file.fileno(), position.offset)
        if position.offset == 0:
            fields = {"software": self.software, "format": "WARC File Format 1.1",
                      "conformsTo": "http://iipc.github.io/warc-specifications/"
                      "specifications/warc-format/warc-1.1/", "robots": "obey"}  # fmt: skip
            head = {"WARC-Date": _now(), "WARC-Filename": self.path(self.number).name}
            self.file.write(_record("warcinfo", "application/warc-fields", _fields(fields), head))

    def path(self, number: int) -> Path:
        """The file of this number."""
        return self.directory / f"pages-{number:05d}.warc.gz"

    def add(
        self, response: Response, digest: str, about: dict[str, str], before: Visit | None = None
    ) -> RecordLocation:
        """Append a fetch whose payload has this digest; with `before`, as a revisit of that visit.

        `about` is written into the metadata record. The records survive a crash of this process.
        """
        if self.file.tell() >= self.max_bytes:
            self.close()
            self._open(Position(self.number + 1))
        record, date = _new_id(), _now()
        head = {"WARC-Date": date, "WARC-Target-URI": response.url}
        if response.address:
            head["WARC-IP-Address"] = response.address
        beside = head | {"WARC-Concurrent-To": record}
        about = about | {"fetchTimeMs": f"{1000 * response.took_s:.0f}"}
        self.file.write(
            _answer(response, digest, {"WARC-Record-ID": record} | head, before)
            + _record("request", f"{_RECORDS}request", _request(response), beside)
            + _record("metadata", "application/warc-fields", _fields(about), beside)
        )
        self.file.flush()
        return RecordLocation(record, date, Position(self.number, self.file.tell()))

    def close(self) -> None:
        """Sync and close."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def _answer(response: Response, digest: str, head: dict[str, str], before: Visit | None) -> bytes:
    """The response or revisit record."""
    lines = [f"HTTP/1.1 {response.status} {response.reason}".rstrip()]
    for name, value in response.headers:
        lines.append(f"{'X-Crawl-' if name.lower() in _UNPACKED else ''}{name}: {value}")
    if response.status == 200:
        lines.append(f"Content-Length: {len(response.body)}")
    http = _lines(lines)
    head["WARC-Payload-Digest"] = digest
    if before is None:
        return _record("response", f"{_RECORDS}response", http + response.body, head)
    same = "server-not-modified" if response.status == 304 else "identical-payload-digest"
    head["WARC-Profile"] = _PROFILE + same
    if before.record:
        head |= {"WARC-Refers-To": before.record, "WARC-Refers-To-Target-URI": response.url,
                 "WARC-Refers-To-Date": before.date}  # fmt: skip
    return _record("revisit", f"{_RECORDS}response", http, head)


def _request(response: Response) -> bytes:
    parts = urlsplit(response.url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _lines([f"GET {target} HTTP/1.1", *(f"{k}: {v}" for k, v in response.asked)])


def _lines(lines: Iterable[str]) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "replace")


def _fields(fields: dict[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()


def _record(kind: str, content_type: str, block: bytes, extra: dict[str, str]) -> bytes:
    fields = {
        "WARC-Type": kind,
        "WARC-Record-ID": extra.get("WARC-Record-ID") or _new_id(),
        **extra,
        "WARC-Block-Digest": payload_digest(block),
        "Content-Type": content_type,
        "Content-Length": str(len(block)),
    }
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
    head = packer.compress(b"WARC/1.1\r\n" + _fields(fields) + b"\r\n")
    return head + packer.compress(block) + packer.compress(b"\r\n\r\n") + packer.flush()


def _new_id() -> str:
    return f"<urn:uuid:{uuid.uuid4()}>"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def payload_digest(data: bytes) -> str:
    """SHA-1 in the notation of WARC headers: base 32, encoded ten bits at a time."""
    number = int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest(), "big")
    return "sha1:" + "".join([_PAIRS[number >> shift & 1023] for shift in range(150, -1, -10)])
