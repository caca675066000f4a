"""Reviews by people: a file of JSON lines that is written for them and read back.

A line has the keys `verdict` (accept, edit or reject), `edit` (the better text) and `reviewer`,
which are empty until a person fills them in, then `id`, `text` (the new one) and what helps to
judge it. A verdict belongs to the text that was reviewed: one on another text of the record is an
error. New columns: `review_verdict` and `reviewer`, null without a verdict.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.files import unreadable
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards import schemas
from sabia.core.shards.atomic import atomic_path
from sabia.core.shards.dry_run import unmeasured
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, Transform, run_map
from sabia.core.shards.summary import Summary
from sabia.core.text.removed_rows import put_column, put_columns

ACCEPT, EDIT, REJECT = "accept", "edit", "reject"
VERDICTS = (ACCEPT, EDIT, REJECT)
KEYS = ("verdict", "edit", "reviewer")
NAMED = 5  # bad lines in an error
ABOUT = (
    "rewrite_verdict", "rewrite_model", "best_of_score", "best_of_items", "ensemble_share",
    "ensemble_segments",
)  # fmt: skip
Reviewed = tuple[str, str]  # id and text of a record


@dataclass(frozen=True)
class Review:
    """What a person decided about a text, and the number of the line that says so."""

    verdict: str
    edit: str
    reviewer: str
    line: int


class Reviews:
    """The verdicts of a file, by id and text of the records; lines without one are left out."""

    def __init__(self, option: str, path: str) -> None:
        """Raises UsageError if the file cannot be read, BadData with the lines that are wrong."""
        self.option, self.path = option, path
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise unreadable(option, path, error) from error
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.by_text: dict[Reviewed, Review] = {}
        self.lines: dict[str, int] = {}  # of ids
        bad = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                self._add(number, line)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
        if bad:
            more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
            raise BadData(f"{option}: {path}: {'; '.join(bad[:NAMED])}{more}")

    def _add(self, number: int, line: bytes) -> None:
        if not line.strip():
            return
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError("is not JSON (expected one object a line)") from None
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("id", "text")
        ):
            raise ValueError("has no id or no text (expected those that --review wrote)")
        verdict, edit, reviewer = (entry.get(key) or "" for key in KEYS)
        if not all(isinstance(value, str) for value in (verdict, edit, reviewer)):
            raise ValueError(f"{', '.join(KEYS)} are not all text")
        verdict, reviewer = verdict.strip().lower(), reviewer.strip()
        if not verdict and not edit and not reviewer:
            return
        if verdict not in VERDICTS:
            raise ValueError(f"verdict {verdict!r} (expected {', '.join(VERDICTS)})")
        if not reviewer:
            raise ValueError(f"verdict {verdict} without a reviewer (expected a name)")
        if bool(edit.strip()) != (verdict == EDIT):
            raise ValueError(
                f"verdict {verdict} {'with' if edit.strip() else 'without'} an edit (expected a "
                "text in `edit` with the verdict edit only)"
            )
        key = (entry["id"], entry["text"])
        before = self.by_text.setdefault(key, Review(verdict, edit, reviewer, number))
        if before != Review(verdict, edit, reviewer, before.line):
            raise ValueError(f"has another verdict than line {before.line} on the same record")
        self.lines.setdefault(entry["id"], number)

    def of(self, id_: str, text: str) -> Review | None:
        """The verdict on a record; BadData if it is on another text of it."""
        review = self.by_text.get((id_, text))
        if review is None and (line := self.lines.get(id_)):
            raise BadData(
                f"{self.option}: {self.path}: line {line}: the text of record {id_} is another one "
                "now (expected the reviewed one: use the same input, recipe and model, and leave "
                "`text` as it is; or remove the verdict)"
            )
        return review


def run_reviewed(
    job: Job,
    options: RewriteOptions,
    transform: Transform,
    sources: Sequence[Any],
    salt: str,
    schema: pa.Schema | None = None,
    live: Callable[[], str] | None = None,
) -> Summary:
    """`run_map` of a recipe, with the verdicts of --reviewed, and then the file of --review.

    schema: that of the chat records; None: documents. live: None for a transform without a model.
    """
    reviews = Reviews("--reviewed", options.reviewed) if options.reviewed else None
    if options.review and (job.shard is not None or options.append):
        raise UsageError(
            "--review: with --shard or --append, the output has other rows as well (expected a "
            "call without them, after all others)"
        )
    given = Reviews("--review", options.review) if Path(options.review or "/").is_file() else None
    if reviews is not None:
        transform = partial(_decided, transform=transform, reviews=reviews)
        salt = f"{salt} reviewed {reviews.digest}"
    kinds = ("prompt", "chat") if schema is not None else ("document", "document")
    summary = run_map(
        job, transform, *kinds, sources, salt, schema=schema,
        sampled=None if live is None else unmeasured, live=live,
    )  # fmt: skip
    if reviews is not None and not job.dry_run and not summary.shards_skipped:
        lost = len(reviews.by_text) - int(summary.counters.get("reviewed", 0))
        if lost > 0:
            notes.warn(
                f"--reviewed: {lost:,} of the {len(reviews.by_text):,} verdicts of "
                f"{options.reviewed} are on records that this output does not have"
            )
    if options.review and job.dry_run:
        print(f"write {options.review}: a line for each new text")
    elif options.review:
        _write(job, options, kinds[1], sources, given)
    return summary


def _decided(
    batches: Iterator[pa.RecordBatch], context: ShardContext, transform: Transform, reviews: Reviews
) -> Iterator[pa.RecordBatch]:
    """The rows of a transform, with the verdicts on them."""
    for batch in transform(batches, context):
        rows = zip(batch.column("id").to_pylist(), _texts(batch), strict=True)
        decided = [reviews.of(id_, text) for id_, text in rows]
        for number, review in enumerate(decided):
            if review is not None and review.verdict == REJECT:
                context.reject(batch.slice(number, 1), f"review: rejected by {review.reviewer}")
        context.count("reviewed", sum(review is not None for review in decided))
        kept = [review is None or review.verdict != REJECT for review in decided]
        batch = batch.filter(pa.array(kept, pa.bool_()))
        left = [review for review, keep in zip(decided, kept, strict=True) if keep]
        edits = [review.edit if review and review.verdict == EDIT else None for review in left]
        if any(edit is not None for edit in edits):
            batch = _edited(batch, edits)
        verdicts = [review.verdict if review else None for review in left]
        reviewers = [review.reviewer if review else None for review in left]
        yield put_columns(batch, {
            "review_verdict": pa.array(verdicts, pa.string()),
            "reviewer": pa.array(reviewers, pa.string()),
        })  # fmt: skip


def _texts(batch: pa.RecordBatch) -> list[str]:
    """The text of each document, or the last turn of each conversation."""
    if "messages" not in batch.schema.names:
        texts: list[str] = batch.column("text").to_pylist()
        return texts
    return [messages[-1]["content"] for messages in batch.column("messages").to_pylist()]


def _edited(batch: pa.RecordBatch, edits: Sequence[str | None]) -> pa.RecordBatch:
    """The batch with the edits (None: none) as the texts of its rows."""
    if "messages" not in batch.schema.names:
        pairs = zip(edits, _texts(batch), strict=True)
        texts = [text if edit is None else edit for edit, text in pairs]
        return put_column(batch, "text", pa.array(texts, pa.string()))
    rows = batch.column("messages").to_pylist()
    for messages, edit in zip(rows, edits, strict=True):
        if edit is not None:
            messages[-1]["content"] = edit
    kind = schemas.KINDS["chat"].field("messages").type
    return put_column(batch, "messages", pa.array(rows, kind))


def _write(
    job: Job, options: RewriteOptions, kind: str, sources: Sequence[Any], given: Reviews | None
) -> None:
    """Write the file of --review from the complete output, with the verdicts that it has."""
    made = open_inputs(replace(job, inputs=(str(job.out),), text_column=""), kind)
    originals = _originals(sources) if kind == "document" else iter(())
    written = set[Reviewed]()
    with atomic_path(options.review) as path, path.open("w", encoding="utf-8") as file:
        for entry in _entries(made, originals):
            key = (entry["id"], entry["text"])
            if key in written:
                continue
            written.add(key)
            review = given.by_text.get(key) if given else None
            filled = {name: getattr(review, name) if review else "" for name in KEYS}
            file.write(json.dumps(filled | entry, ensure_ascii=False) + "\n")
        if given and (lost := given.by_text.keys() - written):
            line = min(given.by_text[key].line for key in lost)
            raise UsageError(
                f"--review: {options.review}: line {line} has a verdict on a text that {job.out} "
                "does not have (expected another file, so that the verdict is not lost)"
            )
    notes.note(f"{len(written):,} texts to review → {options.review}")


def _originals(sources: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Id and text of the documents that were read; none of a stream."""
    if any(getattr(source, "stream", None) is not None for source in sources):
        return
    for source in sources:
        for batch in source.batches(columns=["id", "text"]):
            yield from zip(
                *(batch.column(name).to_pylist() for name in ("id", "text")), strict=True
            )


def _entries(made: Iterable[Any], originals: Iterator[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """What a line has of each new text; the originals are in the order of the rows."""
    for source in made:
        for batch in source.batches():
            texts = _texts(batch)
            for row, text in zip(batch.to_pylist(), texts, strict=True):
                if not row.get("rewritten", True):
                    continue
                entry: dict[str, Any] = {"id": row["id"], "text": text}
                if "messages" in row:
                    entry["conversation"] = [_turn(one) for one in row["messages"][:-1]]
                else:
                    entry["original"] = next((t for id_, t in originals if id_ == row["id"]), None)
                yield entry | {name: row[name] for name in ABOUT if row.get(name) is not None}


def _turn(message: Mapping[str, Any]) -> dict[str, object]:
    return {name: value for name, value in message.items() if value is not None}
