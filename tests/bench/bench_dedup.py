"""Near-duplicate removal beside datasketch: CPU a document, start-up, recall and precision.

    python tests/bench/bench_dedup.py [--docs 20000 80000] [--peer-docs 1000 10000] [--rounds 3]

Generates corpora (Zipf words, a fifth of it edited copies), then measures in turns, one process
each: `sabia dedup` (documents written) and datasketch (word 5-grams, MinHash of 128, LSH of 16 x 8,
query then insert, union-find; it writes nothing). CPU seconds are those of a process; what a
document costs is the slope between two sizes, start-up is a run over 10 documents with the
compiled kernels in their cache. Recall is over planted pairs by their true Jaccard similarity;
precision is the share of removed documents with a twin of 0.7 or more.
"""

import argparse
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORD = re.compile(r"\w+")
PERMUTATIONS, BANDS, ROWS, NGRAM = 128, 16, 8, 5


def shingles(text: str) -> set[str]:
    """Word 5-grams, lower case."""
    words = WORD.findall(text.lower())
    return {" ".join(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))}


def make_corpus(path: Path, count: int) -> list[list[int]]:
    """Write `count` documents of about 2 kB; returns pairs (original, copy) of row numbers."""
    draw = random.Random(7)
    vocabulary = ["".join(draw.choices("aeioubcdfglmnprstv", k=draw.randint(2, 11)))
                  for _ in range(30_000)]  # fmt: skip
    weights = [1 / (i + 3) for i in range(len(vocabulary))]
    originals = count * 4 // 5
    documents = [draw.choices(vocabulary, weights, k=draw.randint(150, 600))
                 for _ in range(originals)]  # fmt: skip
    source = [*range(originals)]
    for _ in range(count - originals):
        of = draw.randrange(originals)
        rate = draw.choice([0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1])
        words = (draw.choice(vocabulary) if draw.random() < rate else w for w in documents[of])
        documents.append([w for w in words if draw.random() >= rate / 3])
        source.append(of)
    order = draw.sample(range(count), count)
    place = {row: i for i, row in enumerate(order)}
    texts = [" ".join(documents[row]).capitalize() + "." for row in order]
    pq.write_table(pa.table({"id": [str(i) for i in range(count)], "text": texts}), path)
    return [[place[source[row]], place[row]] for row in range(originals, count)]


