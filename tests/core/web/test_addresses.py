"""The guard: which addresses, ports and names are refused, and that the checked one is used."""

import asyncio
import socket

import pytest

from sabia.core.options.crawl import CrawlOptions
from sabia.core.urls import canonical
from sabia.core.web import addresses
from sabia.core.web.addresses import (
    AddressRefused,
    GuardedResolver,
    check_url,
    is_public,
    may_connect,
)
from sabia.core.web.fetch import Fetcher, Response

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.0.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "fec0::1", "ff02::1", "::ffff:10.0.0.1",
    "::ffff:127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "::127.0.0.1", "2001:db8::1",
    "100::1", "100.127.255.254", "192.0.2.7", "198.51.100.7", "203.0.113.7", "0.1.2.3",
    "2002:a9fe:a9fe::", "100.100.100.200", "192.168.255.255", "172.31.255.255",
    "2002:7f00:1::", "2001:0:1::1", "fd00:ec2::254",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address):
    assert is_public(address)


def test_link_local_stays_closed_even_when_private_is_allowed():
    assert may_connect("127.0.0.1", True)
    assert may_connect("10.0.0.1", True)
    for address in ("169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "fd00:ec2::254"):
        assert not may_connect(address, True)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://[::1]/", "http://[::ffff:7f00:1]/", "http://169.254.169.254/x",
     "http://example.com:8080/", "http://example.com:22/"],
)  # fmt: skip
def test_check_url_refuses(url):
    with pytest.raises(AddressRefused):
        check_url(url)


@pytest.mark.parametrize(
    "spelling",
    ["2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "127.1", "127.0.1", "017700000001",
     "%31%32%37.0.0.1", "127.0.0.1.", "\uff11\uff12\uff17.0.0.1", "[::ffff:127.0.0.1]",
     "[0:0:0:0:0:ffff:7f00:0001]", "2852039166", "0251.0376.0251.0376", "[64:ff9b::7f00:1]"],
)  # fmt: skip
def test_spellings_of_private_addresses(spelling):
    """Canonical URLs hold one spelling of an address, so that the guard knows it."""
    for port in ("", ":80"):
        url = canonical(f"http://{spelling}{port}/x")
        with pytest.raises(AddressRefused):
            check_url(url)


@pytest.mark.parametrize("port", ["1", "22", "25", "6379", "8080", "65535"])
def test_ports(port):
    for host in ("example.com", "8.8.8.8", "[2606:4700::1]"):
        with pytest.raises(AddressRefused, match=port):
            check_url(f"http://{host}:{port}/")


@pytest.mark.parametrize("path", ["page", "robots"])
def test_redirects_and_robots_pass_the_guard(path, monkeypatch):
    """A public name that redirects into a private network: every hop is checked."""

    async def main():
        async with Fetcher(CrawlOptions(backoff=0.01, attempts=1)) as fetcher:
            seen = []

            async def once(url, wanted, sent):
                seen.append(url)
                if len(seen) == 1:
                    return Response(url, 302, redirect="http://169.254.169.254/latest/")
                return await original(url, wanted, sent)

            original = fetcher._once
            monkeypatch.setattr(fetcher, "_once", once)
            if path == "robots":
                return (await fetcher.robots("http://example.com"))[0].state
            first = await fetcher.page("http://example.com/")
            return (await fetcher.page(first.redirect)).refused

    assert "169.254.169.254" in asyncio.run(main())


def test_check_url_allows():
    for url in ("http://example.com/", "https://8.8.8.8/", "http://[2606:4700::1]:443/"):
        check_url(url)
    check_url("http://127.0.0.1:8080/", allow_private=True)


def _entries(*ips):
    kinds = {4: socket.AF_INET, 6: socket.AF_INET6}
    return [
        (kinds[6 if ":" in ip else 4], socket.SOCK_STREAM, 6, "", (ip, 80, *((0, 0) * (":" in ip))))
        for ip in ips
    ]


def resolve(monkeypatch, *ips, allow_private=False):
    async def main():
        async def answer(*_args, **_kw):
            return _entries(*ips)

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
        return await GuardedResolver(allow_private).resolve("name.example", 80)

    return asyncio.run(main())


def test_resolver_keeps_only_public_answers(monkeypatch):
    found = resolve(monkeypatch, "10.0.0.1", "8.8.8.8", "::1")
    assert [entry["host"] for entry in found] == ["8.8.8.8"]
    with pytest.raises(AddressRefused, match=r"10\.0\.0\.1"):
        resolve(monkeypatch, "10.0.0.1", "fe80::1")
    assert resolve(monkeypatch, "10.0.0.1", allow_private=True)


def test_a_name_that_points_inside_is_never_connected(monkeypatch):
    """A rebinding name: the guard resolves once and the connection uses that answer."""
    tried = []

    async def main():
        loop = asyncio.get_running_loop()

        async def answer(*_args, **_kw):
            return _entries("127.0.0.1")

        async def connect(*args, **_kw):
            tried.append(args)
            raise OSError("no connection in this test")

        monkeypatch.setattr(loop, "getaddrinfo", answer)
        monkeypatch.setattr(loop, "sock_connect", connect)
        async with Fetcher(CrawlOptions(backoff=0.01)) as fetcher:
            return await fetcher.page("http://inside.example/")

    response = asyncio.run(main())
    assert "127.0.0.1" in response.refused
    assert response.requests == 0
    assert not tried
    assert addresses.PORTS == ("", "80", "443")
