"""Politeness in the server's own log: single flight and rest of each host, Crawl-delay, Retry."""

import itertools

import pytest
import site_server
import waiting

SLACK_S = 0.002  # between the clocks of two processes on one machine there is nothing else


@pytest.mark.parametrize(
    ("delay", "crawl_delay_s", "wanted_s"), [("0.15s", 0, 0.15), ("0.05s", 0.3, 0.3)]
)
def test_hosts_rest_between_requests(tmp_path, delay, crawl_delay_s, wanted_s):
    log, pages, hosts = tmp_path / "log", 24, 3
    with site_server.running(pages, hosts, log, 0.02, crawl_delay_s) as port:
        waiting.run(
            "crawl", f"http://127.0.0.1:{port}/p/0", "--contact", "a@example.org", "-q",
            "--allow-private", "--delay", delay, "--no-extract", "--warc", tmp_path / "warc",
            check=True,
        )  # fmt: skip
    asked = site_server.read_log(log)
    assert len(asked) == pages + hosts  # each page once, and each host's robots.txt
    by_host = {}
    for came, left, host, path in sorted(asked):
        by_host.setdefault(host, []).append((came, left, path))
    assert len(by_host) == hosts
    for visits in by_host.values():
        assert visits[0][2] == "/robots.txt"
        for (_, left, _), (came, _, path) in itertools.pairwise(visits):
            assert came - left >= wanted_s - SLACK_S, path
    starts = [came for came, _, _, _ in sorted(asked)]
    gaps = [later - came for came, later in itertools.pairwise(starts)]
    assert min(gaps) < wanted_s  # hosts do not wait for others


def test_flight_is_bounded_by_host_and_in_all(tmp_path):
    log, pages, hosts = tmp_path / "log", 90, 3
    with site_server.running(pages, hosts, log, 0.02, 0, 2_000, 5) as port:
        waiting.run(
            "crawl", f"http://127.0.0.1:{port}/p/0", "--contact", "a@example.org", "-q",
            "--allow-private", "--delay", "0s", "--per-host", "2", "--concurrency", "5",
            "--no-extract", "--warc", tmp_path / "warc", check=True,
        )  # fmt: skip
    asked = site_server.read_log(log)
    assert len(asked) == pages + hosts
    assert most_at_once(asked) == 5
    by_host = {n: [row for row in asked if row[2].startswith(f"127.0.0.{n}:")] for n in (1, 2, 3)}
    assert sorted(map(most_at_once, by_host.values()))[1:] == [2, 2]  # five are 2 + 2 + 1


def most_at_once(asked):
    """The largest number of requests that the server had not answered at one time."""
    ends = sorted([(came, 1) for came, *_ in asked] + [(left, -1) for _, left, *_ in asked])
    running = most = 0
    for _, step in ends:
        running += step
        most = max(most, running)
    return most
