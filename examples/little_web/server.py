"""The little web on a loopback port: pages, redirects, faults, an endless calendar, an access log.

Threads of the standard library's server; every response depends only on the request and, for the
faults that end by themselves (`throttled`, `busy`), on how often the path was requested.
"""

import gzip
import json
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sabia.examples.little_web.pages import Page, render
from sabia.examples.little_web.site import REDIRECTS, ROBOTS, Site

RETRY_AFTER_S = 1
BIG_BYTES = 64 << 20
_CHUNK = b"<p>" + b"and so on " * 6_000 + b"</p>\n"
_HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Reply:
    """A response; `promised`: a wrong Content-Length; `repeat`: how often the body is sent."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", _HTML),)
    promised: int | None = None
    repeat: int = 1


class LittleWebServer(ThreadingHTTPServer):
    """Serves a site on 127.0.0.1; `requests` holds (seconds, path, status) of every request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, site: Site, port: int = 0, log: Path | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.site, self.log = site, log
        self.requests: list[tuple[float, str, int]] = []
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def base_url(self) -> str:
        """http://127.0.0.1:PORT without a final slash."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> "LittleWebServer":
        """Serve in a daemon thread; `shutdown` ends it."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a crawler that closes the connection; report any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def visit(self, path: str) -> int:
        """How often the path was requested before."""
        with self._lock:
            self._seen[path] = self._seen.get(path, 0) + 1
            return self._seen[path] - 1

    def record(self, path: str, status: int, agent: str) -> None:
        """Add a request to `requests` and to the log file."""
        now = time.time()
        with self._lock:
            self.requests.append((now, path, status))
            if self.log:
                row = {"time": now, "path": path, "status": status, "agent": agent}
                with open(self.log, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

    def reply(self, target: str) -> Reply:
        """The answer to GET target."""
        parts = urlsplit(target)
        if parts.path == "/robots.txt":
            return Reply(body=ROBOTS.encode(), headers=(("Content-Type", "text/plain"),))
        if parts.path in REDIRECTS:
            return Reply(status=302, headers=(("Location", REDIRECTS[parts.path]),))
        if parts.path.startswith("/calendar/"):
            return calendar(parts.path)
        if parts.path == "/offers/list":
            return endless_list(parts.query)
        page = self.site.pages.get(parts.path)
        if page is None:
            return Reply(404, b"<title>Not found</title><p>No such page.</p>")
        return _faulty(page, self.visit(parts.path)) if page.fault else Reply(body=render(page))


def calendar(path: str) -> Reply:
    """A month that links to the next, the previous and its days: never ends."""
    try:
        year, month = (int(part) for part in path.split("/")[2:4])
    except ValueError:
        return Reply(404, b"<title>Not found</title><p>No such month.</p>")
    later = year + month // 12, month % 12 + 1
    earlier = (year - 1, 12) if month == 1 else (year, month - 1)
    months = [(f"/calendar/{y}/{m:02d}", f"{y}-{m:02d}") for y, m in (later, earlier)]
    days = [(f"/calendar/{year}/{month:02d}/{day}", f"Day {day}") for day in range(1, 29)]
    title = f"Calendar {year}-{month:02d}"
    body = (f"No events are known for {title}.",)
    page = Page(path, "trap", "en", title, body, tuple(months + days))
    return Reply(body=render(page))


def endless_list(query: str) -> Reply:
    """A product list whose every page links to further pages."""
    given = parse_qs(query).get("page", ["0"])[0]
    number = int(given) if given.isdecimal() else 0
    links = tuple((f"/offers/list?page={number * 2 + n}", f"Page {n}") for n in (1, 2, 100, 1000))
    body = (f"Offers {number} to {number + 9}: sold out, come back later.",)
    return Reply(body=render(Page("/offers/list", "trap", "en", "Offers", body, links)))


def _faulty(page: Page, visits: int) -> Reply:
    body = render(page)
    wait = (("Content-Type", _HTML), ("Retry-After", str(RETRY_AFTER_S)))
    bare = (("Content-Type", "text/html"),)
    match page.fault:
        case "throttled" | "busy" if visits == 0:
            return Reply(429 if page.fault == "throttled" else 503, b"later", wait)
        case "latin-1" | "windows-1252":
            return Reply(body=body, headers=bare)
        case "status-500" | "status-404":
            return Reply(int(page.fault[-3:]), b"<p>This page is broken.</p>")
        case "truncated":
            return Reply(body=body[: len(body) // 2], promised=len(body))
        case "wrong-type":
            kind = (("Content-Type", "application/pdf"),)
            return Reply(body=bytes(range(256)) * 64, headers=kind)
        case "endless-body":
            return Reply(body=_CHUNK, repeat=BIG_BYTES // len(_CHUNK))
        case "gzip-bomb":
            packed = gzip.compress(_CHUNK * (BIG_BYTES // len(_CHUNK)), mtime=0)
            return Reply(body=packed, headers=(*bare, ("Content-Encoding", "gzip")))
        case "empty":
            return Reply()
    return Reply(body=body)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else head and body of an answer wait 40 ms for each other
    server: LittleWebServer

    def do_GET(self) -> None:
        reply = self.server.reply(self.path)
        self.server.record(self.path, reply.status, self.headers.get("User-Agent", ""))
        self.send_response(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        length = len(reply.body) * reply.repeat if reply.promised is None else reply.promised
        self.send_header("Content-Length", str(length))
        self.end_headers()
        try:
            for _ in range(reply.repeat):
                self.wfile.write(reply.body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the crawler reads no further
        if reply.promised is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Requests go to `record`, not to stderr."""
