"""Hold documents out: a share of the documents, and of each long one its end.

    python examples/own_data_split.py DOCUMENTS TRAIN HELD_OUT [--share 0.05] [--stats FILE]

The choice depends only on the ids, so that it does not change when data is added. Of a document of
more than LONG characters only the end is held out, cut at a line, so that a few books do not make
up all of the held-out text. If nothing would be held out, the end of the longest document is.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core.errors import BadData, SabiaError
from sabia.core.shards.atomic import atomic_path, write_atomic
from sabia.core.shards.lineage.run_record import keep_script

LONG = 50_000


@dataclass(frozen=True)
class Rule:
    """What is held out: `share` of the documents and of the long ones; `cut` are cut anyway."""

    share: float
    cut: frozenset[str] = frozenset()

    def whole(self, name: str) -> bool:
        """True for a document that is held out as a whole (if it is not cut)."""
        drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        return drawn < self.share * 2**64

    def parts(self, row: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """(for training, held out) of a document."""
        text = row["text"]
        if len(text) > LONG or row["id"] in self.cut:
            at = cut_place(text, self.share)
            return row | {"text": text[:at]}, row | {"id": f"{row['id']}-end", "text": text[at:]}
        return (None, row) if self.whole(row["id"]) else (row, None)


def cut_place(text: str, share: float) -> int:
    """Where the last `share` of a text begins: after a line, a blank, or anywhere."""
    at = min(len(text) - 1, int(len(text) * (1 - share)))
    for mark in ("\n", " "):
        position = text.rfind(mark, len(text) // 2, at)
        if position >= 0:
            return position + 1
    return max(at, 1)


def make_rule(sizes: Iterable[tuple[str, int]], share: float) -> Rule:
    """The rule for documents (id, characters); the longest is cut where nothing else would be."""
    rule, longest = Rule(share), ("", -1)
    held = kept = False
    for name, size in sizes:
        cut = size > LONG
        held, kept = held or cut or rule.whole(name), kept or cut or not rule.whole(name)
        longest = max(longest, (name, size), key=lambda item: item[1])
    return rule if held and kept else Rule(share, frozenset({longest[0]}))


def split(documents: Path, train: Path, held_out: Path, share: float) -> dict[str, int]:
    """Write both files; returns documents and characters of each."""
    file = pq.ParquetFile(documents)
    if not file.metadata.num_rows:
        raise BadData(f"{documents}: no documents to split (was all of it filtered out?)")
    batches = file.iter_batches(1000, columns=["id", "text"])
    texts = (row for batch in batches for row in batch.to_pylist())
    sizes = ((row["id"], len(row["text"])) for row in texts)
    rule, schema = make_rule(sizes, share), file.schema_arrow.remove_metadata()
    counts = dict.fromkeys(("train", "held_out", "train_characters", "held_out_characters"), 0)
    with atomic_path(train) as a, atomic_path(held_out) as b:
        writers = {"train": pq.ParquetWriter(a, schema, compression="zstd"),
                   "held_out": pq.ParquetWriter(b, schema, compression="zstd")}  # fmt: skip
        for batch in file.iter_batches(1000):
            pairs = [rule.parts(row) for row in batch.to_pylist()]
            for (name, writer), side in zip(writers.items(), zip(*pairs, strict=True), strict=True):
                rows = [row for row in side if row is not None]
                counts[name] += len(rows)
                counts[f"{name}_characters"] += sum(len(row["text"]) for row in rows)
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
        for writer in writers.values():
            writer.close()
    return counts


def main() -> None:
    """Split the files named on the command line and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("documents", "train", "held_out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--share", type=float, default=0.05, help="between 0 and 1")
    parser.add_argument("--stats", type=Path)
    given = parser.parse_args()
    if not 0 < given.share < 1:
        parser.error(f"--share {given.share} (expected between 0 and 1)")
    try:
        counts = split(given.documents, given.train, given.held_out, given.share)
    except SabiaError as error:
        print(f"own_data_split: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    outputs = [str(given.train), str(given.held_out)]
    keep_script(["python", os.path.abspath(__file__)], outputs, [str(given.documents)])
    if given.stats:
        write_atomic(given.stats, json.dumps(counts) + "\n")
    share = counts["held_out_characters"] / sum(v for n, v in counts.items() if "char" in n)
    print(f"{counts['train']} documents for training, {counts['held_out']} held out "
          f"({100 * share:.1f} % of the characters)", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
