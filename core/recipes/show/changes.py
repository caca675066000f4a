"""What differs between two outputs: rows that were removed, added or changed (`show --diff`).

A row of both is matching by its id, of rows with the same id by their order. The ids of what is
compared are held as hashes of 64 bits: of one shard at a time where the shards after record that
they were made from those before, else of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from sabia.core import stop
from sabia.core.errors import UsageError
from sabia.core.recipes.report.given_outputs import column_names, provenance_of
from sabia.core.recipes.show import parts
from sabia.core.recipes.show.parts import ADDED, NAME, REMOVED, Part
from sabia.core.recipes.show.reading import Row, Values, Where, batches_of, kept_rows, sources_of
from sabia.core.recipes.show.related import Related, searchable
from sabia.core.recipes.show.row_kinds import address_of, kind_of, shown_value
from sabia.core.shards import records
from sabia.core.shards.arrow_arrays import as_dict
from sabia.core.shards.sources import Source

_COPY = np.uint64(0x9E3779B97F4A7C15)  # added to the key of a row for each equal one before it
Side = Sequence[Source]


@dataclass(frozen=True)
class Change:
    """A row that was removed (no `after`), added (no `before`) or changed."""

    before: Row | None
    after: Row | None

    @property
    def kind(self) -> str:
        """removed, added or changed."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def values(self) -> Values:
        """The change as a record."""
        sides = {"before": self.before, "after": self.after}
        return {"change": self.kind} | {k: row and row.values for k, row in sides.items()}


@dataclass
class Counts:
    """Rows before and after, and those that differ."""

    before: int = 0
    after: int = 0
    removed: int = 0
    added: int = 0
    changed: int = 0

    def line(self) -> str:
        """The counts in words."""
        return (
            f"{self.before:,} rows before, {self.after:,} after: {self.removed:,} removed, "
            f"{self.added:,} added, {self.changed:,} changed"
        )


def changes_of(
    before: str, after: str, text_column: str, where: Where, counts: Counts
) -> Iterator[Change]:
    """The changes for which the expression is true before or after, in the order before. Raises
    UsageError at the end for a name in the expression that neither side has."""
    for old, new in _pairs(
        [*sources_of([before], text_column)], [*sources_of([after], text_column)]
    ):
        yield from _between([*map(searchable, old)], [*map(searchable, new)], where, counts)
    if where.unknown:
        raise UsageError(f"--where: {min(where.unknown)!r} is neither a column nor a score in "
                         f"{before} or {after}")  # fmt: skip


def _pairs(before: Side, after: Side) -> Iterator[tuple[Side, Side]]:
    """The shards that have the same rows, where that is recorded, else all."""
    by_origin = {source.origin: source for source in before}
    made_of = dict[str, list[Source]]()
    for source in after:
        origins = provenance_of(source).get("origins", [])
        if len(origins) != 1 or origins[0] not in by_origin:
            yield before, after
            return
        made_of.setdefault(origins[0], []).append(source)
    for source in before:
        yield [source], made_of.get(source.origin, [])


def _between(before: Side, after: Side, where: Where, counts: Counts) -> Iterator[Change]:
    old, new = _keys(before), _keys(after)
    counts.before, counts.after = counts.before + len(old), counts.after + len(new)
    kept, known = np.isin(old, new), np.isin(new, old)
    counts.removed += int(len(kept) - kept.sum())
    counts.added += int(len(known) - known.sum())
    following = zip(new.tolist(), known.tolist(), _rows(after, where), strict=True)
    ahead = dict[int, tuple[Row, bool]]()
    for key, is_kept, (row, matches) in zip(
        old.tolist(), kept.tolist(), _rows(before, where), strict=True
    ):
        if not is_kept:
            if matches:
                yield Change(row, None)
            continue
        while key not in ahead:
            other, is_known, matching = next(following)
            if is_known:
                ahead[other] = matching
            elif matching[1]:
                yield Change(None, matching[0])
        then, also = ahead.pop(key)
        if differing(row.values, then.values):
            counts.changed += 1
            if matches or also:
                yield Change(row, then)
    for _, _, (row, matches) in following:
        if matches:
            yield Change(None, row)


def _keys(sources: Side) -> np.ndarray:
    """A key for each row, uint64[n], by its id and the number of rows with this id before it."""
    hashes = list[int]()
    for source in sources:
        has_ids = source.kind != "any" or "id" in column_names(source)
        for rows in batches_of(source, ["id"] if has_ids else None):
            stop.check()
            hashes += (
                xxh3_64_intdigest(_name(row).encode("utf-8", "surrogatepass"))
                for row in (rows if isinstance(rows, list) else rows.to_pylist())
            )
    keys = np.array(hashes, np.uint64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.searchsorted(ordered, ordered)
    keys[order] += (np.arange(len(keys)) - first).astype(np.uint64) * _COPY
    return keys


def _name(values: Values) -> str:
    return records.to_json(values) if values.get("id") is None else str(values["id"])


def _rows(sources: Side, where: Where) -> Iterator[tuple[Row, bool]]:
    """The rows, and whether the expression is true of them."""
    for source in sources:
        at = 0
        for rows in batches_of(source):
            stop.check()
            matches = where.mask(rows, source.name).tolist()
            every = kept_rows(rows, source, at, range(len(rows)))
            yield from zip(every, matches, strict=True)
            at += len(rows)


def differing(before: Values, after: Values) -> list[str]:
    """The names of the columns in which two rows differ; null is as if there were no column."""
    names = dict.fromkeys(chain(before, after))
    return [name for name in names if _plain(name, before) != _plain(name, after)]


def _plain(name: str, values: Values) -> Any:
    value = values.get(name)
    return as_dict(value) if name == "scores" and value else value or None if value != 0 else value


def parts_of(changes: Iterator[Change], related: Related) -> Iterator[Part]:
    """The parts of changes: rows that are on one side as they are, others by what differs."""
    for change in changes:
        row = change.after or change.before
        assert row is not None
        words = row.values.get("id") or f"row {row.number:,}"
        yield parts.title(f"{change.kind} {words}", address_of(row))
        if change.before is None or change.after is None:
            style = ADDED if change.before is None else REMOVED
            yield parts.heading(f"only {'after' if change.before is None else 'before'}", style)
            shown = kind_of(row.values).show([row], related)
            yield from (part for part in shown if part.role != parts.TITLE)
            continue
        yield from _changed(change.before.values, change.after.values, related.chars)


def _changed(before: Values, after: Values, chars: int) -> Iterator[Part]:
    long = list[tuple[str, str, str]]()
    for name in differing(before, after):
        sides = [values.get(name) for values in (before, after)]
        if name == "scores":
            named = [as_dict(side) for side in sides]
            odd = [one for one in named[0] | named[1] if named[0].get(one) != named[1].get(one)]
            sides = [{one: side[one] for one in odd if one in side} for side in named]
        old, new = (shown_value(name, side) for side in sides)
        if max(len(old), len(new)) > parts.AROUND and old and new:
            long.append((name, old, new))
            continue
        spans = tuple((style, shown) for style, shown in ((REMOVED, old), (ADDED, new)) if shown)
        yield Part(parts.FIELD, name, spans)
    for name, old, new in long:
        yield parts.heading(name, NAME)
        yield parts.spans(parts.difference(old, new), chars)
