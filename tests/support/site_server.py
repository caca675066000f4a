"""A site of numbered pages in a process of its own, as fast as a loopback server gets in Python.

Page n links to the pages 10 n + 1 to 10 n + 10 (those that exist) and to two others; with several
hosts (127.0.0.1, 127.0.0.2, …) pages are dealt out to them by number. The log has a line for each
request: the time it came, the time its answer left, host, path. With HOLD, answers behind the
first FREE wait until so many requests are there at once, and then no more. Run as
`python site_server.py PAGES HOSTS LOG [LATENCY_S] [CRAWL_DELAY_S] [BYTES] [HOLD]`; it prints its
port.
"""

import asyncio
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

FREE = 20
WORDS = ("river", "stone", "boat", "fish", "water", "bridge", "market", "morning", "letter")


def page(number, pages, hosts, port, size):
    """The HTML of a page: links, and text of about `size` bytes that no other page has."""
    draw = random.Random(number)
    targets = [n for n in range(10 * number + 1, 10 * number + 11) if n < pages]
    targets += [draw.randrange(pages) for _ in range(2)]
    links = "".join(
        f'<li><a href="http://127.0.0.{1 + n % hosts}:{port}/p/{n}">to {n}</a></li>'
        for n in targets
    )
    words = draw.choices(WORDS, k=size // 7)
    text = "".join(f"<p>{' '.join(words[i : i + 40])}.</p>" for i in range(0, len(words), 40))
    return f"<html><title>Page {number}</title><ul>{links}</ul><main>{text}</main></html>".encode()


class Site(asyncio.Protocol):
    """One connection; answers are made once and kept."""

    def __init__(self, server):
        self.server, self.rest = server, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.rest += data
        while b"\r\n\r\n" in self.rest:
            head, _, self.rest = self.rest.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            host = next((x[6:] for x in lines if x.lower().startswith("host: ")), "")
            self.answer(time.time(), host, lines[0].split(" ")[1])

    def answer(self, came, host, path):
        server = self.server
        server.asked += 1
        if server.hold and server.asked > FREE:
            server.held.append((self, came, host, path))
            if len(server.held) == server.hold:
                server.hold = 0
                for site, *request in server.held:
                    site.send(*request)
        elif self.server.latency_s:
            later = asyncio.get_running_loop().call_later
            later(self.server.latency_s, self.send, came, host, path)
        else:
            self.send(came, host, path)

    def send(self, came, host, path):
        self.server.log.write(f"{came:.6f} {time.time():.6f} {host} {path}\n")
        if not self.transport.is_closing():
            self.transport.write(self.server.reply(path))


class Server:
    """What all connections share."""

    def __init__(self, pages, hosts, log, latency_s=0.0, crawl_delay_s=0.0, size=2_000, hold=0):
        self.pages, self.hosts, self.size = pages, hosts, size
        self.hold, self.held, self.asked = hold, [], 0
        self.latency_s, self.crawl_delay_s, self.port = latency_s, crawl_delay_s, 0
        self.log = open(log, "w", buffering=1)  # noqa: SIM115 - until the process ends
        self.kept = {}

    def reply(self, path):
        """The bytes of an answer."""
        if path not in self.kept:
            self.kept[path] = self._reply(path)
        return self.kept[path]

    def _reply(self, path):
        if path == "/robots.txt":
            delay = f"Crawl-delay: {self.crawl_delay_s}\n" if self.crawl_delay_s else ""
            return _http(200, "text/plain", f"User-agent: *\n{delay}Disallow: /no/\n".encode())
        number = path.removeprefix("/p/")
        if not number.isdecimal() or int(number) >= self.pages:
            return _http(404, "text/plain", b"no such page")
        body = page(int(number), self.pages, self.hosts, self.port, self.size)
        return _http(200, "text/html", body)

    async def serve(self):
        loop = asyncio.get_running_loop()
        for number in range(1, self.hosts + 1):
            found = await loop.create_server(lambda: Site(self), f"127.0.0.{number}", self.port)
            self.port = found.sockets[0].getsockname()[1]
        print(self.port, flush=True)
        await asyncio.Event().wait()


def _http(status, kind, body):
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def running(pages, hosts, log, *more):
    """The server in a process of its own; gives its port."""
    command = [sys.executable, __file__, str(pages), str(hosts), str(log), *map(str, more)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def read_log(path):
    """(came, left, host, path) of each request."""
    rows = (line.split(" ") for line in Path(path).read_text().splitlines())
    return [(float(came), float(left), host, path) for came, left, host, path in rows]


if __name__ == "__main__":
    pages, hosts, log, *more = sys.argv[1:]
    asyncio.run(Server(int(pages), int(hosts), log, *map(float, more[:2]),
                       *map(int, more[2:])).serve())  # fmt: skip
