"""Client for OpenAI-compatible servers with retries, a cache of finished calls and cost limits.

Finished calls are in a content-addressed cache and are on disk before they are used; identical
requests in flight are one call. 408, 409, 425, 429, 5xx, timeouts, connection resets and broken
bodies are retried with full jitter (Brooker 2015) and never before Retry-After; 400, 401, 403, 404
and 422 fail at once with the server's message. A failed call has an `error` and no text, and a
server that answers no call stops the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core import stop
from sabia.core.errors import Failed, UsageError
from sabia.core.generate import calls
from sabia.core.generate.budget import Budget, Price
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest, ChatResponse, Refused, Retryable, Usage
from sabia.core.generate.limiter import Limiter

OUTAGE_AFTER = 8  # calls in a row that failed after all retries
REFUSED_AFTER = 3  # requests in a row refused as malformed before any was accepted
POLL_S = 0.1
GRACE_S = 3.0  # a stop signal leaves 5 s
DATE_SLACK_S = 0.05  # clocks of two processes on one machine


@dataclass(frozen=True)
class ClientStats:
    """Counts of the client so far."""

    calls: int  # answered by the server
    cached: int  # answered from the cache, or by an identical call in flight
    failed: int  # failed after all retries
    requests: int  # HTTP requests sent, including retries
    usage: Usage  # of `calls`
    usd: float | None  # of `usage`; None without a price


@dataclass(frozen=True)
class Estimate:
    """Upper bound of the cost of requests: those not in the cache, with `max_tokens` each."""

    requests: int
    cached: int
    usage: Usage
    usd: float | None


class Client:
    """Sends chat requests from its own event loop; use it as a context manager."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = "SABIA_API_KEY",
        cache_dir: str | os.PathLike[str],
        max_concurrency: int = 16,
        max_usd: float | None = None,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        prices: Mapping[str, Price] | None = None,
        timeout_s: float = 600.0,
        max_tries: int = 6,
        backoff_s: float = 1.0,
        max_wait_s: float = 600.0,
        outage_s: float = 300.0,
    ) -> None:
        """`base_url` is the part before /chat/completions (…/v1). The key is read from the variable
        `api_key_env`; without one no Authorization header is sent. `max_wait_s` is the longest
        Retry-After that is obeyed; after `outage_s` without any reply the run stops.
        Raises UsageError for a cap in dollars without a price.
        """
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(f"not an HTTP address: {base_url} (expected http://HOST:PORT/v1)")
        price = (prices or {}).get(model)
        if max_usd is not None and price is None:
            raise UsageError(f"no price for model {model} (a cap in dollars needs a price table)")
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model = model
        self.budget = Budget(price, max_usd, max_requests, max_tokens)
        self.cache = CallCache(cache_dir)
        self._key = os.environ.get(api_key_env, "")
        self._concurrency, self._timeout_s = max_concurrency, timeout_s
        self._max_tries, self._backoff_s, self._max_wait_s = max_tries, backoff_s, max_wait_s
        self._calls = self._cached = self._failed = 0
        self._failures_in_row = self._refused_first = self._unreachable = 0
        self._outage_s, self._last_reply_at = outage_s, 0.0  # 0: no reply from the server yet
        self._fatal: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> ClientStats:
        """Counts so far."""
        budget = self.budget
        counts = (self._calls, self._cached, self._failed)
        return ClientStats(*counts, budget.requests, budget.used, budget.usd)

    def chat(self, requests: Iterable[ChatRequest]) -> list[ChatResponse]:
        """The responses in the order of the requests.

        Raises Refused, BudgetExceeded, or Failed if the server is down; Interrupted on a stop
        signal. Calls finished by then are in the cache.
        """
        futures = [self.submit(request) for request in requests]
        responses = self.wait(futures)
        if responses and all(response.refused for response in responses):
            raise Failed(str(responses[0].error))
        return responses

    def submit(self, request: ChatRequest) -> concurrent.futures.Future[ChatResponse]:
        """Start one request; collect it with `wait`."""
        with self._starting:
            loop = self._running()
        return asyncio.run_coroutine_threadsafe(self._answer(request), loop)

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
            # start no new call and wait GRACE_S for those in flight, which are already paid for
            self._fatal = self._fatal or error
            _, slow = concurrent.futures.wait(left, GRACE_S)
            for future in slow:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def estimate(self, requests: Iterable[ChatRequest]) -> Estimate:
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
        price = self.budget.price
        return Estimate(len(seen), cached, usage, price.cost_usd(usage) if price else None)

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
        self._limiter = Limiter(self._concurrency, self._backoff_s)
        self._in_flight: dict[str, asyncio.Future[Any]] = {}
        self._budget_changed = asyncio.Condition()
        self._to_store: list[tuple[str, dict[str, Any], asyncio.Future[None]]] = []
        self._storing: asyncio.Task[None] | None = None

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _answer(self, request: ChatRequest) -> ChatResponse:
        """One request: from an identical call in flight, the cache or the server."""
        self._raise_if_over()
        key = request.key(self.model)
        in_flight = self._in_flight.get(key)
        if in_flight is not None:
            reply, cached = await asyncio.shield(in_flight), True
        elif (kept := self.cache.get(key)) is not None:
            reply, cached = kept, True
        else:
            reply, cached = await self._call_once(key, request), False
        if isinstance(reply, Exception):
            return ChatResponse(key, error=str(reply), refused=isinstance(reply, Refused))
        self._cached += cached
        return calls.to_response(key, reply, request, cached)

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            # one error for all calls: its traceback would grow
            raise self._fatal.with_traceback(None)

    async def _call_once(self, key: str, request: ChatRequest) -> dict[str, Any] | Exception:
        """Call the server for all identical requests; returns errors that end this request only."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = result
        try:
            reply = await self._call(key, request)
            result.set_result(reply)
            return reply
        except BaseException as error:
            result.set_exception(error if isinstance(error, Exception) else Failed("cancelled"))
            result.exception()  # retrieved here: no identical call may be waiting
            raise
        finally:
            del self._in_flight[key]

    async def _call(self, key: str, request: ChatRequest) -> dict[str, Any] | Exception:
        estimate, usage = request.estimate(), None
        async with self._budget_changed:
            try:
                await self._budget_changed.wait_for(lambda: self.budget.reserve(estimate))
            except Exception as error:
                self._fatal = error
                raise
        try:
            reply = await self._try(key, request.body(self.model))
            usage = calls.to_response(key, reply, request, False).usage
            self._calls += 1
            self._failures_in_row, self._refused_first = 0, -1
            return reply
        except Refused as error:
            return self._refused(error)
        except Retryable as error:
            self._failed += 1
            self._failures_in_row += 1
            line = f"failed after {self._max_tries} attempts: {error}"
            if self._failures_in_row >= OUTAGE_AFTER:
                self._fatal = Failed(
                    f"{line}; {OUTAGE_AFTER} calls in a row failed; finished calls are kept: "
                    "run again when the server is back"
                )
                raise self._fatal from error
            return Retryable(line)
        except Exception as error:
            self._fatal = error
            raise
        finally:
            self.budget.settle(estimate, usage)
            async with self._budget_changed:
                self._budget_changed.notify_all()

    def _refused(self, error: Refused) -> Refused:
        """Raise if no request of the run can succeed, else return the error of this request."""
        self._failed += 1
        if self._refused_first >= 0:
            self._refused_first += 1
        if error.for_all or self._refused_first >= REFUSED_AFTER:
            self._fatal = error
            raise error
        return error

    async def _try(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Up to `max_tries` attempts; raises the last Retryable, or Refused at once."""
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
        return await attempts(self._attempt, key, body)

    def _wait_too_long(self, state: Any) -> bool:
        asked = getattr(state.outcome.exception(), "wait_s", None)
        return asked is not None and asked > self._max_wait_s

    async def _attempt(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One HTTP request under the shared limiter; its slot is released once the reply is on
        disk, so that a kill loses at most as many paid calls as may be in flight."""
        generation = await self._limiter.acquire()
        succeeded = False
        try:
            self._raise_if_over()
            self.budget.count_request()
            reply = await self._post(body)
            self._last_reply_at = time.monotonic()
            succeeded = True
            await self._store(key, reply)
            return reply
        except Retryable as error:
            self._check_outage(error)
            if error.overload:
                self._limiter.overloaded(generation, has_retry_after=error.wait_s is not None)
            if error.wait_s is not None and error.wait_s <= self._max_wait_s:
                self._limiter.pause(error.wait_s + DATE_SLACK_S)
            raise
        finally:
            await self._limiter.release(succeeded)

    def _check_outage(self, error: Retryable) -> None:
        """Raise Failed if the server was never reachable, or has not replied for too long."""
        now = time.monotonic()
        if not error.unreachable:
            self._last_reply_at = self._last_reply_at or now
        elif not self._last_reply_at:
            self._unreachable += 1
            if self._unreachable >= self._max_tries:
                self._fatal = Failed(f"no server: {error}")
                raise self._fatal
        if self._last_reply_at and now - self._last_reply_at > self._outage_s:
            self._fatal = Failed(
                f"{error}; no answer for {self._outage_s:g} s; finished calls are kept: run again "
                "when the server is back"
            )
            raise self._fatal

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        import aiohttp

        try:
            async with self._session.post(self.url, json=body, allow_redirects=False) as answer:
                raw = await answer.read()
                status, headers = answer.status, dict(answer.headers)
        except TimeoutError as error:
            reason = f"{self.url}: no answer within {self._timeout_s:g} s"
            raise Retryable(reason, overload=True) from error
        except aiohttp.ClientConnectorError as error:
            reason = " ".join(str(error).split())
            line = f"{self.url}: {reason}"
            raise Retryable(line, overload=True, unreachable=True) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Retryable(f"{self.url}: {reason}") from error
        if self._key:
            # some servers repeat the key in their reply
            raw = raw.replace(self._key.encode(), b"***")
        calls.check_status(status, headers, raw, self.url)
        return calls.parse_reply(raw)

    async def _store(self, key: str, reply: dict[str, Any]) -> None:
        """Write a reply to disk; replies that arrive together share one fsync."""
        loop = asyncio.get_running_loop()
        kept: asyncio.Future[None] = loop.create_future()
        self._to_store.append((key, reply, kept))
        if self._storing is None:
            self._storing = loop.create_task(self._store_pending())
        await asyncio.shield(kept)

    async def _store_pending(self) -> None:
        try:
            while self._to_store:
                batch, self._to_store = self._to_store, []
                error: Exception | None = None
                try:
                    await asyncio.to_thread(self.cache.append, [item[:2] for item in batch])
                except OSError as failure:
                    error = Failed(f"cannot write the cache of calls: {failure}")
                for _, _, kept in batch:
                    with contextlib.suppress(asyncio.InvalidStateError):
                        kept.set_exception(error) if error else kept.set_result(None)
        finally:
            self._storing = None
