"""The guard: which addresses, ports and names are refused, and that the checked one is used."""

import asyncio
import socket

import pytest

from sabia.core.web import addresses
from sabia.core.web.addresses import GuardedResolver, Refused, check_url, is_public, may_connect
from sabia.core.web.fetch import Fetcher
from sabia.core.web.settings import FetchSettings

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.0.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "fec0::1", "ff02::1", "::ffff:10.0.0.1",
    "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "2001:0:1::1", "fd00:ec2::254",
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
    with pytest.raises(Refused):
        check_url(url)


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
    with pytest.raises(Refused, match=r"10\.0\.0\.1"):
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
        async with Fetcher(FetchSettings(backoff_s=0.01)) as fetcher:
            return await fetcher.page("http://inside.example/")

    response = asyncio.run(main())
    assert "127.0.0.1" in response.refused
    assert response.requests == 0
    assert not tried
    assert addresses.PORTS == ("", "80", "443")
