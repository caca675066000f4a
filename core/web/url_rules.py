"""Hosts, page families and crawler traps, from canonical URLs (see `sabia.core.urls`)."""

import re
from datetime import date

MOST_CHARACTERS, MOST_SEGMENTS, MOST_PARAMETERS = 2_000, 20, 12  # of a URL that is followed
REPEATS = 3  # of one segment in a path that make it a trap
_FOLDED = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"  # UUIDs
    r"|\b(?=[a-f]*\d)[0-9a-f]{8,}\b|\d+"  # other hashes, numbers
    r"|\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b",
    re.IGNORECASE,
)
_MONTH = re.compile(r"(?<!\d)(\d{4})[/_.-](?:0?[1-9]|1[0-2])(?!\d)|\byear=(\d{4})(?!\d)")
_AHEAD_YEARS = 2
_BINARY = re.compile(
    r"\.(jpe?g|png|gif|webp|svg|ico|bmp|tiff?|css|js|json|mjs|woff2?|ttf|mp[34]|m4[av]|avi|mov|webm"
    r"|ogg|wav|flac|zip|gz|bz2|xz|zst|7z|rar|tar|tgz|jar|exe|dmg|iso|apk|deb|rpm|bin|pdf|docx?"
    r"|xlsx?|pptx?|odt|ods|epub|swf|rss|atom)$",
    re.IGNORECASE,
)


def host_of(url: str) -> str:
    """`host:port` of a canonical URL, the unit of politeness (no port when it is the default)."""
    return url.split("/", 3)[2]


def origin_of(url: str) -> str:
    """`scheme://host:port`, the unit of robots.txt."""
    return "/".join(url.split("/", 3)[:3])


def template_of(url: str) -> str:
    """The template of a page family: the URL with numbers, hashes and months replaced by 0 and
    without the values of its parameters."""
    path, _, query = url.partition("?")
    names = ",".join(sorted(part.partition("=")[0] for part in query.split("&"))) if query else ""
    origin = origin_of(path)
    return origin + _FOLDED.sub("0", path[len(origin) :]) + (f"?{names}" if names else "")


def looks_binary(url: str) -> bool:
    """True if the path has the ending of an image, archive, video or other binary file."""
    return bool(_BINARY.search(url.partition("?")[0]))


def trap(url: str, depth: int, most_depth: int) -> str | None:
    """Why a URL at this depth must not be followed (it looks like a trap), or None."""
    if depth > most_depth:
        return f"deeper than {most_depth} links"
    if len(url) > MOST_CHARACTERS:
        return f"longer than {MOST_CHARACTERS} characters"
    path, _, query = url.partition("?")
    segments = [part for part in path.split("/")[3:] if part]
    if len(segments) > MOST_SEGMENTS:
        return f"more than {MOST_SEGMENTS} path segments"
    if any(segments.count(part) >= REPEATS for part in segments):
        return "the path repeats itself"
    # a month so far in the future that only an endless calendar has it
    first_year = date.today().year + _AHEAD_YEARS + 1
    if any(first_year <= int(m[1] or m[2]) < 3000 for m in _MONTH.finditer(url)):
        return "a calendar far ahead"
    return "too many parameters" if query.count("&") >= MOST_PARAMETERS else None
