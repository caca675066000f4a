"""Conversations as token rows in the run directory, rendered once.

Each conversation is rendered by the chat template, and windows of them are packed into rows (best
fit). A `Form` says how records of another kind become units of documents, which stay together in a
row. The rows are one row file (core.shards.token_rows), so that a run holds one window and not its
conversations, and a later start, or another process, renders nothing. One process makes the file,
with `jobs` workers; conversations that cannot be used are recorded in it with a reason.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.generate.chat import render_rows
from sabia.core.results import result_version
from sabia.core.shards import schemas
from sabia.core.shards.atomic import atomic_path
from sabia.core.shards.executors.processes import map_processes
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_file import ADDRESSES, RowFile
from sabia.core.shards.token_rows.row_store import ENDING, RejectRow, open_made
from sabia.core.shards.token_rows.row_writer import RowWriter
from sabia.core.text.tokenize.packing import WINDOW, best_fit
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer

FOLDER = "rows"
# ids int32[T], mask bool[T], the id of the conversation, tokens of its renderings before this one
Rendered = tuple[np.ndarray, np.ndarray, str, int]
Unit = tuple[str, list[Rendered]]  # the source of its row, its documents
Reject = tuple[dict[str, Any], str]  # row, reason
ROWS = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("document_lengths", pa.list_(pa.int32())),
     ("loss_mask", pa.list_(pa.bool_())),
     *((name, schemas.KINDS["tokens"].field(name).type) for name in ADDRESSES)]
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How records become units of documents that stay together in a row.

    render: (record, tokenizer, length, variables of the template) → its units and the reasons for
    which parts of it cannot be used; it may raise BadData. arrange: makes the units from those of
    all records, in order. name: in the name of the row file ('' for conversations).
    """

    name: str
    columns: tuple[str, ...]
    render: Callable[[Any, Tokenizer, int, Mapping[str, Any]], tuple[list[Unit], list[str]]]
    arrange: Callable[[Iterator[list[Unit]], int], Iterator[Unit]] | None = None


def _render_chat(
    row: Mapping[str, Any], tokenizer: Tokenizer, length: int, variables: Mapping[str, Any]
) -> tuple[list[Unit], list[str]]:
    units, reasons, before = list[Unit](), list[str](), 0
    for ids, mask in render_rows(row["messages"], tokenizer, row["tools"], **variables):
        if len(ids) > length:
            reasons.append(f"{len(ids)} tokens (expected at most --length {length})")
        elif not any(mask[1:]):  # the first token is never predicted
            reasons.append("no token of the assistant follows another")
        else:
            units.append(("", [document(ids, mask, row["id"], before)]))
        before += len(ids)
    return units, reasons


def document(ids: Sequence[int], mask: Sequence[int], name: str, before: int = 0) -> Rendered:
    """A rendered document; before: tokens of the record's renderings before it."""
    return np.array(ids, np.int32), np.array(mask, bool), name, before


CHAT = Form("", ("id", "messages", "tools"), _render_chat)


def chat_rows(
    sources: Sequence[Source],
    tokenizer: str,
    length: int,
    pack: bool,
    folder: Path,
    jobs: int,
    reject: RejectRow,
    variables: Mapping[str, Any] = MappingProxyType({}),
    form: Form = CHAT,
) -> RowFile:
    """The rows of all usable conversations, at most `length` tokens each.

    tokenizer: its directory. variables: of the chat template. `about` of the file: conversations
    (units of another form), and tokens that are `predicted`; of another form than CHAT also `most`,
    the most documents of a row.
    """
    prints = [source.fingerprint() for source in sources]
    fingerprint, result = _loaded(tokenizer).fingerprint, result_version("sft")
    path = folder / row_file_name(prints, fingerprint, length, pack, variables, result, form.name)
    file = open_made(_make, (path, sources, tokenizer, length, pack, jobs, dict(variables), form))
    for row, reason, shard in file.rejects():
        reject(row, reason, shard)
    return file


def row_file_name(
    prints: Sequence[str], tokenizer: str, length: int, pack: bool, variables: Mapping[str, Any],
    result: int, form: str = "",
) -> str:  # fmt: skip
    """The name of the row file of shards and a tokenizer with these fingerprints; result: the
    version of the results of sft; form: the name of the rows' form."""
    settings = repr((list(prints), tokenizer, length, pack))
    settings += repr(sorted(variables.items())) if variables else ""
    if result != 1:
        settings += f" result {result}"
    if form:
        settings += f" form {form}"
    return f"{hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()}{ENDING}"


