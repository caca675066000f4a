"""One GET request: checked addresses, limits on bytes and time, retries with Retry-After.

Redirects are not followed here but returned, so that each hop passes the frontier, robots.txt and
the address check like any other URL. Connection errors, 5xx, 429 and truncated bodies are retried
after Retry-After (seconds or HTTP date), else after a growing pause with jitter. HTTP/1.1 only:
with one request in flight per host, HTTP/2 has nothing to multiplex.
"""

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import aiohttp
from yarl import URL

from sabia.core.options.crawl import CrawlOptions
from sabia.core.urls import canonical
from sabia.core.web import addresses, bodies, robots
from sabia.core.web.addresses import AddressRefused
from sabia.core.web.documents import WarcRecord
from sabia.core.web.url_rules import host_of

MIME_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
MAX_WAIT_S = 60.0  # after a longer Retry-After the URL is put back
_RETRY_STATUSES = (429, 500, 502, 503, 504, 408)
_REDIRECTS = (301, 302, 303, 307, 308)
_DNS_S = 300  # how long the checked addresses of a name are cached
_PAGES = "text/html, application/xhtml+xml, text/plain;q=0.8"
_NO_CONDITIONS: Mapping[str, str] = {}
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Response:
    """A page (200), an unchanged page (304), a redirect, or the reason of a refusal.

    `retry_s`: seconds after which the server asks for a retry; `requests`: number of requests sent;
    `asked`: the headers sent; `address`: the server's address; `took_s`: time of the last request;
    `archived`: the WARC record that it is read from.
    """

    url: str
    status: int | None = None
    headers: Headers = ()
    body: bytes = b""
    redirect: str | None = None
    refused: str = ""
    retry_s: float | None = None
    requests: int = 1
    reason: str = "OK"
    asked: Headers = ()
    address: str = ""
    took_s: float = 0.0
    archived: WarcRecord | None = None

    def header(self, name: str) -> str:
        """A header of the response, or ''; `name` in lower case."""
        return next((v for k, v in self.headers if k.lower() == name), "")

    @property
    def content_type(self) -> str:
        """The Content-Type header of the response."""
        return self.header("content-type")

    def settled(self, types: tuple[str, ...] = ()) -> "Response":
        """With `redirect` or `refused` set by status and headers; a content type that is not in
        `types` is refused."""
        if self.status in _REDIRECTS:
            target = canonical(self.header("location"), self.url)
            reason = "" if target else f"HTTP {self.status} without a usable Location"
            return replace(self, redirect=target, refused=reason)
        if self.status != 200:
            return replace(self, refused=f"HTTP {self.status}")
        kind = self.content_type.partition(";")[0].strip().lower()
        if types and kind not in types:
            return replace(self, refused=f"content type {kind or 'missing'}")
        return self


@dataclass(frozen=True)
class _Limits:
    """The limits of a request; bodies longer than `limit` are refused, or cut off with `cut`."""

    limit: int
    types: tuple[str, ...] = ()
    cut: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


