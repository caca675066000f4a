"""The crawl loop: take the best URL that may be fetched, fetch it, extract, score, store, repeat.

One event loop, and only it writes to the frontier. The results of finished pages are committed
before new requests start, so that a killed crawl loses only the requests in flight. Extraction
runs in sandboxed processes. Redirects and sitemaps become frontier entries of their own. A page
that was fetched before is requested conditionally; if it has not changed, its document stays.
"""

import asyncio
import hashlib
import json
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from sabia.core import stop
from sabia.core.errors import Interrupted
from sabia.core.notes import ProgressBar
from sabia.core.options.crawl import CrawlOptions, comma_separated
from sabia.core.web import addresses, sitemaps
from sabia.core.web.archives.archive_fetcher import ArchiveFetcher
from sabia.core.web.archives.warc_writer import Archive, Position, payload_digest
from sabia.core.web.documents import WarcRecord, document, text_to_judge
from sabia.core.web.expand import Expansion, LinkJudge, link_features
from sabia.core.web.extraction.extract import CAREFUL
from sabia.core.web.extraction.link_scan import links_only
from sabia.core.web.extraction.sandbox import Sandbox, Unextractable
from sabia.core.web.fetch import Fetcher, Response
from sabia.core.web.focus import PageJudge, link_relevance
from sabia.core.web.frontier import DONE, GIVEN_UP, PENDING, SITEMAP, Entry, Frontier, Visit
from sabia.core.web.hosts import Hosts, RobotsCache
from sabia.core.web.robots import Rules
from sabia.core.web.url_rules import host_of, origin_of

MAX_REDIRECTS = 5
LOOK_S = 0.2
TRANSIENT = ("HTTP 5*", "HTTP 4[02]*", "no connection*", "transfer failed*", "robots.txt: unreach*")
_PERMANENT = ("HTTP 404", "HTTP 410")


