"""A crawl over a scripted server, in this process: sitemaps, revisits, robots' copies, traps."""

import email.utils
import gzip
import json
import time

import pyarrow.parquet as pq
import pytest

from sabia.core.errors import UsageError
from sabia.core.options.crawl import CrawlOptions
from sabia.core.shards.job import Job
from sabia.core.web.crawl_inputs import PageFiles
from sabia.core.web.extraction.sandbox import Sandbox, Unextractable
from sabia.core.web.frontier import Frontier
from sabia.core.web.run import run

HTML = {"Content-Type": "text/html"}


def crawl(web, tmp_path, *seeds, extract=False, force=False, **changes):
    """Crawl from seeds (paths) into tmp_path; the summary."""
    given = {"contact": "a@example.org", "allow_private": True, "attempts": 2, "backoff": 0.01,
             "delay": 0.0, "budget": 500, "stay": True}  # fmt: skip
    if not extract:
        given |= {"warc": str(tmp_path / "warc"), "no_extract": True}
    urls = tuple(seed if "://" in seed else web.url + seed for seed in seeds)
    out = str(tmp_path / "o.parquet") if extract else None
    rejects = str(tmp_path / "rejects.parquet")
    job = Job("crawl", inputs=urls, out=out, rejects=rejects, force=force)
    return run(job, CrawlOptions(**given | changes))


def frontier(tmp_path):
    return Frontier(tmp_path / "warc.crawl" / "frontier.sqlite")


def rejects(tmp_path):
    rows = pq.read_table(tmp_path / "rejects.parquet").to_pylist()
    return {json.loads(row["record"])["url"].split("/", 3)[3]: row["reason"] for row in rows}


def urlset(web, *paths, changed=""):
    rows = "".join(
        f"<url><loc>{web.url}{path}</loc><lastmod>{changed}</lastmod></url>" for path in paths
    )
    return f"<urlset>{rows}</urlset>".encode()


def serve(web, path, body, kind="text/html", **headers):
    web.script[path] = lambda _visit: (200, {"Content-Type": kind, **headers}, body)


def sitemap_site(web):
    robots = f"User-agent: *\nDisallow: /no/\nSitemap: {web.url}/index.xml\n"
    serve(web, "/robots.txt", robots.encode(), "text/plain")
    index = (
        f"<sitemapindex><sitemap><loc>{web.url}/a.xml.gz</loc></sitemap>"
        f"<sitemap><loc>{web.url}/broken.xml</loc></sitemap></sitemapindex>"
    )
    serve(web, "/index.xml", index.encode(), "application/xml")
    serve(web, "/a.xml.gz", gzip.compress(urlset(web, "/s/1", "/s/2", "/no/3")), "text/xml")
    serve(web, "/broken.xml", b"<html>no sitemap</html>")
    for path in ("/", "/s/1", "/s/2"):
        web.page(path, f"<p>page {path}</p>")


@pytest.mark.parametrize("which", ["robots", "url", "none"])
def test_sitemaps(web, tmp_path, which):
    sitemap_site(web)
    asked = {"robots": "robots", "url": f"{web.url}/a.xml.gz", "none": ""}[which]
    summary = crawl(web, tmp_path, "/", sitemaps=asked)
    found = {path for path in web.paths() if path.startswith("/s/")}
    assert found == (set() if which == "none" else {"/s/1", "/s/2"})
    assert summary.rows_in == 1 + len(found)
    if which == "robots":
        assert summary.counters["sitemaps"] == 2
        said = rejects(tmp_path)
        assert said["no/3"] == "robots.txt disallows it"
        assert "no sitemap" in said["broken.xml"]
        state = frontier(tmp_path)
        vias = dict(state.db.execute("SELECT url, via FROM pages WHERE kind=0"))
        assert vias[f"{web.url}/s/1"] == "sitemap"
        assert vias[f"{web.url}/"] == "seed"
        state.close()


def warc_kinds(tmp_path):
    from fastwarc.warc import ArchiveIterator

    kinds = {}
    with open(tmp_path / "warc" / "pages-00000.warc.gz", "rb") as file:
        for record in ArchiveIterator(file, parse_http=False):
            fields = dict(record.headers.astuples())
            if fields["WARC-Type"] in ("response", "revisit"):
                path = fields["WARC-Target-URI"].split("/", 3)[3]
                kinds.setdefault(path, []).append(fields["WARC-Type"])
    return kinds


