"""Title, language, date, robots rules and links, from the marks that the HTML scanner recorded.

Only the tags that the marks name are parsed again, each within a bounded span.
"""

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from sabia.core.urls import canonical
from sabia.kernels.html.definitions import MARK_COLUMNS, TAG_NAMES, Page

MAX_LINKS = 2_000
MAX_ANCHOR = 200
_SPAN = 4_000  # largest number of bytes of attributes that are read
_ANCHOR_SPAN = 2_000  # largest number of source bytes of an anchor text
_ATTRIBUTE = re.compile(r"""([^\s"'<>/=]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+)))?""")
_MARKUP = re.compile(r"<(?:script|style)\b.*?</|<[^>]*>?", re.IGNORECASE | re.DOTALL)
_DATE = re.compile(r"\d{4}-[01]\d-[0-3]\d(?:[T ][\d:.]+(?:Z|[+-]\d\d:?\d\d)?)?")
_JSON_DATE = re.compile(rb'"datePublished"\s{0,9}:\s{0,9}"([^"]{8,40})"')
_DATE_NAMES = ("article:published_time", "datepublished", "og:published_time", "pubdate", "date",
               "publishdate", "dc.date", "dc.date.issued", "dcterms.created", "parsely-pub-date",
               "sailthru.date", "publish-date")  # fmt: skip
_READ_META = re.compile(rb"robots|sabia|date|time|created|&", re.IGNORECASE)  # in _DATE_NAMES, too
_TAG = {name: TAG_NAMES.index(name) + 1 for name in ("a", "meta", "base", "html", "title")}
_TAG["time"] = len(TAG_NAMES) + 1
_COLUMN = {name: i for i, name in enumerate(MARK_COLUMNS)}
_START, _END, _HREF, _HREF_END, _NOFOLLOW = (
    _COLUMN[name] for name in ("start", "end", "href", "href_end", "nofollow")
)


class Metadata(NamedTuple):
    """`date` is ISO 8601 as on the page; `index`, `follow`: what its robots rules permit."""

    title: str
    language: str
    date: str
    base: str
    index: bool  # type: ignore[assignment]  # the field stands in for tuple.index
    follow: bool


class MetadataReader:
    """The marks of a page whose source is `data`, UTF-8 bytes."""

    def __init__(self, page: Page, data: bytes) -> None:
        self._rows, self._data = page.marks, data

    def facts(self) -> Metadata:
        """Title, language, date, base URL and robots rules of the page."""
        metas = [self._attributes(row) for row in self._of("meta") if self._may_matter(row)]
        base = next((attributes["href"] for attributes in map(self._attributes, self._of("base"))
                     if "href" in attributes), "")  # fmt: skip
        roots = [self._attributes(row) for row in self._of("html")[:1]]
        language = next((root.get("lang") or root.get("xml:lang") or "" for root in roots), "")
        directives = ",".join(meta.get("content", "") for meta in metas
                        if meta.get("name", "").lower() in ("robots", "sabia")).lower()  # fmt: skip
        rules = {part.strip() for part in directives.split(",")}
        sources = (self._source(row, "text", "text_end", _SPAN) for row in self._of("title"))
        titles = (" ".join(html.unescape(source).split()) for source in sources)
        return Metadata(
            next(filter(None, titles), ""), language.strip().lower(), self._date(metas), base,
            rules.isdisjoint({"none", "noindex"}), rules.isdisjoint({"none", "nofollow"}),
        )  # fmt: skip

    def links(self, url: str, base: str) -> list[tuple[str, str]]:
        """(canonical target, anchor text) in order, each target once, nofollow left out."""
        base = (canonical(base, url) if base else None) or url
        anchors: dict[str, str] = {}
        seen: set[bytes] = set()  # menus repeat the same links
        for row in self._of("a"):
            start, end = row[_HREF], row[_HREF_END]
            raw = self._data[start:end]
            if start == end or row[_NOFOLLOW] or raw in seen:
                continue
            seen.add(raw)
            target = html.unescape(raw.decode("utf-8", "ignore"))
            whole = target.startswith(("http://", "https://"))
            address = canonical(target, "" if whole else base)
            if address and address not in anchors:
                source = self._source(row, "text", "text_end", _ANCHOR_SPAN)
                text = html.unescape(_MARKUP.sub("", source) if "<" in source else source)
                anchors[address] = " ".join(text.split())[:MAX_ANCHOR]
                if len(anchors) >= MAX_LINKS:
                    break
        return list(anchors.items())

    def _of(self, name: str) -> list[list[int]]:
        rows: list[list[int]] = self._rows[self._rows[:, 0] == _TAG[name]].tolist()
        return rows

    def _may_matter(self, row: list[int]) -> bool:
        """Whether a `meta` can have a name that is read."""
        return bool(_READ_META.search(self._data, row[_START], min(row[_END], row[_START] + _SPAN)))

    def _source(self, row: list[int], first: str, last: str, most: int) -> str:
        """The source between two columns of a mark, `most` bytes of it."""
        start, end = row[_COLUMN[first]], row[_COLUMN[last]]
        return self._data[start : min(end, start + most)].decode("utf-8", "ignore")

    def _attributes(self, row: list[int]) -> dict[str, str]:
        attributes: dict[str, str] = {}
        for match in _ATTRIBUTE.finditer(self._source(row, "start", "end", _SPAN)):
            value = match[2] or match[3] or match[4] or ""
            attributes.setdefault(match[1].lower(), html.unescape(value))
        return attributes

    def _date(self, metas: list[dict[str, str]]) -> str:
        contents = {
            (meta.get("property") or meta.get("name") or meta.get("itemprop") or "").lower():
            meta.get("content", "") for meta in reversed(metas)
        }  # fmt: skip
        dates = (match[0] for text in self._dates(contents) if (match := _DATE.match(text.strip())))
        return next(dates, "")

    def _dates(self, contents: dict[str, str]) -> Iterator[str]:
        """Texts that may be the date, the most trusted first."""
        yield from (contents.get(name, "") for name in _DATE_NAMES)
        if script := _JSON_DATE.search(self._data):
            yield script[1].decode("ascii", "ignore")
        yield from (self._attributes(row).get("datetime", "") for row in self._of("time")[:3])
