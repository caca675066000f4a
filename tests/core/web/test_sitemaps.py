"""Sitemaps: the forms of the protocol, damage, other hosts, and files that want to do harm."""

import gzip
import time

import pytest

from sabia.core.web import sitemaps
from sabia.core.web.sitemaps import BadSitemap, Listed, read_sitemap, seconds_of

HERE = "http://h/sitemap.xml"
SPACE = 'xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"'


def urlset(*urls, root="urlset", entry="url", more=""):
    rows = "".join(f"<{entry}><loc>{url}</loc>{more}</{entry}>" for url in urls)
    return f'<?xml version="1.0" encoding="UTF-8"?><{root} {SPACE}>{rows}</{root}>'.encode()


def pages(body, **more):
    return [page.url for page in read_sitemap(body, HERE, **more).pages]


def test_pages_with_dates():
    body = urlset("http://h/a?x=1&amp;y=2", " /b#top\n", more="<lastmod>2026-01-02</lastmod>")
    day = seconds_of("2026-01-02T00:00:00Z")
    assert read_sitemap(body, HERE).pages == [
        Listed("http://h/a?x=1&y=2", day), Listed("http://h/b", day)
    ]  # fmt: skip
    assert pages(gzip.compress(body)) == pages(body)


def test_index_and_text():
    body = urlset("http://h/1.xml", "http://h/2.xml.gz", root="sitemapindex", entry="sitemap")
    found = read_sitemap(body, HERE)
    assert [one.url for one in found.nested] == ["http://h/1.xml", "http://h/2.xml.gz"]
    assert not found.pages
    assert pages(b"\xef\xbb\xbfhttp://h/a\r\nhttp://h/b\n") == ["http://h/a", "http://h/b"]


def test_other_hosts_are_left_out_unless_they_named_it():
    body = urlset("http://h/a", "http://g/b", "javascript:1", "http://[")
    found = read_sitemap(body, HERE)
    assert ([page.url for page in found.pages], found.left_out) == (["http://h/a"], 3)
    assert pages(body, hosts=["g"]) == ["http://h/a", "http://g/b"]


def test_images_do_not_replace_pages():
    image = '<i:image xmlns:i="http://h/sitemap-image"><i:loc>http://h/i.png</i:loc></i:image>'
    assert pages(urlset("http://h/a", more=image)) == ["http://h/a"]


def test_what_was_read_before_the_damage_is_kept(monkeypatch):
    body = urlset(*(f"http://h/{n}" for n in range(4_000)))
    assert len(pages(body[: len(body) // 2])) in range(1_900, 2_200)
    monkeypatch.setattr(sitemaps, "MAX_URLS", 1_000)
    found = read_sitemap(body, HERE)
    assert (len(found.pages), found.left_out) == (1_000, 3_000)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html><body>404</body></html>", "no sitemap"),
        (b"plain words", "neither"),
        (b"<urlset><url>", "broken"),
        (gzip.compress(urlset("http://h/a"), mtime=0)[:-20], "gzip"),
        (b'<!DOCTYPE u [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><urlset>&b;</urlset>', "entity"),
        (b'<!DOCTYPE u [<!ENTITY x SYSTEM "file:///etc/passwd">]><urlset><url><loc>&x;</loc></url>'
         b"</urlset>", "entity"),
    ],
)  # fmt: skip
def test_refused(body, said):
    with pytest.raises(BadSitemap, match=said):
        read_sitemap(body, HERE)


def test_hostile_files_cost_little():
    long = gzip.compress(b"http://h/" + b"a" * (60 << 20), 1)
    started = time.process_time()
    assert not pages(long)
    deep = b"<urlset>" + b"<a>" * 200_000
    with pytest.raises(BadSitemap):
        read_sitemap(deep, HERE)
    assert time.process_time() - started < 4


@pytest.mark.parametrize(
    ("said", "day"),
    [("2026", "2026-01-01"), ("2026-03", "2026-03-01"), ("2026-03-04T00:00:00+00:00", "2026-03-04"),
     ("2026-03-04", "2026-03-04"), ("yesterday", None), ("", None)],
)  # fmt: skip
def test_dates(said, day):
    assert seconds_of(said) == (None if day is None else seconds_of(f"{day}T00:00:00Z"))
