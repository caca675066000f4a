"""Bytes and tokens by language and by source, and bytes per token.

Bytes are those of the UTF-8 text; end-of-document tokens are not counted. Counters are named
`bytes[language=pt]`, `tokens[source=web]`; after MAX_NAMES names of a field the rest is `other`.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job
from sabia.core.shards.summary import Summary

FIELDS = ("language", "source")
MAX_NAMES = 40
COUNTER = re.compile(r"(bytes|tokens)\[(language|source)=(.*)\]", re.DOTALL)


class Tally:
    """Bytes and tokens of one shard."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def add(self, batch: pa.RecordBatch, tokens: np.ndarray) -> None:
        """Count documents (`text`, `language`, `source`) with tokens[n]."""
        sizes = pc.binary_length(batch.column("text")).to_numpy()
        for field in FIELDS:
            for name, counts in sums_by_name(batch.column(field), sizes, tokens):
                add_to(self._entry(field, "unknown" if name is None else name), counts)

    def _entry(self, field: str, name: str) -> list[int]:
        key = (field, name)
        if key not in self._counts and sum(f == field for f, _ in self._counts) >= MAX_NAMES:
            key = (field, "other")
        return self._counts.setdefault(key, [0, 0])

    def counters(self) -> dict[str, int]:
        """Counters for the summary."""
        counters = {}
        for (field, name), (size, tokens) in self._counts.items():
            counters[f"bytes[{field}={name}]"] = size
            counters[f"tokens[{field}={name}]"] = tokens
        return counters


def coded(column: pa.Array) -> tuple[list[str | None], np.ndarray]:
    """(distinct values in order of appearance, null among them; the code of each row)."""
    dictionary = column.dictionary_encode("encode")
    return dictionary.dictionary.to_pylist(), dictionary.indices.to_numpy().astype(np.int64)


def sums_by_name(column: pa.Array, *weights: np.ndarray) -> Iterator[tuple[str | None, list[int]]]:
    """(value, sums of the weights of its rows), in order of appearance; weights[n] are integers."""
    names, codes = coded(column)
    sums = [np.bincount(codes, each, len(names)) for each in weights]
    for name, *totals in zip(names, *sums, strict=True):
        yield name, [int(n) for n in totals]


def add_to(totals: list[int], more: Sequence[int]) -> None:
    """Add `more` to `totals`, element by element."""
    totals[:] = map(sum, zip(totals, more, strict=True))


def bytes_per_token(counters: dict[str, float]) -> dict[str, dict[str, float]]:
    """{"language": {"pt": 4.1, …}, "source": {…}} from the counters of a summary."""
    totals: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in counters.items():
        if match := COUNTER.fullmatch(name):
            totals.setdefault((match[2], match[3]), {})[match[1]] = value
    ratios: dict[str, dict[str, float]] = {field: {} for field in FIELDS}
    for (field, name), counted in sorted(totals.items()):
        if counted.get("tokens"):
            ratios[field][name] = round(counted["bytes"] / counted["tokens"], 4)
    return ratios


def report_bytes_per_token(job: Job, summary: Summary) -> None:
    """Note the ratios on stderr and add them to `--stats`."""
    ratios = bytes_per_token(summary.counters)
    if any(ratios.values()):
        parts = [
            f"{field} " + ", ".join(f"{name} {value:.2f}" for name, value in by_name.items())
            for field, by_name in ratios.items()
            if by_name
        ]
        notes.note("bytes per token: " + "; ".join(parts))
    if job.stats == "-":
        sys.stderr.write(json.dumps({"command": job.command, "bytes_per_token": ratios}) + "\n")
    elif job.stats and any(ratios.values()):
        with open(job.stats, encoding="utf-8") as file:
            figures = json.load(file)
        write_atomic(job.stats, json.dumps(figures | {"bytes_per_token": ratios}) + "\n")
