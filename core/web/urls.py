"""Canonical URLs and the traps that URLs give away.

One page should have one URL: WHATWG parsing (can_ada), no fragment, no default port, no tracking
or session parameters, percent-encoding in one form. The order of parameters is kept, since some
sites read it. `Limits.trap` refuses what only endless sites produce.
"""

import re
from dataclasses import dataclass
from urllib.parse import urljoin

import can_ada

_TRACKERS = re.compile(
    r"(utm_|mc_|mkt_|pk_|hsa_|oly_|vero_|__hs|_hs|_ga|_gl|at_)\w*"
    r"|[gdy]clid|fbclid|msclkid|twclid|igshid|wickedid|ref_src|spm|yclid"
    r"|phpsessid|jsessionid|aspsessionid\w*|sessionid|session_id|zenid|cfid|cftoken",
    re.IGNORECASE,
)
_SESSION = re.compile(r";(jsessionid|phpsessid|sid)=[^/?;]*", re.IGNORECASE)
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_CONTROLS = "".join(map(chr, range(0x21)))  # stripped from both ends, as browsers do
_BREAKS = str.maketrans("", "", "\t\r\n")
MAX_RAW = 10_000  # characters of a link that are looked at
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_DIGITS = re.compile(r"\d+")
_BINARY = re.compile(
    r"\.(jpe?g|png|gif|webp|svg|ico|bmp|tiff?|css|js|json|mjs|woff2?|ttf|mp[34]|m4[av]|avi|mov|webm"
    r"|ogg|wav|flac|zip|gz|bz2|xz|zst|7z|rar|tar|tgz|jar|exe|dmg|iso|apk|deb|rpm|bin|pdf|docx?"
    r"|xlsx?|pptx?|odt|ods|epub|swf|rss|atom)$",
    re.IGNORECASE,
)


def canonical(url: str, base: str = "") -> str | None:
    """The one spelling of an http(s) URL (resolved against `base`); None for anything else."""
    try:
        plain = url[:MAX_RAW].strip(_CONTROLS).translate(_BREAKS)
        parsed = can_ada.parse(urljoin(base, plain))
    except (ValueError, UnicodeError):
        return None
    if parsed.protocol not in ("http:", "https:") or not parsed.hostname or parsed.username:
        return None
    host = parsed.hostname.rstrip(".")
    port = f":{parsed.port}" if parsed.port else ""
    path = _escapes(_SESSION.sub("", parsed.pathname)) or "/"
    query = _query(parsed.search)
    return f"{parsed.protocol}//{host}{port}{path}{query}"


def _query(search: str) -> str:
    parts = [part for part in search.removeprefix("?").split("&") if part]
    kept = [_escapes(part) for part in parts if not _TRACKERS.fullmatch(part.partition("=")[0])]
    return "?" + "&".join(kept) if kept else ""


def _escapes(text: str) -> str:
    """Percent-escapes in capitals; those of unreserved characters undone (RFC 3986, 6.2.2)."""

    def one(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return _ESCAPE.sub(one, text)


def host_of(url: str) -> str:
    """`host:port` of a canonical URL, the unit of politeness (no port when it is the default)."""
    return url.split("/", 3)[2]


def origin_of(url: str) -> str:
    """`scheme://host:port`, the unit of robots.txt."""
    return "/".join(url.split("/", 3)[:3])


def template_of(url: str) -> str:
    """The URL with its numbers folded and its parameters' values dropped: one per page family."""
    place, _, query = url.partition("?")
    names = ",".join(sorted(part.partition("=")[0] for part in query.split("&"))) if query else ""
    origin = origin_of(place)
    return origin + _DIGITS.sub("0", place[len(origin) :]) + (f"?{names}" if names else "")


def looks_binary(url: str) -> bool:
    """True when the path ends like an image, archive, film or the like."""
    return bool(_BINARY.search(url.partition("?")[0]))


@dataclass(frozen=True)
class Limits:
    """How far a crawl follows: link depth, URL length in characters, parts of path and query."""

    depth: int = 50
    length: int = 2_000
    segments: int = 20
    parameters: int = 12
    repeats: int = 3
    queries: int = 2_000  # pages of one path that differ in their parameters' values only

    def trap(self, url: str, depth: int) -> str | None:
        """Why the URL is not worth following, or None."""
        if depth > self.depth:
            return f"deeper than {self.depth} links"
        if len(url) > self.length:
            return f"longer than {self.length} characters"
        path, _, query = url.partition("?")
        segments = [part for part in path.split("/")[3:] if part]
        if len(segments) > self.segments:
            return f"more than {self.segments} path segments"
        if any(segments.count(part) >= self.repeats for part in segments):
            return "the path repeats itself"
        return "too many parameters" if query.count("&") >= self.parameters else None
