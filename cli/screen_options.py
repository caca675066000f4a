"""Options of `classify` that look for what should not be in a corpus."""

from collections.abc import Mapping
from typing import Annotated, Any

from sabia.cli.grammar import option

SCREENS: Mapping[str, tuple[Any, Any]] = {
    "pii": (
        Annotated[str, option("Personal data: count it, or mask it too.", metavar="count|mask")],
        "",
    ),
    "bad_words": (
        Annotated[
            list[str] | None,
            option("Count words of lists: FILE, or DIR of LANGUAGE.txt.", metavar="PATH"),
        ],
        None,
    ),
    "block_urls": (
        Annotated[
            list[str] | None,
            option("Domains and URLs that give blocked_url 1: FILE or DIR.", metavar="PATH"),
        ],
        None,
    ),
    "c4_lines": (
        Annotated[bool, option("Keep only the lines that C4 keeps; edits text.", "--c4-lines")],
        False,
    ),
}
