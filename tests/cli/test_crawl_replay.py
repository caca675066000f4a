"""`sabia crawl --replay`: the same crawl on an archive, and the report of a focus."""

import gzip
import json
import subprocess
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest
from forked import Command
from labelled_graph import Graph, breadth_first

SABIA = Command("crawl")
BUDGET = 50


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Graph]:
    folder, graph = tmp_path_factory.mktemp("web"), Graph(800, 1)
    graph.write_warc(folder / "web.warc.gz")
    (folder / "seeds.txt").write_text("\n".join(graph.seeds(1)) + "\n")
    return folder, graph


def crawl(folder: Path, out: Path, *words: str, code: int = 0) -> str:
    archive = () if "--replay" in words else ("--replay", str(folder / "web.warc.gz"))
    given = [*SABIA, str(folder / "seeds.txt"), *archive, "-o", str(out), *words]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stderr


def fetched(path: Path) -> list[str]:
    rows = pq.read_table(path, columns=["url", "meta"]).to_pylist()
    return [r["url"] for r in sorted(rows, key=lambda r: json.loads(r["meta"])["order"])]


def test_policies_and_their_report(web: tuple[Path, Graph], tmp_path: Path) -> None:
    folder, graph = web
    focus = ("--focus", " ".join(graph.words[0][:40]), "--threshold", "40%")
    report = tmp_path / "focus.html"
    said = crawl(folder, tmp_path / "best.parquet", *focus, "--budget", str(BUDGET),
                 "--report", str(report))  # fmt: skip
    crawl(folder, tmp_path / "again.parquet", *focus, "--budget", str(BUDGET))
    best = fetched(tmp_path / "best.parquet")
    assert best == fetched(tmp_path / "again.parquet") and len(best) == BUDGET
    breadth = [page.url for page in islice(breadth_first(graph, graph.seeds(1)), BUDGET)]
    shares = [sum(url in graph.wanted for url in urls) / BUDGET for urls in (best, breadth)]
    assert shares[0] > 1.8 * shares[1]
    assert "harvest" in said
    page = report.read_text()
    ElementTree.fromstring(page.partition("\n")[2])
    assert "breadth-first, same archive" in page and "Harvest rate" in page


def test_the_whole_archive_is_crawled_and_nothing_else(
    web: tuple[Path, Graph], tmp_path: Path
) -> None:
    folder, graph = web
    crawl(folder, tmp_path / "all.parquet", "--budget", "2k", "-j", "2")
    found = set(fetched(tmp_path / "all.parquet"))
    assert found <= set(graph.by_url) and len(found) > 0.95 * len(graph.pages)


def test_redirects_robots_and_holes_of_an_archive(tmp_path: Path) -> None:
    def record(url: str, head: str, body: str = "") -> bytes:
        block = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        fields = (f"WARC/1.1\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\n"
                  "WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:1>\r\n"
                  "Content-Type: application/http; msgtype=response\r\n"
                  f"Content-Length: {len(block)}\r\n\r\n").encode()  # fmt: skip
        return gzip.compress(fields + block + b"\r\n\r\n")

    page = "<p>The river runs past the mill and the old stone bridge every day.</p>"
    html = "200 OK\r\nContent-Type: text/html"
    links = "".join(f'<a href="/{name}">{name}</a>' for name in ("moved", "secret", "gone", "pdf"))
    (tmp_path / "web.warc.gz").write_bytes(
        record("http://s.example/robots.txt", "200 OK\r\nContent-Type: text/plain",
               "User-agent: *\nDisallow: /secret\nCrawl-delay: 60\n")
        + record("http://s.example/", html, page + links)
        + record("http://s.example/moved", "302 Found\r\nLocation: /new")
        + record("http://s.example/new", html, page.replace("river", "road"))
        + record("http://s.example/secret", html, page)
        + record("http://s.example/pdf", "200 OK\r\nContent-Type: application/pdf", "x")
    )  # fmt: skip
    (tmp_path / "seeds.txt").write_text("http://s.example/\n")
    crawl(tmp_path, tmp_path / "out.parquet", "--rejects", str(tmp_path / "rejects.parquet"))
    assert set(fetched(tmp_path / "out.parquet")) == {"http://s.example/", "http://s.example/new"}
    rejects = pq.read_table(tmp_path / "rejects.parquet").to_pylist()
    reasons = {json.loads(row["record"])["url"]: row["reason"] for row in rejects}
    assert reasons["http://s.example/gone"] == "HTTP 404"
    assert "robots" in reasons["http://s.example/secret"]
    assert "application/pdf" in reasons["http://s.example/pdf"]


def test_what_does_not_fit_is_refused(web: tuple[Path, Graph], tmp_path: Path) -> None:
    folder, _ = web
    out = tmp_path / "x.parquet"
    for words in (("--warc", "w"), ("--delay", "1s"), ("--attempts", "3"), ("--revisit", "0s")):
        said = crawl(folder, out, *words, code=2)
        assert f"{words[0]}: only without --replay" in said
    said = crawl(folder, out, "--report", "r.html", code=2)
    assert "--report: only with --focus or --classifier" in said
    said = crawl(folder, out, "--replay", str(tmp_path / "none.warc"), code=2)
    assert "No such file or directory" in said
    (tmp_path / "bad.warc.gz").write_bytes(b"not an archive")
    crawl(folder, out, "--replay", str(tmp_path / "bad.warc.gz"), code=65)
