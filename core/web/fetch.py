"""One GET: guarded, bounded in bytes and time, retried with the server's own Retry-After.

Redirects are not followed here but handed back, so that each hop passes the frontier, robots.txt
and the guard like any other URL. Connection errors, 5xx, 429 and bodies cut short are tried again
after Retry-After (seconds or HTTP date), else after a growing, jittered pause.
"""

import asyncio
import email.utils
import time
from dataclasses import dataclass

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter
from yarl import URL

from sabia.core.web import addresses, robots
from sabia.core.web.addresses import Refused
from sabia.core.web.settings import FetchSettings
from sabia.core.web.urls import canonical

_CHUNK = 64 << 10
_AGAIN = (429, 500, 502, 503, 504, 408)
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Response:
    """What came back: exactly one of a page (status 200 and no `refused`), a redirect, a refusal.

    `retry_s` asks to come back later; `requests` counts what was sent for it.
    """

    url: str
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    redirect: str | None = None
    refused: str = ""
    retry_s: float | None = None
    requests: int = 1

    @property
    def content_type(self) -> str:
        """The Content-Type header as sent."""
        return next((v for k, v in self.headers if k.lower() == "content-type"), "")


class _Again(Exception):
    """Worth another try; `wait_s` is what the server asked for."""

    def __init__(self, reason: str, wait_s: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.wait_s, self.status = wait_s, status


class Fetcher:
    """An aiohttp session with the guard built in; use as an async context manager."""

    def __init__(self, settings: FetchSettings) -> None:
        self.settings = settings
        self._pause = wait_exponential_jitter(settings.backoff_s, max=settings.max_wait_s)

    async def __aenter__(self) -> "Fetcher":
        resolver = addresses.GuardedResolver(self.settings.allow_private)
        connector = aiohttp.TCPConnector(resolver=resolver, limit=0)
        timeout = aiohttp.ClientTimeout(self.settings.timeout_s, sock_connect=15, sock_read=30)
        headers = {"User-Agent": self.settings.agent, "Accept": "text/html, text/plain;q=0.8"}
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )  # fmt: skip
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.session.close()

    async def page(self, url: str) -> Response:
        """Fetch a page; never raises for what the other side does."""
        return await self._retried(url, self.settings.max_bytes, self.settings.mime_types)

    async def robots(self, origin: str) -> tuple[robots.Verdict, int]:
        """The verdict for an origin such as `https://host`, and the requests it took."""
        url, sent = f"{origin}/robots.txt", 0
        for hops in range(robots.MAX_REDIRECTS + 1):
            answer = await self._retried(url, robots.MAX_BYTES, ())
            sent += answer.requests
            if answer.status is None and not answer.requests:
                return robots.Verdict(robots.DENY_ALL, answer.refused), sent
            if answer.redirect is None or hops == robots.MAX_REDIRECTS:
                return robots.verdict(answer.status, answer.body, hops + 1), sent
            url = answer.redirect
        raise AssertionError("the loop above returns at its last turn")

    async def _retried(self, url: str, limit: int, types: tuple[str, ...]) -> Response:
        sent = 0
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_Again), wait=self._wait, stop=self._enough,
                reraise=True,
            ):  # fmt: skip
                with attempt:
                    sent += 1
                    return await self._once(url, limit, types, sent)
        except _Again as error:
            later = error.wait_s if (error.wait_s or 0) > self.settings.max_wait_s else None
            return Response(url, error.status, refused=str(error), retry_s=later, requests=sent)
        except Refused as error:
            return Response(url, refused=str(error), requests=0)
        raise AssertionError("tenacity ended without a result")

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.wait_s if isinstance(error, _Again) else None
        return asked if asked is not None else self._pause(state)

    def _enough(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        asked = error.wait_s if isinstance(error, _Again) else None
        too_long = asked is not None and asked > self.settings.max_wait_s
        return too_long or state.attempt_number >= self.settings.attempts

    async def _once(self, url: str, limit: int, types: tuple[str, ...], sent: int) -> Response:
        addresses.check_url(url, self.settings.allow_private)
        try:
            target = URL(url, encoded=True)
            async with self.session.get(target, allow_redirects=False) as answer:
                return await self._read(url, answer, limit, types, sent)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, Refused) or isinstance(error.__cause__, Refused):
                raise Refused(str(error.__cause__)) from error
            raise _Again(f"no connection: {error.os_error.strerror or error}") from error
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            raise _Again(f"transfer failed: {said}") from error

    async def _read(
        self,
        url: str,
        answer: aiohttp.ClientResponse,
        limit: int,
        types: tuple[str, ...],
        sent: int,
    ) -> Response:
        headers = tuple((str(k), str(v)) for k, v in answer.headers.items())
        status = answer.status
        if status in _AGAIN:
            wait = retry_after_s(answer.headers.get("Retry-After"), time.time())
            raise _Again(f"HTTP {status}", wait, status)
        if status in _REDIRECTS:
            target = canonical(answer.headers.get("Location", ""), url)
            refused = "" if target else f"HTTP {status} without a usable Location"
            return Response(url, status, headers, b"", target, refused, requests=sent)
        if status != 200:
            return Response(url, status, headers, refused=f"HTTP {status}", requests=sent)
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if types and kind not in types:
            said = f"content type {kind or 'missing'}"
            return Response(url, status, headers, refused=said, requests=sent)
        body = await _bounded(answer, limit)
        if len(body) > limit and types:
            said = f"larger than {limit} bytes"
            return Response(url, status, headers, refused=said, requests=sent)
        return Response(url, status, headers, body, requests=sent)


async def _bounded(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The decompressed body, read until it exceeds the limit (then it is not whole)."""
    body = bytearray()
    async for chunk in answer.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > limit:
            answer.close()
            break
    return bytes(body)


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
