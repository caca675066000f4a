"""Which host is asked next: best first, rests kept, budgets, failing hosts; robots' copies."""

import asyncio
import time

import pytest

from sabia.core.options.crawl import CrawlOptions
from sabia.core.web import hosts as room
from sabia.core.web.frontier import DONE, PENDING, DiscoveredUrl, Frontier
from sabia.core.web.hosts import Hosts, RobotsCache
from sabia.core.web.robots import KEEP_S, STALE_S, RobotsFile


class Clock:
    """Time that the test moves."""

    def __init__(self, monkeypatch):
        self.now = 1_000_000.0
        monkeypatch.setattr(room.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(room.time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def frontier(tmp_path):
    opened = Frontier(tmp_path / "frontier.sqlite")
    yield opened
    opened.close()


def hosts(frontier, **changes):
    made = Hosts(CrawlOptions(**changes), frontier)
    made.load()
    return made


def fill(frontier, **priorities):
    """`h=[.5, .4]`: host h has two URLs of these priorities."""
    for host, found in priorities.items():
        frontier.add([DiscoveredUrl(f"http://{host}/{n}", p, 0, 1.0) for n, p in enumerate(found)])


def end(found, frontier, entry, rest_s=0.0, state=DONE):
    frontier.end(entry, state)
    found.done(entry, rest_s)


def test_a_rest_outlives_the_process(frontier, clock):
    fill(frontier, a=[0.5], b=[0.4])
    frontier.rest("a", clock.now + 300)
    frontier.commit()
    after = hosts(frontier)
    assert after.take().url == "http://b/0"
    assert after.take() is None
    assert after.wait_s() == 300
    clock.now += 301
    assert after.take().url == "http://a/0"


def test_best_host_first_and_one_request_each(frontier, clock):
    fill(frontier, a=[0.2, 0.9], b=[0.5], c=[0.7])
    found = hosts(frontier)
    taken = [found.take().url for _ in range(3)]
    assert taken == ["http://a/1", "http://c/0", "http://b/0"]
    assert found.take() is None
    assert found.wait_s() is None  # a is busy; nothing else has a URL


def test_rest_is_kept_and_other_hosts_go_on(frontier, clock):
    fill(frontier, a=[0.9, 0.8], b=[0.1])
    found = hosts(frontier)
    end(found, frontier, found.take(), rest_s=5.0)
    assert found.take().host == "b"
    assert found.take() is None
    assert found.wait_s() == 5.0
    clock.now += 4.999
    assert found.take() is None
    clock.now += 0.001
    assert found.take().url == "http://a/1"


def test_what_was_put_off_comes_again(frontier, clock):
    fill(frontier, a=[0.3])
    found = hosts(frontier)
    end(found, frontier, found.take(), rest_s=2.0, state=PENDING)
    assert found.wait_s() == 2.0
    clock.now += 2
    assert found.take().tries == 1


def test_pages_of_a_host_are_bounded(frontier, clock):
    fill(frontier, a=[0.9] * 5, b=[0.1])
    found = hosts(frontier, host_pages=2)
    for _ in range(2):
        entry = found.take()
        found.get(entry.host).pages += 1
        end(found, frontier, entry)
    assert found.take().host == "b"
    assert found.wait_s() is None


def test_failing_hosts_rest_ever_longer(frontier, clock):
    found = hosts(frontier)
    rests = [found.failed("a") for _ in range(8)]
    assert rests == [2, 4, 8, 16, 32, 60, 60, 60]
    found.answered("a")
    assert found.failed("a") == 2


def test_many_hosts_cost_little(frontier):
    frontier.begin()
    frontier.add([DiscoveredUrl(f"http://h{n % 2_000}/{n}", 0.5, 0, 1.0) for n in range(6_000)])
    frontier.commit()
    found = hosts(frontier)
    started = time.process_time()
    for _ in range(4_000):
        end(found, frontier, found.take())
    assert time.process_time() - started < 4


class Answers:
    """In place of a Fetcher: verdicts one after another."""

    def __init__(self, *verdicts):
        self.verdicts = list(verdicts)

    async def robots(self, _origin):
        return self.verdicts.pop(0), 1


def ask(frontier, *verdicts):
    """Requests sent and the state of the rules."""
    cache = RobotsCache(frontier, Answers(*verdicts), "sabia")
    rules, sent = asyncio.run(cache.rules("http://h/x"))
    return sent, rules.state, rules.allowed("http://h/x")


DOWN, OPEN = RobotsFile("User-agent: *\nDisallow: /", "unreachable", 900.0), RobotsFile("", "none")
CLOSED = RobotsFile("User-agent: *\nDisallow: /x")


def test_robots_is_kept_for_a_day(frontier, clock):
    assert ask(frontier, CLOSED) == (1, "rules", False)
    clock.now += KEEP_S - 1
    assert ask(frontier) == (0, "rules", False)
    clock.now += 2
    assert ask(frontier, OPEN) == (1, "none", True)


def test_an_old_copy_stands_in_until_it_is_too_old(frontier, clock):
    assert ask(frontier, DOWN) == (1, "unreachable", False)
    assert ask(frontier, OPEN) == (1, "none", True)
    clock.now += KEEP_S + 1
    assert ask(frontier, DOWN) == (1, "none", True)
    clock.now += STALE_S
    assert ask(frontier, DOWN) == (1, "unreachable", False)


def test_unreachable_is_asked_again_after_a_while(frontier, clock):
    cache = RobotsCache(frontier, Answers(DOWN, OPEN), "sabia")
    assert asyncio.run(cache.rules("http://h/x"))[0].state == "unreachable"
    clock.now += 899
    assert asyncio.run(cache.rules("http://h/x")) == (cache.known("http://h/"), 0)
    clock.now += 2
    assert asyncio.run(cache.rules("http://h/x"))[0].state == "none"
