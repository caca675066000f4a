"""A site of 5,000 pages crawled through 20 kills: nothing lost, nothing twice, WARC whole."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import site_server
from fastwarc.warc import ArchiveIterator, WarcRecordType
from kills import left_over

CONCURRENCY = 8
SABIA = [sys.executable, "-m", "sabia.cli.main", "crawl"]


def pages_asked(log):
    return [path for _, _, _, path in site_server.read_log(log) if path.startswith("/p/")]


def crawl_through_kills(command, log, pages, kills, seed):
    """Kill at random numbers of requests, then let the crawl end; how often it was killed. The last
    150 requests leave time for the kill on a busy machine."""
    draw = random.Random(seed)
    marks = sorted(draw.randrange(pages // 50, pages - 150) for _ in range(kills))
    killed = 0
    for number, mark in enumerate(marks):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        while child.poll() is None and log.read_bytes().count(b" /p/") < mark:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        if child.poll() is None:
            sent = signal.SIGTERM if number % 5 == 4 else signal.SIGKILL
            os.killpg(child.pid, sent)
            killed += 1
        message = child.communicate()[1]
        assert child.returncode in (0, -signal.SIGKILL, 75), message
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return killed


def warc_pages(folder):
    """URLs of the response records; all digests are looked at."""
    urls = []
    for path in sorted(Path(folder).glob("*.warc.gz")):
        with open(path, "rb") as file:
            for record in ArchiveIterator(file, parse_http=False):
                assert record.verify_block_digest(), record.record_id
                if record.record_type == WarcRecordType.response:
                    urls.append(record.headers["WARC-Target-URI"])
    return urls


def options(tmp_path, port, hosts):
    return [
        *SABIA, f"http://127.0.0.1:{port}/p/0", "--contact", "a@example.org", "--allow-private",
        "--delay", "0s", "--concurrency", str(CONCURRENCY), "--per-host", str(CONCURRENCY // hosts),
        "--budget", "1M", "--warc", str(tmp_path / "warc"), "--warc-size", "1MB", "-q",
    ]  # fmt: skip


def check(tmp_path, port, hosts, pages, killed, log):
    wanted = {f"http://127.0.0.{1 + n % hosts}:{port}/p/{n}" for n in range(pages)}
    kept = Counter(warc_pages(tmp_path / "warc"))
    assert kept.keys() == wanted
    assert set(kept.values()) == {1}
    asked = Counter(pages_asked(log))
    twice = sum(asked.values()) - len(asked)
    print(f"{pages} pages, {killed} kills, {twice} fetched twice of {CONCURRENCY} in flight")
    assert len(asked) == pages
    assert twice <= CONCURRENCY * killed


def test_kills_without_extraction(tmp_path):
    log = tmp_path / "log"
    with site_server.running(300, 2, log, 0.02, 0, 500) as port:
        command = [*options(tmp_path, port, 2), "--no-extract"]
        killed = crawl_through_kills(command, log, 300, 2, seed=1)
        assert killed == 2
        check(tmp_path, port, 2, 300, killed, log)


@pytest.mark.slow
def test_5000_pages_and_20_kills(tmp_path):
    log, out = tmp_path / "log", tmp_path / "o.parquet"
    with site_server.running(5_000, 4, log, 0.002, 0, 800) as port:
        command = [*options(tmp_path, port, 4), "-o", str(out)]
        killed = crawl_through_kills(command, log, 5_000, 20, seed=2)
        assert killed >= 18
        check(tmp_path, port, 4, 5_000, killed, log)
    rows = pq.read_table(out, columns=["url"]).column("url").to_pylist()
    assert len(rows) == len(set(rows)) == 5_000
    assert not left_over(tmp_path)
