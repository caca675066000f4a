"""Documents a second of the heuristics, beside datatrove's filters, and how far they agree.

    python tests/bench/bench_heuristics.py DOCS.jsonl [--datatrove PYTHON] [--limit N]
        [--sabia COMMAND ...] [--rounds N]

DOCS.jsonl has a `text` on each line; PYTHON is an interpreter with datatrove[processing]. CPU
seconds of one process each, compiled code warm. Verdicts are compared as for English. Each
COMMAND is the `sabia` of a checkout: the CPU time of `classify` per document is the slope between
the documents and five copies of them as Parquet, and the start-up is the rest, in turn, so many
rounds; the first one's slope over that of the others is printed. The cost of checksums is that of
writing the output of the last one with and without them.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core import digests
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.classify import heuristics, language

PEER = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
filters = [GopherQualityFilter(), GopherRepetitionFilter(), C4QualityFilter(),
           FineWebQualityFilter()]
texts = [json.loads(line) for line in sys.stdin]
filters[0].filter(Document(text="warm " * 60, id="0"))
verdicts, start = [], time.process_time()
for text in texts:
    row = []
    for one in filters:
        try:
            row.append(one.filter(Document(text=text, id="0")) is True)
        except ZeroDivisionError:
            row.append(False)
    verdicts.append(row)
print(json.dumps([time.process_time() - start, verdicts]))
"""
GROUPS = {
    "gopher quality": heuristics.RULES["gopher"][:10],
    "gopher repetition": heuristics.RULES["gopher"][10:],
    "c4": heuristics.RULES["c4"],
    "fineweb": heuristics.RULES["fineweb"],
}


def timed(function: Callable[[], Any], repeats: int = 5) -> float:
    """The median of the CPU seconds of `repeats` calls, after one."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return float(np.median(seconds))


def child_seconds(command: list[str]) -> float:
    """CPU seconds of a process and of those it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def whole_command(texts: list[str], commands: list[str], rounds: int) -> None:
    """Print the CPU time of `classify` by slope for each command, and the cost of checksums."""
    n, copies = len(texts), 5
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/once.parquet", f"{folder}/copies.parquet"]
        for path, times in zip(paths, (1, copies), strict=True):
            ids = [f"{i:032x}" for i in range(n * times)]
            pq.write_table(pa.table({"id": ids, "text": texts * times}), path, compression="zstd")
        out = f"{folder}/out.parquet"
        calls = [[command, "classify", "-o", out, "--force"] for command in commands]
        slopes = dict[str, list[float]]((command, []) for command in commands)
        starts = dict[str, list[float]]((command, []) for command in commands)
        for call in calls:
            child_seconds([*call, paths[0]])  # compiles
        for _ in range(rounds):
            for command, call in zip(commands, calls, strict=True):
                once, many = (child_seconds([*call, path]) for path in paths)
                slopes[command].append((many - once) / (n * (copies - 1)))
                starts[command].append(once - slopes[command][-1] * n)
        for command in commands:
            ratios = [a / b for a, b in zip(slopes[commands[0]], slopes[command], strict=True)]
            print(
                f"classify, {command}: {statistics.median(slopes[command]) * 1e6:.1f} us of CPU a"
                f" document, start-up {statistics.median(starts[command]):.2f} s; first / this"
                f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        table = pq.read_table(out)
    seconds = []
    for checked in (False, True):
        seconds.append(timed(lambda checked=checked: write(table, checked)))
    of_classify = statistics.median(slopes[commands[-1]]) * table.num_rows
    print(f"checksums: {(seconds[1] - seconds[0]) / of_classify:.2%} of classify's CPU")


def write(table: pa.Table, checked: bool) -> None:
    """Write a table with or without checksums of pages and the digest of the footer."""
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
    sink = pa.BufferOutputStream()
    writer = (digests.ParquetWriter if checked else pq.ParquetWriter)(sink, table.schema, **options)
    writer.write_table(table, row_group_size=10_000)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("documents")
    parser.add_argument("--datatrove", default="")
    parser.add_argument("--limit", type=int, default=100_000)
    parser.add_argument("--sabia", nargs="+", default=[], metavar="COMMAND")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with open(given.documents, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file][: given.limit]
    data, offsets = text_buffers(pa.array(texts, pa.string()))
    n, size = len(texts), offsets[-1] / 1e6
    english = np.full(n, language.LANGUAGES.index("en"))
    verdict = language.IdentifiedLanguages(
        np.full(n, "en", object), np.ones(n), np.ones(n), english
    )
    scores = heuristics.measure(data, offsets, verdict)
    for name, call in (
        ("heuristics", lambda: heuristics.measure(data, offsets, verdict)),
        ("language", lambda: language.identify(data, offsets)),
    ):
        seconds = timed(call)
        print(f"{name}: {n / seconds:,.0f} documents/s, {size / seconds:.1f} MB/s")
    if given.sabia:
        whole_command(texts, given.sabia, given.rounds)
    if not given.datatrove:
        return
    lines = "\n".join(map(json.dumps, texts))
    run = subprocess.run(
        [given.datatrove, "-c", PEER], input=lines, stdout=-1, text=True, check=True
    )
    seconds, verdicts = json.loads(run.stdout.splitlines()[-1])
    print(f"datatrove: {n / seconds:,.0f} documents/s, {size / seconds:.2f} MB/s")
    for column, (name, rules) in enumerate(GROUPS.items()):
        passed = np.ones(n, bool) if name == "c4" else scores["word_count"] > 0
        for rule in rules:
            passed &= ~rule.fails(scores[rule.figure])
        same = passed == np.array([row[column] for row in verdicts])
        print(f"{name}: {same.mean():.2%} of verdicts agree ({int((~same).sum())} do not)")


if __name__ == "__main__":
    main()
