"""Paragraphs within lists and quotes to the lines of a Markdown document."""


class Writer:
    """Collects lines. The elements around a paragraph are its path; each has a marker."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._path: tuple[int, ...] = ()
        self._markers: list[str] = []

    def add(self, path: tuple[int, ...], markers: list[str], lines: list[str]) -> None:
        """Add a paragraph, heading, table or code block; `markers` belong to `path`."""
        common = 0
        while path[: common + 1] == self._path[: common + 1] and common < len(path):
            common += 1
        around = [_continued(marker) for marker in markers[:common]]
        if self._lines and not self._in_one_list(markers, common):
            self._lines.append("".join(around).rstrip())
        begin = "".join([*around, *markers[common:]])
        go_on = "".join(map(_continued, markers))
        self._lines.append((begin + lines[0]).rstrip() if not lines[0] else begin + lines[0])
        self._lines += [go_on + line if line else go_on.rstrip() for line in lines[1:]]
        self._path, self._markers = path, markers

    def _in_one_list(self, markers: list[str], common: int) -> bool:
        """Whether the paragraph begins an item of the list that is open, or of one within it."""
        if common >= len(markers) or markers[common] == "> ":
            return False
        if common < len(self._markers):  # an item after an item of the same kind
            return (self._markers[common][0] == "-") == (markers[common][0] == "-")
        # a list within an item; only a list from 1 on can follow a text directly
        return common > 0 and markers[common] in ("- ", "1. ") and markers[common - 1] != "> "

    def text(self) -> str:
        """The document."""
        return "\n".join(self._lines)


def _continued(marker: str) -> str:
    """What stands before the further lines."""
    return marker if marker == "> " else " " * len(marker)
