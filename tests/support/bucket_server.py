"""An S3 server (moto) behind a proxy that fails, stalls and cuts a share of the requests.

The proxy counts what it passes on. Faults are drawn from a seed, so that a test meets the same ones
each time as far as its requests come in the same order.
"""

import http.client
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.'
    b"</Message></Error>"
)
HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "expect")


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server; `share` of them get a fault, of which `kinds` may occur."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.share, self.kinds = 0.0, ("fail", "stall", "cut")
        self.stall_s, self.retry_after = 0.2, "0"
        self.most = 10**9  # faults
        self.draw, self.lock = random.Random(3), threading.Lock()
        self.requests: list[tuple[str, str, float]] = []  # method, path with query, time
        self.faults: list[str] = []
        self.gate: threading.Event | None = None  # uploads of parts wait for it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self) -> str:
        with self.lock:
            if self.draw.random() >= self.share or len(self.faults) >= self.most:
                return ""
            self.faults.append(self.draw.choice(self.kinds))
            return self.faults[-1]

    def clear(self) -> None:
        self.requests, self.faults = [], []

    def read_objects(self) -> list[str]:
        """Paths of objects whose bytes were asked for."""
        return [path for method, path, _ in self.requests if method == "GET" and "?" not in path]

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _pass_on(self) -> None:
        server, body = self.server, self._body()
        with server.lock:
            server.requests.append((self.command, self.path, time.monotonic()))
        if server.gate is not None and "partNumber" in self.path:
            server.gate.wait(60)
        fault = server.fault()
        if fault == "fail":
            return self._answer(503, {"Retry-After": server.retry_after}, SLOW_DOWN)
        if fault == "stall":
            time.sleep(server.stall_s)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
        line = http.client.HTTPConnection("127.0.0.1", server.target, timeout=60)
        line.request(self.command, self.path, body, headers)
        answer = line.getresponse()
        data = answer.read()
        about = {k: v for k, v in answer.getheaders() if k.lower() not in (*HOP, "server", "date")}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        line.close()
        return self._answer(answer.status, about, data, length, cut=fault == "cut")

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, length: str | None = None,
        cut: bool = False,
    ) -> None:  # fmt: skip
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if cut:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
        elif self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on


@contextmanager
def bucket_server() -> Iterator[Proxy]:
    """A server with an empty bucket `bucket`, and the proxy before it."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    line = http.client.HTTPConnection("127.0.0.1", port)
    line.request("PUT", "/bucket")
    assert line.getresponse().status == 200
    try:
        yield proxy
    finally:
        proxy.shutdown()
        server.stop()


def environment(proxy: Proxy) -> dict[str, str]:
    """Variables with which S3 clients use the proxy."""
    return {
        "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "test", "AWS_REGION": "us-east-1",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip
