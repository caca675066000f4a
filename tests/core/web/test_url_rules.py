"""Canonical URLs, page families and what URLs give away of traps."""

import random
import re

import can_ada
import pytest

from sabia.core import urls
from sabia.core.urls import canonical, comparison_key
from sabia.core.web.frontier import fingerprint
from sabia.core.web.url_rules import host_of, looks_binary, origin_of, template_of, trap


@pytest.mark.parametrize(
    ("given", "base", "wanted"),
    [
        ("HTTP://EXAMPLE.com:80/a/./b/../c", "", "http://example.com/a/c"),
        ("https://example.com:443", "", "https://example.com/"),
        ("https://example.com:8443/#top", "", "https://example.com:8443/"),
        ("http://example.com./x", "", "http://example.com/x"),
        ("/x?utm_source=a&b=2&a=1&fbclid=z#f", "http://h/", "http://h/x?b=2&a=1"),
        ("?utm_medium=web", "http://h/p", "http://h/p"),
        ("../x", "http://h/b/c/d", "http://h/b/x"),
        ("//other/p", "https://h/", "https://other/p"),
        ("/%7euser/%2fz/%c3%a9", "http://h", "http://h/~user/%2Fz/%C3%A9"),
        ("/caf\u00e9", "http://h/", "http://h/caf%C3%A9"),
        (" /a\n b ", "http://h/", "http://h/a%20b"),
        ("/p;jsessionid=AB12", "http://h/", "http://h/p"),
        ("http://b\u00fccher.example/", "", "http://xn--bcher-kva.example/"),
    ],
)
def test_canonical(given, base, wanted):
    assert canonical(given, base) == wanted
    assert canonical(wanted) == wanted


@pytest.mark.parametrize(
    "given",
    ["mailto:a@b.c", "javascript:void(0)", "ftp://h/", "http://u:p@h/", "http://", "http://[", ""],
)
def test_what_is_no_url(given):
    assert canonical(given) is None


def test_parts():
    url = "http://h:8080/c/2031/01?page=3&x=1"
    assert host_of(url) == "h:8080"
    assert origin_of(url) == "http://h:8080"
    assert template_of(url) == "http://h:8080/c/0/0?page,x"
    assert template_of("http://h1/about") == "http://h1/about"
    assert template_of("http://h/2031-March-01/x") == template_of("http://h/1999-june-30/x")
    uuid = "5f0c1d2e-aaaa-bbbb-cccc-0123456789ab"
    assert template_of(f"http://h/s/{uuid}") == "http://h/s/0"
    assert (
        template_of("http://h/s/deadbeef01") == template_of("http://h/s/00c0ffee") == "http://h/s/0"
    )
    assert template_of("http://h/marching/faded") == "http://h/marching/faded"
    assert looks_binary("http://h/a.JPG?x=1.html")
    assert not looks_binary("http://h/a.html?file=b.zip")


@pytest.mark.parametrize(
    ("url", "depth", "said"),
    [
        ("http://h/a/b/c", 3, None),
        ("http://h/a", 51, "deeper"),
        ("http://h/" + "x" * 2_000, 1, "longer"),
        ("http://h/a/b/a/b/a/b", 1, "repeats"),
        ("http://h/" + "/".join(str(n) for n in range(30)), 1, "segments"),
        ("http://h/calendar/2999/12/", 1, "calendar"),
        ("http://h/?year=2999&x=1", 1, "calendar"),
        ("http://h/archive/1850/12/", 1, None),
        ("http://h/part/9999", 1, None),
        ("http://h/?" + "&".join(f"a{n}=1" for n in range(20)), 1, "parameters"),
    ],
)
def test_traps(url, depth, said):
    found = trap(url, depth, 50)
    assert found is None if said is None else said in found


BASES = ("http://h/b/c?x=1#f", "https://h:81/")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("///other/p", ("http://other/p", "https://other/p")),
        ("\\\\other\\p", ("http://other/p", "https://other/p")),
        ("\\p", ("http://h/p", "https://h:81/p")),
        ("http:p", ("http://h/b/p", "http://p/")),  # relative only where the schemes are the same
        ("https:p", ("https://p/", "https://h:81/p")),
        ("HTTP://other", ("http://other/", "http://other/")),
        ("https:/\\other", ("https://other/", "https://other/")),
        ("", ("http://h/b/c?x=1", "https://h:81/")),
        ("#g", ("http://h/b/c?x=1", "https://h:81/")),
        ("?y#g", ("http://h/b/c?y", "https://h:81/?y")),
        ("a:b/../c", (None, None)),
        ("./a:b/../c", ("http://h/b/c", "https://h:81/c")),
        ("\t/ p\n", ("http://h/%20p", "https://h:81/%20p")),
        ("../../..", ("http://h/", "https://h:81/")),
    ],
)
def test_relative_urls_are_resolved_as_browsers_do(given, wanted):
    assert tuple(canonical(given, base) for base in BASES) == wanted


