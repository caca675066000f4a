"""One GET: retries with the server's Retry-After, limits, redirects handed back, robots.txt."""

import asyncio
import contextlib
import email.utils
import gzip
import itertools
import subprocess
import sys
import time

import pytest

from sabia.core.options.crawl import CrawlOptions
from sabia.core.web.fetch import Fetcher, retry_after_s

HTML = {"Content-Type": "text/html"}


def options(**changes):
    return CrawlOptions(**{"allow_private": True, "backoff": 0.02} | changes)


def fetch(url, **changes):
    async def main():
        async with Fetcher(options(**changes)) as fetcher:
            return await fetcher.page(url)

    return asyncio.run(main())


def robots(origin, **changes):
    async def main():
        async with Fetcher(options(**changes)) as fetcher:
            return await fetcher.robots(origin)

    return asyncio.run(main())


def test_page(web):
    web.page("/a")
    found = fetch(web.url + "/a")
    assert (found.status, found.body, found.refused) == (200, b"<p>some words</p>", "")
    assert found.content_type == "text/html"


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_waited_out(web, status):
    wait = HTML | {"Retry-After": "1"}
    web.script["/a"] = lambda n: (status, wait, b"") if n == 0 else (200, HTML, b"<p>x</p>")
    found = fetch(web.url + "/a")
    assert (found.status, found.requests) == (200, 2)
    assert web.seen[1][0] - web.seen[0][0] >= 1.0


def test_retry_after_too_long_is_handed_back(web):
    web.script["/a"] = lambda _n: (429, HTML | {"Retry-After": "3600"}, b"")
    found = fetch(web.url + "/a")
    assert (found.retry_s, found.requests, found.refused) == (3600, 1, "HTTP 429")


def test_retry_after_forms():
    now = time.time()
    assert retry_after_s("120", now) == 120
    assert retry_after_s(email.utils.formatdate(now + 90, usegmt=True), now) == pytest.approx(
        90, abs=1
    )
    assert retry_after_s(email.utils.formatdate(now - 90, usegmt=True), now) == 0
    assert retry_after_s("soon", now) is None
    assert retry_after_s(None, now) is None


def test_server_errors_are_tried_again_and_then_given_up(web):
    web.script["/a"] = lambda _n: (500, HTML, b"")
    found = fetch(web.url + "/a", attempts=3)
    assert (found.status, found.requests, found.refused) == (500, 3, "HTTP 500")
    assert fetch(web.url + "/missing").requests == 1  # 404 is an answer


def test_body_cut_short_is_refused(web):
    web.script["/a"] = lambda _n: (200, HTML | {"Content-Length": "1000"}, b"<p>half")
    found = fetch(web.url + "/a", attempts=2)
    assert "transfer failed" in found.refused
    assert (found.requests, found.body) == (2, b"")


def test_no_server():
    found = fetch("http://127.0.0.1:9/", attempts=2)
    assert "no connection" in found.refused


def test_byte_cap_stops_reading(web):
    body = b"<p>" + b"x" * (50 << 20)
    web.script["/a"] = lambda _n: (200, HTML, body)
    found = fetch(web.url + "/a", max_bytes=100_000)
    assert (found.refused, found.body) == ("larger than 100000 bytes", b"")
    assert web.bytes_sent < len(body) // 2


def test_gzip_bomb_is_refused(web):
    body = gzip.compress(b"0" * (64 << 20))
    web.script["/a"] = lambda _n: (200, HTML | {"Content-Encoding": "gzip"}, body)
    assert fetch(web.url + "/a", max_bytes=1_000_000).refused == "larger than 1000000 bytes"


def test_mime_allow_list(web):
    web.script["/a"] = lambda _n: (200, {"Content-Type": "application/pdf"}, b"%PDF")
    assert fetch(web.url + "/a").refused == "content type application/pdf"


def test_redirects_are_not_followed(web):
    web.script["/a"] = lambda _n: (302, {"Location": "/b?utm_source=x#f"}, b"")
    web.script["/c"] = lambda _n: (301, {"Location": "javascript:alert(1)"}, b"")
    assert fetch(web.url + "/a").redirect == web.url + "/b"
    assert fetch(web.url + "/c").refused == "HTTP 301 without a usable Location"
    assert web.paths() == ["/a", "/c"]


@pytest.mark.parametrize(("hops", "state"), [(1, "rules"), (5, "rules"), (6, "none")])
def test_robots_follows_five_redirects(web, hops, state):
    names = ["/robots.txt", *(f"/r{n}" for n in range(1, hops + 1))]
    for here, there in itertools.pairwise(names):
        web.script[here] = lambda _n, there=there: (301, {"Location": there}, b"")
    rules = b"User-agent: *\nDisallow: /"
    web.script[names[-1]] = lambda _n: (200, {"Content-Type": "text/plain"}, rules)
    found, sent = robots(web.url)
    assert (found.state, sent) == (state, min(hops, 5) + 1)


def test_robots_reads_the_start_of_a_huge_file(web):
    body = b"User-agent: *\nDisallow: /a\n" + b"# filler\n" * 600_000
    web.script["/robots.txt"] = lambda _n: (200, {"Content-Type": "text/plain"}, body)
    found, _ = robots(web.url)
    assert found.state == "rules"
    assert found.text.startswith("User-agent: *\nDisallow: /a\n")
    assert (4 << 20) - 10 < len(found.text) < 4 << 20


def test_robots_5xx_and_silence_deny(web):
    web.script["/robots.txt"] = lambda _n: (503, {}, b"")
    assert robots(web.url, attempts=1)[0].state == "unreachable"
    assert robots("http://127.0.0.1:9", attempts=1)[0].state == "unreachable"


@pytest.mark.slow
def test_a_killed_crawl_keeps_retry_after(web, tmp_path):
    web.script["/a"] = lambda _n: (429, HTML | {"Retry-After": "40"}, b"")
    command = [
        sys.executable, "-m", "sabia.cli.main", "crawl", web.url + "/a",
        "--contact", "a@example.org", "--allow-private", "--delay", "0s", "-q",
        "-o", tmp_path / "out.parquet",
    ]  # fmt: skip
    for _ in range(2):
        child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = child.communicate(timeout=6)
                raise AssertionError(said)
        finally:
            child.kill()  # while it waits
            child.wait()
    assert web.paths().count("/a") == 1
