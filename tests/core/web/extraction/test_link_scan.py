"""Links without text: those that lxml finds, what pages ask for, linear time in hostile bytes."""

import random
import time

import lxml.html
import pytest

from sabia.core.urls import canonical
from sabia.core.web.extraction.link_scan import MAX_LINKS, links_only

HERE = "http://h/d/page.html"


def links(body, kind="text/html; charset=utf-8"):
    return [url for url, _ in links_only(body.encode(), kind, HERE)["links"]]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('<a href="x">', ["http://h/d/x"]),
        ("<A class=b HREF='/x?a=1&amp;b=2#f'>", ["http://h/x?a=1&b=2"]),
        ("<a\nhref=x>y</a><area href = '//g/y'>", ["http://h/d/x", "http://g/y"]),
        ('<a data-href="no" href="yes">', ["http://h/d/yes"]),
        ("<base href='/other/'><a href=x>", ["http://h/other/x"]),
        ('<a href="x"><a href="x?utm_source=y">', ["http://h/d/x"]),
        ('<a rel="me nofollow" href="x"><a href=z>', ["http://h/d/z"]),
        ('<a href="mailto:a@b"><a href="javascript:1"><a name=q><abbr href=x>', []),
        ('<meta name="robots" content="index, nofollow"><a href=x>', []),
        ("<META content=none name=robots><a href=x>", []),
        ('<meta name=description content="nofollow"><a href=x>', ["http://h/d/x"]),
    ],
)
def test_links(body, wanted):
    assert links(body) == wanted


def test_other_types_have_none():
    assert links('<a href="x">', "text/plain") == []
    found = links_only(b"<a href=x>", "text/html", HERE)
    assert (found["text"], found["index"]) == ("", True)


def test_agrees_with_lxml():
    draw = random.Random(5)
    quotes = ['"', "'", ""]
    for _ in range(200):
        parts = []
        for n in range(draw.randrange(1, 12)):
            quote, more = draw.choice(quotes), draw.choice(["", " class=c", ' title="a b"'])
            target = (
                draw.choice(["", "/", "../", "http://g/"]) + f"p{n}" + draw.choice(["", "?q=1"])
            )
            parts.append(f"<p>t<a{more} href={quote}{target}{quote}{more and ' id=i'}>w</a>")
        body = "".join(parts)
        tree = lxml.html.document_fromstring(body)
        wanted = dict.fromkeys(canonical(tag.get("href"), HERE) for tag in tree.iter("a"))
        assert links(body) == list(wanted)


@pytest.mark.parametrize(
    "body",
    ["<a " * 500_000, "<a href=" * 200_000, "<a href='" + "x" * 2_000_000, "<meta " * 300_000,
     "<a rel=" + "nofollo" * 300_000, "<a " + "href " * 400_000, "<meta name=robots " * 100_000],
)  # fmt: skip
def test_hostile_bytes_cost_little(body):
    started = time.process_time()
    links(body)
    assert time.process_time() - started < 10


def test_no_more_than_a_bound():
    assert len(links("".join(f"<a href={n}>" for n in range(5_000)))) == MAX_LINKS
