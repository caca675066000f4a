"""The frontier: best first, once each, whole transactions, alive after kill -9."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from sabia.core.errors import UsageError
from sabia.core.web.frontier import DONE, GIVEN_UP, PENDING, DiscoveredUrl, Frontier, Visit


@pytest.fixture
def frontier(tmp_path):
    opened = Frontier(tmp_path / "state" / "frontier.sqlite")
    yield opened
    opened.close()


def link(path, priority=0.5, host="h", **more):
    return DiscoveredUrl(f"http://{host}/{path}", priority, more.pop("depth", 1), 0.5, **more)


def test_best_first_and_ties_by_age(frontier):
    frontier.add([link("b"), link("a"), link("best", 0.9), link("other", host="g")])
    taken = [frontier.take("h")[0].url for _ in range(3)]
    assert taken == ["http://h/best", "http://h/b", "http://h/a"]
    assert frontier.take("h") == (None, None)
    assert frontier.hosts() == {"h": 0.9, "g": 0.5}


def test_what_is_in_flight_is_pending_in_the_file(frontier):
    """Only the running process knows what it fetches: a crash needs no repair."""
    frontier.add([link("a"), link("b", 0.4)])
    first, following = frontier.take("h")
    assert (first.url, following) == ("http://h/a", 0.4)
    assert frontier.best_of("h") == 0.4
    other = Frontier(frontier.path)
    assert other.best_of("h") == 0.5
    other.close()
    frontier.release(first)
    assert frontier.take("h")[0] == first


def test_urls_are_known_once_and_rise(frontier):
    assert frontier.add([link("a"), link("a"), link("b")]) == 2
    assert frontier.add([link("a", 0.9, depth=7), link("b", 0.1)]) == 0
    first, _ = frontier.take("h")
    assert (first.url, first.depth) == ("http://h/a", 1)
    frontier.end(first, DONE)
    frontier.release(first)
    frontier.add([link("a", 1.0)])
    assert frontier.take("h")[0].url == "http://h/b"


def test_put_off_and_asked_again(frontier):
    frontier.add([link("a"), link("b"), link("c")])
    a, b, c = (frontier.take("h")[0] for _ in range(3))
    frontier.end(a, PENDING)
    frontier.visited(b, Visit(100.0, '"x"', "Mon", "sha1:A", "<urn:1>", "2026"))
    frontier.end(b, DONE)
    frontier.end(c, GIVEN_UP, "HTTP 503")
    for entry in (a, b, c):
        frontier.release(entry)
    again, _ = frontier.take("h")
    assert (again.url, again.tries) == (a.url, 1)
    frontier.end(again, DONE)
    assert frontier.visit(b).conditions() == {"If-None-Match": '"x"', "If-Modified-Since": "Mon"}
    assert frontier.revisit(99.0, ("HTTP 4*",)) == 0
    assert frontier.given_up(("HTTP 5*",)) == 1
    assert frontier.revisit(101.0, ("HTTP 4*", "HTTP 5*")) == 2
    assert frontier.waiting() == 2
    frontier.drop_page(b)
    assert frontier.visit(b) is None


def test_pages_that_changed_since_are_pending_again(frontier):
    frontier.add([link("a"), link("b")])
    for _ in range(2):
        entry, _ = frontier.take("h")
        frontier.visited(entry, Visit(1000.0))
        frontier.end(entry, DONE)
        frontier.release(entry)
    frontier.add([link("a", changed_s=999.0), link("b", changed_s=1001.0)])
    assert frontier.take("h")[0].url == "http://h/b"
    assert frontier.take("h") == (None, None)


def test_another_layout_is_refused(tmp_path):
    path = tmp_path / "old.sqlite"
    old = sqlite3.connect(path)
    old.execute("CREATE TABLE pages (number INTEGER)")
    old.commit()
    old.close()
    with pytest.raises(UsageError, match="another version"):
        Frontier(path)


def test_rescore_and_family(frontier):
    frontier.add([link(f"p/{n}") for n in range(5)] + [link("q", 0.1)])
    frontier.rescore("h", lambda entry: 1.0 if entry.url.endswith("q") else 0.2)
    assert frontier.best_of("h") == 1.0
    assert frontier.drop_family("http://h/p/0", "h", "trap: the same") == 5
    assert {reason for _, _, reason in frontier.refusals()} == {"trap: the same"}


def test_figures_seen_facts_documents(frontier):
    frontier.tally("word", ["a", "b"], 1.0)
    frontier.tally("word", ["a"], 0.0)
    assert frontier.figures("word") == {"a": (2.0, 1.0), "b": (1.0, 1.0)}
    assert frontier.first_time(b"x")
    assert not frontier.first_time(b"x")
    frontier.add([link("a")])
    entry, _ = frontier.take("h")
    frontier.keep_document(2, entry, {"text": "second"})
    frontier.keep_document(1, replace(entry, number=9), {"text": "fir\u00e7t"})
    assert [row["text"] for row in frontier.documents()] == ["fir\u00e7t", "second"]
    frontier.keep_document(3, entry, {"text": "changed"})
    assert [row["text"] for row in frontier.documents()] == ["fir\u00e7t", "changed"]
    frontier.end(entry, GIVEN_UP, "because")
    assert list(frontier.refusals()) == [("http://h/a", "h", "because")]


def test_state_of_another_crawl_is_refused(frontier):
    frontier.belongs_to({"seeds": "1"})
    frontier.belongs_to({"seeds": "1"})
    with pytest.raises(UsageError, match="another crawl"):
        frontier.belongs_to({"seeds": "2"})


def test_kill_9_leaves_each_page_before_or_after(tmp_path):
    """A child works through pages and is killed in the middle of a transaction."""
    path = tmp_path / "frontier.sqlite"
    code = f"""
    from pathlib import Path
    from sabia.core.web.frontier import *
    f = Frontier(Path({str(path)!r}))
    f.add([DiscoveredUrl(f"http://h/{{n}}", 0.5, 0, 0.5) for n in range(50)])
    for place in range(1, 50):
        entry, _ = f.take("h")
        f.begin()
        f.keep_document(place, entry, {{"url": entry.url}})
        f.end(entry, DONE)
        f.release(entry)
        if place == 20:
            print("half", flush=True)
            import time; time.sleep(3600)
        f.commit()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"half\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    frontier = Frontier(path)
    kept = [row["url"] for row in frontier.documents()]
    assert len(kept) == 19
    rest = []
    while entry := frontier.take("h")[0]:
        rest.append(entry.url)
    assert len(rest) == 31
    assert set(rest).isdisjoint(kept)
    assert PENDING == 0
    frontier.close()
