"""Texts that define the topic of a crawl: labelled documents and unlabelled examples.

They are generated with other seeds than the pages of the site, so a classifier trained on them has
not seen the pages that it will score.
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


def focus_texts(seed: int, characters: int = 2_000) -> list[str]:
    """Example texts of relevant pages: one article per topic and some lessons of sums."""
    pages = build_site(LABELLED_PAGES, seed + _OTHER_SEED).pages.values()
    lessons = [page for page in pages if page.kind == "exercise"]
    by_topic = {page.path.rpartition("/")[0]: page for page in pages if page.kind == "prose"}
    return [
        " ".join((page.title, *page.body))[:characters]
        for page in (*lessons[::7], *by_topic.values())
    ]
