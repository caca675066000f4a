"""The crawl: take the best URL that may be fetched, fetch, read, judge, remember, repeat.

One event loop; the frontier is written only from it, so each page's end is one transaction.
Extraction runs in sandboxed processes. Redirects become frontier entries of their own. A page
family (URLs that differ in numbers only) that keeps giving the same text is given up as a trap.
"""

import asyncio
import hashlib
import json
import queue
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from sabia.core import stop
from sabia.core.errors import Interrupted
from sabia.core.progress import Bar
from sabia.core.web import addresses
from sabia.core.web.documents import document, judged_text
from sabia.core.web.fetch import Fetcher, Response
from sabia.core.web.focus import Judge, LinkJudge, link_words, worth_of
from sabia.core.web.frontier import DONE, GONE, PENDING, Entry, Frontier, Link
from sabia.core.web.hosts import Hosts, RobotsCache
from sabia.core.web.sandbox import Sandbox, Unextractable
from sabia.core.web.settings import CrawlSettings
from sabia.core.web.urls import canonical, host_of, looks_binary, template_of
from sabia.core.web.warc import WarcFile

MAX_REDIRECTS = 5
TRAP_PAGES = 20  # a family is judged after so many pages
TRAP_FRESH = 0.1  # and given up when a smaller share of them was new
LOOK_S = 0.2
_DIGITS = re.compile(r"\d+")


