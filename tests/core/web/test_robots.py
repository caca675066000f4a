"""RFC 9309: what each kind of answer means, and rules for our product token.

Cases in our own words; `test_robots_google` asks the judge of a parser's authors.
"""

import random
import re
import time

import pytest

from sabia.core.web.robots import (
    KEEP_S,
    MAX_BYTES,
    MAX_DELAY_S,
    RobotsFile,
    Rules,
    path_of,
    robots_file_of,
)


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
    found = robots_file_of(status, b"User-agent: *\nDisallow: /", hops)
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
        ("useragent: sabia\ndissalow: /x", "/x", False),
        ("user-agent: sabia\rdisallow: /x\r", "/x", False),  # CR alone
        ("user-agent: sabia\r\n\r\ndisallow: /x", "/x", False),  # a blank line closes nothing
        ("\ufeffuser-agent: sabia\ndisallow: /x", "/x", False),
        ("disallow: /x\nuser-agent: sabia\nallow: /", "/x", True),  # outside of groups
        ("user-agent: sabia\nsitemap: http://h/s\nuser-agent: b\ndisallow: /x", "/x", False),
        ("user-agent: sabia\ncrawl-delay: 5\nuser-agent: b\ndisallow: /x", "/x", False),
        ("user-agent: sabia\nallow: /y\nuser-agent: b\ndisallow: /x", "/x", True),
        (
            "user-agent: sabia\ndisallow: /x\nuser-agent: b\ndisallow: /\nuser-agent: sabia\n"
            "disallow: /z",
            "/z",
            False,
        ),  # groups of one agent are one
        ("user-agent: sabia\ndisallow: /a/b # c", "/a/b", False),
        ("user-agent: sabia\n#disallow: /a", "/a", True),
        ("user-agent: *\ndisallow: /\nuser-agent: sabia", "/x", True),  # named, with no rule
        ("user-agent: sabia\ndisallow: /\nallow: /a*c", "/abbc?x", True),
        ("user-agent: sabia\ndisallow: /\nallow: /a*c$", "/abbc?x", False),
        ("user-agent: sabia\ndisallow: /*/*/end$", "/a/b/end", False),
        ("user-agent: sabia\ndisallow: /*/*/end$", "/a/end", True),
        ("user-agent: sabia\ndisallow: /ab*ab$", "/ab", True),  # parts may not overlap
        ("user-agent: sabia\ndisallow: /$a", "/$a", False),  # a dollar inside is one
        ("user-agent: sabia\ndisallow: /a\nallow: /A", "/a", False),  # paths keep their case
        ("user-agent: sabia\ndisallow: /%7ejoe/", "/~joe/", False),  # RFC 9309, 2.2.2
        ("user-agent: sabia\ndisallow: /~joe/", "/%7ejoe/", False),
        ("user-agent: sabia\ndisallow: /a%2fb", "/a/b", True),  # reserved ones stay
        ("user-agent: sabia\ndisallow: /a%2fb", "/a%2Fb", False),
        ("user-agent: sabia\ndisallow: /\nallow: /%7ejoe/", "/~joe/", False),  # both readings
        ("user-agent: sabia\ndisallow: /\nallow: /index.html", "/", True),
        ("user-agent: sabia\ndisallow: /?q=", "/?q=1", False),
        ("user-agent: sabia\ndisallow: /" + "a" * 20_000, "/" + "a" * 16_700, False),  # long lines
    ],
)
def test_rules(text, path, allowed):
    found = robots_file_of(200, text.encode())
    assert Rules(found, "sabia").allowed(f"http://h{path}") is allowed


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h", "/"), ("http://h/", "/"), ("http://h?q", "/?q"), ("http://h/a?b#c", "/a?b"),
        ("http://h:8080/a;b?u=http://g/", "/a;b?u=http://g/"), ("//h/a", "/a"), ("/a:b", "/a:b"),
    ],
)  # fmt: skip
def test_paths(url, path):
    assert path_of(url) == path


def test_matching_agrees_with_expressions():
    """Random patterns over a small alphabet, beside the same as regular expressions."""
    draw = random.Random(3)
    for _ in range(3_000):
        pattern = "/" + "".join(draw.choice("ab*") for _ in range(draw.randrange(6)))
        pattern += draw.choice(["", "$"])
        path = "/" + "".join(draw.choice("ab") for _ in range(draw.randrange(8)))
        form = re.escape(pattern.removesuffix("$")).replace(r"\*", ".*")
        wanted = re.match(form + ("$" if pattern.endswith("$") else ""), path) is None
        found = Rules(RobotsFile(f"user-agent: *\ndisallow: {pattern}"), "sabia")
        assert found.allowed(f"http://h{path}") is wanted, (pattern, path)


def test_sitemaps_and_delays_of_groups():
    text = (
        "Sitemap: http://h/1.xml\nuser-agent: other\ncrawl-delay: 9\nuser-agent: *\n"
        "crawl-delay: 3\nuser-agent: sabia\nsite-map: /2.xml\ncrawl-delay: .5 # s\ndisallow:\n"
    )
    found = Rules(RobotsFile(text), "sabia")
    assert (found.sitemaps, found.delay_s()) == (["http://h/1.xml", "/2.xml"], 0.5)
    assert Rules(RobotsFile(text), "nobody").delay_s() == 3  # still open below, but the longer wins
    assert Rules(RobotsFile("user-agent: *\ncrawl-delay: soon"), "sabia").delay_s() == 0


def test_how_long_a_verdict_stands():
    assert robots_file_of(200).keep_s == KEEP_S
    assert robots_file_of(200, cache="public, max-age=600").keep_s == 600
    assert robots_file_of(404, cache="max-age=0").keep_s == 60
    assert robots_file_of(200, cache="max-age=99999999").keep_s == KEEP_S
    assert robots_file_of(503, cache="max-age=86400").keep_s < 3600


def test_crawl_delay_is_bounded():
    assert Rules(RobotsFile("User-agent: *\nCrawl-delay: 2.5"), "sabia").delay_s() == 2.5
    assert Rules(RobotsFile("User-agent: *\nCrawl-delay: 86400"), "sabia").delay_s() == MAX_DELAY_S
    assert Rules(RobotsFile(""), "sabia").delay_s() == 0


def test_the_first_4_mib_count():
    start = b"User-agent: *\nDisallow: /a\n"
    filler = b"#" * (3 << 20)
    rest = b"#" * (MAX_BYTES - len(start + filler) - 24)
    body = start + filler + b"\nDisallow: /b\n" + rest + b"\nAllow: /a/private/$\nDisallow: /c"
    assert len(start + filler) > 500 << 10 and body[:MAX_BYTES].endswith(b"\nAllow: /a")
    rules = Rules(robots_file_of(200, body), "sabia")
    assert not rules.allowed("http://h/a")  # the rule that is cut in the middle does not count
    assert not rules.allowed("http://h/b")
    assert rules.allowed("http://h/c")
    assert not Rules(robots_file_of(200, b"\xef\xbb\xbfUser-agent: *\nDisallow: /a"), "s").allowed(
        "http://h/a"
    )


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 500_000,
        "a" * 500_000,
        " " * 500_000,
        "u\r" * 200_000,
        "user-agent: *\n" + ("disallow: /" + "*a" * 8_000 + "\n") * 31,
    ],
)
def test_hostile_files_cost_little(text):
    started = time.process_time()
    assert Rules(RobotsFile(text), "sabia").allowed("http://h/" + "a" * 1_990)
    assert time.process_time() - started < 10
