"""Client for OpenAI-compatible servers with retries, a cache of finished calls and cost limits.

Finished calls are in a content-addressed cache and are on disk before they are used; identical
requests in flight are one call. 408, 409, 425, 429, 5xx, timeouts, connection resets and broken
bodies are retried with full jitter (Brooker 2015) and never before Retry-After or the reset of an
exhausted x-ratelimit; 400, 401, 403, 404 and 422 fail at once with the server's message, and 401,
403 and 404 end the run unless it is moderation that refuses one text. A reply
that its reader does not accept is requested again, READ_TRIES times in all, and is not kept. A
failed call has an `error` and no text, and servers that answer no call stop the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sabia.core import stop
from sabia.core.errors import Failed, Unavailable, UsageError
from sabia.core.generate import calls
from sabia.core.generate.budget import Budget, Spent
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatResponse, ModelRequest, Reader, Refused, Retryable, Usage
from sabia.core.generate.ledger import Ticket
from sabia.core.generate.limiter import Limiter, Server

OUTAGE_AFTER = 8  # calls in a row that failed after all retries
REFUSED_AFTER = 3  # requests in a row refused as malformed before any was accepted
READ_TRIES = 2  # replies to a request before one that cannot be read is returned
POLL_S = 0.1
GRACE_S = 3.0  # a stop signal leaves 5 s
DATE_SLACK_S = 0.05  # clocks of two processes on one machine
Follow = Callable[[ChatResponse], ModelRequest | None]  # the request that a response leads to


@dataclass(frozen=True)
class ClientStats:
    """Counts of this client so far."""

    calls: int = 0  # answered by the server
    cached: int = 0  # answered from the cache, or by an identical call in flight
    failed: int = 0  # failed after all retries
    requests: int = 0  # HTTP requests sent, including retries
    usage: Usage = field(default_factory=Usage)  # of `calls`
    usd: float | None = None  # of `usage`; None without a price

    def __add__(self, other: ClientStats) -> ClientStats:
        usd = None if self.usd is None or other.usd is None else self.usd + other.usd
        names = ("calls", "cached", "failed", "requests", "usage")
        return ClientStats(**{n: getattr(self, n) + getattr(other, n) for n in names}, usd=usd)


@dataclass(frozen=True)
class Estimate:
    """Upper bound of the cost of requests: those not in the cache, with `max_tokens` each."""

    requests: int
    cached: int
    usage: Usage
    usd: float | None


class Client:
    """Sends chat requests from its own event loop; use it as a context manager.

    Several addresses are those of replicas of one model, among which the calls are divided.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        *,
        api_key_env: str = "SABIA_API_KEY",
        cache_dir: str | os.PathLike[str],
        budget: Budget | None = None,
        max_concurrency: int = 16,
        timeout_s: float = 600.0,
        max_tries: int = 6,
        backoff_s: float = 1.0,
        max_wait_s: float = 600.0,
        outage_s: float = 300.0,
        refused_after: int | None = REFUSED_AFTER,
    ) -> None:
        """`base_url` is the part before /chat/completions (…/v1). The key is read from the variable
        `api_key_env`; without one no Authorization header is sent. `max_wait_s` is the longest
        Retry-After that is obeyed; the run stops after `outage_s` in which every attempt failed,
        and after `refused_after` requests refused as malformed before any was accepted (None:
        never). Raises UsageError for a cap in dollars without a price.
        """
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"not an HTTP address: {url} (expected http://HOST:PORT/v1)")
        self.urls = [url.rstrip("/") for url in urls]
        self.model = model
        self.budget = budget or Budget()
        self.budget.check_prices(model)
        self.cache = CallCache(cache_dir)
        self._key = os.environ.get(api_key_env, "")
        self._concurrency, self._timeout_s = max_concurrency, timeout_s
        self._max_tries, self._backoff_s, self._max_wait_s = max_tries, backoff_s, max_wait_s
        self._calls = self._cached = self._failed = self._requests = 0
        self._used = Usage()
        self._failures_in_row = self._refused_first = self._unreachable = 0
        self._refused_after = refused_after
        self._outage_s, self._failing_since = outage_s, 0.0  # 0: the last attempt was answered
        self._reached = False
        self._fatal: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, Exception):
            self._finish_calls(error)
        self.close()

    @property
    def stats(self) -> ClientStats:
        """Counts so far."""
        counts = (self._calls, self._cached, self._failed, self._requests, self._used)
        return ClientStats(*counts, self.budget.cost_usd({self.model: self._used}))

    def summary(self) -> str:
        """What the calls were and what they, and the whole run, have cost."""
        stats, spent = self.stats, self.budget.spent
        own = Spent(stats.requests, stats.usage, stats.usd)
        line = f"{stats.calls:,} calls, {stats.cached:,} from the cache, {stats.failed:,} failed; "
        line += own.text().partition(", ")[2]
        return line if spent == own else f"{line}; the run in all: {spent.text()}"

    def chat(
        self, requests: Iterable[ModelRequest], readers: Iterable[Reader] = ()
    ) -> list[ChatResponse]:
        """The responses in the order of the requests; `readers`: one of each request, or none.

        Raises Refused, BudgetExceeded, or Failed if the server is down; Interrupted on a stop
        signal. Calls finished by then are in the cache.
        """
        pairs = zip_longest(requests, readers)
        return self.answers([self.submit(request, reader) for request, reader in pairs])

    def answers(
        self, futures: Sequence[concurrent.futures.Future[ChatResponse]]
    ) -> list[ChatResponse]:
        """The results of `submit`, as `chat` returns them."""
        responses = self.wait(futures)
        if responses and all(response.refused for response in responses):
            raise Failed(str(responses[0].error))
        return responses

    def submit(
        self, request: ModelRequest, reader: Reader | None = None, follow: Follow | None = None
    ) -> concurrent.futures.Future[ChatResponse]:
        """Start one request; collect it with `wait`. Raises what has ended the client.

        A reply that `reader` does not accept is requested again, and returned in the end. `follow`
        gives the request that a response leads to, such as one with the results of tool calls; the
        last response is the result.
        """
        if self._fatal is not None:
            self._finish_calls(self._fatal)
        self._raise_if_over()
        with self._starting:
            loop = self._running()
        return asyncio.run_coroutine_threadsafe(self._last_answer(request, reader, follow), loop)

    def wait(
        self, futures: Sequence[concurrent.futures.Future[ChatResponse]]
    ) -> list[ChatResponse]:
        """The results of `submit`; checks for stop signals meanwhile and raises like `chat`."""
        left = set(futures)
        try:
            while left:
                stop.check()
                done, left = concurrent.futures.wait(left, POLL_S, "FIRST_EXCEPTION")
                for future in done:
                    future.result()
        except Exception as error:
            self._finish_calls(error)
            for future in left:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def _finish_calls(self, error: Exception) -> None:
        """Start no new call and wait GRACE_S for those in flight, which are already paid for."""
        self._fatal = self._fatal or error
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()

    async def _ended(self) -> None:
        if self._in_flight:
            await asyncio.wait(list(self._in_flight.values()), timeout=GRACE_S)

    def estimate(self, requests: Iterable[ModelRequest]) -> Estimate:
        """What `chat` would send and what it would cost; sends nothing."""
        seen: set[str] = set()
        cached, usage = 0, Usage()
        for request in requests:
            key = request.key(self.model)
            if key in seen or self.cache.get(key) is not None:
                cached += 1
            else:
                usage += request.estimate()
                seen.add(key)
        return Estimate(len(seen), cached, usage, self.budget.cost_usd({self.model: usage}))

    def close(self) -> None:
        """Stop the event loop; calls still in flight are cancelled."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            asyncio.run_coroutine_threadsafe(self._shut(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()
        self.cache.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self._loop

    async def _open(self) -> None:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=30),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._limiter = Limiter(self._concurrency, self._backoff_s, self.urls)
        self._in_flight: dict[str, asyncio.Future[Any]] = {}
        self._to_sync: list[asyncio.Future[None]] = []
        self._syncing: asyncio.Task[None] | None = None

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _last_answer(
        self, request: ModelRequest, reader: Reader | None, follow: Follow | None
    ) -> ChatResponse:
        response = await self._answer(request, reader)
        while follow is not None and (more := follow(response)) is not None:
            response = await self._answer(more, reader)
        return response

    async def _answer(self, request: ModelRequest, reader: Reader | None) -> ChatResponse:
        """One request: from an identical call in flight, the cache or the server."""
        self._raise_if_over()
        key = request.key(self.model)
        in_flight = self._in_flight.get(key)
        if in_flight is not None:
            reply, cached = await asyncio.shield(in_flight), True
        elif (kept := self.cache.get(key)) is not None and calls.is_read(kept, request, reader):
            reply, cached = kept, True
        else:
            reply, cached = await self._call_once(key, request, reader), False
        if isinstance(reply, Exception):
            return ChatResponse(key, error=str(reply), refused=isinstance(reply, Refused))
        self._cached += cached
        return calls.to_response(key, reply, request, cached)

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            # one error for all calls: its traceback would grow
            raise self._fatal.with_traceback(None)

    async def _call_once(
        self, key: str, request: ModelRequest, reader: Reader | None
    ) -> dict[str, Any] | Exception:
        """Call the server for all identical requests; returns errors that end this request only."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = result
        try:
            reply = await self._call(key, request, reader)
            result.set_result(reply)
            return reply
        except BaseException as error:
            result.set_exception(error if isinstance(error, Exception) else Failed("cancelled"))
            result.exception()  # retrieved here: no identical call may be waiting
            raise
        finally:
            del self._in_flight[key]

    async def _call(
        self, key: str, request: ModelRequest, reader: Reader | None
    ) -> dict[str, Any] | Exception:
        try:
            for _ in range(READ_TRIES):
                reply, accepted = await self._try(key, request, reader)
                if accepted:
                    break
            return reply
        except Refused as error:
            return self._refused(error)
        except Retryable as error:
            self._failed += 1
            self._failures_in_row += 1
            line = f"failed after {self._max_tries} attempts: {error}"
            if self._failures_in_row >= OUTAGE_AFTER:
                self._fatal = self._outage(f"{line}; {OUTAGE_AFTER} calls in a row failed")
                raise self._fatal from error
            return Retryable(line)
        except Exception as error:
            self._fatal = error
            raise

    def _outage(self, line: str) -> Failed:
        """The error of servers that do not answer; exit code 75 if they have answered this run."""
        if not self.budget.ledger.answered:
            return Failed(f"{line}; no call of this run was answered (is the address right?)")
        return Unavailable(f"{line}; finished calls are kept: run again when the server is back")

    def _refused(self, error: Refused) -> Refused:
        """Raise if no request of the run can succeed, else return the error of this request."""
        self._failed += 1
        if self._refused_first >= 0 and not error.moderated:
            self._refused_first += 1
        enough = self._refused_after is not None and self._refused_first >= self._refused_after
        if error.for_all or enough:
            self._fatal = error
            raise error
        return error

    async def _try(
        self, key: str, request: ModelRequest, reader: Reader | None
    ) -> tuple[dict[str, Any], bool]:
        """The reply, and whether the reader accepts it, after up to `max_tries` attempts.

        Raises the last Retryable, or Refused at once.
        """
        import tenacity

        jitter = tenacity.wait_random_exponential(multiplier=self._backoff_s, max=60)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = getattr(error, "wait_s", None)
            return max(jitter(state), 0.0 if asked is None else asked + DATE_SLACK_S)

        asks_too_much: Any = self._wait_too_long  # tenacity accepts a function as well
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._max_tries) | asks_too_much,
            wait=wait,
            retry=tenacity.retry_if_exception_type(Retryable),
            reraise=True,
        )
        return await attempts(self._attempt, key, request, reader)

    def _wait_too_long(self, state: Any) -> bool:
        asked = getattr(state.outcome.exception(), "wait_s", None)
        return asked is not None and asked > self._max_wait_s

    async def _attempt(
        self, key: str, request: ModelRequest, reader: Reader | None
    ) -> tuple[dict[str, Any], bool]:
        """One HTTP request under the shared limiter; its slot is released once the reply is
        written, so that a kill loses at most as many paid calls as may be in flight."""
        server, generation = await self._limiter.acquire()
        succeeded, estimate = False, request.estimate()
        try:
            ticket = await self._admit(estimate)
            self._requests += 1
            try:
                reply, headers = await self._post(server.url, request)
            except Exception:  # of a call that is cancelled, the outcome is unknown
                self.budget.ledger.settle(ticket, self.model, Usage())
                raise
            usage = calls.to_response(key, reply, request, False).usage
            self.budget.ledger.settle(ticket, self.model, usage)
            self._calls, self._used = self._calls + 1, self._used + usage
            self._failures_in_row, self._refused_first = 0, -1
            self._reached, self._failing_since = True, 0.0
            succeeded = True
            if (reset := calls.limit_reset_s(headers, estimate)) is not None:
                self._pause(server, reset)
            if accepted := calls.is_read(reply, request, reader):
                self._write(key, reply)
        except Retryable as error:
            self._check_outage(error)
            if error.overload:
                wait_s = error.wait_s
                self._limiter.overloaded(server, generation, has_retry_after=wait_s is not None)
            if error.wait_s is not None:
                self._pause(server, error.wait_s)
            raise
        finally:
            await self._limiter.release(server, succeeded)
        if accepted:
            await self._sync()
        return reply, accepted

    def _pause(self, server: Server, seconds: float) -> None:
        if seconds <= self._max_wait_s:
            self._limiter.pause(server, seconds + DATE_SLACK_S)

    async def _admit(self, estimate: Usage) -> Ticket:
        """Charge one request to the budget, waiting for calls in flight while it is full."""
        while True:
            self._raise_if_over()
            ticket = self.budget.admit(self.model, estimate)
            if ticket is not None:
                return ticket
            await asyncio.sleep(POLL_S)

    def _check_outage(self, error: Retryable) -> None:
        """Raise Failed if no server was ever reachable, or every attempt failed for too long."""
        self._reached |= not error.unreachable
        self._failing_since = self._failing_since or time.monotonic()
        if not self._reached:
            self._unreachable += 1
            if self._unreachable >= self._max_tries * len(self.urls):
                self._fatal = self._outage(f"no server: {error}")
                raise self._fatal
        elif time.monotonic() - self._failing_since > self._outage_s:
            self._fatal = self._outage(f"{error}; no answer for {self._outage_s:g} s")
            raise self._fatal

    async def _post(
        self, server: str, request: ModelRequest
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The reply to a request and its headers."""
        import aiohttp

        url, body = server + request.path, request.body(self.model)
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                raw = await answer.read()
                status, headers = answer.status, answer.headers
        except TimeoutError as error:
            reason = f"{url}: no answer within {self._timeout_s:g} s"
            raise Retryable(reason, overload=True) from error
        except aiohttp.ClientConnectorError as error:
            reason = " ".join(str(error).split())
            line = f"{url}: {reason}"
            raise Retryable(line, overload=True, unreachable=True) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Retryable(f"{url}: {reason}") from error
        if self._key:
            # some servers repeat the key in their reply
            raw = raw.replace(self._key.encode(), b"***")
        calls.check_status(status, headers, raw, url)
        return request.parse(raw), headers

    def _write(self, key: str, reply: dict[str, Any]) -> None:
        try:
            self.cache.write(key, reply)
        except OSError as error:
            raise Failed(f"cannot write the cache of calls: {error}") from error

    async def _sync(self) -> None:
        """Wait until the replies written so far are on the disk; those that arrive together share
        one fsync."""
        loop = asyncio.get_running_loop()
        synced: asyncio.Future[None] = loop.create_future()
        self._to_sync.append(synced)
        if self._syncing is None:
            self._syncing = loop.create_task(self._sync_pending())
        await asyncio.shield(synced)

    async def _sync_pending(self) -> None:
        try:
            while self._to_sync:
                batch, self._to_sync = self._to_sync, []
                error: Exception | None = None
                try:
                    await asyncio.to_thread(self.cache.sync)
                except OSError as failure:
                    error = Failed(f"cannot write the cache of calls: {failure}")
                for synced in batch:
                    with contextlib.suppress(asyncio.InvalidStateError):
                        synced.set_exception(error) if error else synced.set_result(None)
        finally:
            self._syncing = None
