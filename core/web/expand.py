"""From links to the frontier: which links are followed, with which priority, and crawler traps.

A page family (URLs that differ only in numbers, dates and parameter values) whose pages have nearly
all the same text is dropped. A family of URLs with a query is also dropped after `--query-pages`
pages, because some sites answer any parameter value with a new page.

The priority of a link is that of a naive Bayes classifier that is trained during the crawl. The
features of a link are its words (anchor text and path), its host, and the relevance of its page.
For each feature the crawl stores how many pages it fetched through such links and the sum of their
scores. With G the sum of all scores and T the number of all pages, a word w seen in t pages with
scores that sum to g has the weight

    ln [(g + a p) / (G + a)] - ln [(t - g + a (1 - p)) / (T - G + a)],   p = (G + c) / (T + 2 c),

its log-likelihood ratio with a = PRIOR_PAGES pages of prior at the crawl's own rate p, so that a
word never seen has a weight of about 0. Words of the focus, and the relevance of the page, have a
higher prior. The sum of the weights and the log-odds of p is the log-odds of a relevant page
(McCallum and Nigam 1998, with fractional counts); the priority is its probability plus a small
random number for exploration.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import unquote

from sabia.core.options.crawl import CrawlOptions
from sabia.core.urls import canonical
from sabia.core.web import sitemaps
from sabia.core.web.focus import PageJudge, words_of
from sabia.core.web.frontier import PAGE, SITEMAP, DiscoveredUrl, Entry, Frontier
from sabia.core.web.hosts import Hosts
from sabia.core.web.sitemaps import Sitemap
from sabia.core.web.url_rules import host_of, looks_binary, template_of, trap

TRAP_PAGES = 20  # pages of a family before it can be a trap
TRAP_FRESH = 0.1  # a trap has a smaller share of new texts
SITEMAP_PRIORITY = 2.0  # higher than that of any page
SITEMAP_RELEVANCE = 0.5  # a sitemap has no score
SITEMAPS_A_HOST = 500
PRIOR_PAGES = 2.0  # weight of the prior of a word, in pages
HOST_PRIOR_PAGES = 4.0
EXPLORATION = 0.05  # largest random addition to the priority
FOCUS_PRIOR = 0.8  # prior share of relevant pages for a word of the focus
RELEVANCE_LEVELS = 5  # into which the relevance of a page is divided
MAX_LOG_ODDS = 6.0  # bound of the sum of the weights

Counts = dict[str, tuple[float, float]]  # name → (pages fetched, sum of their scores)


def link_words(url: str, anchor: str) -> list[str]:
    """The words of a link: anchor text, path and parameters, without numbers."""
    path = unquote(url.split("/", 3)[-1])
    return sorted(set(words_of(f"{anchor} {path.replace('_', ' ')}")) - {"0", "html", "htm", "php"})


def link_features(url: str, anchor: str, relevance: float) -> list[str]:
    """What is learnt of a link: its words, and the step of its page's worth (as `worth:3`)."""
    level = min(RELEVANCE_LEVELS - 1, int(relevance * RELEVANCE_LEVELS))
    return [*link_words(url, anchor), f"worth:{level}"]


class LinkJudge:
    """Priorities of links; `words` and `hosts` are updated by `learn`."""

    def __init__(self, seed: int, judge: PageJudge | None, words: Counts, hosts: Counts) -> None:
        self.seed, self.judge, self.words, self.hosts = seed, judge, words, hosts
        self.tried = sum(tried for tried, _ in hosts.values())
        self.good = sum(good for _, good in hosts.values())

    def learn(self, features: Iterable[str], host: str, good: float) -> None:
        """A page of this score was fetched through a link with these features."""
        for table, names in ((self.words, features), (self.hosts, (host,))):
            for name in names:
                tried, total = table.get(name, (0.0, 0.0))
                table[name] = (tried + 1, total + good)
        self.tried, self.good = self.tried + 1, self.good + good

    def priority(self, url: str, host: str, anchor: str, relevance: float) -> float:
        """The priority of a link on a page of this relevance, from 0 to about 1."""
        rate = (self.good + 1) / (self.tried + 2)
        odds = math.log(rate / (1 - rate)) + self._weight(
            self.hosts.get(host), rate, HOST_PRIOR_PAGES
        )
        for feature in link_features(url, anchor, relevance):
            odds += self._weight(self.words.get(feature), self._prior(feature, relevance, rate))
        odds = max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, odds))
        # from seed and path, not host: a site that has moved gives the same numbers in [0, 1)
        text = f"{self.seed}/{url.split('/', 3)[-1]}"
        random = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32
        return 1 / (1 + math.exp(-odds)) + EXPLORATION * random

    def _prior(self, feature: str, relevance: float, rate: float) -> float:
        """The prior share of relevant pages behind a feature."""
        if feature.startswith("worth:"):
            return min(0.95, max(0.05, relevance))
        known = self.judge is not None and self.judge.knows(feature)
        return max(FOCUS_PRIOR, rate) if known else rate

    def _weight(
        self, seen: tuple[float, float] | None, prior: float, pages: float = PRIOR_PAGES
    ) -> float:
        tried, good = seen or (0.0, 0.0)
        bad, rate = tried - good, (self.good + 1) / (self.tried + 2)
        share = (good + pages * prior) / (self.good + pages * rate)
        bad_share = (bad + pages * (1 - prior)) / (self.tried - self.good + pages * (1 - rate))
        return math.log(share) - math.log(bad_share)


