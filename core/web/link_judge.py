"""Priorities of links: a naive Bayes classifier that is trained during the crawl.

The features of a link are its words (anchor text and path), its host, and the relevance of its
page. For each feature the crawl stores how many pages it fetched through such links and the sum of
their scores. With G the sum of all scores and T the number of all pages, a word w seen in t pages
with scores that sum to g has the weight

    ln [(g + a p) / (G + a)] - ln [(t - g + a (1 - p)) / (T - G + a)],   p = (G + c) / (T + 2 c),

its log-likelihood ratio with a = PRIOR_PAGES pages of prior at the crawl's own rate p, so that a
word never seen has a weight of about 0. Words of the focus, and the relevance of the page, have a
higher prior. The sum of the weights and the log-odds of p is the log-odds of a relevant page
(McCallum and Nigam 1998, with fractional counts); the priority is its probability plus a small
random number for exploration.
"""

import hashlib
import math
from collections.abc import Iterable
from urllib.parse import unquote

from sabia.core.web.focus import PageJudge, words_of

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
