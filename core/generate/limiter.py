"""How many calls may be in flight: one limiter shared by all, with AIMD and a common pause.

An overloaded server (429, 503, 529) halves the limit, once for all the calls that were in flight
together; every success raises it by 1/limit, as TCP does (Chiu and Jain 1989). Retry-After pauses
everybody, not only the call that was told. For one event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import time


class Limiter:
    """Admits at most `limit` calls at once, `limit` moving between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = float(most)
        self.in_flight = 0
        self.cuts = 0
        self._generation = 0
        self._resume_at = 0.0
        self._freed = asyncio.Condition()

    async def acquire(self) -> int:
        """Waits for a place and the end of any pause; returns the generation, for `overloaded`."""
        while True:
            async with self._freed:
                await self._freed.wait_for(lambda: self.in_flight < int(self.limit))
                if (pause := self._resume_at - time.monotonic()) <= 0:
                    self.in_flight += 1
                    return self._generation
            await asyncio.sleep(pause)

    async def release(self, succeeded: bool) -> None:
        """Gives the place back; a success raises the limit."""
        async with self._freed:
            self.in_flight -= 1
            if succeeded:
                self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._freed.notify(max(1, int(self.limit) - self.in_flight))

    def overloaded(self, generation: int) -> None:
        """Halves the limit, unless calls of the same generation have done so already."""
        if generation == self._generation:
            self.limit = max(1.0, self.limit / 2)
            self._generation += 1
            self.cuts += 1

    def pause(self, seconds: float) -> None:
        """Lets nobody in for so long."""
        self._resume_at = max(self._resume_at, time.monotonic() + seconds)
