"""Canonical URLs: one URL for each page.

WHATWG parsing (can_ada), no fragment, no default port, no tracking or session parameters,
normalized percent-encoding. The order of parameters is kept, because some sites depend on it.
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
MAX_RAW = 10_000  # characters of a link that are read
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def canonical(url: str, base: str = "") -> str | None:
    """The canonical form of an http(s) URL (resolved against `base`); None for anything else."""
    try:
        plain = url[:MAX_RAW].strip(_CONTROLS).translate(_BREAKS)
        path = re.split("[?#]", plain, maxsplit=1)[0]  # WHATWG reads its backslashes as slashes
        plain = path.replace("\\", "/") + plain[len(path) :]
        parsed = can_ada.parse(urljoin(base, plain))
    except (ValueError, UnicodeError):
        return None
    if parsed.protocol not in ("http:", "https:") or not parsed.hostname or parsed.username:
        return None
    host = parsed.hostname.rstrip(".")
    port = f":{parsed.port}" if parsed.port else ""
    path = _escapes(_SESSION.sub("", parsed.pathname)) or "/"
    parameters = [
        _escapes(parameter)
        for parameter in parsed.search.removeprefix("?").split("&")
        if parameter and not _TRACKERS.fullmatch(parameter.partition("=")[0])
    ]
    query = "?" + "&".join(parameters) if parameters else ""
    return f"{parsed.protocol}//{host}{port}{path}{query}"


def _escapes(text: str) -> str:
    """Percent-escapes in upper case; those of unreserved characters decoded (RFC 3986, 6.2.2)."""

    def one(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return _ESCAPE.sub(one, text)
