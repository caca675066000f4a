"""robots.txt by RFC 9309: what may be fetched, how fast, and what to do when it cannot be read.

2xx: its rules (of the first 4 MiB; RFC 9309 asks for at least 500 KiB). 4xx: everything is
allowed, except 429, which counts as unreachable. 5xx and no response: nothing is allowed, unless
there is an earlier copy. Up to five redirects, also to other hosts; a sixth means "unavailable", so
everything is allowed. Files are cached for 24 hours, or less with Cache-Control.

Lines end in CR, LF or both; a byte order mark, even an incomplete one, is skipped. Common
misspellings and missing colons are accepted. The group of our product token applies, else that of
`*`; all groups of one agent are merged. Of the matching rules the longest wins, and Allow wins over
a Disallow of the same length. `*` matches any characters and a final `$` the end. RFC 9309 (2.2.2)
compares after decoding escapes of unreserved characters, Google's published parser as written: a
URL is allowed only if both allow it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_BYTES = 4 << 20
MAX_REDIRECTS = 5
KEEP_S = 24 * 3600
STALE_S = 30 * 24 * 3600  # age up to which a copy replaces a file that cannot be reached
UNREACHABLE_S = 900.0  # until a file that could not be reached is requested again
MAX_DELAY_S = 60.0  # maximum Crawl-delay
_LINE_CHARACTERS = 16_663  # as in Google's parser
_MARKS = ("\xef\xbb\xbf", "\xef\xbb", "\xef")
_LINE_END = re.compile(r"\r\n|\r|\n")
_NAMES = (
    ("agent", ("user-agent", "useragent", "user agent")),
    ("allow", ("allow",)),
    ("disallow", ("disallow", "dissallow", "dissalow", "disalow", "diasllow", "disallaw")),
    ("sitemap", ("sitemap", "site-map")),
    ("delay", ("crawl-delay", "crawldelay", "crawl delay")),
)
_TOKEN = re.compile(r"[A-Za-z_-]*")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_NOT_ASCII = re.compile(r"[\x80-\xff]")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
_INDEX = re.compile(r"/index\.html?$")
_PATH = re.compile(r"(?:[^/?#;]*:)?(?://[^/?#;]*|[^/?#;]*)([^#]*)")
ALLOW_ALL = ""
DENY_ALL = "User-agent: *\nDisallow: /\n"


@dataclass(frozen=True)
class RobotsFile:
    """The rules of an origin; `state`: `rules`, `none` (4xx), `unreachable`, or a refused address.

    `text` holds the file's bytes as Latin-1 characters; `keep_s` is how long it is valid.
    """

    text: str
    state: str = "rules"
    keep_s: float = KEEP_S


def robots_file_of(
    status: int | None, body: bytes = b"", hops: int = 0, cache: str = ""
) -> RobotsFile:
    """The rules that follow from a response to /robots.txt; `status` None: no response."""
    # a day, or Cache-Control's max-age where it is shorter (but never less than a minute)
    asked = re.search(r"\bmax-age\s*=\s*\"?(\d{1,9})", cache, re.IGNORECASE)
    keep_s = min(KEEP_S, max(60.0, float(asked[1]))) if asked else KEEP_S
    status = status or 0
    if 200 <= status < 300:
        if len(body) >= MAX_BYTES:  # it goes on, perhaps within a line: half a rule is another rule
            body = body[:MAX_BYTES].rpartition(b"\n")[0]
        return RobotsFile(body.decode("latin-1"), "rules", keep_s)
    too_many_redirects = 300 <= status < 400 and hops > MAX_REDIRECTS
    if too_many_redirects or (400 <= status < 500 and status != 429):
        return RobotsFile(ALLOW_ALL, "none", keep_s)
    return RobotsFile(DENY_ALL, "unreachable", UNREACHABLE_S)


@dataclass
class _Group:
    """All rules of one agent: (length, allow, pattern) as written and with escapes decoded."""

    written: list[tuple[int, bool, str]] = field(default_factory=list)
    plain: list[tuple[int, bool, str]] = field(default_factory=list)
    delay_s: float = 0.0

    def add(self, allow: bool, value: str) -> None:
        """Add a rule; one for /index.html also applies to the folder."""
        # octets beyond ASCII as escapes, all escapes in capitals
        escaped = _NOT_ASCII.sub(lambda octet: f"%{ord(octet[0]):02X}", value)
        pattern = _ESCAPE.sub(lambda escape: escape[0].upper(), escaped)
        match = _INDEX.search(pattern) if allow else None
        for form in (pattern, pattern[: match.start()] + "/$") if match else (pattern,):
            self.written.append((len(form), allow, form))
            self.plain.append((len(_undone(form)), allow, _undone(form)))

    def allows(self, path: str) -> bool:
        """Whether both lists of rules allow the path."""
        return _allowed(self.written, path) and _allowed(self.plain, _undone(path))


class Rules:
    """Parsed rules for one product token such as `sabia`; `sitemaps` are URLs as written."""

    def __init__(self, robots_file: RobotsFile, token: str) -> None:
        self.state, self.sitemaps = robots_file.state, list[str]()
        own, others = _Group(), _Group()
        self._named = self._read(robots_file.text, token.lower(), own, others)
        self._group = own if self._named else others

    def _read(self, text: str, token: str, own: _Group, others: _Group) -> bool:
        """Fill both groups; True if the file names our token."""
        named, ended = False, False
        open_groups: list[_Group] = []
        for name, value in _lines(text):
            if name == "agent":
                open_groups = [] if ended else open_groups
                ended = False
                group = _governed(value, token, own, others)
                named = named or group is own
                open_groups += [group] if group else []
            elif name == "sitemap":
                self.sitemaps.append(value)
            elif name == "delay":
                for group in open_groups:
                    group.delay_s = max(group.delay_s, _seconds(value))
            else:
                ended = True
                for group in open_groups:
                    group.add(name == "allow", value)
        return named

    def allowed(self, url: str) -> bool:
        """May this URL be fetched? /robots.txt itself always may."""
        path = path_of(url)
        return path == "/robots.txt" or self._group.allows(path)

    def delay_s(self) -> float:
        """Crawl-delay in seconds, 0 when there is none."""
        return self._group.delay_s


def path_of(url: str) -> str:
    """Path, parameters and query of a URL, as rules speak of it."""
    match = _PATH.match(url)
    path = match[1] if match else ""
    return path if path.startswith("/") else f"/{path}"


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of the lines that are understood."""
    mark = next((mark for mark in _MARKS if text.startswith(mark)), "")
    for line in _LINE_END.split(text[len(mark) :]):
        plain = line[:_LINE_CHARACTERS].partition("#")[0].strip()
        name, colon, value = plain.partition(":")
        if not colon:
            parts = plain.split()
            name, value = parts if len(parts) == 2 else ("", "")
        lower = name.strip().lower()
        kind = next((kind for kind, forms in _NAMES if lower.startswith(forms)), None)
        if kind:
            yield kind, value.strip()


