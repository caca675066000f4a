"""Servers that lie, dawdle and talk nonsense: each costs one bounded request and gives a reason."""

import asyncio
import shutil
import ssl
import subprocess

import brotli
import pytest
from waiting import HANG_S

from sabia.core.options.crawl import CrawlOptions
from sabia.core.web.fetch import Fetcher

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
BOMB = brotli.compress(b"\0" * (64 << 20), quality=1)


def fetch(script, conditions=None, **changes):
    """The Response when one connection after another is answered by `script(writer)`."""
    given = {"allow_private": True, "backoff": 0.01, "attempts": 1, "timeout": HANG_S,
             "max_bytes": 100_000} | changes  # fmt: skip

    async def serve(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            await script(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Fetcher(CrawlOptions(**given)) as fetcher:
            return await fetcher.page(f"http://127.0.0.1:{port}/", conditions or {})

    return asyncio.run(main())


def say(*parts, for_ever=b""):
    """A script that says the parts, and then one thing again and again, slowly."""

    async def script(writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        while for_ever:
            writer.write(for_ever)
            await writer.drain()
            await asyncio.sleep(0.05)

    return script


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([b"\x00\xff\xfe garbage \r\n\r\n" * 9], "transfer failed"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "transfer failed"),
        ([b""], "transfer failed"),
        ([b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n"], "transfer failed"),
        ([b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n"], "HTTP 999"),
        ([OK + b"Content-Length: 1000\r\n\r\nshort"], "transfer failed"),
        ([OK + b"Content-Length: -5\r\n\r\nx"], "transfer failed"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nx\r\n"], "transfer failed"),
        ([OK + b"Content-Length: 99999999\r\n\r\nx"], "larger than 100000 bytes"),
        ([OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nplain"], "damaged gzip"),
        ([OK + b"Content-Encoding: lzma\r\nContent-Length: 5\r\n\r\nplain"], "content encoding"),
        ([OK + b"Content-Encoding: br\r\nContent-Length: %d\r\n\r\n" % len(BOMB), BOMB],
         "larger than|bomb"),
        ([b"HTTP/1.1 302 F\r\nLocation: http://[::1/\r\nContent-Length: 0\r\n\r\n"], "Location"),
        ([b"HTTP/1.1 304 Not Modified\r\n\r\n"], "HTTP 304"),  # nobody asked on conditions
    ],
)  # fmt: skip
def test_nonsense_is_refused(parts, said):
    found = fetch(say(*parts))
    assert any(part in found.refused for part in said.split("|")), found.refused
    assert (found.body, found.redirect) == (b"", None)


def test_slow_servers_are_left(tmp_path):
    found = fetch(say(OK, for_ever=b"X: 1\r\n"), timeout=0.6)
    assert "transfer failed" in found.refused
    head = OK + b"Content-Length: 50000000\r\n\r\n"
    found = fetch(say(head, for_ever=b"x"), timeout=0.6, max_bytes=100_000_000)
    assert "transfer failed" in found.refused


def test_endless_pages_are_cut_off():
    sent = 0

    async def script(writer):
        nonlocal sent
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            await writer.drain()
            sent += 65_536

    found = fetch(script)
    assert found.refused == "larger than 100000 bytes"
    assert sent < 20 << 20


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_certificates_are_checked(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def main():
        server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with Fetcher(CrawlOptions(allow_private=True, attempts=3)) as fetcher:
            return await fetcher.page(f"https://127.0.0.1:{port}/")

    found = asyncio.run(main())
    assert found.refused.startswith("TLS: ")
    assert "certificate verify failed" in found.refused
    assert found.requests == 0


def test_more_bytes_than_promised_are_not_taken():
    found = fetch(say(OK + b"Content-Length: 5\r\n\r\nwords and more of them"))
    assert found.body == b"words" or "transfer failed" in found.refused
    assert b"more" not in found.body


def test_conditions_are_sent_and_304_understood():
    heads = []

    async def serve(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b'HTTP/1.1 304 Not Modified\r\nETag: "b"\r\n\r\n')
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Fetcher(CrawlOptions(allow_private=True, attempts=1)) as fetcher:
            asked = {"If-None-Match": '"a"', "If-Modified-Since": "Mon, 02 Nov 2026 10:00:00 GMT"}
            return await fetcher.page(f"http://127.0.0.1:{port}/", asked)

    found = asyncio.run(main())
    assert (found.status, found.refused, found.header("etag")) == (304, "", '"b"')
    assert b'If-None-Match: "a"\r\n' in heads[0]
    assert b"If-Modified-Since: Mon, 02 Nov 2026 10:00:00 GMT\r\n" in heads[0]
    assert dict(found.asked)["User-Agent"] == "sabia"
    assert found.address == "127.0.0.1"