def peer(corpus: Path) -> dict:
    """datasketch over the corpus: CPU seconds of each phase and the rows kept."""
    from datasketch import MinHash, MinHashLSH

    texts = pq.read_table(corpus)["text"].to_pylist()
    start = time.process_time()
    signatures = []
    for text in texts:
        signature = MinHash(num_perm=PERMUTATIONS, seed=1)
        signature.update_batch([shingle.encode() for shingle in shingles(text)])
        signatures.append(signature)
    sketched = time.process_time() - start
    index = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, ROWS))
    parent = list(range(len(texts)))

    def find(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for row, signature in enumerate(signatures):
        for other in index.query(signature):
            a, b = sorted((find(row), find(other)))
            parent[b] = a
        index.insert(row, signature, check_duplication=False)
    kept = [row for row in range(len(texts)) if find(row) == row]
    return {"sketch_cpu_s": sketched, "kept": kept}


def ours_sketching(corpus: Path) -> dict:
    """Our sketches alone, over the same texts in memory, compiled code from the cache."""
    import numpy as np

    from sabia.core.options.dedup import DedupOptions
    from sabia.core.shards.arrow_arrays import text_buffers
    from sabia.core.text.dedup.lsh import sketch_of
    from sabia.kernels.minhash.interface import sketch as sketch_documents

    column = pq.read_table(corpus)["text"].combine_chunks()
    data, offsets = text_buffers(column)
    config = sketch_of(DedupOptions(), 0)
    sketch_documents(data, np.array([0, 0]), config, "numba")
    start = time.process_time()
    sketch_documents(data, offsets, config, "numba")
    return {"sketch_cpu_s": time.process_time() - start}


def measured(words: list[str]) -> tuple[float, str]:
    """(CPU seconds of a process and its children, its stdout)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, done.stdout


def quality(corpus: Path, pairs: list[list[int]], kept: set[int]) -> dict:
    """Recall of planted pairs by similarity, and precision of what was removed."""
    texts = pq.read_table(corpus)["text"].to_pylist()
    sets: dict[int, set[str]] = {}

    def grams(row: int) -> set[str]:
        return sets.setdefault(row, shingles(texts[row]))

    found: dict[str, list[bool]] = {}
    twins: dict[int, float] = {}
    for a, b in pairs:
        similarity = len(grams(a) & grams(b)) / len(grams(a) | grams(b))
        low = next(limit for limit in (0.9, 0.8, 0.7, 0.0) if similarity >= limit)
        found.setdefault(f">={low}", []).append(not (a in kept and b in kept))
        for row in (a, b):
            twins[row] = max(twins.get(row, 0), similarity)
    removed = [row for row in range(len(texts)) if row not in kept]
    # copies of one original may be each other's twins: a lower bound
    good = sum(twins.get(row, 0) >= 0.7 for row in removed)
    recall = {name: round(statistics.mean(hits), 4) for name, hits in sorted(found.items())}
    return {"recall": recall, "removed": len(removed),
            "removed_with_planted_twin_j70": round(good / max(len(removed), 1), 4)}  # fmt: skip


def cpu_of_sabia(corpus: Path, out: Path) -> float:
    """CPU seconds of `sabia dedup`, documents written."""
    command = [sys.executable, "-m", "sabia.cli.main", "dedup", "--force", str(corpus)]
    return measured([*command, "-o", str(out)])[0]


def main() -> None:
    """Run and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", type=int, nargs=2, default=[20_000, 80_000])
    parser.add_argument("--peer-docs", type=int, nargs=2, default=[1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phase", nargs=2, metavar=("NAME", "CORPUS"))
    options = parser.parse_args()
    own = [sys.executable, __file__, "--phase"]
    if options.phase:
        name, corpus = options.phase[0], Path(options.phase[1])
        print(json.dumps(peer(corpus) if name == "peer" else ours_sketching(corpus)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "kept.parquet"
        sizes = {10, *options.docs, *options.peer_docs}
        corpora = {size: Path(scratch) / f"{size}.parquet" for size in sizes}
        pairs = {size: make_corpus(path, size) for size, path in corpora.items()}
        cpu_of_sabia(corpora[options.docs[0]], out)  # fills the cache of compiled kernels
        ours: dict[int, list[float]] = {10: [], **{size: [] for size in options.docs}}
        theirs: dict[int, list[float]] = {size: [] for size in options.peer_docs}
        sketch: list[float] = []
        for _ in range(options.rounds):
            for size, spent in ours.items():
                spent.append(cpu_of_sabia(corpora[size], out))
            for size, spent in theirs.items():
                seconds, said = measured([*own, "peer", str(corpora[size])])
                spent.append(seconds)
            _, text = measured([*own, "ours", str(corpora[options.docs[0]])])
            sketch.append(json.loads(text)["sketch_cpu_s"] / options.docs[0])
        largest = options.peer_docs[1]
        cpu_of_sabia(corpora[largest], out)
        kept = {"datasketch": set(json.loads(said)["kept"]),
                "sabia": {int(name) for name in pq.read_table(out)["id"].to_pylist()}}  # fmt: skip
        report = {
            "sabia": figures(ours, options.docs), "datasketch": figures(theirs, options.peer_docs)
        }  # fmt: skip
        for name, figure in report.items():
            figure |= quality(corpora[largest], pairs[largest], kept[name])
        report["sabia"]["start_cpu_s"] = round(statistics.median(ours[10]), 2)
        report["sabia"]["sketch_us"] = round(statistics.median(sketch) * 1e6, 1)
        ratio = report["datasketch"]["slope_us"] / report["sabia"]["slope_us"]
        print(json.dumps({**report, "datasketch_over_sabia": round(ratio, 1)}, indent=1))


def figures(spent: dict[int, list[float]], sizes: list[int]) -> dict:
    """CPU seconds by size (medians), and what a document more costs, in microseconds."""
    low, high = (statistics.median(spent[size]) for size in sizes)
    slope = (high - low) / (sizes[1] - sizes[0])
    return {"docs": sizes, "cpu_s": [round(low, 2), round(high, 2)],
            "slope_us": round(slope * 1e6, 1)}  # fmt: skip


if __name__ == "__main__":
    main()