@pytest.mark.parametrize("given", ["http://./", "http://../", "http://a../", "http://127.1../x",
                                   "http://h/\ud800", "http://h/" + "x" * 20_000])  # fmt: skip
def test_hosts_and_characters_that_no_server_has(given):
    assert canonical(given) is None


def test_what_is_fetched_keeps_parameters_that_may_matter():
    url = "http://h/p?at_x=1&ns_y=2&sessionid=3&session_id=4&pk_z=5&wt.a=6&id=7"
    assert canonical(url + "&utm_source=8&fbclid=9&PHPSESSID=a") == url
    assert comparison_key(url) == "http://h/p?id=7"
    assert fingerprint(url) == fingerprint("http://h/p?id=7") != fingerprint("http://h/p")


def test_urls_recognized_as_canonical_are_what_the_parser_makes_of_them(monkeypatch):
    choice = random.Random(5)
    pieces = ("/", "a", "B1", ".", "..", "-", "_", "~", ",", "?", "&", "=", "a=b", "utm_source=c",
              "%41", ";sid=1", "#", ":80", "@", "é", "'", "*", "(", "$", "//", " ")  # fmt: skip
    hosts = ("h.com/", "www.a-b.org", "h/", "127.1/", "1.2.3.4", "a.0x1/", "A.com/", "xn--a.de/",
             "a.-b/", "", "https.co/")  # fmt: skip
    given = []
    for _ in range(4_000):
        path = "".join(choice.choices(pieces, k=choice.randrange(6)))
        given.append(f"{choice.choice(('http', 'https'))}://{choice.choice(hosts)}{path}")
    fast = [canonical(url) for url in given]
    recognized = sum(bool(urls._PLAIN.fullmatch(url)) for url in given)
    monkeypatch.setattr(urls, "_PLAIN", re.compile("(?!)"))
    assert fast == [canonical(url) for url in given]
    assert recognized > 150


SCHEMES = ("http:", "https:", "HTTP:", "ftp:", "", "javascript:")
SLASHES = ("//", "//", "//", "/", "", "///", "\\\\", "/\\")
HOSTS = ("example.com", "EXAMPLE.com.", "a..", "1.2.3.4", "1.2.3.4.", "0x7f.1", "a.1..", "127.1.",
         "b\u00fccher.example", "xn--bcher-kva.example", "[::1]", "[::ffff:1.2.3.4]", ".", "..",
         "%65xample.com", "ex ample", "u:p@h", "u@h", "h:80", "h:443", "h:8080", "h:99999", "",
         "a_b.c", "\u65e5\u672c.jp", "host%2e", "%2e", "\u00df.de", "-a-.b")  # fmt: skip
PARTS = ("/", "//", "a", "..", ".", "%2e%2e", "%2E", "%41", "%7e", "%%34%31", "%4%31", "%", "%zz",
         "%c3%a9", "\u00e9", ";jsessionid=AB", "..;sid=1", "\\", "?", "&", "=", "utm_source=1",
         "at_x=1", "sessionid=2", "a=1", "#", " ", "\t", "\n", "'", '"', "<", "|", "^", "{", "@",
         ":", "~", "%25", "%2525", "%00", "\x00", "\x7f", "[", "*", "%2F", "%3f", "%23",
         "%26")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_20_000_urls_are_idempotent_and_have_the_host_of_whatwg(seed):
    choice = random.Random(seed)
    known = 0
    for _ in range(20_000):
        parts = (choice.choice(PARTS) for _ in range(choice.randrange(12)))
        ends = (choice.choice(("", "", "", " ", "\x01", "\t")) for _ in range(2))
        url = f"{choice.choice(SCHEMES)}{choice.choice(SLASHES)}{choice.choice(HOSTS)}"
        url = "".join(parts).join((next(ends) + url, next(ends)))
        for base in BASES:
            form = canonical(url, base)
            assert form is None or canonical(form) == form, (url, base)
        form = canonical(url)
        try:
            parsed = can_ada.parse(url)
        except ValueError:
            parsed = None
        if form is None:
            assert (
                parsed is None or parsed.protocol not in ("http:", "https:") or parsed.username
                or "" in parsed.hostname.removesuffix(".").split(".")
            ), url  # fmt: skip
            continue
        known += 1
        again = can_ada.parse(form)
        assert canonical(form) == form and comparison_key(form) == comparison_key(
            comparison_key(form)
        )
        assert again.hostname == parsed.hostname.removesuffix("."), url
        assert (again.protocol, again.port) == (parsed.protocol, parsed.port), url
    assert known > 1_500
