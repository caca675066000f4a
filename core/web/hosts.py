"""Politeness: which host may be requested now, and what its robots.txt permits.

A host has at most `per_host` requests in flight and a pause of `delay` seconds (its Crawl-delay, if
that is longer) after each; the pause of a host that keeps failing doubles each time. Of the hosts
that may be requested, the one with the best pending URL comes first. Hosts wait in two heaps, by
priority and by the end of their pause; outdated heap entries are skipped when they are reached.
"""

import asyncio
import heapq
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

from sabia.core.options.crawl import CrawlOptions
from sabia.core.web import robots
from sabia.core.web.archives.archive_fetcher import ArchiveFetcher
from sabia.core.web.fetch import MAX_WAIT_S, Fetcher
from sabia.core.web.frontier import Entry, Frontier
from sabia.core.web.url_rules import origin_of

MAX_STRIKES = 10  # doublings of the pause of a failing host


@dataclass
class Host:
    """A host: requests in flight, time of the next request (monotonic seconds), pages so far."""

    busy: int = 0
    ready_s: float = 0.0
    pages: int = 0
    rescore_at: int = 0  # pages at which the priorities of its pending URLs are recomputed
    strikes: int = 0  # failures since the last response
    best: float | None = None
    ticket: int = 0  # of its valid heap entry; entries with older tickets are skipped


@dataclass
class Hosts:
    """All hosts with URLs to fetch."""

    options: CrawlOptions
    frontier: Frontier
    table: defaultdict[str, Host] = field(default_factory=lambda: defaultdict(Host))
    _ready: list[tuple[float, int, str]] = field(default_factory=list)
    _resting: list[tuple[float, int, str]] = field(default_factory=list)
    _tickets: int = 0

    def load(self) -> None:
        """Load the hosts from the frontier."""
        for name, (tried, _good) in self.frontier.figures("host").items():
            self.get(name).pages = int(tried)
        for name, until_s in self.frontier.rests().items():
            host = self.get(name)  # the clocks differ: time(), monotonic()
            host.ready_s = max(host.ready_s, time.monotonic() + until_s - time.time())
        for name in self.frontier.hosts():
            self.refresh(name)

    def get(self, name: str) -> Host:
        """The host of this name, added if it is new."""
        return self.table[name]

    def refresh(self, name: str) -> None:
        """Look up the host's best pending URL."""
        host = self.get(name)
        host.best = self.frontier.best_of(name)
        self._queue(name, host)

    def take(self) -> Entry | None:
        """The best URL that may be fetched now, counted as in flight; None if there is none."""
        self._wake()
        while self._ready:
            _, ticket, name = heapq.heappop(self._ready)
            host = self.table[name]
            if host.ticket != ticket or not self._waiting(host):
                continue
            entry, host.best = self.frontier.take(name)
            host.busy += entry is not None
            self._queue(name, host)
            if entry is not None:
                return entry
        return None

    def _queue(self, name: str, host: Host) -> None:
        """Put the host into the heap where it belongs; its older entries become invalid."""
        self._tickets += 1
        host.ticket = self._tickets
        if not self._waiting(host):
            return
        if host.ready_s > time.monotonic():
            heapq.heappush(self._resting, (host.ready_s, host.ticket, name))
        else:
            heapq.heappush(self._ready, (-(host.best or 0.0), host.ticket, name))

    def _wake(self) -> None:
        """Move the hosts whose pause has ended."""
        now = time.monotonic()
        while self._resting and self._resting[0][0] <= now:
            _, ticket, name = heapq.heappop(self._resting)
            if self.table[name].ticket == ticket:
                self._queue(name, self.table[name])

    def _waiting(self, host: Host) -> bool:
        """Whether the host has URLs that may be fetched, now or after its pause."""
        if host.best is None or host.busy >= self.options.per_host:
            return False
        return host.pages + host.busy < self.options.host_pages

    def done(self, entry: Entry, rest_s: float) -> None:
        """A request to the host has ended; its pause starts."""
        self.frontier.release(entry)
        host = self.get(entry.host)
        host.busy -= 1
        host.ready_s = max(host.ready_s, time.monotonic() + rest_s)
        if host.best is None:
            self.refresh(entry.host)  # the URL itself may be pending again
        else:
            self._queue(entry.host, host)

    def failed(self, name: str) -> float:
        """The host did not respond; returns the seconds of its pause."""
        host = self.get(name)
        host.strikes = min(host.strikes + 1, MAX_STRIKES)
        return float(min(self.options.backoff * 2.0**host.strikes, MAX_WAIT_S))

    def answered(self, name: str) -> None:
        """The host responded; reset its failures."""
        self.get(name).strikes = 0

    def wait_s(self) -> float | None:
        """Seconds until some host may be requested; None if no host is waiting."""
        for heap in (self._ready, self._resting):
            while heap and self.table[heap[0][2]].ticket != heap[0][1]:
                heapq.heappop(heap)
        if self._ready:
            return 0.0
        return max(0.0, self._resting[0][0] - time.monotonic()) if self._resting else None


class RobotsCache:
    """The rules of each origin: fetched at most once a day, stored in the frontier.

    If robots.txt cannot be reached, a copy that is not too old is used, and the file is requested
    again after UNREACHABLE_S seconds.
    """

    def __init__(self, frontier: Frontier, fetcher: Fetcher | ArchiveFetcher, token: str) -> None:
        self.frontier, self.fetcher, self.token = frontier, fetcher, token
        self._known: dict[str, tuple[float, robots.Rules]] = {}  # (until when, rules)
        self._locks: dict[str, asyncio.Lock] = {}

    def known(self, url: str) -> robots.Rules | None:
        """The rules for a URL if they are in memory and valid."""
        cached = self._known.get(origin_of(url))
        return cached[1] if cached and cached[0] > time.time() else None

    async def rules(self, url: str) -> tuple[robots.Rules, int]:
        """The rules for a URL, and the number of requests sent for them."""
        origin = origin_of(url)
        async with self._locks.setdefault(origin, asyncio.Lock()):
            if known := self.known(url):
                return known, 0
            kept = self.frontier.robots(origin)
            if kept and kept[1] + kept[0].keep_s > time.time():
                return self._keep(origin, kept[0], kept[1] + kept[0].keep_s), 0
            robots_file, sent = await self.fetcher.robots(origin)
            now = time.time()
            if robots_file.state in ("rules", "none"):
                self.frontier.keep_robots(origin, robots_file, now)
            elif robots_file.state == "unreachable" and kept:
                fresh = now - kept[1] < robots.STALE_S  # without such a copy nothing is allowed
                robots_file = replace(
                    kept[0] if fresh else robots_file, keep_s=robots.UNREACHABLE_S
                )
            return self._keep(origin, robots_file, now + robots_file.keep_s), sent

    def _keep(self, origin: str, robots_file: robots.RobotsFile, until: float) -> robots.Rules:
        rules = robots.Rules(robots_file, self.token)
        self._known[origin] = (until, rules)
        return rules
