"""Documents a second of the heuristics, beside datatrove's filters, and how far they agree.

    python tests/bench/bench_heuristics.py DOCS.jsonl [--datatrove PYTHON] [--limit N]

DOCS.jsonl has a `text` on each line; PYTHON is an interpreter with datatrove[processing]. CPU
seconds of one process each, compiled code warm. Verdicts are compared as for English.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("documents")
    parser.add_argument("--datatrove", default="")
    parser.add_argument("--limit", type=int, default=100_000)
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
