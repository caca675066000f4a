"""Fetches a second of CPU: the crawler without politeness and extraction, on loopback.

`python tests/bench/bench_crawl.py [PAGES] [ROUNDS] [BYTES]` serves a linked site from another
process and crawls it breadth-first with `--delay 0s --no-extract --warc DIR`. CPU seconds are the
crawler's own, start-up included; beside it the same URLs fetched by bare aiohttp with the same
concurrency, keeping nothing, which no crawler upon aiohttp can beat.
"""

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import site_server

CONCURRENCY = 32
SABIA = [sys.executable, "-m", "sabia.cli.main", "crawl"]


def measured(command):
    """(CPU seconds, seconds) of a child."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, time.monotonic() - started


def crawl(port, folder):
    shutil.rmtree(folder, ignore_errors=True)
    return measured(
        [*SABIA, f"http://127.0.0.1:{port}/p/0", "--contact", "bench@example.org",
         "--allow-private", "--delay", "0s", "--per-host", str(CONCURRENCY), "--concurrency",
         str(CONCURRENCY), "--budget", "1M", "--no-extract", "--warc", f"{folder}/warc", "-q"]
    )  # fmt: skip


async def bare(port, pages):
    import aiohttp

    numbers = iter(range(pages))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def work():
            for number in numbers:
                async with session.get(f"http://127.0.0.1:{port}/p/{number}") as answer:
                    await answer.read()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


def main(pages=5_000, rounds=5, size=8_000):
    with tempfile.TemporaryDirectory() as scratch:
        log = f"{scratch}/log"
        with site_server.running(pages, 1, log, 0, 0, size) as port:
            times = {"sabia": [], "bare aiohttp": []}
            for _ in range(rounds):
                times["sabia"].append(crawl(port, f"{scratch}/out"))
                times["bare aiohttp"].append(
                    measured([sys.executable, __file__, "bare", str(port), str(pages)])
                )
            asked = site_server.read_log(log)
        found = {path for _, _, _, path in asked if path.startswith("/p/")}
        assert len(found) == pages, (len(found), pages)
    print(f"{pages} pages of {size} bytes, {rounds} rounds, median; load {os.getloadavg()[0]:.1f}")
    for name, spent in times.items():
        cpu = statistics.median(pages / cpu for cpu, _ in spent)
        wall = statistics.median(pages / wall for _, wall in spent)
        print(f"{name:14} {cpu:7.0f} fetches per CPU-second, {wall:7.0f} a second")


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        asyncio.run(bare(*map(int, sys.argv[2:])))
    else:
        main(*map(int, sys.argv[1:]))
