"""The document record of a page, the same for the network, WARC files and local files.

`meta` is JSON: title, date and language as given on the page, and the extractor; for crawled pages
also the depth and `order` (the page's number in the order of fetching; with scores["focus"] it
gives the harvest curve).
"""

import json
from datetime import datetime
from typing import Any

from sabia.core.shards.schemas import document_id

FOCUS = "focus"  # the name of the score of a focused crawl


def document(
    extracted: dict[str, Any],
    url: str,
    source: str,
    time: datetime | str | None,
    score: float | None,
    **meta: Any,
) -> dict[str, Any]:
    """A row for `records.to_batch(…, "document")`; `time` is when the page was fetched."""
    metadata = {"title": extracted["title"], "date": extracted.get("date", ""),
            "html_language": extracted["language"], "extractor": extracted["extractor"],
            **meta}  # fmt: skip
    kept = {n: v for n, v in metadata.items() if v not in ("", None) and v is not False}
    return {
        "id": document_id(url, extracted["text"]),
        "text": extracted["text"],
        "url": url,
        "source": source,
        "crawl_time": time,
        "scores": [] if score is None else [(FOCUS, score)],
        "meta": json.dumps(kept, ensure_ascii=False),
    }


def text_to_judge(extracted: dict[str, Any]) -> str:
    """The text that a judge scores: title and text."""
    return f"{extracted['title']}\n{extracted['text']}"
