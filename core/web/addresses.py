"""Which addresses a crawler may connect to: protection against requests into private networks.

A page may link to http://169.254.169.254/ or to a name that resolves to 10.0.0.1, and so make the
crawler read from the internal network (SSRF). Every name is resolved here, every address is
checked, and the connection is made to the address that was checked, so that a second answer of the
name server has no effect. Only ports 80 and 443 are used. `allow_private` permits loopback,
private networks and other ports, but never link-local addresses, where clouds serve credentials.
"""

import asyncio
import ipaddress
import socket
from functools import lru_cache
from typing import Any

from aiohttp.abc import AbstractResolver

from sabia.core.errors import Failed
from sabia.core.web.url_rules import host_of

PORTS = ("", "80", "443")
_METADATA = (ipaddress.ip_address("fd00:ec2::254"),)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressRefused(Failed):
    """The URL or its address must not be requested."""


def is_public(address: str) -> bool:
    """True for addresses of the public internet, including IPv4 addresses embedded in IPv6."""
    ip = _unwrapped(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip.is_site_local or ip.teredo is not None):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


@lru_cache(4096)
def may_connect(address: str, allow_private: bool) -> bool:
    """Whether the crawler may connect to this address."""
    ip = _unwrapped(address)
    return is_public(address) or (
        allow_private and not ip.is_link_local and ip not in _METADATA and not ip.is_multicast
    )


def _unwrapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    inner = ip.ipv4_mapped or ip.sixtofour
    return inner or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip)


def check_url(url: str, allow_private: bool = False) -> None:
    """Raise AddressRefused for a literal address that is not permitted, or for another port."""
    if reason := _refusal(host_of(url), allow_private):
        raise AddressRefused(reason)


@lru_cache(4096)
def _refusal(authority: str, allow_private: bool) -> str:
    """Why a `host:port` must not be requested, as far as that is known without resolving it."""
    numbered = authority.rpartition(":")[2].isdecimal() and not authority.endswith("]")
    host, _, port = authority.rpartition(":") if numbered else (authority, "", "")
    if port not in PORTS and not allow_private:
        return f"port {port} is not 80 or 443"
    try:
        literal = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return ""  # a name; the resolver checks its addresses
    return "" if may_connect(literal, allow_private) else f"{literal} is not a public address"


class GuardedResolver(AbstractResolver):
    """Resolves names with the system's resolver and returns only permitted addresses."""

    def __init__(self, allow_private: bool) -> None:
        self.allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[Any]:
        """aiohttp's records of the permitted addresses; AddressRefused if there is none."""
        loop = asyncio.get_running_loop()
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        good = [entry for entry in answers if may_connect(str(entry[4][0]), self.allow_private)]
        if not good:
            seen = ", ".join(sorted({str(entry[4][0]) for entry in answers}))
            raise AddressRefused(f"{host} resolves to {seen or 'nothing'}, which is not public")
        return [
            {"hostname": host, "host": address[0], "port": port, "family": kind,
             "proto": protocol, "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV}
            for kind, _type, protocol, _name, address in good
        ]  # fmt: skip

    async def close(self) -> None:
        """There is nothing to close."""
