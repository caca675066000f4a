"""The elements of a scanned page, and where in them a text stands."""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from sabia.core.web.extraction.markdown.markup import attribute, attributes_at
from sabia.kernels.html.definitions import ELEMENT_COLUMNS, TAG_NAMES, Page

DEEPEST = 8  # lists and quotes around a paragraph; those within do not show
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_COLUMN = {name: i for i, name in enumerate(ELEMENT_COLUMNS)}


class Context(NamedTuple):
    """Elements around a text, -1 for none: `path` has the block quotes and list items from outside
    in, `pre`, `row` (tr) and `table` are the innermost; `heading` is a level or 0."""

    path: tuple[int, ...] = ()
    heading: int = 0
    pre: int = -1
    row: int = -1
    table: int = -1


class Tree:
    """Columns of the elements as lists: parent, name, where the source begins and ends."""

    def __init__(self, page: Page) -> None:
        columns = {name: page.elements[:, i] for name, i in _COLUMN.items()}
        self.tags = columns["tag"]
        self.up, self.source, self.end = (columns[name].tolist()
                                          for name in ("up", "source", "source_end"))  # fmt: skip
        names = ("", *TAG_NAMES)
        self.names = [names[tag] for tag in self.tags.tolist()]
        self._contexts: dict[int, Context] = {0: Context()}
        self._ordinals: dict[int, int] = {}

    def of(self, *names: str) -> list[int]:
        """The elements of these names in order."""
        numbers = [TAG_NAMES.index(name) + 1 for name in names]
        return np.flatnonzero(np.isin(self.tags, numbers)).tolist()

    def context(self, element: int) -> Context:
        """Where text directly in the element stands."""
        way = []
        while element not in self._contexts:
            way.append(element)
            element = self.up[element]
        context = self._contexts[element]
        for inner in reversed(way):
            context = self._contexts[inner] = self._inside(context, inner)
        return context

    def _inside(self, context: Context, element: int) -> Context:
        name = self.names[element]
        if name in ("li", "blockquote") and len(context.path) < DEEPEST:
            return context._replace(path=(*context.path, element))
        if name in _HEADINGS:
            return context._replace(heading=_HEADINGS[name])
        if name == "pre":
            return context._replace(pre=element)
        if name == "table":
            return context._replace(table=element, row=-1)
        if name == "tr" and context.table >= 0:
            return context._replace(row=element)
        return context

    def element_at(self, position: int) -> int:
        """The innermost element around a position of the source."""
        element = bisect_right(self.source, position) - 1
        while element > 0 and self.end[element] <= position:
            element = self.up[element]
        return max(element, 0)

    def marker(self, data: bytes, element: int) -> str:
        """What begins the first line of a list item or each line of a quote."""
        if self.names[element] == "blockquote":
            return "> "
        items = self.up[element]
        if self.names[items] != "ol":
            return "- "
        if not self._ordinals:
            self._count()
        start = attribute(attributes_at(data, self.source[items]), "start").strip()
        first = int(start) if start.isdecimal() and len(start) < 8 else 1
        return f"{first + self._ordinals[element]}. "

    def _count(self) -> None:
        """The position of each list item in its list."""
        counts: dict[int, int] = {}
        for element in self.of("li"):
            items = self.up[element]
            self._ordinals[element] = counts.get(items, 0)
            counts[items] = self._ordinals[element] + 1
