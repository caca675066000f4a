"""Which links look promising: a naive Bayes classifier that learns while the crawl goes on.

A link is known by its words (anchor text and path), its host, and what its page was worth. For each
of these the crawl remembers how many pages it fetched through such links and the sum of their
scores. With G the scores and T the pages in all, a word w seen in t pages of scores g weighs

    ln [(g + a p) / (G + a)] - ln [(t - g + a (1 - p)) / (T - G + a)],   p = (G + c) / (T + 2 c),

its log-likelihood ratio with a = BELIEF pages of prior belief at the crawl's own rate p, so that a
word never seen weighs about nothing. Words that the focus knows, and the worth of the page, are
believed to be good before anything was learnt. The sum, from the log-odds of p on, is the
log-odds of a relevant page (McCallum and Nigam 1998, with fractional counts); the priority is its
probability and a little exploration.
"""

import hashlib
import math
from collections.abc import Iterable
from urllib.parse import unquote

from sabia.core.web.focus import Judge, words_of

BELIEF = 2.0  # pages that what is believed of a word counts as
HOST_BELIEF = 4.0
EXPLORATION = 0.05  # of the priority is chance
KNOWN = 0.8  # believed share of relevant pages behind a word that the focus knows
WORTHS = 5  # steps in which a page's worth is learnt from
SURE = 6.0  # log-odds that no sum of words goes beyond

Tallies = dict[str, tuple[float, float]]  # name → (pages fetched, sum of their scores)


def link_words(url: str, anchor: str) -> list[str]:
    """The words of a link: anchor text, path and parameters; numbers say nothing."""
    path = unquote(url.split("/", 3)[-1])
    return sorted(set(words_of(f"{anchor} {path.replace('_', ' ')}")) - {"0", "html", "htm", "php"})


def link_features(url: str, anchor: str, worth: float) -> list[str]:
    """What is learnt of a link: its words, and the step of its page's worth (as `worth:3`)."""
    return [*link_words(url, anchor), f"worth:{min(WORTHS - 1, int(worth * WORTHS))}"]


class LinkJudge:
    """Priorities of links; `words` and `hosts` are kept current."""

    def __init__(self, seed: int, judge: Judge | None, words: Tallies, hosts: Tallies) -> None:
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

    def priority(self, url: str, host: str, anchor: str, worth: float) -> float:
        """The priority of a link found on a page of this worth, from 0 to about 1."""
        rate = (self.good + 1) / (self.tried + 2)
        odds = _logit(rate) + self._weight(self.hosts.get(host), rate, HOST_BELIEF)
        for feature in link_features(url, anchor, worth):
            odds += self._weight(self.words.get(feature), self._belief(feature, worth, rate))
        odds = max(-SURE, min(SURE, odds))
        return 1 / (1 + math.exp(-odds)) + EXPLORATION * self._chance(url)

    def _belief(self, feature: str, worth: float, rate: float) -> float:
        """The share of relevant pages behind a feature before anything was learnt of it."""
        if feature.startswith("worth:"):
            return min(0.95, max(0.05, worth))
        known = self.judge is not None and self.judge.knows(feature)
        return max(KNOWN, rate) if known else rate

    def _weight(
        self, seen: tuple[float, float] | None, belief: float, pages: float = BELIEF
    ) -> float:
        tried, good = seen or (0.0, 0.0)
        bad, rate = tried - good, (self.good + 1) / (self.tried + 2)
        share = (good + pages * belief) / (self.good + pages * rate)
        return math.log(share) - math.log(
            (bad + pages * (1 - belief)) / (self.tried - self.good + pages * (1 - rate))
        )

    def _chance(self, url: str) -> float:
        """A number in [0, 1) from seed and path; not host, so that a moved site crawls alike."""
        text = f"{self.seed}/{url.split('/', 3)[-1]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
