"""A scripted web server on loopback: each path has a function from visit number to a reply."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, dict[str, str], bytes]


class Scripted(ThreadingHTTPServer):
    """`script[path](visit)` gives (status, headers, body); `seen` holds (time, path)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: dict[str, Callable[[int], Reply]] = {}
        self.seen: list[tuple[float, str]] = []
        self.bytes_sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for _, path in self.seen]

    def page(self, path: str, text: str = "<p>some words</p>", **headers: str) -> None:
        body = text.encode()
        self.script[path] = lambda _visit: (200, {"Content-Type": "text/html", **headers}, body)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Scripted

    def do_GET(self) -> None:
        visit = self.server.paths().count(self.path)
        self.server.seen.append((time.monotonic(), self.path))
        missing = (404, {"Content-Type": "text/plain"}, b"")
        script = self.server.script.get(self.path, lambda _visit: missing)
        status, headers, body = script(visit)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(body), 1 << 16):
            self.wfile.write(body[start : start + (1 << 16)])
            self.server.bytes_sent += 1 << 16
        if int(headers.get("Content-Length", len(body))) > len(body):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def web():
    server = Scripted()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
