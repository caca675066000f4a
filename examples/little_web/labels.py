"""Texts that say what a crawl is after: labelled documents and unlabelled examples.

They come from other seeds than the site's own pages, so a classifier trained on them has not seen
what it will judge.
"""

from collections.abc import Iterator
from typing import Any

from sabia.examples.little_web.site import build_site

LABELLED_PAGES = 160
_OTHER_SEED = 1_000_003


def labelled_documents(seed: int) -> Iterator[dict[str, Any]]:
    """Documents with `label` keep (prose, exercises) or drop (spam, navigation)."""
    site = build_site(LABELLED_PAGES, seed + _OTHER_SEED)
    for page in site.pages.values():
        if page.kind in ("exercise", "prose", "spam", "navigation"):
            label = "keep" if page.relevant else "drop"
            links = " ".join(anchor for _, anchor in page.links)
            text = page.text if page.body else f"{page.title}\n{links}"
            yield {"text": text, "source": "little_web", "language": page.language, "label": label}


def focus_texts(seed: int, count: int = 12) -> list[str]:
    """Example texts of what is wanted, one a line, half of them exercises."""
    pages = list(build_site(LABELLED_PAGES, seed + _OTHER_SEED).pages.values())
    return [
        " ".join(page.body)
        for kind in ("exercise", "prose")
        for page in [p for p in pages if p.kind == kind][:: max(1, 96 // count)][: count // 2]
    ]
