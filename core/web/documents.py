"""The document record of a page, the same for the network, WARC files and local files.

`meta` is JSON: title, date and language as given on the page, and the extractor; for crawled pages
also the depth and `order` (the page's number in the order of fetching; with scores["focus"] it
gives the harvest curve).
"""

import json
import os
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from sabia.core.shards.schemas import document_id

FOCUS = "focus"  # the name of the score of a focused crawl


class WarcRecord(NamedTuple):
    """Where a page is archived: the name of the WARC file, and the WARC-Record-ID without <>."""

    file: str
    id: str

    @staticmethod
    def of(path: str, header: str | None) -> "WarcRecord | None":
        """The record with this header WARC-Record-ID in the file at a path; None without one."""
        name = (header or "").strip("<> ")
        return WarcRecord(os.path.basename(path), name) if name else None


# the columns of documents whose pages are archived
ARCHIVED = (pa.field("warc_file", pa.string()), pa.field("warc_record", pa.string()))


def document(
    extracted: dict[str, Any],
    url: str,
    source: str,
    time: datetime | str | None,
    score: float | None,
    archived: WarcRecord | None = None,
    **meta: object,
) -> dict[str, object]:
    """A row for `records.to_batch(…, "document")`; `time` is when the page was fetched. The columns
    ARCHIVED are in it if the page is archived."""
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
        **(archived_columns(archived) if archived else {}),
    }


def archived_columns(record: WarcRecord) -> dict[str, str | None]:
    """The columns ARCHIVED of a document; the file of a stream has no name."""
    return {field.name: value or None for field, value in zip(ARCHIVED, record, strict=True)}


def text_to_judge(extracted: dict[str, Any]) -> str:
    """The text that a judge scores: title and text."""
    return f"{extracted['title']}\n{extracted['text']}"