@cache
def _loaded(tokenizer: str) -> Tokenizer:
    return load_tokenizer(tokenizer)


def _make(
    path: Path, sources: Sequence[Source], tokenizer: str, length: int, pack: bool, jobs: int,
    variables: Mapping[str, Any], form: Form,
) -> None:  # fmt: skip
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        writer, windows = RowWriter(file), dict[str, list[list[Rendered]]]()
        figures, most = {"conversations": 0, "predicted": 0}, 0
        render = partial(
            _render, tokenizer=tokenizer, length=length, variables=variables, form=form
        )

        def rendered() -> Iterator[list[Unit]]:
            batches = _batches(sources, form.columns)
            for shard, records, rejected in map_processes(render, batches, jobs):
                stop.check()
                for row, reason in rejected:
                    writer.reject(row, reason, shard)
                yield from records

        def write(source: str, window: Sequence[list[Rendered]]) -> int:
            rows, _ = packed_rows(source, window, length, pack)
            writer.add(rows)
            return max(len(documents) for documents in rows["document_lengths"])

        each = (unit for units in rendered() for unit in units)
        for source, documents in form.arrange(rendered(), length) if form.arrange else each:
            figures["conversations"] += 1
            figures["predicted"] += sum(int(mask.sum()) for _, mask, *_ in documents)
            window = windows.setdefault(source, [])
            window.append(documents)
            if len(window) == WINDOW:
                most = max(most, write(source, window))
                window.clear()
        for source, window in windows.items():
            if window:
                most = max(most, write(source, window))
        writer.close(**figures, **({"most": most} if form.name else {}))


def _batches(
    sources: Sequence[Source], columns: Sequence[str]
) -> Iterator[tuple[str, pa.RecordBatch | None, list[Reject]]]:
    """(shard, a batch of conversations, what was rejected before it); None after the last one."""
    for source in sources:
        rejected: list[Reject] = []

        def refuse(row: dict[str, Any], reason: str, rejected: list[Reject] = rejected) -> None:
            rejected.append((row, reason))

        for batch in source.batches(columns=columns, reject=refuse):
            yield source.name, batch, rejected.copy()
            rejected.clear()
        yield source.name, None, rejected


def _render(
    item: tuple[str, pa.RecordBatch | None, list[Reject]],
    tokenizer: str,
    length: int,
    variables: Mapping[str, Any],
    form: Form,
) -> tuple[str, list[list[Unit]], list[Reject]]:
    """The shard, the units of its records, and all rejects in order."""
    shard, batch, rejected = item
    records: list[list[Unit]] = []
    for row in batch.to_pylist() if batch is not None else ():
        try:
            units, reasons = form.render(row, _loaded(tokenizer), length, variables)
        except BadData as error:
            rejected.append((row, str(error)))
            continue
        rejected += [(row, reason) for reason in reasons]
        if units:
            records.append(units)
    return shard, records, rejected


def packed_rows(
    source: str, window: Sequence[list[Rendered]], length: int, pack: bool
) -> tuple[pa.RecordBatch, list[list[int]]]:
    """The rows of a window of units, packed or one in each, and which units each of them has."""
    units = [sum(len(ids) for ids, *_ in documents) for documents in window]
    bins = best_fit(units, length) if pack else [[i] for i in range(len(window))]
    rows = [[document for i in members for document in window[i]] for members in bins]
    flat = [document for row in rows for document in row]
    counts = [len(row) for row in rows]
    tokens = [sum(len(ids) for ids, *_ in row) for row in rows]
    columns = [
        _lists(tokens, np.concatenate([ids for ids, *_ in flat])),
        _lists(counts, np.array([len(ids) for ids, *_ in flat], np.int32)),
        _lists(tokens, np.concatenate([mask for _, mask, *_ in flat])),
        _lists(counts, [name for _, _, name, _ in flat]),
        _lists(counts, np.array([before for *_, before in flat], np.int32)),
    ]
    if not source:
        return pa.RecordBatch.from_arrays(columns, schema=ROWS), bins
    of_source = pa.repeat(pa.scalar(source), len(rows))
    schema = ROWS.append(pa.field("source", of_source.type))
    return pa.RecordBatch.from_arrays([*columns, of_source], schema=schema), bins


def _lists(sizes: Iterable[int], values: np.ndarray | list[str]) -> pa.ListArray:
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values))
