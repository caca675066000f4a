"""Links are judged by what lay behind links like them."""

import math
import random

import pytest
from labelled_graph import Graph, Page, breadth_first

from sabia.core.options.crawl import CrawlOptions
from sabia.core.web.expand import (
    HOST_PRIOR_PAGES,
    PRIOR_PAGES,
    LinkJudge,
    link_features,
    link_words,
)
from sabia.core.web.focus import WordJudge, link_relevance

CHANCE = "sabia.core.web.expand.EXPLORATION"
SOFT, HARD = CrawlOptions(focus="any"), CrawlOptions(focus="any", hard=True)


def test_words_of_links() -> None:
    words = link_words("http://h/pt/li%C3%A7%C3%A3o_2.html?p=3", "Lição 2")
    assert words == ["licao", "p", "pt"]
    assert link_features("http://h/a", "b", 0.65) == ["a", "b", "worth:3"]
    assert link_features("http://h/", "", 1.0) == ["worth:4"]


def test_links_learn_from_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHANCE, 0.0)
    links = LinkJudge(0, WordJudge("honey"), {}, {})
    before = links.priority("http://h/offers/1", "h", "Offer", 0.5)
    assert links.priority("http://h/honey", "h", "Honey", 0.5) > before
    for _ in range(10):
        links.learn(link_features("http://h/offers/2", "Offer", 0.5), "h", 0.0)
        links.learn(link_features("http://g/bees", "Bees", 0.5), "g", 0.9)
    assert links.priority("http://h/offers/1", "h", "Offer", 0.5) < before / 2
    assert links.priority("http://new/bees", "new", "", 0.5) > before
    better, worse = (links.priority("http://x/new", "x", "New", worth) for worth in (0.9, 0.1))
    assert better > worse


def test_the_priority_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHANCE, 0.0)
    words = {"a": (8.0, 6.0), "worth:2": (20.0, 9.0)}
    hosts = {"h": (10.0, 7.0), "g": (30.0, 8.0)}
    links = LinkJudge(0, None, words, hosts)
    total, good = 40.0, 15.0
    rate = (good + 1) / (total + 2)

    def weight(tried: float, seen: float, belief: float, pages: float) -> float:
        return math.log((seen + pages * belief) / (good + pages * rate)) - math.log(
            (tried - seen + pages * (1 - belief)) / (total - good + pages * (1 - rate))
        )

    odds = math.log(rate / (1 - rate)) + weight(10, 7, rate, HOST_PRIOR_PAGES)
    odds += weight(8, 6, rate, PRIOR_PAGES) + weight(20, 9, 0.5, PRIOR_PAGES)
    assert links.priority("http://h/a", "h", "", 0.5) == pytest.approx(1 / (1 + math.exp(-odds)))


def test_exploration_is_small_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    links = LinkJudge(3, None, {}, {})
    found = [links.priority(f"http://h/{n}", "h", "", 0.5) for n in range(200)]
    with monkeypatch.context() as patch:
        patch.setattr(CHANCE, 0.0)
        base = LinkJudge(3, None, {}, {}).priority("http://h/1", "h", "", 0.5)
    assert min(found) >= base and max(found) <= base + 0.05 and len(set(found)) > 150
    again = LinkJudge(3, None, {}, {})
    assert again.priority("http://h/7", "h", "", 0.5) == found[7]


def steered(graph: Graph, budget: int, options: CrawlOptions) -> list[bool]:
    """Which of the first pages are wanted, with pages judged nearly right and no network."""
    links = LinkJudge(0, None, {}, {})
    scores = {"wanted": 0.95, "near": 0.25, "other": 0.02, "list": 0.02}
    pending = {url: (url, "", 1.0, 0) for url in graph.seeds()}
    done: set[str] = set()
    good: list[bool] = []
    while pending and len(good) < budget:
        sample = (
            list(pending) if len(pending) < 150 else random.Random(0).sample(list(pending), 150)
        )
        best = max(sample, key=lambda url: links.priority(url, _host(url), *pending[url][1:3]))
        _, anchor, worth, depth = pending.pop(best)
        done.add(best)
        page: Page = graph.by_url[best]
        good.append(page.kind == "wanted")
        links.learn(link_features(best, anchor, worth), _host(best), scores[page.kind])
        passed = link_relevance(scores[page.kind], worth, options)
        passed = worth if passed is None and depth == 0 else passed
        if passed is not None:
            fresh = [(url, text) for url, text in page.links if url not in done]
            pending |= {url: (url, text, passed, depth + 1) for url, text in fresh}
    return good


def _host(url: str) -> str:
    return url.split("/")[2]


@pytest.mark.parametrize("hard", [False, True])
def test_best_first_beats_breadth_first(hard: bool) -> None:
    graph, budget = Graph(1_500, 0), 120
    plain = [page.kind == "wanted" for page in breadth_first(graph, graph.seeds())][:budget]
    good = steered(graph, budget, HARD if hard else SOFT)
    assert sum(good) > 1.6 * sum(plain)