def test_unchanged_pages_are_not_sent_again(web, tmp_path):
    """By ETag, by date, and by content where a server knows no conditions."""
    web.page(
        "/", '<a href="/tag">1</a><a href="/date">2</a><a href="/same">3</a><a href="/new">4</a>'
    )
    marks = {"tag": {"ETag": '"1"'}, "date": {"Last-Modified": email.utils.formatdate(0)}}
    for name, mark in marks.items():
        first = (200, HTML | mark, f"<p>{name}</p>".encode())
        web.script[f"/{name}"] = lambda n, first=first, mark=mark: (304, mark, b"") if n else first
    web.page("/same", "<p>same</p>")
    web.script["/new"] = lambda visit: (200, HTML, b"<p>%d</p><a href='/late'>x</a>" % visit)
    web.script["/late"] = lambda visit: (503, HTML, b"") if visit < 2 else (200, HTML, b"<p>z</p>")
    crawl(web, tmp_path, "/")
    assert rejects(tmp_path) == {"late": "HTTP 503"}
    before = len(web.seen)
    summary = crawl(web, tmp_path, "/", revisit=0.0)
    asked = sorted(web.paths()[before:])
    assert asked == ["/", "/date", "/late", "/new", "/same", "/tag"]
    assert summary.counters["unchanged"] == 4
    assert warc_kinds(tmp_path) == {
        "": ["response", "revisit"], "tag": ["response", "revisit"],
        "date": ["response", "revisit"], "same": ["response", "revisit"],
        "new": ["response", "response"], "late": ["response"],
    }  # fmt: skip
    crawl(web, tmp_path, "/", revisit=3600.0)
    assert len(web.seen) == before + 6  # nothing is so old


def test_documents_follow_revisits(web, tmp_path):
    web.page("/", '<p>Where the pages are.</p><a href="/a">a</a><a href="/b">b</a>')
    web.script["/a"] = lambda visit: (200, HTML, b"<p>This is text number %d.</p>" % visit)
    web.script["/b"] = lambda visit: (404 if visit else 200, HTML, b"<p>This will be gone.</p>")
    crawl(web, tmp_path, "/", extract=True)
    texts = [row["text"] for row in pq.read_table(tmp_path / "o.parquet").to_pylist()]
    assert {"This is text number 0.", "This will be gone."} <= set(texts)
    crawl(web, tmp_path, "/", extract=True, revisit=0.0)
    texts = [row["text"] for row in pq.read_table(tmp_path / "o.parquet").to_pylist()]
    assert len(texts) == 2
    assert "This is text number 1." in texts


def test_sitemap_dates_bring_pages_back(web, tmp_path):
    web.page("/s/1", "<p>one</p>")
    web.page("/s/2", "<p>two</p>")
    serve(web, "/map.xml", urlset(web, "/s/1", changed="2000-01-01"), "text/xml")
    crawl(web, tmp_path, "/s/1", "/s/2", sitemaps=f"{web.url}/map.xml")
    serve(web, "/map.xml", urlset(web, "/s/1", changed="2999-01-01"), "text/xml")
    before = len(web.seen)
    crawl(web, tmp_path, "/s/1", "/s/2", sitemaps=f"{web.url}/map.xml", revisit=1e6)
    assert web.paths()[before:] == ["/map.xml", "/s/1"]


def test_an_old_robots_txt_stands_in_for_one_that_is_down(web, tmp_path):
    serve(web, "/robots.txt", b"User-agent: *\nDisallow: /no", "text/plain")
    web.page("/", '<p>x</p><a href="/no">n</a>')
    crawl(web, tmp_path, "/")
    web.script["/robots.txt"] = lambda _visit: (500, {}, b"")
    state = frontier(tmp_path)
    state.db.execute("UPDATE robots SET time=?", (time.time() - 2 * 86_400,))
    state.close()
    crawl(web, tmp_path, "/", revisit=0.0)
    assert web.paths().count("/") == 2
    assert "/no" not in web.paths()
    state = frontier(tmp_path)
    state.db.execute("UPDATE robots SET time=?", (time.time() - 31 * 86_400,))
    state.close()
    crawl(web, tmp_path, "/", revisit=0.0)
    assert web.paths().count("/") == 2
    assert rejects(tmp_path)[""] == "robots.txt: unreachable"


def test_robots_is_asked_once_a_day_over_runs(web, tmp_path):
    web.page("/", "<p>x</p>")
    for _ in range(3):
        crawl(web, tmp_path, "/", revisit=0.0)
    assert web.paths().count("/robots.txt") == 1


