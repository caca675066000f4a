"""Sitemaps: lists of the URLs of a site, as XML, as an index of sitemaps, or as plain text.

The protocol (sitemaps.org, 0.9) allows 50,000 URLs and 50 MB per file. Files are read as a stream
by expat; one that declares entities is refused, because entities can expand to gigabytes. URLs of
other hosts are left out, except of the hosts in `hosts`, whose robots.txt names the sitemap.
"""

import xml.parsers.expat
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sabia.core.urls import canonical
from sabia.core.web.bodies import gunzip
from sabia.core.web.url_rules import host_of

MAX_BYTES = 50 << 20
MAX_URLS = 50_000
MAX_NESTED = 2  # levels of sitemap indexes
_CHUNK = 64 << 10
_MAX_TEXT = 4_096
_FIELDS = ("loc", "lastmod")


class BadSitemap(ValueError):
    """Not a sitemap, or a dangerous one."""


@dataclass(frozen=True)
class Listed:
    """A URL and the seconds since 1970 at which its page last changed, if given."""

    url: str
    changed_s: float | None = None


@dataclass
class Sitemap:
    """`pages`, and `nested` sitemaps of an index; `left_out` counts URLs that were refused."""

    pages: list[Listed] = field(default_factory=list)
    nested: list[Listed] = field(default_factory=list)
    left_out: int = 0


def read_sitemap(body: bytes, url: str, hosts: Collection[str] = ()) -> Sitemap:
    """Read a sitemap that was found at `url`; raises BadSitemap."""
    if body[:2] == b"\x1f\x8b":
        try:
            body = gunzip(body, MAX_BYTES)
        except (zlib.error, EOFError) as error:
            raise BadSitemap(f"damaged gzip ({error})") from error
    reader = _Reader(url, {host_of(url), *hosts})
    if body.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        reader.read_xml(body)
    else:
        reader.read_text(body)
    return reader.sitemap


class _Reader:
    def __init__(self, url: str, hosts: Collection[str]) -> None:
        self.url, self.hosts, self.sitemap = url, hosts, Sitemap()
        self._entry: dict[str, str] = {}
        self._field, self._space = "", ""
        self._known = False  # the root element is one of a sitemap

    def read_text(self, body: bytes) -> None:
        """One URL per line."""
        lines = body.decode("utf-8-sig", "replace").split()
        if lines and not any(line.startswith(("http://", "https://")) for line in lines):
            raise BadSitemap("neither XML nor a list of URLs")
        for line in lines:
            self._take(line, "", self.sitemap.pages)

    def read_xml(self, body: bytes) -> None:
        """A urlset or a sitemapindex; a truncated one gives the URLs before its end."""
        parser = xml.parsers.expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.EntityDeclHandler = _refuse_entities
        parser.SetParamEntityParsing(xml.parsers.expat.XML_PARAM_ENTITY_PARSING_NEVER)
        try:
            for start in range(0, len(body), _CHUNK):
                parser.Parse(body[start : start + _CHUNK], start + _CHUNK >= len(body))
        except xml.parsers.expat.ExpatError as error:
            if not (self.sitemap.pages or self.sitemap.nested):
                raise BadSitemap(f"broken XML ({error})") from error
        if not self._known:
            raise BadSitemap("XML, but neither urlset nor sitemapindex")

    def _start(self, name: str, _attributes: dict[str, str]) -> None:
        tag = name.rpartition(" ")[2]
        if not self._known:
            self._known = tag in ("urlset", "sitemapindex")
            if not self._known:
                raise BadSitemap(f"XML of a {tag:.40}, which is no sitemap")
        space = name[: -len(tag)]
        if tag in ("url", "sitemap"):
            self._entry, self._space = {}, space
        self._field = tag if tag in _FIELDS and space == self._space else ""  # not <image:loc>

    def _text(self, text: str) -> None:
        value = self._entry.get(self._field, "")
        if self._field and len(value) < _MAX_TEXT:
            self._entry[self._field] = value + text

    def _end(self, name: str) -> None:
        tag = name.rpartition(" ")[2]
        self._field = ""
        if tag in ("url", "sitemap"):
            into = self.sitemap.pages if tag == "url" else self.sitemap.nested
            self._take(self._entry.get("loc", ""), self._entry.get("lastmod", ""), into)
            self._entry = {}

    def _take(self, address: str, changed: str, into: list[Listed]) -> None:
        url = canonical(address, self.url) if 0 < len(address.strip()) < _MAX_TEXT else None
        if url is None or host_of(url) not in self.hosts or len(into) >= MAX_URLS:
            self.sitemap.left_out += 1
        else:
            into.append(Listed(url, seconds_of(changed)))


def _refuse_entities(name: str, *_rest: object) -> None:
    raise BadSitemap(f"it declares an entity ({name:.40})")


def seconds_of(text: str) -> float | None:
    """Seconds since 1970 of a W3C date such as 2026-11-21 or 2026-11-21T10:00:00Z, else None."""
    plain = text.strip()
    if len(plain) in (4, 7):  # a year, a month
        plain += "-01-01"[: 10 - len(plain)]
    try:
        parsed = datetime.fromisoformat(plain)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
