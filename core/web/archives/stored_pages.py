"""Pages from WARC files and folders to documents: extraction and scoring without the network.

A map stage: one transform per shard, run in worker processes or Slurm array slices. Documents that
are read from records (JSON lines, Parquet) keep their text; columns that are not in the document
schema are moved into `meta`.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.options.crawl import CrawlOptions
from sabia.core.shards import schemas
from sabia.core.shards.arrow_arrays import as_dict
from sabia.core.shards.columns import score_names
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import columns_there
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.records import to_batch
from sabia.core.shards.sources import Source
from sabia.core.shards.summary import Summary
from sabia.core.web.crawl_inputs import FolderRecords, PageFiles, is_document
from sabia.core.web.documents import (
    ARCHIVED,
    FOCUS,
    WarcRecord,
    archived_columns,
    document,
    text_to_judge,
)
from sabia.core.web.extraction.extract import CAREFUL
from sabia.core.web.extraction.sandbox import Sandbox, Unextractable
from sabia.core.web.fetch import MIME_TYPES
from sabia.core.web.focus import make_judge

Extract = Callable[[bytes, str, str], dict[str, Any]]  # body, content type and URL of a page
ScoreOf = Callable[[str], float | None]  # the score of a text and a count of relevant ones


def read_stored_pages(job: Job, sources: tuple[Any, ...], options: CrawlOptions) -> Summary:
    """Turn the sources into documents at the job's output."""
    judged = bool(options.focus or options.classifier)
    files = [source for source in sources if isinstance(source, PageFiles)]
    if options.markdown and all(isinstance(one, FolderRecords) for one in files):
        raise UsageError("--markdown: only with pages as INPUT; these inputs are documents")
    if judged:
        make_judge(options)  # reports a mistake in the options once, before any work
    whole = not job.shard
    score_columns = set().union(*(_score_names(source, whole) for source in sources))
    names = tuple(sorted(score_columns | ({FOCUS} if judged else set())))
    there = columns_there(job) if job.append else None
    lacks = there is not None and ARCHIVED[0].name not in there.names
    extras = ARCHIVED if any(one.warc for one in files) and not lacks else ()
    transform = partial(read_shard, options=options, names=names, extras=extras)
    return run_map(job, transform, sources=list(sources), next_step="sabia classify",
                   schema=pa.schema([*schemas.document(names), *extras]))  # fmt: skip


def _score_names(source: object, whole: bool) -> set[str]:
    """Names of the scores of documents among the inputs; pages have none."""
    if isinstance(source, Source):
        return score_names(source, whole)
    if not isinstance(source, FolderRecords):
        return set()
    try:
        return set().union(*(score_names(one, whole) for one in source.records()))
    except BadData:
        return set()  # a file that cannot be read is rejected when it is opened


def read_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    options: CrawlOptions,
    names: tuple[str, ...],
    extras: Sequence[pa.Field] = (),
) -> Iterator[pa.RecordBatch]:
    """The transform: batches of pages or documents in, batches of documents out.

    names: the scores that any document of the output has; extras: its further columns, ARCHIVED or
    none: then `meta` has what they would have.
    """
    judge = make_judge(options)

    def score_of(text: str) -> float | None:
        if judge is None:
            return None
        score = judge(text)
        context.count("relevant", float(score >= options.threshold))
        return score

    with Sandbox() as sandbox:
        for batch in batches:
            if is_document(batch):
                documents = list(_folded(batch, context.name))
                for row in documents:
                    score = score_of(row["text"])
                    row["scores"] += [] if score is None else [(FOCUS, score)]
            else:
                extract = partial(sandbox.extract, links=False, markdown=options.markdown)
                documents = list(_documents(batch, extract, score_of, context, bool(extras)))
            if documents:
                yield to_batch(documents, "document", extras, names)


def _documents(
    batch: pa.RecordBatch, extract: Extract, score_of: ScoreOf, context: ShardContext, columns: bool
) -> Iterator[dict[str, Any]]:
    for page in batch.to_pylist():
        kind = page["content_type"] or "text/html"
        if kind.partition(";")[0].strip().lower() not in MIME_TYPES:
            context.reject({"url": page["url"]}, f"content type {kind}")
            continue
        try:
            extracted = extract(page["body"], kind, page["url"])
        except Unextractable as error:
            context.reject({"url": page["url"]}, str(error))
            continue
        context.count("careful", float(extracted["extractor"] == CAREFUL))
        if not extracted["text"]:
            context.reject({"url": page["url"]}, "no text on the page")
            continue
        score = score_of(text_to_judge(extracted))
        record = WarcRecord(*(page[field.name] for field in ARCHIVED))
        archived = record if record.id else None
        meta = archived_columns(archived) if archived and not columns else {}
        yield document(extracted, page["url"], page["source"], page["crawl_time"], score,
                       archived if columns else None, truncated=page["cut"], **meta)  # fmt: skip


def _folded(batch: pa.RecordBatch, shard: str) -> Iterator[dict[str, Any]]:
    """Document rows with unknown columns moved into `meta`, so that all shards have one schema."""
    known = schemas.document().names
    for row in batch.to_pylist():
        kept = {name: row[name] for name in known}
        kept["scores"] = list(as_dict(row["scores"]).items())
        kept["source"] = kept["source"] or os.path.basename(shard)
        extra = {n: value for n, value in row.items() if n not in known and value is not None}
        if extra:
            before = json.loads(row["meta"]) if row["meta"] else {}
            kept["meta"] = json.dumps({**before, **extra}, ensure_ascii=False, default=str)
        yield kept