class Crawl:
    """One run over a frontier, which also stores the `counters` for later runs."""

    def __init__(
        self, options: CrawlOptions, frontier: Frontier, judge: PageJudge | None,
        hosts_allowed: frozenset[str] | None, archive: Archive | None, bar: ProgressBar,
        web: ArchiveFetcher | None = None,
    ) -> None:  # fmt: skip
        self.options, self.frontier, self.judge = options, frontier, judge
        self.sitemaps = comma_separated(options.sitemaps)
        self.web = web  # replaces the network
        self.archive, self.bar = archive, bar
        self.counters: dict[str, float] = json.loads(frontier.fact("counters") or "{}")
        self.before = int(frontier.fact("before") or 0)  # pages fetched in earlier rounds
        tables = frontier.figures("word"), frontier.figures("host")
        self.links = LinkJudge(options.seed, judge, *tables)
        self.hosts = Hosts(options, frontier)
        self.expansion = Expansion(
            options, frontier, self.hosts, self.links, hosts_allowed, self.count
        )
        self.tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(options.jobs)
        self._sandboxes: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        for _ in range(options.jobs):
            self._sandboxes.put(Sandbox())
        self._written: Position | None = None  # up to which the archive is complete
        self._again = self.before > 0  # some pages were fetched in an earlier round
        self._origins: set[str] = set()  # with known sitemaps

    @property
    def fetched(self) -> int:
        """Pages fetched so far, in this run and those before it."""
        return int(self.counters.get("fetched", 0))

    @property
    def left(self) -> int:
        """Pages that the budget still allows in this round."""
        return self.options.budget - (self.fetched - self.before)

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + n

    def add_seeds(self, urls: Sequence[str]) -> None:
        """Put canonical seed URLs and the sitemaps of `--sitemaps` at the head of the frontier."""
        self.frontier.begin()
        self.expansion.seeds(urls)
        self.expansion.sitemaps([s for s in self.sitemaps if s != "robots"], "")
        self.frontier.commit()
        self.hosts.load()

    async def run(self) -> None:
        """Crawl until the budget is spent or nothing is left; raises Interrupted."""
        self._wake = asyncio.Event()
        try:
            async with self.web or Fetcher(self.options, self._rest) as self.fetcher:
                self.robots = RobotsCache(self.frontier, self.fetcher, "sabia")
                try:
                    await self._loop()
                except Interrupted:
                    self._commit()
                    raise
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
                raise Interrupted("stopped; the frontier is kept: run again to resume")
            self._commit()
            busy = self._launch()
            wait_s = self.hosts.wait_s()
            if not self.tasks and (wait_s is None or self.left <= 0):
                return
            await self._pause(LOOK_S if busy or wait_s is None else min(LOOK_S, wait_s))
            for task in [task for task in self.tasks if task.done()]:
                self.tasks.discard(task)
                task.result()

    async def _pause(self, seconds: float) -> None:
        """Wait until a task ends, at most so many seconds."""
        timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    def _launch(self) -> bool:
        """Start all visits that may start; True if more can start only after a task ends."""
        while len(self.tasks) < min(self.options.concurrency, max(self.left, 0)):
            entry = self.hosts.take()
            if entry is None:
                return False
            task = asyncio.create_task(self._visit(entry))
            task.add_done_callback(lambda _task: self._wake.set())
            self.tasks.add(task)
        return True

    async def _visit(self, entry: Entry) -> None:
        rest_s = self.options.delay
        try:
            rest_s = await self._visited(entry)
        finally:
            self.hosts.done(entry, 0.0 if self.web else rest_s)

    async def _visited(self, entry: Entry) -> float:
        """Process a URL; returns the seconds to wait before the next request to its host."""
        try:
            addresses.check_url(entry.url, self.options.allow_private)
        except addresses.AddressRefused as error:
            self.count("guarded")
            self._give_up(entry, str(error))
            return 0.0
        rules, sent = self.robots.known(entry.url), 0
        if rules is None:
            rules, sent = await self.robots.rules(entry.url)
            self.count("requests", sent)
        rest_s = max(self.options.delay, rules.delay_s())
        if refused := self._disallowed(entry, rules):
            self._give_up(entry, refused)
            return rest_s if sent else 0.0
        if sent and rest_s:
            return rest_s  # the URL stays pending during the delay
        return max(rest_s, await self._fetched(entry))

    def _rest(self, host: str, seconds: float) -> None:
        """Keep a host's Retry-After in the frontier, for a run that starts again."""
        self.frontier.rest(host, time.time() + seconds)

    def _disallowed(self, entry: Entry, rules: Rules) -> str:
        """Why robots.txt disallows the URL; empty if it does not. Adds its sitemaps."""
        if rules.state not in ("rules", "none"):
            self.count("robots_unreachable")
            return f"robots.txt: {rules.state}"
        if not rules.allowed(entry.url):
            self.count("robots_denied")
            return "robots.txt disallows it"
        origin = origin_of(entry.url)
        if "robots" in self.sitemaps and origin not in self._origins:
            self._origins.add(origin)
            self.expansion.sitemaps(rules.sitemaps, host_of(entry.url))
        return ""

    async def _fetched(self, entry: Entry) -> float:
        """Fetch the URL and store the result; returns the seconds to wait beyond the delay."""
        before = self.frontier.visit(entry) if self._again else None
        if entry.kind == SITEMAP:
            response = await self.fetcher.file(entry.url, sitemaps.MAX_BYTES)
        else:
            conditions = before.conditions() if before else {}
            response = await self.fetcher.page(entry.url, conditions)
        self.count("requests", response.requests)
        if response.retry_s is not None and entry.tries + 1 < self.options.attempts:
            self.frontier.begin()
            self.frontier.end(entry, PENDING)
            return response.retry_s
        if response.redirect is not None:
            self._redirect(entry, response.redirect)
        elif response.refused:
            self.count("failed")
            self._give_up(entry, response.refused)
        elif entry.kind == SITEMAP:
            await self._sitemap(entry, response)
        else:
            await self._page(entry, response, before)
        if response.status is None and response.requests:
            return max(response.retry_s or 0.0, self.hosts.failed(entry.host))
        self.hosts.answered(entry.host)
        return response.retry_s or 0.0

    def _give_up(self, entry: Entry, reason: str) -> None:
        self.frontier.begin()
        self.expansion.tally_family(entry, 0.0)
        if reason in _PERMANENT:
            self.frontier.drop_page(entry)
        self.frontier.end(entry, GIVEN_UP, reason)

    def _redirect(self, entry: Entry, target: str) -> None:
        self.count("redirects")
        self.frontier.begin()
        hops = entry.hops + 1
        if hops > MAX_REDIRECTS:
            self.frontier.end(entry, GIVEN_UP, f"more than {MAX_REDIRECTS} redirects")
            return
        if entry.kind == SITEMAP:
            self.expansion.sitemaps([target], entry.anchor, hops)
        else:
            link = (target, entry.anchor)
            self.expansion.follow([link], entry.depth, entry.relevance, hops, "redirect")
        self.frontier.visited(entry, Visit(time.time()))
        self.frontier.end(entry, DONE, "redirect")

    async def _sitemap(self, entry: Entry, response: Response) -> None:
        loop = asyncio.get_running_loop()
        hosts = [entry.anchor] if entry.anchor else []
        try:
            sitemap = await loop.run_in_executor(
                self._threads, sitemaps.read_sitemap, response.body, entry.url, hosts
            )
        except sitemaps.BadSitemap as error:
            self.count("failed")
            self._give_up(entry, f"sitemap: {error}")
            return
        self.frontier.begin()
        self.expansion.listed(sitemap, entry)
        self.frontier.end(entry, DONE)

    async def _page(self, entry: Entry, response: Response, before: Visit | None) -> None:
        digest = payload_digest(response.body) if response.status == 200 else ""
        if before and (response.status == 304 or digest == before.digest):
            # the page has not changed: keep its document, links and statistics
            self.frontier.begin()
            self.count("fetched")
            self.count("unchanged")
            same = before if response.status == 304 or before.record else None
            self._archive(entry, response, before.digest, same)
            self.frontier.end(entry, DONE)
            self.bar.advance(1)
            return
        try:
            extracted = await self._extracted(response)
        except Unextractable as error:
            self.count("failed")
            self.frontier.begin()
            self._archive(entry, response, digest)  # a later extractor may succeed
            self._give_up(entry, str(error))
            return
        score = self.judge(text_to_judge(extracted)) if self.judge else None
        self.frontier.begin()
        self.count("fetched")
        self.count("bytes", len(response.body))
        self.count("careful", float(extracted["extractor"] == CAREFUL))
        archived = self._archive(entry, response, digest) or response.archived
        if self.options.no_extract:
            self.frontier.end(entry, DONE)
        else:
            self._keep(entry, extracted, score, archived)
        if score is not None:
            self.count("relevant", float(score >= self.options.threshold))
            self.frontier.judged(self.fetched, score)
        content = response.body if self.options.no_extract else extracted["text"].encode()
        self._learn(entry, extracted["links"], _folded(content), score)
        self.bar.advance(1, harvest=f"{self.harvest():.0%}" if self.judge else "")

    async def _extracted(self, response: Response) -> dict[str, Any]:
        """Text and links, from a sandbox; only links with `--no-extract`."""
        if self.options.no_extract:
            return links_only(response.body, response.content_type, response.url)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._extract, response)

    def _extract(self, response: Response) -> dict[str, object]:
        sandbox = self._sandboxes.get()
        try:
            markdown = self.options.markdown
            return sandbox.extract(
                response.body, response.content_type, response.url, True, markdown
            )
        finally:
            self._sandboxes.put(sandbox)

    def _archive(
        self, entry: Entry, response: Response, digest: str, before: Visit | None = None
    ) -> WarcRecord | None:
        """Write the fetch to the WARC files, if there are any, and store its validators. Returns
        the new record."""
        etag, modified = response.header("etag"), response.header("last-modified")
        record, date = (before.record, before.date) if before else ("", "")
        written = None
        if before and response.status == 304:
            etag, modified = etag or before.etag, modified or before.modified
        if self.archive:
            about = {"hopsFromSeed": str(entry.depth), "foundBy": entry.via}
            kept = self.archive.add(response, digest, about, before)
            self._written = kept.position
            if before is None:
                record, date = kept.record, kept.date
                written = WarcRecord.of(str(self.archive.path(kept.position.file)), record)
        self.frontier.visited(entry, Visit(time.time(), etag, modified, digest, record, date))
        return written

    def _learn(
        self, entry: Entry, links: Sequence[str], digest: bytes, score: float | None
    ) -> None:
        """Update page families, link words and hosts from a page, and follow its links."""
        self.expansion.tally_family(entry, float(self.frontier.first_time(digest)))
        if self.options.order == "best":
            features = link_features(entry.url, entry.anchor, entry.relevance)
            self.links.learn(features, entry.host, score or 0.0)
            self.frontier.tally("word", features, score or 0.0)
        self.frontier.tally("host", [entry.host], score or 0.0)
        relevance = 1.0 if score is None else link_relevance(score, entry.relevance, self.options)
        relevance = entry.relevance if relevance is None and entry.depth == 0 else relevance
        if relevance is not None:
            self.expansion.follow(links, entry.depth + 1, relevance)
        self.expansion.rescore(entry.host)

    def _keep(
        self, entry: Entry, extracted: dict[str, Any], score: float | None,
        archived: WarcRecord | None,
    ) -> None:  # fmt: skip
        reason = None if extracted["index"] else "the page asks not to be indexed"
        reason = reason or (None if extracted["text"] else "no text on the page")
        if reason is None:
            now = datetime.now(UTC).isoformat()
            row = document(extracted, entry.url, host_of(entry.url), now, score, archived,
                           depth=entry.depth, order=self.fetched, via=entry.via)  # fmt: skip
            self.frontier.keep_document(self.fetched, entry, row)
        else:
            self.frontier.drop_document(entry)
        self.frontier.end(entry, GIVEN_UP if reason else DONE, reason)

    def _commit(self) -> None:
        """Make all that has ended durable, with the counters and the archive's position."""
        if self.frontier.begun:
            self.frontier.set_fact("counters", json.dumps(self.counters))
            if self._written:
                self.frontier.set_fact("warc", str(self._written))
            self.frontier.commit()

    def harvest(self) -> float:
        """The share of relevant pages among those fetched."""
        return self.counters.get("relevant", 0.0) / max(1, self.fetched)


def _folded(text: bytes) -> bytes:
    """A digest of a page that does not know its numbers."""
    return hashlib.blake2b(text.translate(None, b"0123456789"), digest_size=12).digest()
