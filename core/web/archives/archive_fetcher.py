"""A fetcher that answers from WARC files: the same crawl as on the network, without the network.

A crawl requests URLs as usual and gets what the archive holds of them: pages, redirects, errors and
robots.txt. Any other URL is HTTP 404. So policies (focus, order, budget, limits) can be compared
offline, on one's own archive or on Common Crawl's. Of several captures of a URL the last counts.
Files must be uncompressed or compressed by record with gzip, as WARC files are.
"""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastwarc.warc import ArchiveIterator

from sabia.core.errors import BadData, UsageError
from sabia.core.urls import canonical
from sabia.core.web import robots
from sabia.core.web.archives.warc_reader import ENDINGS, PAGES, url_of
from sabia.core.web.documents import WarcRecord
from sabia.core.web.fetch import MIME_TYPES, Response


class ArchiveFetcher:
    """Takes the place of `Fetcher`; `pages` is the number of URLs in the archive."""

    def __init__(self, paths: Sequence[str], max_bytes: int) -> None:
        self.max_bytes, self.paths = max_bytes, _files(paths)
        self.positions: dict[str, tuple[int, int]] = {}
        for number, path in enumerate(self.paths):
            for url, offset in _captures(path):
                self.positions[url] = (number, offset)
        if not self.positions:
            raise BadData(f"--replay {' '.join(paths)}: no page in it")

    async def __aenter__(self) -> "ArchiveFetcher":
        return self

    async def __aexit__(self, *_error: object) -> None:
        return None

    async def page(self, url: str, conditions: Mapping[str, str] | None = None) -> Response:
        """The page as archived; conditions are ignored."""
        return self._response(url, self.max_bytes, MIME_TYPES)

    async def file(self, url: str, limit: int) -> Response:
        """A file of any type."""
        return self._response(url, limit)

    async def robots(self, origin: str) -> tuple[robots.RobotsFile, int]:
        """The robots.txt in the archive; without one everything is allowed."""
        response = self._response(f"{origin}/robots.txt", robots.MAX_BYTES)
        return robots.robots_file_of(response.status or 404, response.body, 1, ""), 0

    def _response(self, url: str, limit: int, types: tuple[str, ...] = ()) -> Response:
        """The response that `Fetcher` would give."""
        position = self.positions.get(url)
        if position is None:
            return Response(url, 404).settled()
        response = _read_response(url, self.paths[position[0]], position[1], limit)
        if response.status is None:
            return response
        response = response.settled(types)
        if len(response.body) > limit and not (response.redirect or response.refused):
            return replace(response, body=b"", refused=f"larger than {limit} bytes")
        return response


def _files(paths: Sequence[str]) -> list[str]:
    """The WARC files of paths, folders and patterns."""
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            inside = (str(p) for p in sorted(Path(path).rglob("*")))
            files += [name for name in inside if name.lower().endswith(ENDINGS)]
        else:
            files += sorted(glob.glob(path)) or [path]
    for name in files:
        if not os.path.isfile(name):
            raise UsageError(f"--replay: {name}: No such file or directory")
        if name.lower().endswith(".zst"):
            raise UsageError(f"--replay {name}: zstd cannot be read by record (expected gzip)")
    if not files:
        raise UsageError(f"--replay {' '.join(paths)}: no WARC file in it")
    return files


def _captures(path: str) -> Iterator[tuple[str, int]]:
    """(canonical URL, offset) of the records that hold a response."""
    try:
        with open(path, "rb") as file:
            for record in ArchiveIterator(file, parse_http=False, record_types=PAGES):
                if url := canonical(url_of(record)):
                    yield url, record.stream_pos
    except (OSError, ValueError, EOFError) as error:
        raise BadData(f"--replay {path}: damaged ({error})") from error


def _read_response(url: str, path: str, offset: int, limit: int) -> Response:
    """The archived response; a body that is too large is cut one byte above the limit."""
    with open(path, "rb") as file:
        file.seek(offset)
        record: Any = next(iter(ArchiveIterator(file, parse_http=False)))
        archived = WarcRecord.of(path, record.record_id)
        if not record.is_http:
            kind = record.headers.get("Content-Type") or "text/plain"
            body = record.reader.read(limit)
            return Response(url, 200, (("content-type", str(kind)),), body, archived=archived)
        try:
            record.parse_http(auto_decode="all")
            body = record.reader.read(limit + 1)
        except (OSError, ValueError, EOFError) as error:
            return Response(url, refused=f"archived answer cannot be decoded ({error})")
    headers = tuple((str(k), str(v)) for k, v in record.http_headers.items())
    status = int(record.http_headers.status_code or 0)
    return Response(url, status, headers, body, archived=archived)
