"""Calls to a server of this run's own: many at a time, repeated until the server answers.

A server that does not answer is waited for; after `OUTAGE_S` the run ends with exit status 75 if
the server has answered before, else with 1. The environment variable SABIA_API_KEY has its token.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp

from sabia.core import notes
from sabia.core.errors import Failed, Unavailable, UsageError
from sabia.core.generate.calls import Refused, Retryable, check_status

KEY = "SABIA_API_KEY"  # variable of the server's token
CONCURRENT = 64  # requests
OUTAGE_S = 600.0  # without an answer
LONGEST_WAIT_S = 30.0
POLL_S = 0.1
Json = dict[str, Any]


class ServerCalls:
    """Calls to the server at `url` (up to /v1), which the option `flag` names. on_wait: called
    while answers are waited for; it may raise."""

    def __init__(self, flag: str, url: str) -> None:
        self.flag, self.url = flag, url.rstrip("/")
        self.on_wait: Callable[[], None] | None = None
        self._answered = self._warned = False

    def model(self) -> Json:
        """What the server says about its model; `id` is its name."""
        (models,) = self.answers([(f"{self.url}/models", None)])
        try:
            return {"id": models["data"][0]["id"]} | models["data"][0]
        except (KeyError, IndexError, TypeError):
            raise UsageError(f"{self.flag}: {self.url} names no model") from None

    def answers(self, calls: Sequence[tuple[str, Json | None]]) -> Iterator[Json]:
        """The replies to requests (None: GET), with their bodies as `asked`, as they arrive; a list
        is given as `items`."""
        loop, every = asyncio.new_event_loop(), set[asyncio.Task[Json]]()
        http = loop.run_until_complete(_session())
        try:
            limit = asyncio.Semaphore(CONCURRENT)
            every = {loop.create_task(self._answer(http, limit, *call)) for call in calls}
            tasks = every
            while tasks:
                if self.on_wait is not None:
                    self.on_wait()
                waits: Any = {"timeout": POLL_S, "return_when": asyncio.FIRST_COMPLETED}
                done, tasks = loop.run_until_complete(asyncio.wait(tasks, **waits))
                yield from [task.result() for task in done]
        finally:
            for task in every:
                task.cancel()
            for task in every:  # asyncio prints errors that nobody has looked at
                loop.run_until_complete(asyncio.wait([task]))
                _ = task.cancelled() or task.exception()
            loop.run_until_complete(http.close())
            loop.close()

    async def _answer(
        self, http: aiohttp.ClientSession, limit: asyncio.Semaphore, url: str, body: Json | None
    ) -> Json:
        """One reply, after as many attempts as it takes. Raises Failed, or Unavailable after a
        long outage."""
        since, wait = time.monotonic(), POLL_S
        while True:
            try:
                async with limit:
                    reply = await _once(http, url, body)
                self._answered, self._warned = True, False
                return reply | {"asked": body}
            except Refused as error:
                raise UsageError(f"{self.flag}: {error}") from error
            except (Retryable, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                line = f"{url}: {' '.join(str(error).split()) or type(error).__name__}"
            if time.monotonic() - since > OUTAGE_S:
                if self._answered:
                    raise Unavailable(f"{self.flag}: {line}; run again when the server is back")
                raise Failed(f"{self.flag}: {line}; it has never answered")
            if not self._warned:
                self._warned = True
                notes.warn(f"{self.flag}: {line}; waiting for the server")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)


async def _session() -> aiohttp.ClientSession:
    key = os.environ.get(KEY, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=OUTAGE_S)
    return aiohttp.ClientSession(headers=headers, timeout=timeout)


async def _once(http: aiohttp.ClientSession, url: str, body: Json | None) -> Json:
    call = http.get(url) if body is None else http.post(url, json=body)
    async with call as answer:
        raw = await answer.read()
        check_status(answer.status, answer.headers, raw, url)
    reply = json.loads(raw)
    if isinstance(reply, list):
        return {"items": reply}
    if not isinstance(reply, dict):
        raise ValueError("the reply is no JSON object")
    return reply
