"""Canonical URLs: one URL for each page.

WHATWG parsing (can_ada), no fragment, no default port, no tracking or session parameters,
normalized percent-encoding. The order of parameters is kept, because some sites depend on it. A
canonical URL is what is fetched, so it loses only parameters whose names can mean nothing else;
`comparison_key` also loses those that usually mean nothing, and is only compared.
"""

import re
from functools import lru_cache

import can_ada

_TRACKERS = re.compile(
    r"(utm_|mc_|hsa_|oly_|vero_|__hs|_hs|_ga|_gl)\w*"
    r"|[gdy]clid|gclsrc|[gw]braid|fbclid|msclkid|twclid|ttclid|li_fat_id|epik|igshid|igsh|wickedid"
    r"|ref_src|ref_url|spm|scm|yclid|ysclid|_openstat|_branch_match_id|icid|elqtrack\w*"
    r"|mkcid|mkevt|s_cid|cvid|ocid|_bta_\w+|sb_referer_host"
    r"|phpsessid|jsessionid|aspsessionid\w*|zenid|cfid|cftoken|osCsid|xtor",
    re.IGNORECASE,
)
# trackers and sessions of some sites, that other sites use for what they show
_OFTEN_TRACKERS = re.compile(r"(at_|mkt_|ns_|pk_|trk_|wt[._])\w*|session_?id", re.IGNORECASE)
_SESSION = re.compile(r";(jsessionid|phpsessid|sid)=[^/?;]*", re.IGNORECASE)
# not one whose character would become part of another escape: %%34%31, %4%31
_ESCAPE = re.compile(r"(?<!%)(?<!%[0-9A-Fa-f])%([0-9A-Fa-f]{2})")
MAX_RAW = 10_000  # characters of a link that is read
# (the URL up to its query, the query) of a URL that is its own canonical form but for parameters: a
# host name in small letters that is no number, no escape, no session, no dots as a segment
_PLAIN = re.compile(
    r"(https?://(?:(?!xn--)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*(?!xn--)[a-z](?:[a-z0-9-]*[a-z0-9])?"
    r"(?:/(?!\.{1,2}(?:[/?]|$))[A-Za-z0-9_~.,:@!*+=&$()-]*)+)"
    r"(?:\?([A-Za-z0-9_~.,:@!*+=&$()/-]*))?",
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_TWO_SLASHES = ("//", "\\\\", "/\\", "\\/")
_CONTROLS = "".join(map(chr, range(0x21)))  # stripped from both ends, as browsers do
_BREAKS = str.maketrans("", "", "\t\r\n")
_PASSES = 4  # until a form is its own
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def canonical(url: str, base: str = "") -> str | None:
    """The canonical form of an http(s) URL (resolved against `base`), which is its own canonical
    form; None for anything else."""
    if len(url) > MAX_RAW:
        return None
    try:
        whole = _joined(url, base) if base else url
    except (ValueError, TypeError):  # can_ada takes no lone surrogates
        return None
    if (plain := _PLAIN.fullmatch(whole)) and len(whole) <= MAX_RAW:
        return whole if plain[2] is None else _with_parameters(whole, _TRACKERS)
    form = _form(whole)
    for _ in range(_PASSES):  # without a session or a dot, a path or a host can be another
        if form is None or len(form) > MAX_RAW:
            return None
        if (plain := _PLAIN.fullmatch(form)) and plain[2] is None:
            return form
        again = _form(form)
        if again == form:
            return form
        form = again
    return None


def comparison_key(url: str) -> str:
    """A canonical URL without the parameters that seldom decide what a page shows."""
    return _with_parameters(url, _OFTEN_TRACKERS)


def _form(url: str) -> str | None:
    try:
        parsed = can_ada.parse(url)
    except (ValueError, TypeError):
        return None
    host = parsed.hostname.removesuffix(".")
    labels = host.split(".")  # an empty one cannot be resolved
    if parsed.protocol not in ("http:", "https:") or "" in labels or parsed.username:
        return None
    port = f":{parsed.port}" if parsed.port else ""
    path = _escapes(_SESSION.sub("", parsed.pathname)) or "/"
    form = f"{parsed.protocol}//{host}{port}{path}{_escapes(parsed.search)}"
    return _with_parameters(form, _TRACKERS)


@lru_cache(64)
def _parts(url: str) -> tuple[str, str, str, str]:
    """Protocol, origin, path and query of a URL. Raises ValueError."""
    parsed = can_ada.parse(url)
    return parsed.protocol, parsed.origin, parsed.pathname, parsed.search


def _joined(url: str, base: str) -> str:
    """A URL that is relative to an http(s) base, made absolute as WHATWG does (can_ada cannot)."""
    clean = url.isprintable() and " " not in url
    plain = url if clean else url.strip(_CONTROLS).translate(_BREAKS)
    protocol, origin, path, query = _parts(base)
    if scheme := _SCHEME.match(plain):
        rest = plain[scheme.end() :]
        if scheme[0].lower() != protocol or rest[:2] in _TWO_SLASHES:
            return plain
        plain = rest  # http:a is a relative URL where the base is of the same scheme
    if plain[:2] in _TWO_SLASHES:
        return protocol + plain
    if plain[:1] in ("/", "\\"):
        return origin + plain
    folder = path.rpartition("/")[0] + "/"
    kept = {"": path + query, "#": path + query, "?": path}.get(plain[:1], folder)
    return origin + kept + plain


def _with_parameters(url: str, dropped: re.Pattern[str]) -> str:
    """A URL without empty parameters, and those whose name matches."""
    address, _, query = url.partition("?")
    parameters = [
        parameter
        for parameter in query.split("&")
        if parameter and not dropped.fullmatch(parameter.partition("=")[0])
    ]
    return f"{address}?{'&'.join(parameters)}" if parameters else address


def _escapes(text: str) -> str:
    """Percent-escapes in upper case; those of unreserved characters decoded (RFC 3986, 6.2.2)."""

    def one(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return _ESCAPE.sub(one, text)