def test_traps_end(web, tmp_path):
    """Four endless places beside ten good pages; each is given up within its bound."""

    def endless(visit_path):
        def reply(_visit):
            words = visit_path.replace("/", " ").replace("?", " ").replace("=", " ")
            more = f'<a href="{visit_path}/x">d</a>' if "deep" in visit_path else ""
            return 200, HTML, f"<p>{words}</p>{more}{links}".encode()

        return reply

    links = "".join(f'<a href="/good/{n}">g</a>' for n in range(10))
    links += '<a href="/deep/x">d</a>'
    links += "".join(f'<a href="/calendar/{y}/{m}/">c</a>' for y in range(2000, 2006)
                     for m in range(1, 13))  # fmt: skip
    links += "".join(f'<a href="/list?order={n}&amp;page={n}">q</a>' for n in range(90))
    links += "".join(f'<a href="/day/2999-{1 + n % 12}/{n}">f</a>' for n in range(90))

    class Script(dict):
        def get(self, path, default=None):
            return default if path == "/robots.txt" else endless(path)

    web.script = Script()
    summary = crawl(web, tmp_path, "/")
    asked = web.paths()
    assert sum(path.startswith("/good/") for path in asked) == 10
    assert sum(path.startswith("/deep") for path in asked) <= 5  # the path repeats itself
    assert sum(path.startswith("/calendar") for path in asked) <= 60
    assert sum(path.startswith("/list") for path in asked) <= 60
    assert not [path for path in asked if "2999" in path]
    assert summary.counters["traps"] > 0
    assert any(reason.startswith("trap:") for reason in rejects(tmp_path).values())


def test_pages_of_one_path_are_bounded(web, tmp_path):
    links = "".join(f'<a href="/q?id={n}">q</a>' for n in range(60))
    web.page("/", links)
    for n in range(60):
        web.page(f"/q?id={n}", f"<p>{'abcdefgh'[n % 8] * (n + 1)}</p>")
    crawl(web, tmp_path, "/", query_pages=15)
    asked = [path for path in web.paths() if path.startswith("/q")]
    assert 15 <= len(asked) <= 16
    assert "the same parameter names" in " ".join(rejects(tmp_path).values())


def test_a_state_is_found_again_by_what_was_always_kept_of_it(web, tmp_path):
    web.page("/", "<p>x</p>")
    crawl(web, tmp_path, "/", budget=3, delay=0.01, timeout=9.0)
    state = frontier(tmp_path)
    kept = json.loads(state.fact("identity"))
    state.close()
    assert kept.pop("seeds") and kept == {
        "steering": {"words": "", "classifier": "", "label": "keep", "threshold": 0.5,
                     "hard": False, "order": "breadth", "exploration": 0.05},
        "seed": 0, "stay": True, "warc": str(tmp_path / "warc"), "extract": False, "replay": [],
    }  # fmt: skip
    crawl(web, tmp_path, "/", budget=5)  # budget and pace may change
    with pytest.raises(UsageError, match="the state of another crawl"):
        crawl(web, tmp_path, "/", stay=False)


def test_the_archive_alone_gives_the_pages(web, tmp_path):
    web.page("/", '<p>x</p><a href="/b?x=1&amp;y=2">b</a><a rel=nofollow href="/c">c</a>')
    web.page("/b?x=1&y=2", "<p>more</p>")
    crawl(web, tmp_path, "/")
    path = str(tmp_path / "warc" / "pages-00000.warc.gz")
    found = [row for batch in PageFiles(path, (path,), 1 << 20, warc=True).batches() for row in
             batch.to_pylist()]  # fmt: skip
    assert [row["url"] for row in found] == [web.url + "/", web.url + "/b?x=1&y=2"]
    assert found[1]["body"] == b"<p>more</p>"


def test_what_cannot_be_read_is_archived_all_the_same(web, tmp_path, monkeypatch):
    original = Sandbox.extract

    def extract(self, body, content_type, url, *others):
        if url.endswith("/bad"):
            raise Unextractable("extraction took more than 20 s")
        return original(self, body, content_type, url, *others)

    monkeypatch.setattr(Sandbox, "extract", extract)
    web.page("/", '<p>Some text that can be read.</p><a href="/bad">b</a>')
    web.page("/bad", "<p>endless</p>")
    crawl(web, tmp_path, "/", extract=True, warc=str(tmp_path / "warc"))
    assert warc_kinds(tmp_path) == {"": ["response"], "bad": ["response"]}
    assert rejects(tmp_path) == {"bad": "extraction took more than 20 s"}
