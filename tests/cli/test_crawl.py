"""sabia crawl through the shell: the little web whole and steered, kills, WARC, folders, errors."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forked import Command

from sabia.core.shards.outputs import read_metadata
from sabia.examples.little_web import build_site
from sabia.examples.little_web.labels import focus_texts
from sabia.examples.little_web.server import LittleWebServer

SABIA = Command("crawl")
PLAIN = [sys.executable, "-m", "sabia.cli.main", "crawl"]
FAST = ["--contact", "test@example.org", "--delay", "0s", "--backoff", "0.05s", "--attempts", "2"]
LOCAL = [*FAST, "--allow-private"]
ONE = ["http://example.org/", *FAST]


@pytest.fixture(scope="module")
def site():
    return build_site(160, 0)


@pytest.fixture
def server(site):
    server = LittleWebServer(site).start()
    yield server
    server.shutdown()


@pytest.fixture
def seeds(server, tmp_path):
    path = tmp_path / "seeds.txt"
    path.write_text(f"# the little web\n{server.base_url}/\n")
    return path


def crawl(*arguments, check=0, **settings):
    done = subprocess.run(
        [*SABIA, *map(str, arguments)], capture_output=True, timeout=120, check=False, **settings
    )
    assert done.returncode == check, done.stderr.decode()
    return done


def rows(path):
    return pq.read_table(path).to_pylist()


def paths(path, server):
    return [row["url"].removeprefix(server.base_url) for row in rows(path)]


def relevant(site):
    return {page.path for page in site.pages.values() if page.relevant}


def test_whole_site(server, site, seeds, tmp_path):
    out, stats = tmp_path / "o.parquet", tmp_path / "stats.json"
    crawl(seeds, *LOCAL, "--warc", tmp_path / "warc", "--stats", stats, "-o", out)
    found = paths(out, server)
    assert len(found) == len(set(found))
    assert relevant(site) <= set(found)
    texts = {row["url"].removeprefix(server.base_url): row["text"] for row in rows(out)}
    for path in relevant(site):
        page = site.pages[path]  # the headline goes into meta, as the title
        assert f"{page.title} {texts[path]}".split() == page.text.split(), path
    asked = [path for _, path, _ in server.requests]
    assert not [path for path in asked if path.startswith("/private/") or "?sort=" in path]
    assert asked.count("/robots.txt") == 1
    assert len([path for path in asked if path.startswith("/calendar/")]) <= 60
    assert len([path for path in asked if path.startswith("/offers/list")]) <= 25
    assert len([path for path in asked if path.startswith("/go/round")]) == 1
    again = {path for path in asked if asked.count(path) > 1}
    assert again == {f"/library/archive/{f}.html"
                     for f in ("throttled", "busy", "status-500", "truncated")}  # fmt: skip
    _check_waits(server)
    _check_rejects(tmp_path / "o.rejects.parquet")
    _check_figures(json.loads(stats.read_text()), len(found))
    _check_replay(tmp_path, out)


def _check_waits(server):
    for fault in ("throttled", "busy"):
        times = [when for when, path, _ in server.requests if fault in path]
        assert times[1] - times[0] >= 1.0  # Retry-After: 1


def _check_rejects(path):
    made = read_metadata(str(path))  # so that a report lists the file and how it is made again
    assert made["command"] == "crawl" and made["out"] == path.name.replace(".rejects", "")
    reasons = " ".join(row["reason"] for row in rows(path))
    for said in ("robots.txt disallows it", "HTTP 404", "HTTP 500", "content type application/pdf",
                 "larger than", "transfer failed", "169.254.169.254", "trap", "redirects",
                 "no text on the page"):  # fmt: skip
        assert said in reasons, said


def _check_figures(stats, documents):
    assert stats["rows_out"] == documents
    assert stats["counters"]["robots_denied"] > 0
    assert stats["counters"]["redirects"] >= 5


def _check_replay(tmp_path, out):
    """The WARC that was written gives the same texts without the network."""
    again = tmp_path / "again.parquet"
    crawl(tmp_path / "warc" / "pages-00000.warc.gz", "-o", again)
    texts = {row["url"]: row["text"] for row in rows(out)}
    assert {row["url"]: row["text"] for row in rows(again)} == texts


def test_best_first_beats_breadth_first(server, site, seeds, tmp_path):
    focus = tmp_path / "focus.txt"
    focus.write_text("\n".join(focus_texts(0)))
    hits = {}
    for order in ("best", "breadth"):
        out, stats = tmp_path / f"{order}.parquet", tmp_path / f"{order}.json"
        crawl(seeds, *LOCAL, "--focus", focus, "--order", order, "--budget", 100,
              "-o", out, "--stats", stats)  # fmt: skip
        hits[order] = len(relevant(site) & set(paths(out, server)))
        figures = json.loads(stats.read_text())
        assert figures["rows_in"] == 100
        said = figures["counters"]["harvest_rate"]
        scores = [dict(row["scores"])["focus"] for row in rows(out)]
        assert said == pytest.approx(sum(score >= 0.5 for score in scores) / 100)
        orders = [json.loads(row["meta"])["order"] for row in rows(out)]
        assert orders == sorted(set(orders))
    assert hits["best"] >= 1.5 * hits["breadth"]
    assert hits["best"] >= 50


def test_kill_9_and_resume(server, site, seeds, tmp_path):
    out = tmp_path / "o.parquet"
    command = [*PLAIN, str(seeds), *LOCAL, "--budget", "150", "-o", str(out)]
    for wanted in (30, 90):
        child = subprocess.Popen(command, stderr=subprocess.PIPE)
        while len(server.requests) < wanted:
            time.sleep(0.01)
            assert child.poll() is None
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        assert not out.exists()
    crawl(*command[len(PLAIN) :])
    killed = paths(out, server)
    asked = [path for _, path, status in server.requests if status == 200]
    twice = sum(asked.count(path) - 1 for path in set(asked) - {"/robots.txt"})
    assert twice <= 2  # what was in flight when it was killed
    whole = tmp_path / "whole.parquet"
    crawl(seeds, *LOCAL, "--budget", 150, "-o", whole)
    assert killed == paths(whole, server)


def test_sigterm_saves_and_exits_75(server, seeds, tmp_path):
    out = tmp_path / "o.parquet"
    command = [*PLAIN, str(seeds), *LOCAL, "--budget", "40", "--delay", "0.05s", "-o", str(out)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE)
    while len(server.requests) < 15:
        time.sleep(0.01)
    child.terminate()
    started = time.monotonic()
    _, said = child.communicate(timeout=20)
    assert (child.returncode, time.monotonic() - started < 5) == (75, True), said
    assert not out.exists()
    crawl(*command[len(PLAIN) :])
    assert len(rows(out)) == 40
    before = len(server.requests)
    crawl(*command[len(PLAIN) :], "--budget", "50")  # a larger budget goes on from there
    assert len(rows(out)) == 50
    assert [status for _, _, status in server.requests[before:]].count(200) == 10


def test_private_addresses_are_refused_by_default(server, seeds, tmp_path):
    done = crawl(seeds, *FAST, "-o", tmp_path / "o.parquet", check=1)
    assert b"no page was fetched" in done.stderr
    assert b"not 80 or 443" in done.stderr
    assert not server.requests
    assert not (tmp_path / "o.parquet").exists()
    done = crawl("http://localhost/", *FAST, "-o", tmp_path / "o.parquet", check=1)
    assert b"not public" in done.stderr


def test_pipe_in_and_out(server, tmp_path):
    lines = f"{server.base_url}/learn/en/sums/1.html\n".encode()
    done = crawl(*LOCAL, "--budget", 3, "--to", "jsonl", input=lines, cwd=tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[0]["url"] == f"{server.base_url}/learn/en/sums/1.html"
    assert len(found) == 3
    done = crawl(*LOCAL, "--budget", 2, input=lines, cwd=tmp_path)
    assert pq.read_table(io.BytesIO(done.stdout)).num_rows == 2


@pytest.mark.parametrize(
    ("arguments", "given", "code", "said"),
    [
        (["http://example.org/"], None, 2, b"--contact is missing"),
        ([*ONE, "--order", "best"], None, 2, b"--order: best only with --focus or"),
        ([*ONE, "--order", "worst"], None, 2, b"expected best or breadth"),
        ([*ONE, "--focus", "a", "--classifier", "b"], None, 2, b"--focus: not together with"),
        ([*ONE, "--hard"], None, 2, b"--hard: only with --focus or --classifier"),
        ([*ONE, "--label", "keep"], None, 2, b"--label: only with --classifier"),
        ([*ONE, "--warc-size", "1GB"], None, 2, b"--warc-size: only with --warc"),
        ([*ONE, "--no-extract"], None, 2, b"--no-extract: only with --warc"),
        ([*ONE, "--no-extract", "--warc", "w"], None, 2, b"--no-extract: not together with --out"),
        ([*ONE, "--no-extract", "--warc", "w", "--focus", "a"], None, 2, b"only without --focus"),
        ([*ONE, "--exclude", "a"], None, 2, b"--exclude: only with files of pages as INPUT"),
        ([*ONE, "--shard", "0/2"], None, 2, b"slice"),
        (["no/such/file.html"], None, 65, b"no/such/file.html"),
        (["no/such/thing"], None, 2, b"No such file or directory"),
        (FAST, b"", 65, b"empty"),
        (FAST, b"neither URLs nor pages\n", 65, b"no seed URL"),
        (["http://example.org/", __file__.replace(".py", ".parquet")], None, 2, b""),
    ],
)
def test_errors(arguments, given, code, said, tmp_path):
    settings = {"stdin": subprocess.DEVNULL} if given is None else {"input": given}
    done = crawl(*arguments, "-o", tmp_path / "o.parquet", check=code, **settings)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 4


@pytest.mark.parametrize(
    "words",
    [["--depth", "3"], ["--stay"], ["--budget", "10k"], ["--delay", "1s"], ["--state", "s"],
     ["--replay", "x"], ["--warc", "w"], ["--contact", "me@example.org"], ["--revisit", "1d"],
     ["--focus", "a", "--order", "breadth"], ["--focus", "a", "--hard"]],
)  # fmt: skip
def test_files_take_no_options_of_the_network(words, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "A record of its own."}\n')
    done = crawl(tmp_path / "rows.jsonl", *words, "-o", tmp_path / "o.parquet", check=2)
    flag = next(word for word in reversed(words) if word.startswith("--"))
    assert f"{flag}: only with seed URLs as INPUT".encode() in done.stderr
    assert not (tmp_path / "o.parquet").exists()


def article(n):
    text = " ".join(f"Sentence {i} of page {n} is about rivers." for i in range(20))
    return f"<html><title>Page {n}</title><main><p>{text}</p></main></html>"


def warc(pages):
    parts = []
    for n in range(pages):
        http = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n{article(n)}".encode()
        head = (
            f"WARC/1.1\r\nWARC-Type: response\r\nWARC-Target-URI: http://h/{n}\r\n"
            f"WARC-Date: 2026-01-02T03:04:05Z\r\nWARC-Record-ID: <urn:uuid:{n:032x}>\r\n"
            f"Content-Type: application/http\r\nContent-Length: {len(http)}\r\n\r\n"
        )
        parts.append(gzip.compress(head.encode() + http + b"\r\n\r\n"))
    return b"".join(parts)


def test_the_estimate_of_an_archive_counts_its_pages(tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(warc(40))
    piped = json.loads(crawl("--dry-run", "--json", input=warc(40)).stdout)
    named = json.loads(crawl("--dry-run", "--json", tmp_path / "a.warc.gz").stdout)
    assert piped["reads"] == [{"name": "<stdin>", "bytes": len(warc(40))}]
    assert named["reads"][0]["bytes"] == len(warc(40)) and named["cpu_seconds"] > 0
    crawl(tmp_path / "a.warc.gz", "-o", tmp_path / "o.parquet")
    written = (tmp_path / "o.parquet").stat().st_size
    for plan in (piped, named):
        assert plan["bytes_written"] == pytest.approx(written, rel=0.3)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "own"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.html").write_text(article(100))
    (folder / "deep" / "b.htm.gz").write_bytes(gzip.compress(article(101).encode()))
    (folder / "deep" / "novel.txt").write_text("Era uma vez um rio.\n" * 50)
    (folder / "rows.jsonl").write_text(
        '{"text": "A record of its own.", "year": 1899}\n{"text": 5}\n{"no": "text"}\n'
    )
    (folder / "c.warc.gz").write_bytes(warc(4))
    (folder / "cut.warc.gz").write_bytes(warc(6)[:-30])
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def test_folder_of_own_files(folder, tmp_path):
    out = tmp_path / "docs"
    crawl(folder, "-j", 2, "--focus", "rivers", "-o", out)
    found = [row for part in sorted(out.glob("part-*.parquet")) for row in rows(part)]
    urls = sorted(Path(row["url"] or "record").name for row in found)
    assert urls == sorted(
        ["a.html", "b.htm.gz", "novel.txt", "record", *"0123", *"01234", "5"]
    )  # fmt: skip
    metas = [json.loads(row["meta"] or "{}") for row in found]
    assert [m["year"] for m in metas if "year" in m] == [1899]
    assert [m["title"] for m in metas if m.get("truncated")] == ["Page 5"]
    rejected = [row for part in Path(f"{out}.rejects").glob("*.parquet") for row in rows(part)]
    assert sorted(row["reason"].split(" in record")[0] for row in rejected) == [
        "cut short", "no text", "text is int (expected a string)",
    ]  # fmt: skip
    scores = {row["url"]: dict(row["scores"])["focus"] for row in found}
    assert scores["http://h/0"] == 1.0
    assert (
        "shards already done"
        in crawl(folder, "-j", 2, "--focus", "rivers", "-o", out).stderr.decode()
    )


def test_slices_cover_a_folder(folder, tmp_path):
    out = tmp_path / "docs"
    for part in ("0/2", "1/2"):
        crawl(folder, "--shard", part, "-o", out)
    sliced = [r["id"] for part in sorted(out.glob("part-*.parquet")) for r in rows(part)]
    crawl(folder, "-o", tmp_path / "one.parquet")
    assert sorted(sliced) == sorted(r["id"] for r in rows(tmp_path / "one.parquet"))


def test_truncated_warc_on_a_pipe(tmp_path):
    whole = warc(8)
    done = crawl("-o", tmp_path / "o.parquet", input=whole[: len(whole) // 2], cwd=tmp_path)
    assert 3 <= len(rows(tmp_path / "o.parquet")) <= 5
    reasons = [row["reason"] for row in rows(tmp_path / "o.rejects.parquet")]
    assert len(reasons) == 1
    assert "cut short" in reasons[0]
    assert b"1 rejected" in done.stderr


def test_dry_run_touches_nothing(server, seeds, tmp_path):
    done = crawl(seeds, *LOCAL, "--dry-run", "-o", tmp_path / "o.parquet")
    assert b"seeds: 1\n" in done.stdout
    assert not server.requests
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seeds.txt"]
