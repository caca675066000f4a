"""Links of a page without extracting its text: for crawls that only fetch and archive.

One pass of a regular expression over the bytes, in linear time for any bytes, so that no sandbox is
needed. Anchor texts are not read; `extract` does that for crawls that keep text.
"""

import html
import re
from functools import lru_cache

from sabia.core.urls import canonical

MAX_LINKS = 2_000
_VALUE = rb"\s*=\s*(?:\"([^\"<>]*)\"|'([^'<>]*)'|([^\s\"'<>]+))"
_LINK = re.compile(rb"<(a|area|base)\s([^<>]*)", re.IGNORECASE)
_HREF = re.compile(rb"(?:^|\s)href" + _VALUE, re.IGNORECASE)
_NOFOLLOW = re.compile(rb"(?:^|\s)rel\s*=\s*[\"']?[^\"'>]*nofollow", re.IGNORECASE)
_ROBOTS = re.compile(rb"<meta\s[^<>]*name\s*=\s*[\"']?(?:robots|sabia)\b[^<>]*", re.IGNORECASE)
_CLOSED = re.compile(rb"\b(?:nofollow|none)\b", re.IGNORECASE)


def links_only(body: bytes, content_type: str, url: str) -> dict[str, object]:
    """Like `extract.Extracted` as a dictionary, with links and without text."""
    links: list[tuple[str, str]] = []
    if "html" in content_type.lower() and not _closed(body):
        links = [(link, "") for link in _links(body, url)]
    return {"text": "", "title": "", "language": "", "links": links, "index": True,
            "extractor": ""}  # fmt: skip


@lru_cache(1 << 15)
def _address(address: str, base: str) -> str | None:
    """The canonical URL, cached because menus repeat; an absolute URL does not need the base."""
    return canonical(address, "" if address.startswith(("http://", "https://")) else base)


def _closed(body: bytes) -> bool:
    """Whether the page forbids following its links."""
    return any(_CLOSED.search(tag[0]) for tag in _ROBOTS.finditer(body))


def _links(body: bytes, url: str) -> list[str]:
    base, links = url, dict[str, None]()
    for tag, attributes in _LINK.findall(body):
        target = _HREF.search(attributes)
        if target is None or _NOFOLLOW.search(attributes):
            continue
        value = next(filter(None, target.groups()), b"").decode("utf-8", "replace")
        address = _address(html.unescape(value) if "&" in value else value, base)
        if tag.lower() == b"base":
            base = address or base
        elif address and len(links) < MAX_LINKS:
            links[address] = None
    return list(links)
