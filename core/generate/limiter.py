"""Limit on concurrent calls: one limiter shared by all calls, with AIMD and a common pause.

An overloaded or unreachable server halves the limit, once for all calls that were in flight at the
same time; every success raises it by 1/limit, as TCP does (Chiu and Jain 1989). Retry-After pauses
all calls, not only the one that received it; without it all calls pause, twice as long each time
until a call succeeds, so an outage costs a few attempts in all and not six per call.
For one event loop; not thread-safe.
"""

import asyncio
import random
import time

LONGEST_PAUSE_S = 15.0


class Limiter:
    """Admits at most `limit` calls at once, `limit` moving between 1 and `most`."""

    def __init__(self, most: int, backoff_s: float = 1.0) -> None:
        self.most, self.backoff_s = most, backoff_s
        self.limit = float(most)
        self.in_flight = 0
        self.cuts = 0
        self._generation = 0
        self._streak = 0  # overloads since the last success
        self._resume_at = 0.0
        self._freed = asyncio.Condition()

    async def acquire(self) -> int:
        """Wait for a free slot and the end of any pause; returns the generation, for
        `overloaded`."""
        while True:
            async with self._freed:
                await self._freed.wait_for(lambda: self.in_flight < int(self.limit))
                if (pause := self._resume_at - time.monotonic()) <= 0:
                    self.in_flight += 1
                    return self._generation
            await asyncio.sleep(pause)

    async def release(self, succeeded: bool) -> None:
        """Release the slot; a success raises the limit."""
        async with self._freed:
            self.in_flight -= 1
            if succeeded:
                self._streak = 0
                self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._freed.notify(max(1, int(self.limit) - self.in_flight))

    def overloaded(self, generation: int, has_retry_after: bool) -> None:
        """Halve the limit, and pause unless the server sent a Retry-After; does nothing if another
        call of the same generation has done so already."""
        if generation != self._generation:
            return
        self.limit = max(1.0, self.limit / 2)
        self._generation += 1
        self.cuts += 1
        longest = min(LONGEST_PAUSE_S, self.backoff_s * 2**self._streak)
        self._streak += 1
        if not has_retry_after:
            self.pause(longest * random.uniform(0.5, 1.0))

    def pause(self, seconds: float) -> None:
        """Admit no call for this many seconds."""
        self._resume_at = max(self._resume_at, time.monotonic() + seconds)
