"""Extraction in a child process: a page that hangs or uses too much memory costs only itself.

The child, `python -m sabia.core.web.extraction.sandbox`, has the limits of `core.sandbox.limits`.
"""

import sys
from typing import Any

from sabia.core.errors import Failed
from sabia.core.sandbox.limits import Child, PastLimitError, serve

MODULE = "sabia.core.web.extraction.sandbox"
TIME_S = 20.0  # of CPU, for a page
MEMORY_BYTES = 2 << 30  # beyond what the child takes before its first page


class Unextractable(Failed):
    """The page cannot be turned into text within the limits."""


class Sandbox(Child):
    """One child; `extract` may be called from one thread at a time."""

    def __init__(
        self, time_s: float = TIME_S, memory_bytes: int = MEMORY_BYTES, wait_s: float = 0.0
    ) -> None:
        super().__init__(MODULE, time_s, memory_bytes, wait_s)

    def extract(
        self, body: bytes, content_type: str, url: str, links: bool, markdown: bool = False
    ) -> dict[str, object]:
        """`extract.Extracted` as a dictionary; raises Unextractable."""
        try:
            asked = {"type": content_type, "url": url, "links": links, "markdown": markdown}
            answer = self.ask(asked, body)
        except PastLimitError as error:
            raise Unextractable(f"extraction {error}") from error
        if "error" in answer:
            raise Unextractable(f"extraction failed: {answer['error']}")
        return answer


def _serve(memory_bytes: int) -> None:
    from sabia.core.web.extraction import extract

    def answer(asked: dict[str, Any], body: bytes) -> dict[str, object]:
        given = (asked[name] for name in ("type", "url", "links", "markdown"))
        return vars(extract.extract(body, *given))

    serve(answer, memory_bytes, extract.warm_up)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
