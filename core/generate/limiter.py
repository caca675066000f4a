"""Limit on concurrent calls: shared by all calls to all servers of a client, with AIMD and pauses.

An overloaded or unreachable server halves its limit, once for all calls that were in flight at the
same time; every success raises it by 1/limit, as TCP does (Chiu and Jain 1989). Retry-After pauses
all calls to the server, not only the one that received it; without it they all pause, twice as long
each time until a call succeeds, so an outage costs a few attempts in all and not six per call. A
call goes to the server that is least loaded in relation to its limit.
For one event loop; not thread-safe.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_PAUSE_S = 15.0


@dataclass
class Server:
    """One server; at most `limit` calls are in flight to it."""

    url: str
    limit: float
    in_flight: int = 0
    generation: int = 0
    streak: int = 0  # overloads since the last success
    resume_at: float = 0.0

    def free(self, now: float) -> bool:
        """Whether another call may be sent."""
        return self.in_flight < int(self.limit) and self.resume_at <= now


class Limiter:
    """Admits at most `most` calls at once; the limit of each server moves between 1 and `most`."""

    def __init__(self, most: int, backoff_s: float = 1.0, urls: Sequence[str] = ("",)) -> None:
        self.most, self.backoff_s = most, backoff_s
        self.servers = [Server(url, float(most)) for url in urls]
        self.in_flight = self.cuts = 0
        self._freed = asyncio.Condition()

    @property
    def limit(self) -> float:
        """The number of calls that may be in flight now."""
        return min(float(self.most), sum(server.limit for server in self.servers))

    async def acquire(self) -> tuple[Server, int]:
        """Wait for a free slot and the end of any pause; returns the server to call and its
        generation, for `overloaded`."""
        while True:
            async with self._freed:
                await self._freed.wait_for(self._has_slot)
                now = time.monotonic()
                if free := [server for server in self.servers if server.free(now)]:
                    server = min(free, key=lambda one: one.in_flight / one.limit)
                    server.in_flight += 1
                    self.in_flight += 1
                    return server, server.generation
                pause = min(one.resume_at for one in self.servers if self._below_limit(one)) - now
            await asyncio.sleep(pause)

    def _has_slot(self) -> bool:
        return self.in_flight < self.most and any(map(self._below_limit, self.servers))

    @staticmethod
    def _below_limit(server: Server) -> bool:
        return server.in_flight < int(server.limit)

    async def release(self, server: Server, succeeded: bool) -> None:
        """Release the slot; a success raises the server's limit."""
        async with self._freed:
            server.in_flight -= 1
            self.in_flight -= 1
            if succeeded:
                server.streak = 0
                server.limit = min(float(self.most), server.limit + 1 / server.limit)
            self._freed.notify(max(1, int(self.limit) - self.in_flight))

    def overloaded(self, server: Server, generation: int, has_retry_after: bool) -> None:
        """Halve the limit, and pause unless the server sent a Retry-After; does nothing if another
        call of the same generation has done so already."""
        if generation != server.generation:
            return
        server.limit = max(1.0, server.limit / 2)
        server.generation += 1
        self.cuts += 1
        longest = min(LONGEST_PAUSE_S, self.backoff_s * 2**server.streak)
        server.streak += 1
        if not has_retry_after:
            self.pause(server, longest * random.uniform(0.5, 1.0))

    @staticmethod
    def pause(server: Server, seconds: float) -> None:
        """Send no call to the server for this many seconds."""
        server.resume_at = max(server.resume_at, time.monotonic() + seconds)