class Expansion:
    """Puts URLs into the frontier; `count` adds to the crawl's counters."""

    def __init__(
        self, options: CrawlOptions, frontier: Frontier, hosts: Hosts, links: LinkJudge,
        hosts_allowed: frozenset[str] | None, count: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        self.options, self.frontier, self.hosts, self.links = options, frontier, hosts, links
        self.hosts_allowed, self.count = hosts_allowed, count
        self.families = frontier.figures("family")
        self._sitemaps: dict[str, int] = {}

    def seeds(self, urls: Sequence[str]) -> None:
        """Add canonical seed URLs with the highest priority of a page."""
        self.frontier.add([DiscoveredUrl(url, 1.0, 0, 1.0, via="seed") for url in urls])

    def follow(
        self, links: Sequence[Sequence[str]], depth: int, relevance: float, hops: int = 0,
        via: str = "link",
    ) -> None:  # fmt: skip
        """Add links (URL, anchor text) that may be followed, with their priorities."""
        self._add(self._link(raw, anchor, depth, relevance, hops, via) for raw, anchor in links)

    def listed(self, sitemap: Sitemap, entry: Entry) -> None:
        """Add the pages and sitemaps that a sitemap lists."""
        self.count("sitemaps", 1)
        self.count("sitemap_urls", len(sitemap.pages))
        self._add(
            self._link(page.url, "", 1, SITEMAP_RELEVANCE, 0, "sitemap", page.changed_s)
            for page in sitemap.pages
        )
        if entry.hops < sitemaps.MAX_NESTED:
            self.sitemaps([one.url for one in sitemap.nested], entry.anchor, entry.hops + 1)

    def sitemaps(self, urls: Sequence[str], named_by: str, hops: int = 0) -> None:
        """Add sitemaps that the robots.txt of host `named_by` names, or the user if it is empty."""
        kept = []
        for address in urls:
            url = canonical(address, f"http://{named_by}/" if named_by else "")
            count = self._sitemaps.get(named_by, 0)
            if url is None or count >= SITEMAPS_A_HOST or not self._in_scope(url):
                self.count("sitemaps_left_out", 1)
                continue
            self._sitemaps[named_by] = count + 1
            kept.append(DiscoveredUrl(url, SITEMAP_PRIORITY, 0, SITEMAP_RELEVANCE, named_by, hops,
                             "sitemap", SITEMAP))  # fmt: skip
        self._add(kept)

    def _link(
        self, raw: str, anchor: str, depth: int, relevance: float, hops: int, via: str,
        changed_s: float | None = None,
    ) -> DiscoveredUrl | None:  # fmt: skip
        breadth = self.options.order == "breadth"
        if breadth and not changed_s and self.frontier.skips(raw, float(-depth)):
            return None
        url = canonical(raw)
        if url is None or looks_binary(url) or not self._in_scope(url):
            return None
        if trap(url, depth, self.options.depth) or self.is_trap(template_of(url)):
            self.count("traps", 1)
            return None
        priority = self.priority(Entry(0, url, host_of(url), depth, hops, 0, relevance, anchor))
        return DiscoveredUrl(url, priority, depth, relevance, anchor, hops, via, PAGE, changed_s)

    def _add(self, links: Iterable[DiscoveredUrl | None]) -> None:
        kept = [link for link in links if link is not None]
        self.frontier.add(kept)
        for link in kept:
            host = host_of(link.url)
            best = self.hosts.get(host).best
            if best is None or link.priority > best:
                self.hosts.refresh(host)

    def priority(self, entry: Entry) -> float:
        """The present priority of a URL; in breadth-first order the negative depth."""
        if entry.kind == SITEMAP:
            return SITEMAP_PRIORITY
        if self.options.order == "breadth":
            return float(-entry.depth)
        return self.links.priority(entry.url, entry.host, entry.anchor, entry.relevance)

    def rescore(self, name: str) -> None:
        """Count a page of the host; now and then recompute the priorities of its pending URLs
        (about 20 per page fetched)."""
        host = self.hosts.get(name)
        host.pages += 1
        if self.options.order == "best" and host.pages >= host.rescore_at:
            judged = self.frontier.rescore(name, self.priority)
            host.rescore_at = host.pages + max(5, judged // 20)
            self.hosts.refresh(name)

    def tally_family(self, entry: Entry, fresh: float) -> None:
        """Count a page of this family, fresh or not; drop the family if it is a trap."""
        template = template_of(entry.url)
        if template == entry.url:
            return
        known = self.is_trap(template)
        tried, good = self.families.get(template, (0.0, 0.0))
        self.families[template] = (tried + 1, good + fresh)
        self.frontier.tally("family", [template], fresh)
        if self.is_trap(template) and not known:
            reason = f"trap: {tried + 1:.0f} pages of this family have nearly all the same text"
            if good + fresh >= TRAP_FRESH * (tried + 1):
                reason = f"trap: {tried + 1:.0f} pages with the same parameter names were fetched"
            self.count("traps", self.frontier.drop_family(template, entry.host, reason))
            self.hosts.refresh(entry.host)

    def is_trap(self, template: str) -> bool:
        """Whether the family of this template is a trap."""
        tried, good = self.families.get(template, (0.0, 0.0))
        if tried >= self.options.query_pages and "?" in template:
            return True
        return tried >= TRAP_PAGES and good < TRAP_FRESH * tried

    def _in_scope(self, url: str) -> bool:
        return self.hosts_allowed is None or host_of(url) in self.hosts_allowed
