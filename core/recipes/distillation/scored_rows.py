"""Distillation records as packed token rows with a teacher's tokens, made once for a run.

A record is a row of its own documents: token ids, which of them count, and for each that counts the
teacher's likeliest tokens with their log-probabilities. The records are of the tokenizer of the
trained model; malformed ones are recorded with a reason.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.chat_rows import packed_rows
from sabia.core.shards.atomic import atomic_path
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_file import RowFile
from sabia.core.shards.token_rows.row_store import ENDING, RejectRow, open_made
from sabia.core.shards.token_rows.row_writer import RowWriter
from sabia.core.text.tokenize.packing import WINDOW
from sabia.core.train.distilled_rows import ENTRY, STARTS, TOP

COLUMNS = ("id", "input_ids", "loss_mask", "teacher_ids", "teacher_logprobs", "tokenizer")
MOST_MASS = 1.001  # the sum of a token's probabilities, with rounding
Scored = tuple[np.ndarray, np.ndarray, str, np.ndarray]  # ids[T], mask[T], id, entries[n, K]


def scored_rows(
    sources: Sequence[Source], fingerprint: str, vocabulary: int, length: int, pack: bool,
    folder: Path, reject: RejectRow,
) -> RowFile:  # fmt: skip
    """The rows of all usable records, at most `length` tokens each.

    fingerprint: of the model's tokenizer. vocabulary: of the model. `about` of the file: the
    figures of chat rows, and `top`, the teacher's tokens at each token. Raises UsageError for
    records of another tokenizer.
    """
    prints = [source.fingerprint() for source in sources]
    key = hashlib.blake2b(repr((prints, fingerprint, vocabulary, length, pack)).encode(),
                          digest_size=16).hexdigest()  # fmt: skip
    path = folder / f"{key}{ENDING}"
    file = open_made(_make, (path, sources, fingerprint, vocabulary, length, pack))
    for row, reason, shard in file.rejects():
        reject(row, reason, shard)
    return file


def _make(
    path: Path, sources: Sequence[Source], fingerprint: str, vocabulary: int, length: int,
    pack: bool,
) -> None:  # fmt: skip
    figures = {"conversations": 0, "predicted": 0}
    starts, window, top = [0], list[Scored](), 0
    beside = [path.with_name(path.name + ending) for ending in (TOP, STARTS)]
    with (
        atomic_path(beside[0]) as top_path, open(top_path, "wb") as entries,
        atomic_path(path) as temporary, open(temporary, "wb") as file,
    ):  # fmt: skip
        writer = RowWriter(file)

        def write() -> None:
            rows, order = packed_rows("", [[(*one[:3], 0)] for one in window], length, pack)
            writer.add(rows)
            for members in order:
                held = [window[member][3] for member in members]
                starts.append(starts[-1] + sum(map(len, held)))
                for part in held:
                    entries.write(part.tobytes())
            window.clear()

        for row, shard in _records(sources, writer):
            try:
                scored = _checked(row, fingerprint, vocabulary, length, top)
            except BadData as error:
                writer.reject(row, str(error), shard)
                continue
            top = scored[3].shape[1]
            figures["conversations"] += 1
            figures["predicted"] += len(scored[3])
            window.append(scored)
            if len(window) == WINDOW:
                write()
        if window:
            write()
        writer.close(**figures, top=top)
        with atomic_path(beside[1]) as numbers, open(numbers, "wb") as target:
            np.save(target, np.array(starts, np.int64))


def _records(sources: Sequence[Source], writer: RowWriter) -> Iterator[tuple[dict[str, Any], str]]:
    for source in sources:
        refuse = partial(writer.reject, shard=source.name)
        for batch in source.batches(columns=COLUMNS, reject=refuse):
            stop.check()
            for row in batch.to_pylist():
                yield row, source.name


def _checked(
    row: dict[str, Any], fingerprint: str, vocabulary: int, length: int, top: int
) -> Scored:
    """The arrays of a record; top: how many tokens each is to have (0: any). Raises BadData."""
    if row["tokenizer"] != fingerprint:
        raise UsageError(
            f"record {row['id']}: its teacher has another tokenizer ({row['tokenizer']}) than the "
            f"model ({fingerprint}; expected the same: its tokens are those of the records)"
        )
    ids = _numbers(row["input_ids"], "input_ids", np.int32)
    if len(ids) > length:
        raise BadData(f"{len(ids)} tokens (expected at most --length {length})")
    mask = np.ones(len(ids), bool) if row["loss_mask"] is None else np.array(row["loss_mask"], bool)
    if len(mask) != len(ids):
        raise BadData(f"a loss_mask of {len(mask)} for {len(ids)} tokens")
    if row["loss_mask"] is None:
        mask[:1] = False
    if not mask.any() or mask[0]:
        raise BadData("no token that follows another counts, or the first one does")
    tokens = _lists(row["teacher_ids"], "teacher_ids", int(mask.sum()))
    given = _lists(row["teacher_logprobs"], "teacher_logprobs", int(mask.sum()))
    entries = np.zeros(tokens.shape, ENTRY)
    if given.shape != tokens.shape or (top and tokens.shape[1] != top):
        raise BadData(
            f"{given.shape[1]} log-probabilities of {tokens.shape[1]} tokens (expected equally "
            f"many{f', {top} as in the first record' if top else ''})"
        )
    every = np.concatenate([ids, tokens.ravel().astype(np.int32)])
    if every.min() < 0 or every.max() >= vocabulary:
        raise BadData(f"token {every.max()} (expected 0 to {vocabulary - 1})")
    if not tokens.shape[1] < vocabulary:
        raise BadData(f"{tokens.shape[1]} tokens of the teacher (expected fewer than all)")
    if (np.diff(np.sort(tokens, 1), axis=1) == 0).any():
        raise BadData("a token of the teacher that stands twice")
    mass = np.exp(given).sum(1)
    if not np.isfinite(given).all() or given.max() > 1e-4 or mass.max() > MOST_MASS:
        raise BadData("log-probabilities above 0, not finite, or whose probabilities exceed 1")
    entries["id"], entries["logprob"] = tokens, given
    return ids, mask, row["id"], entries


def _numbers(values: Any, name: str, dtype: Any) -> np.ndarray:
    if not values or any(value is None for value in values):
        raise BadData(f"{name} is empty, or has null values")
    return np.array(values, dtype)


def _lists(values: Any, name: str, count: int) -> np.ndarray:
    """[count, K] of lists of one length K."""
    sizes = {len(part or ()) for part in values or ()}
    if len(values or ()) != count or len(sizes) != 1 or 0 in sizes:
        raise BadData(
            f"{name}: {len(values or ())} lists of {sorted(sizes) or 0} values (expected {count} "
            "of one length, one for each token that counts)"
        )
    return np.stack([_numbers(part, name, np.float64) for part in values])
