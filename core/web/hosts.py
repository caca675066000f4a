"""Politeness: which host may be asked now, and what its robots.txt says.

A host has at most `per_host` requests in flight and rests `delay` seconds (its Crawl-delay, if
that is longer) after each. Among the hosts that may be asked, the one with the best pending URL
comes first.
"""

import asyncio
import time
from dataclasses import dataclass, field

from sabia.core.web import robots
from sabia.core.web.fetch import Fetcher
from sabia.core.web.frontier import Entry, Frontier
from sabia.core.web.settings import CrawlSettings
from sabia.core.web.urls import origin_of


@dataclass
class Host:
    """Requests in flight, when it may be asked again (monotonic seconds), pages so far."""

    busy: int = 0
    ready_s: float = 0.0
    pages: int = 0
    rescore_at: int = 0  # pages at which its pending URLs are judged anew
    best: float | None = None


@dataclass
class Hosts:
    """All hosts with URLs to fetch."""

    settings: CrawlSettings
    frontier: Frontier
    table: dict[str, Host] = field(default_factory=dict)

    def load(self) -> None:
        """Take up what the frontier knows."""
        for name, best in self.frontier.hosts().items():
            self.get(name).best = best
        for name, (tried, _good) in self.frontier.figures("host").items():
            self.get(name).pages = int(tried)

    def get(self, name: str) -> Host:
        """The host of this name."""
        return self.table.setdefault(name, Host())

    def raise_best(self, name: str, priority: float) -> None:
        """A URL of this priority was added."""
        host = self.get(name)
        host.best = priority if host.best is None else max(host.best, priority)

    def refresh(self, name: str) -> None:
        """Look up the host's best pending URL."""
        self.get(name).best = self.frontier.best_of(name)

    def take(self) -> Entry | None:
        """The best URL that may be fetched now, its host made busy; None when there is none."""
        while (name := self._best_open()) is not None:
            entry = self.frontier.take(name)
            self.refresh(name)
            if entry is not None:
                self.get(name).busy += 1
                return entry
        return None

    def _best_open(self) -> str | None:
        now = time.monotonic()
        names = (name for name, host in self.table.items() if self._open(host, now))
        return max(names, key=lambda name: self.table[name].best or 0.0, default=None)

    def _open(self, host: Host, now: float) -> bool:
        return self._waiting(host) and host.ready_s <= now

    def _waiting(self, host: Host) -> bool:
        """Has URLs, and may be asked as soon as it has rested."""
        free = host.busy < self.settings.per_host and not self._full(host)
        return host.best is not None and free

    def _full(self, host: Host) -> bool:
        return host.pages + host.busy >= self.settings.host_pages

    def done(self, name: str, rest_s: float) -> None:
        """A request to the host has ended; let it rest."""
        host = self.get(name)
        host.busy -= 1
        host.ready_s = max(host.ready_s, time.monotonic() + rest_s)

    def wait_s(self) -> float | None:
        """Seconds until some resting host may be asked; None when no host waits."""
        resting = [host.ready_s for host in self.table.values() if self._waiting(host)]
        return max(0.0, min(resting) - time.monotonic()) if resting else None


class RobotsCache:
    """The rules of each origin, asked for once a day at most."""

    def __init__(self, frontier: Frontier, fetcher: Fetcher, token: str) -> None:
        self.frontier, self.fetcher, self.token = frontier, fetcher, token
        self.requests = 0
        self._known: dict[str, tuple[float, robots.Rules]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def rules(self, url: str) -> tuple[robots.Rules, bool]:
        """The rules for a URL, and whether they had to be asked for just now."""
        origin = origin_of(url)
        async with self._locks.setdefault(origin, asyncio.Lock()):
            known = self._known.get(origin)
            if known and time.time() - known[0] < robots.KEEP_S:
                return known[1], False
            kept = self.frontier.robots(origin, time.time() - robots.KEEP_S)
            if kept and kept[0] in ("rules", "none") and not known:
                found = robots.Verdict(kept[1], kept[0])
                asked = False
            else:
                found, sent = await self.fetcher.robots(origin)
                self.requests += sent
                self.frontier.keep_robots(origin, found.state, found.text, time.time())
                asked = True
            rules = robots.Rules(found, self.token)
            self._known[origin] = (time.time(), rules)
            return rules, asked
