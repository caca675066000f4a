"""A page's document record, the same for the network, WARC files and local files.

`meta` is JSON: title, date and language as the page says them, extractor; for crawled pages depth
and `order` (the page was the order-th that was fetched; with scores["focus"] it draws the harvest
curve).
"""

import json
from datetime import datetime
from typing import Any

from sabia.core.shards.schemas import document_id

FOCUS = "focus"  # the score of a crawl that has a focus


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
    kept = {
        name: value
        for name, value in metadata.items()
        if value not in ("", None) and value is not False
    }
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
    """What a page is judged by: its title and text."""
    return f"{extracted['title']}\n{extracted['text']}"
