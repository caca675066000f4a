"""Canonical URLs, page families and what URLs give away of traps."""

import pytest

from sabia.core.urls import canonical
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
