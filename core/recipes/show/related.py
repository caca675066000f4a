"""The rows that rows refer to by id: the kept document, the prompt of a sample, the text before.

They are looked up in the paths of `--with`, else in those that the shards record, as far as these
still exist.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.report.given_outputs import (
    RUN_RECORD,
    column_names,
    provenance_of,
    rows_with,
)
from sabia.core.recipes.report.token_chain import tokenizers_beside
from sabia.core.recipes.show.reading import Row, Values, sources_of
from sabia.core.shards.lineage.run_record import RUN, of_parquet
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer

MOST_SEARCHED = 1_000_000  # rows, of recorded paths
OUT, INPUTS = "out", "inputs"  # of the record of a shard: the output, or the inputs, of its run


@dataclass
class Related:
    """Finds rows by id, and tokenizers. given: the paths of --with; tokenizer: that of the option,
    '' for the one next to the rows; chars: that are shown of a text, 0 for all."""

    given: Sequence[str]
    tokenizer: str
    chars: int
    _known: dict[str, Values] = field(default_factory=dict)
    _paths: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _tokenizers: dict[str, Tokenizer | None] = field(default_factory=dict)
    _searched_whole: bool = True

    def get(self, name: object) -> Values | None:
        """The row of an id that was looked up; None if there is none."""
        return self._known.get(str(name))

    def look_up(self, rows: Sequence[Row], column: str, role: str) -> None:
        """Look up the ids in a column of rows; role: OUT or INPUTS, where the records of the shards
        tell that they are."""
        names = dict.fromkeys(str(row.values[column]) for row in rows if row.values.get(column))
        self._known = {name: self._known[name] for name in names if name in self._known}
        missing = {name for name in names if name not in self._known}
        sources = list(self._given) if self.given else list(self._recorded(rows, role))
        searched = 0
        for source in sources:
            if not missing or (searched >= MOST_SEARCHED and not self.given):
                break
            for _, table in rows_with(source, {"id": pa.array(sorted(missing))}):
                new = {str(one["id"]): one for one in table.to_pylist()}
                self._known |= {name: new[name] for name in missing & new.keys()}
            missing -= self._known.keys()
            searched += source.rows() or 0
        if missing and sources and self._searched_whole and searched >= MOST_SEARCHED:
            self._searched_whole = False
            notes.note(
                f"{len(missing)} of {len(names)} rows that rows refer to are not among the first "
                f"{searched:,} of {os.path.dirname(sources[0].name)}; --with PATH searches all"
            )

    @cached_property
    def _given(self) -> list[Source]:
        return list(map(searchable, sources_of(self.given)))

    def _recorded(self, rows: Sequence[Row], role: str) -> Iterator[Source]:
        """The shards of the paths that the shards of rows record, where they exist."""
        paths = dict[str, None]()
        for row in rows:
            key = row.source.name, role
            if key not in self._paths:
                self._paths[key] = [path for path in recorded(row.source, role)
                                    if os.path.exists(path)]  # fmt: skip
            paths |= dict.fromkeys(self._paths[key])
        for path in paths:
            try:
                yield from map(searchable, sources_of([path]))
            except (UsageError, BadData):  # it is something else by now
                continue

    def tokenizer_of(self, source: Source) -> Tokenizer | None:
        """The tokenizer of a shard of token rows or samples; None if there is none."""
        if self.tokenizer:
            return self.given_tokenizer
        folder = Path(source.name).parent
        if str(folder) not in self._tokenizers:
            made = provenance_of(source)
            near = [*tokenizers_beside(source.name, made), str(folder.parent / "final")]
            near += self._of_run(folder.parent)
            there = (one for one in near if (Path(one) / "tokenizer.json").is_file())
            path = next(there, "")
            self._tokenizers[str(folder)] = load_tokenizer(path) if path else None
        return self._tokenizers[str(folder)]

    def _of_run(self, folder: Path) -> list[str]:
        """The model directory that a run began with."""
        record = _run(folder)
        model = record.get("options", {}).get("model") if record else ""
        return [os.path.join(str(record.get("folder", "")), str(model))] if model else []

    @cached_property
    def given_tokenizer(self) -> Tokenizer | None:
        """That of the option; None if none was given."""
        return load_tokenizer(self.tokenizer, "--tokenizer") if self.tokenizer else None


def searchable(source: Source) -> Source:
    """A shard whose rows have ids, also where they are hashes of the text."""
    names = [*column_names(source), *(["text"] if source.text_column else [])]
    kinds = {"messages": "prompt", "text": "document"}
    kind = next((kind for name, kind in kinds.items() if name in names), "any")
    return replace(source, kind=kind)


def _run(folder: Path) -> Mapping[str, Any]:
    """The record of the run of a run directory; {} if it has none."""
    try:
        stored = json.loads((folder / RUN_RECORD).read_text("utf-8"))
        return dict(stored.get(RUN) or {})
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def recorded(source: Source, role: str) -> Iterable[str]:
    """The paths that the record of a shard's run tells: the output, or the inputs."""
    if source.name.startswith("<"):
        return []
    made, record = provenance_of(source), dict[str, Any]()
    if source.form == "parquet":
        with source.open() as file:
            record = of_parquet(file) or {}
    record = record or dict(_run(Path(source.name).parent.parent))
    if role == INPUTS:
        return [str(one["name"]) for one in record.get("inputs", ()) if "name" in one]
    beside = Path(source.name).parent
    name = made.get("out")
    own = [str(folder / str(name)) for folder in (beside, beside.parent) if name]
    return [*([str(record["out"])] if record.get("out") else []), *own]
