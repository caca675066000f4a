"""Canonical URLs: one page should have one.

WHATWG parsing (can_ada), no fragment, no default port, no tracking or session parameters,
percent-encoding in one form. The order of parameters is kept, since some sites read it.
"""

import re
from urllib.parse import urljoin

import can_ada

_TRACKERS = re.compile(
    r"(utm_|mc_|mkt_|pk_|hsa_|oly_|vero_|__hs|_hs|_ga|_gl|at_)\w*"
    r"|[gdy]clid|gclsrc|[gw]braid|fbclid|msclkid|twclid|ttclid|li_fat_id|epik|igshid|igsh|wickedid"
    r"|ref_src|ref_url|spm|scm|yclid|ysclid|_openstat|_branch_match_id|icid|ns_\w+|elqtrack\w*"
    r"|mkcid|mkevt|s_cid|cvid|ocid|_bta_\w+|trk_\w+|sb_referer_host|wt[._]\w+"
    r"|phpsessid|jsessionid|aspsessionid\w*|sessionid|session_id|zenid|cfid|cftoken|osCsid|xtor",
    re.IGNORECASE,
)
_SESSION = re.compile(r";(jsessionid|phpsessid|sid)=[^/?;]*", re.IGNORECASE)
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_CONTROLS = "".join(map(chr, range(0x21)))  # stripped from both ends, as browsers do
_BREAKS = str.maketrans("", "", "\t\r\n")
MAX_RAW = 10_000  # characters of a link that are looked at
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def canonical(url: str, base: str = "") -> str | None:
    """The one spelling of an http(s) URL (resolved against `base`); None for anything else."""
    try:
        plain = _slashes(url[:MAX_RAW].strip(_CONTROLS).translate(_BREAKS))
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


def _slashes(url: str) -> str:
    """Backslashes before the query turned round, as WHATWG reads them in http(s) URLs."""
    if "\\" not in url:
        return url
    end = next((place for place, mark in enumerate(url) if mark in "?#"), len(url))
    return url[:end].replace("\\", "/") + url[end:]


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