class Crawl:
    """One run over a frontier; `counters` are kept in it and so outlive the process."""

    def __init__(
        self, settings: CrawlSettings, frontier: Frontier, judge: Judge | None,
        hosts_allowed: frozenset[str] | None, warc: WarcFile | None, bar: Bar,
    ) -> None:  # fmt: skip
        self.settings, self.frontier, self.judge = settings, frontier, judge
        self.hosts_allowed, self.warc, self.bar = hosts_allowed, warc, bar
        self.counters: dict[str, float] = json.loads(frontier.fact("counters") or "{}")
        self.links = LinkJudge(
            settings.focus,
            settings.seed,
            judge,
            frontier.figures("word"),
            frontier.figures("host"),
        )
        self.families = frontier.figures("family")
        self.hosts = Hosts(settings, frontier)
        self.tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(settings.workers)
        self._sandboxes: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        for _ in range(settings.workers):
            self._sandboxes.put(Sandbox())

    @property
    def fetched(self) -> int:
        """Pages fetched so far, in this run and those before it."""
        return int(self.counters.get("fetched", 0))

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + n

    def add_seeds(self, urls: Sequence[str]) -> None:
        """Put canonical seed URLs at the head of the frontier."""
        self.frontier.add([Link(url, 1.0, 0, 1.0) for url in urls])
        self.hosts.load()

    async def run(self) -> None:
        """Crawl until the budget is spent or nothing is left; raises Interrupted."""
        try:
            async with Fetcher(self.settings.fetch) as self.fetcher:
                token = self.settings.fetch.agent.partition("/")[0]
                self.robots = RobotsCache(self.frontier, self.fetcher, token)
                await self._loop()
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            self._threads.shutdown(wait=True, cancel_futures=True)
            while not self._sandboxes.empty():
                self._sandboxes.get().close()

    async def _loop(self) -> None:
        while True:
            if stop.requested():
                raise Interrupted("stopped; the frontier is kept: run again to go on")
            self._launch()
            wait_s = self.hosts.wait_s()
            if self.tasks:
                pause = LOOK_S if wait_s is None else min(LOOK_S, max(wait_s, 0.001))
                ended, self.tasks = await asyncio.wait(
                    self.tasks, timeout=pause, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    task.result()
            elif wait_s is None or self.fetched >= self.settings.budget:
                return
            else:
                await asyncio.sleep(min(wait_s, LOOK_S))

    def _launch(self) -> None:
        while (
            len(self.tasks) < self.settings.concurrency
            and self.fetched + len(self.tasks) < self.settings.budget
            and (entry := self.hosts.take()) is not None
        ):
            self.tasks.add(asyncio.create_task(self._visit(entry)))

    async def _visit(self, entry: Entry) -> None:
        rest_s, retry_s = self.settings.delay_s, 0.0
        try:
            reason, rest_s = await self._refusal(entry)
            if reason:
                self._give_up(entry, reason)
                return
            response = await self.fetcher.page(entry.url)
            self.count("requests", response.requests)
            if response.retry_s is not None and entry.tries < self.settings.fetch.attempts:
                self.frontier.end(entry, PENDING)
                self.hosts.refresh(entry.host)
                retry_s = response.retry_s
            elif response.redirect is not None:
                self._redirect(entry, response.redirect)
            elif response.refused:
                self.count("failed")
                self._give_up(entry, response.refused)
            else:
                await self._page(entry, response)
        finally:
            self.hosts.done(entry.host, max(rest_s, retry_s))

    async def _refusal(self, entry: Entry) -> tuple[str, float]:
        """Why the URL may not be fetched (or nothing), and the seconds its host is to rest."""
        try:
            addresses.check_url(entry.url, self.settings.fetch.allow_private)
        except addresses.Refused as error:
            self.count("guarded")
            return str(error), 0.0
        before = self.robots.requests
        rules, asked = await self.robots.rules(entry.url)
        rest_s = max(self.settings.delay_s, rules.delay_s())
        if rules.state not in ("rules", "none"):
            self.count("robots_unreachable")
            return f"robots.txt: {rules.state}", 0.0
        if not rules.allowed(entry.url):
            self.count("robots_denied")
            return "robots.txt disallows it", 0.0
        if asked:
            self.count("requests", self.robots.requests - before)
            await asyncio.sleep(rest_s)
        return "", rest_s

    def _give_up(self, entry: Entry, reason: str) -> None:
        self.frontier.begin()
        self._tally_family(entry, 0.0)
        self.frontier.end(entry, GONE, reason)
        self._commit()

    def _redirect(self, entry: Entry, target: str) -> None:
        self.count("redirects")
        self.frontier.begin()
        if entry.hops >= MAX_REDIRECTS:
            self.frontier.end(entry, GONE, f"more than {MAX_REDIRECTS} redirects")
        else:
            self._follow([(target, entry.anchor)], entry.depth, entry.worth, entry.hops + 1)
            self.frontier.end(entry, DONE, "redirect")
        self._commit()

    async def _page(self, entry: Entry, response: Response) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._extract, response)
        except Unextractable as error:
            self.count("failed")
            self._give_up(entry, str(error))
            return
        score = self.judge(judged_text(found)) if self.judge else None
        self.frontier.begin()
        self.count("fetched")
        self.count("bytes", len(response.body))
        self._settle(entry, response, found, score)
        self._commit()
        self.bar.advance(1, harvest=f"{self.harvest():.0%}" if self.judge else "")

    def _extract(self, response: Response) -> dict[str, Any]:
        sandbox = self._sandboxes.get()
        try:
            return sandbox.extract(response.body, response.content_type, response.url, True)
        finally:
            self._sandboxes.put(sandbox)

    def _settle(
        self, entry: Entry, response: Response, found: dict[str, Any], score: float | None
    ) -> None:
        """Everything that a page leaves behind, inside its transaction."""
        self._keep(entry, response, found, score)
        relevant = score is not None and score >= self.settings.focus.threshold
        if score is not None:
            self.count("relevant", float(relevant))
        folded = _DIGITS.sub("0", found["text"]).encode()
        fresh = self.frontier.first_time(hashlib.blake2b(folded, digest_size=12).digest())
        self._tally_family(entry, float(fresh))
        words = link_words(entry.url, entry.anchor)
        self.links.learn(words, entry.host, score or 0.0)
        self.frontier.tally("word", words, score or 0.0)
        self.frontier.tally("host", [entry.host], score or 0.0)
        worth = 1.0 if score is None else worth_of(score, entry.worth, self.settings.focus)
        worth = entry.worth if worth is None and entry.depth == 0 else worth
        if worth is not None:
            self._follow(found["links"], entry.depth + 1, worth)
        self._rescore(entry.host)

    def _rescore(self, name: str) -> None:
        """Judge the host's pending URLs anew, at a cost of about 20 of them a page."""
        host = self.hosts.get(name)
        host.pages += 1
        if self.settings.focus.order == "best" and host.pages >= host.rescore_at:
            judged = self.frontier.rescore(name, self._priority)
            host.rescore_at = host.pages + max(5, judged // 20)
            self.hosts.refresh(name)

    def _keep(
        self, entry: Entry, response: Response, found: dict[str, Any], score: float | None
    ) -> None:
        if self.warc:
            self.frontier.set_fact("warc", str(self.warc.add(response)))
        reason = None if found["index"] else "the page asks not to be indexed"
        reason = reason or (None if found["text"] else "no text on the page")
        if reason is None:
            now = datetime.now(UTC).isoformat()
            row = document(found, entry.url, host_of(entry.url), now, score,
                           depth=entry.depth, order=self.fetched)  # fmt: skip
            self.frontier.keep_document(self.fetched, entry, row)
        self.frontier.end(entry, GONE if reason else DONE, reason)

    def _follow(
        self, links: Sequence[Sequence[str]], depth: int, worth: float, hops: int = 0
    ) -> None:
        """Remember links that are worth it, with their priorities."""
        kept = []
        for raw, anchor in links:
            url = canonical(raw)
            if url is None or looks_binary(url) or not self._in_scope(url):
                continue
            if self.settings.limits.trap(url, depth) or self._is_trap(template_of(url)):
                self.count("traps")
                continue
            found = Entry(0, url, host_of(url), depth, hops, 0, worth, anchor)
            kept.append(Link(url, self._priority(found), depth, worth, anchor, hops))
        if self.frontier.add(kept):
            for link in kept:
                self.hosts.raise_best(host_of(link.url), link.priority)

    def _priority(self, entry: Entry) -> float:
        """By what is known now; breadth first counts links from the seeds."""
        if self.settings.focus.order == "breadth":
            return float(-entry.depth)
        return self.links.priority(entry.url, entry.host, entry.anchor, entry.worth)

    def _in_scope(self, url: str) -> bool:
        return self.hosts_allowed is None or host_of(url) in self.hosts_allowed

    def _tally_family(self, entry: Entry, fresh: float) -> None:
        """Note a page of this family, fresh or not; give the family up if it is a trap."""
        template = template_of(entry.url)
        if template == entry.url:
            return
        known = self._is_trap(template)
        tried, good = self.families.get(template, (0.0, 0.0))
        self.families[template] = (tried + 1, good + fresh)
        self.frontier.tally("family", [template], fresh)
        if self._is_trap(template) and not known:
            reason = f"trap: {tried + 1:.0f} pages like it said nearly all the same"
            self.count("traps", self.frontier.drop_family(template, entry.host, reason))
            self.hosts.refresh(entry.host)

    def _is_trap(self, template: str) -> bool:
        tried, good = self.families.get(template, (0.0, 0.0))
        return tried >= TRAP_PAGES and good < TRAP_FRESH * tried

    def _commit(self) -> None:
        self.frontier.set_fact("counters", json.dumps(self.counters))
        self.frontier.commit()

    def harvest(self) -> float:
        """The share of relevant pages among those fetched."""
        return self.counters.get("relevant", 0.0) / max(1, self.fetched)