def _governed(value: str, token: str, own: _Group, others: _Group) -> _Group | None:
    """The group that a user-agent line opens, if it is one that may concern us."""
    if value[:1] == "*" and (len(value) == 1 or value[1].isspace()):
        return others
    match = _TOKEN.match(value)
    return own if token and match and match[0].lower() == token else None


def _seconds(value: str) -> float:
    match = re.match(r"\d{1,9}(\.\d+)?|\.\d+", value)
    return min(float(match[0]), MAX_DELAY_S) if match else 0.0


def _allowed(rules: list[tuple[int, bool, str]], path: str) -> bool:
    """By the longest match; a rule that is empty says nothing."""
    longest, allow = 0, True
    for length, allows, pattern in rules:
        if (length > longest or (length == longest and allows)) and _matches(pattern, path):
            longest, allow = length, allows
    return allow


def _matches(pattern: str, path: str) -> bool:
    """Does the pattern match the path's beginning? In linear time for each of its stars."""
    anchored = pattern.endswith("$")
    first, *others = (pattern[:-1] if anchored else pattern).split("*")
    if not path.startswith(first):
        return False
    position = len(first)
    if not others:
        return not anchored or position == len(path)
    last = others.pop() if anchored else ""
    for part in others:
        start = path.find(part, position)
        if start < 0:
            return False
        position = start + len(part)
    return not anchored or (path.endswith(last) and len(path) - len(last) >= position)


def _undone(path: str) -> str:
    """Escapes of unreserved characters undone (RFC 3986, 2.3)."""

    def one(match: re.Match[str]) -> str:
        character = chr(int(match[0][1:], 16))
        return character if _UNRESERVED.fullmatch(character) else match[0].upper()

    return _ESCAPE.sub(one, path) if "%" in path else path