class _Retryable(Exception):
    """The request may be retried; `wait_s` is the server's Retry-After."""

    def __init__(self, reason: str, wait_s: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.wait_s, self.status = wait_s, status


class _Response(aiohttp.ClientResponse):
    """Stores the server's address, which aiohttp drops once a short body has ended."""

    address = ""

    async def start(self, connection: Any) -> "_Response":
        """See aiohttp."""
        peer = connection.transport.get_extra_info("peername") if connection.transport else None
        self.address = str(peer[0]) if peer else ""
        await super().start(connection)
        return self


def user_agent(options: CrawlOptions) -> str:
    """`sabia/VERSION (+CONTACT)`: the product token, then the contact."""
    if not options.contact:
        return "sabia"
    link = options.contact if "://" in options.contact else f"mailto:{options.contact}"
    return f"sabia/{version('sabia')} (+{link})"


class Fetcher:
    """An aiohttp session with checked addresses; use as an async context manager."""

    def __init__(
        self, options: CrawlOptions, on_retry_after: Callable[[str, float], None] | None = None
    ) -> None:
        """on_retry_after(host, seconds) is called with each Retry-After of a server."""
        self.options, self._on_retry_after = options, on_retry_after

    async def __aenter__(self) -> "Fetcher":
        resolver = addresses.GuardedResolver(self.options.allow_private)
        connector = aiohttp.TCPConnector(resolver=resolver, limit=0, ttl_dns_cache=_DNS_S)
        total = self.options.timeout
        connect_s, read_s = min(15, total), min(30, total)
        timeout = aiohttp.ClientTimeout(total, sock_connect=connect_s, sock_read=read_s)
        headers = {"User-Agent": user_agent(self.options), "Accept-Encoding": bodies.ACCEPTED}
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, response_class=_Response,
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.session.close()

    async def page(self, url: str, conditions: Mapping[str, str] = _NO_CONDITIONS) -> Response:
        """Fetch a page, with conditions (such as If-None-Match) if given; does not raise for
        errors of the server."""
        headers = {"Accept": _PAGES, **conditions}
        wanted = _Limits(self.options.max_bytes, MIME_TYPES, False, headers)
        return await self._retried(url, wanted)

    async def file(self, url: str, limit: int) -> Response:
        """Fetch a file of any type, such as a sitemap; a longer one is cut at `limit` bytes."""
        return await self._retried(url, _Limits(limit, cut=True, headers={"Accept": "*/*"}))

    async def robots(self, origin: str) -> tuple[robots.RobotsFile, int]:
        """The robots.txt of an origin such as `https://host`, and the number of requests sent."""
        url, sent = f"{origin}/robots.txt", 0
        for hops in range(robots.MAX_REDIRECTS + 1):
            answer = await self.file(url, robots.MAX_BYTES)
            sent += answer.requests
            if answer.status is None and not answer.requests:
                return robots.RobotsFile(robots.DENY_ALL, answer.refused), sent
            if answer.redirect is None or hops == robots.MAX_REDIRECTS:
                status = None if answer.refused and answer.status == 200 else answer.status
                cache = answer.header("cache-control")
                return robots.robots_file_of(status, answer.body, hops + 1, cache), sent
            url = answer.redirect
        raise AssertionError("the loop above returns at its last turn")

    async def _retried(self, url: str, wanted: _Limits) -> Response:
        for sent in range(1, self.options.attempts + 1):
            try:
                return await self._once(url, wanted, sent)
            except _Retryable as error:
                asked = error.wait_s
                if asked is not None and self._on_retry_after is not None:
                    self._on_retry_after(host_of(url), asked)
                too_long = asked is not None and asked > MAX_WAIT_S
                if too_long or sent == self.options.attempts:
                    return Response(url, error.status, refused=str(error), requests=sent,
                                    retry_s=asked if too_long else None)  # fmt: skip
                if asked is None:  # doubled for each request sent, plus up to 50 % of jitter
                    pause_s = self.options.backoff * 2 ** (sent - 1) * random.uniform(1.0, 1.5)
                    asked = min(pause_s, MAX_WAIT_S)
                await asyncio.sleep(asked)
            except AddressRefused as error:
                return Response(url, refused=str(error), requests=sent - 1)
        raise AssertionError("attempts is 1 or more")

    async def _once(self, url: str, wanted: _Limits, sent: int) -> Response:
        addresses.check_url(url, self.options.allow_private)
        try:
            target, headers = URL(url, encoded=True), wanted.headers
            started = time.monotonic()
            async with self.session.get(target, allow_redirects=False, headers=headers) as answer:
                response = Response(
                    url, answer.status, _headers(answer.headers), requests=sent,
                    asked=_headers(answer.request_info.headers),
                    reason=answer.reason or "", address=getattr(answer, "address", ""),
                )  # fmt: skip
                response = await _read(response, answer, wanted)
            return replace(response, took_s=time.monotonic() - started)
        except aiohttp.ClientSSLError as error:
            raise AddressRefused(f"TLS: {_first_line(error)}") from error
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.__cause__, AddressRefused):
                raise AddressRefused(str(error.__cause__)) from error
            raise _Retryable(f"no connection: {error.os_error.strerror or error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError, EOFError, ValueError) as error:
            raise _Retryable(f"transfer failed: {_first_line(error)}") from error


async def _read(response: Response, answer: aiohttp.ClientResponse, wanted: _Limits) -> Response:
    """The response with `redirect`, `refused` or `body` set."""
    if response.status in _RETRY_STATUSES:
        wait = retry_after_s(response.header("retry-after"), time.time())
        raise _Retryable(f"HTTP {response.status}", wait, response.status)
    if response.status == 304 and wanted.headers.keys() & {"If-None-Match", "If-Modified-Since"}:
        return response
    response = response.settled(wanted.types)
    if response.redirect or response.refused:
        return response
    return replace(response, **await _body(answer, wanted))


async def _body(answer: aiohttp.ClientResponse, wanted: _Limits) -> dict[str, Any]:
    """The body, read and decompressed up to the limit."""
    if not wanted.cut and (answer.content_length or 0) > wanted.limit:
        answer.close()
        return {"refused": f"larger than {wanted.limit} bytes"}
    raw = bytearray()  # as sent; incomplete if it exceeds the limit
    while chunk := await answer.content.readany():
        raw += chunk
        if len(raw) > wanted.limit:
            answer.close()
            break
    encodings = answer.headers.get("Content-Encoding", "")
    if len(raw) <= wanted.limit or not encodings:
        try:
            body = bodies.decoded(bytes(raw), encodings, wanted.limit)
        except bodies.Undecodable as error:
            return {"refused": str(error)}
        if wanted.cut or len(body) <= wanted.limit:
            return {"body": body[: wanted.limit]}
    return {"refused": f"larger than {wanted.limit} bytes"}


def _headers(headers: Mapping[Any, Any]) -> Headers:
    return tuple((str(name), str(value)) for name, value in headers.items())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def retry_after_s(header: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for (a number or an HTTP date), else None."""
    if not header:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, TypeError):
        return None
