"""`sabia show`: rows as text, as JSON lines or as a page."""

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

from sabia.core import notes
from sabia.core.options.reporting import ShowOptions
from sabia.core.recipes.show import changes, html, parts, row_kinds
from sabia.core.recipes.show.judged_removals import ROWS, judge
from sabia.core.recipes.show.parts import Part
from sabia.core.recipes.show.reading import Row, Where, manifest_of, rows_of, sample, sources_of
from sabia.core.recipes.show.related import Related
from sabia.core.recipes.show.terminal import show_text
from sabia.core.shards import records
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job, is_stream

ROWS_OF_PAGE = 100
T = TypeVar("T")


def run(job: Job, options: ShowOptions) -> None:
    """Show what the options select."""
    related = Related(options.with_, options.tokenizer, options.chars)
    where = Where(options.where, strict=not options.diff)
    if options.judge:
        piped = any(one == "-" or is_stream(one) for one in job.inputs or ("-",))
        judge(_rows(job, options, where), related, piped, options.json)
        return
    limit = options.rows or (ROWS_OF_PAGE if options.out else None)
    counts, shown = changes.Counts(), _Shown(limit)
    if options.diff:
        before, after = job.inputs
        every = changes.changes_of(before, after, options.text_column, where, counts)
        differing = (one for several in shown.of([one] for one in every) for one in several)
        if options.to == "jsonl":
            _write_json(one.values() for one in differing)
        else:
            _show(options, job, changes.parts_of(differing, related), shown)
        more = f"there are more; the first {shown.rows:,} are shown"
        notes.note(more if shown.cut else counts.line())
        return
    chunks = shown.of(_rows(job, options, where))
    if options.to == "jsonl":
        _write_json(row.values for chunk in chunks for row in chunk)
    else:
        _show(options, job, chain(_about(job.inputs), row_kinds.parts_of(chunks, related)), shown)
    if not shown.rows:
        notes.note(f"no rows{f' for which {options.where} is true' * bool(options.where)}")


class _Shown:
    """Counts what is shown, and ends after `limit` rows."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.rows, self.cut = limit, 0, False

    def of(self, chunks: Iterable[list[T]]) -> Iterator[list[T]]:
        """The chunks up to the limit."""
        for chunk in chunks:
            left = len(chunk) if self.limit is None else self.limit - self.rows
            self.cut = len(chunk) > left
            if left:
                self.rows += len(chunk[:left])
                yield chunk[:left]
            if self.cut:
                return


def _rows(job: Job, options: ShowOptions, where: Where) -> Iterator[list[Row]]:
    count = options.sample or (ROWS if options.judge else None)
    sources = sources_of(job.inputs, options.text_column, once=count is None)
    if count is not None:
        return sample([*sources], where, count, options.seed)
    return (rows for source in sources for rows in rows_of(source, where))


def _about(inputs: Iterable[str]) -> Iterator[Part]:
    """What the manifests of directories tell about them."""
    for given in inputs:
        if manifest := manifest_of(given):
            totals = manifest.get("totals", {})
            shards = manifest.get("shards", ())
            yield parts.title(given, f"made by sabia {manifest.get('command')}")
            if all("rows" in one for one in shards):
                rows = sum(one["rows"] for one in shards)
                yield parts.field("rows", f"{rows:,} in {len(shards):,} files")
            for name in ("removed", "rejected"):
                if totals.get(name):
                    yield parts.field(name, f"{totals[name]:,}")


def _show(options: ShowOptions, job: Job, shown: Iterable[Part], count: _Shown) -> None:
    if not options.out:
        show_text(shown)
        return
    every = list(shown)
    what = "changes" if options.diff else "rows"
    note = f"{'the first ' * count.cut}{count.rows:,} {what}"
    note += f" for which {options.where}" * bool(options.where)
    note += f", a random sample (seed {options.seed})" * bool(options.sample)
    names = " ".join(os.path.basename(one.rstrip("/")) or one for one in job.inputs or ("stdin",))
    write_atomic(options.out, html.page_of(every, f"sabia show {names}", note))
    notes.note(f"{note} → {options.out}")


def _write_json(rows: Iterable[dict[str, object]]) -> None:
    for row in rows:
        sys.stdout.buffer.write(f"{records.to_json(row)}\n".encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
