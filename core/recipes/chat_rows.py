"""Conversations as token rows in the run directory, rendered once.

Each conversation is rendered by the chat template, and windows of them are packed into rows (best
fit). The rows are one row file (core.shards.token_rows), so that a run holds one window and not its
conversations, and a later start, or another process, renders nothing. One process makes the file,
with `jobs` workers; conversations that cannot be used are recorded in it with a reason.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from sabia.core.shards.executor import map_processes
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_file import ADDRESSES, RowFile
from sabia.core.shards.token_rows.row_store import RejectRow, open_made
from sabia.core.shards.token_rows.row_writer import ENDING, RowWriter
from sabia.core.text.tokenize.packing import WINDOW, best_fit
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer

FOLDER = "rows"
# ids int32[T], mask bool[T], the id of the conversation, tokens of its renderings before this one
Rendered = tuple[np.ndarray, np.ndarray, str, int]
Reject = tuple[dict[str, Any], str]  # row, reason
ROWS = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("document_lengths", pa.list_(pa.int32())),
     ("loss_mask", pa.list_(pa.bool_())),
     *((name, schemas.KINDS["tokens"].field(name).type) for name in ADDRESSES)]
)  # fmt: skip


def chat_rows(
    sources: Sequence[Source],
    tokenizer: str,
    length: int,
    pack: bool,
    folder: Path,
    jobs: int,
    reject: RejectRow,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> RowFile:
    """The rows of all usable conversations, at most `length` tokens each.

    tokenizer: its directory. variables: of the chat template. `about` of the file: conversations,
    and tokens that are `predicted`.
    """
    prints = [source.fingerprint() for source in sources]
    fingerprint, result = _loaded(tokenizer).fingerprint, result_version("sft")
    path = folder / row_file_name(prints, fingerprint, length, pack, variables, result)
    file = open_made(_make, (path, sources, tokenizer, length, pack, jobs, dict(variables)))
    for row, reason, shard in file.rejects():
        reject(row, reason, shard)
    return file


def row_file_name(
    prints: Sequence[str], tokenizer: str, length: int, pack: bool, variables: Mapping[str, Any],
    result: int,
) -> str:  # fmt: skip
    """The name of the row file of shards and a tokenizer with these fingerprints; result: the
    version of the results of sft."""
    settings = repr((list(prints), tokenizer, length, pack))
    settings += repr(sorted(variables.items())) if variables else ""
    if result != 1:
        settings += f" result {result}"
    return f"{hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()}{ENDING}"


@cache
def _loaded(tokenizer: str) -> Tokenizer:
    return load_tokenizer(tokenizer)


def _make(
    path: Path, sources: Sequence[Source], tokenizer: str, length: int, pack: bool, jobs: int,
    variables: Mapping[str, Any],
) -> None:  # fmt: skip
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        writer, window = RowWriter(file), list[Rendered]()
        figures = {"conversations": 0, "predicted": 0}
        render = partial(_render, tokenizer=tokenizer, length=length, variables=variables)
        for shard, rendered, rejected in map_processes(render, _batches(sources), jobs):
            stop.check()
            for row, reason in rejected:
                writer.reject(row, reason, shard)
            figures["conversations"] += len(rendered)
            figures["predicted"] += sum(int(mask.sum()) for _, mask, *_ in rendered)
            window += rendered
            while len(window) >= WINDOW:
                writer.add(_packed(window[:WINDOW], length, pack))
                del window[:WINDOW]
        if window:
            writer.add(_packed(window, length, pack))
        writer.close(**figures)


def _batches(
    sources: Sequence[Source],
) -> Iterator[tuple[str, pa.RecordBatch | None, list[Reject]]]:
    """(shard, a batch of conversations, what was rejected before it); None after the last one."""
    for source in sources:
        rejected: list[Reject] = []

        def refuse(row: dict[str, Any], reason: str, rejected: list[Reject] = rejected) -> None:
            rejected.append((row, reason))

        for batch in source.batches(columns=["id", "messages", "tools"], reject=refuse):
            yield source.name, batch, rejected.copy()
            rejected.clear()
        yield source.name, None, rejected


def _render(
    item: tuple[str, pa.RecordBatch | None, list[Reject]],
    tokenizer: str,
    length: int,
    variables: Mapping[str, Any],
) -> tuple[str, list[Rendered], list[Reject]]:
    """The shard, its rendered conversations, and all rejects in order."""
    shard, batch, rejected = item
    rendered: list[Rendered] = []
    for row in batch.to_pylist() if batch is not None else ():
        try:
            pairs = render_rows(row["messages"], _loaded(tokenizer), row["tools"], **variables)
        except BadData as error:
            rejected.append((row, str(error)))
            continue
        before = 0
        for ids, mask in pairs:
            if len(ids) > length:
                rejected.append((row, f"{len(ids)} tokens (expected at most --length {length})"))
            elif not any(mask[1:]):  # the first token is never predicted
                rejected.append((row, "no token of the assistant follows another"))
            else:
                made = np.array(ids, np.int32), np.array(mask, bool)
                rendered.append((*made, row["id"], before))
            before += len(ids)
    return shard, rendered, rejected


def _packed(window: Sequence[Rendered], length: int, pack: bool) -> pa.RecordBatch:
    """The rows of a window of conversations, packed or one in each."""
    sizes = [len(ids) for ids, *_ in window]
    bins = best_fit(sizes, length) if pack else [[i] for i in range(len(window))]
    order = [i for members in bins for i in members]
    counts = [len(members) for members in bins]
    tokens = [sum(sizes[i] for i in members) for members in bins]
    columns = [
        _lists(tokens, np.concatenate([window[i][0] for i in order])),
        _lists(counts, np.array([sizes[i] for i in order], np.int32)),
        _lists(tokens, np.concatenate([window[i][1] for i in order])),
        _lists(counts, [window[i][2] for i in order]),
        _lists(counts, np.array([window[i][3] for i in order], np.int32)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _lists(sizes: Iterable[int], values: np.ndarray | list[str]) -> pa.ListArray:
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values))
