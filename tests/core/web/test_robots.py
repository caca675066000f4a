"""RFC 9309: what each kind of answer means, and rules for our product token."""

import time

import pytest

from sabia.core.web.robots import MAX_BYTES, Rules, Verdict, verdict


@pytest.mark.parametrize(
    ("status", "hops", "state", "allowed"),
    [
        (200, 0, "rules", False),
        (401, 0, "none", True),
        (403, 0, "none", True),
        (404, 0, "none", True),
        (410, 0, "none", True),
        (429, 0, "unreachable", False),
        (500, 0, "unreachable", False),
        (503, 0, "unreachable", False),
        (None, 0, "unreachable", False),
        (301, 6, "none", True),
    ],
)
def test_answers(status, hops, state, allowed):
    found = verdict(status, b"User-agent: *\nDisallow: /", hops)
    assert found.state == state
    assert Rules(found, "sabia").allowed("http://h/page") is allowed


@pytest.mark.parametrize(
    ("text", "path", "allowed"),
    [
        ("", "/x", True),
        ("User-agent: *\nDisallow: /private/", "/private/x", False),
        ("User-agent: *\nDisallow: /private/\nAllow: /private/open", "/private/open", True),
        ("User-agent: *\nDisallow: /a\nAllow: /a", "/a", True),
        ("User-agent: *\nDisallow: /*?sort=", "/l?sort=1", False),
        ("User-agent: *\nDisallow: /x$", "/x", False),
        ("User-agent: *\nDisallow: /x$", "/xy", True),
        ("User-agent: other\nDisallow: /", "/x", True),
        ("User-agent: sabia\nAllow: /\n\nUser-agent: *\nDisallow: /", "/x", True),
        ("User-agent: *\nDisallow:\n\nUser-agent: SABIA\nDisallow: /", "/x", False),
        ("User-agent: sabia/1.0\nDisallow: /", "/x", False),
        ("User-agent: sabia bot\nDisallow: /", "/x", False),
        ("User-agent: sabiax\nDisallow: /", "/x", True),
        ("User-agent: a\nUser-agent: sabia\nDisallow: /x", "/x", False),
        ("User-agent: *\nDisallow: /caf\u00e9", "/caf%C3%A9", False),
        ("User-agent: *\nDisallow: /", "/robots.txt", True),
        ("<html>not rules</html>", "/x", True),
        ("User-agent: sabia\nUnknown: line\nUser-agent: a\nDisallow: /x", "/x", False),
        ("user-agent sabia\ndisallow /", "/x", False),
    ],
)
def test_rules(text, path, allowed):
    assert Rules(Verdict(text), "sabia").allowed(f"http://h{path}") is allowed


def test_crawl_delay_is_bounded():
    assert Rules(Verdict("User-agent: *\nCrawl-delay: 2.5"), "sabia").delay_s() == 2.5
    assert Rules(Verdict("User-agent: *\nCrawl-delay: 86400"), "sabia").delay_s() == 60
    assert Rules(Verdict(""), "sabia").delay_s() == 0


def test_the_first_500_kib_count():
    body = b"User-agent: *\nDisallow: /a\n" + b"#" * MAX_BYTES + b"\nDisallow: /b\n"
    rules = Rules(verdict(200, body), "sabia")
    assert not rules.allowed("http://h/a")
    assert rules.allowed("http://h/b")
    assert not Rules(verdict(200, b"\xef\xbb\xbfUser-agent: *\nDisallow: /a"), "s").allowed(
        "http://h/a"
    )


@pytest.mark.parametrize("text", ["\n" * 500_000, "a" * 500_000, " " * 500_000, "u\r" * 200_000])
def test_hostile_files_cost_little(text):
    started = time.process_time()
    assert Rules(Verdict(text), "sabia").allowed("http://h/x")
    assert time.process_time() - started < 2
