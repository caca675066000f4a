"""`sabia dedup --method semantic` beside plain NumPy: CPU of the same k-means and threshold.

    OMP_NUM_THREADS=1 python tests/bench/bench_semantic.py [--docs 10000 40000] [--width 384]

Generates unit vectors (a fifth are near copies) in a column. The command reads, compares and writes
the documents; the peer loads the vectors and runs Lloyd's k-means (10 rounds, the square root of
the number of documents as centroids) and a full table of cosines for each cluster. CPU seconds of
a process, start-up included, and the slope between the sizes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from bench_dedup import figures, measured

THRESHOLD, ROUNDS = 0.95, 10


def make_vectors(path: Path, count: int, width: int) -> None:
    """Write `count` documents with vectors around 200 topics, a fifth of them near copies."""
    draw = np.random.default_rng(7)
    topics = draw.normal(size=(200, width))
    vectors = topics[draw.integers(0, 200, count)] + 1.5 * draw.normal(size=(count, width))
    copies = draw.choice(count, count // 5, replace=False)
    vectors[copies] = vectors[draw.integers(0, count, len(copies))]
    vectors[copies] += 0.2 * draw.normal(size=(len(copies), width))
    flat = pa.array(
        (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).ravel(), pa.float32()
    )
    columns = {
        "id": [str(i) for i in range(count)],
        "text": [f"document {i}" for i in range(count)],
    }
    column = pa.FixedSizeListArray.from_arrays(flat, width)
    pq.write_table(pa.table({**columns, "vector": column}), path)


def peer(path: Path) -> int:
    """Rows that plain NumPy removes."""
    vectors = pq.read_table(path, columns=["vector"])["vector"].combine_chunks()
    x = np.asarray(vectors.flatten()).reshape(len(vectors), -1)
    k = int(np.sqrt(len(x)))
    centres = x[np.random.default_rng(0).choice(len(x), k, replace=False)]
    for _ in range(ROUNDS):
        nearest = (x @ centres.T).argmax(axis=1)
        for c in np.unique(nearest):
            mean = x[nearest == c].mean(axis=0)
            centres[c] = mean / np.linalg.norm(mean)
    nearest, removed = (x @ centres.T).argmax(axis=1), 0
    for c in np.unique(nearest):
        members = x[nearest == c]
        removed += int((np.tril(members @ members.T, -1) >= THRESHOLD).any(axis=1).sum())
    return removed


def main() -> None:
    """Run and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", type=int, nargs=2, default=[10_000, 40_000])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", metavar="FILE")
    options = parser.parse_args()
    if options.peer:
        print(peer(Path(options.peer)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        paths = {size: Path(scratch) / f"{size}.parquet" for size in options.docs}
        for size, path in paths.items():
            make_vectors(path, size, options.width)
        words = f"dedup --method semantic --force --embeddings vector --threshold {THRESHOLD}"
        command = [sys.executable, "-m", "sabia.cli.main", *words.split()]
        out = Path(scratch) / "kept.parquet"
        spent: dict = {name: {size: [] for size in options.docs} for name in ("sabia", "numpy")}
        removed: dict = {}
        for _ in range(options.rounds):
            for size, path in paths.items():
                spent["sabia"][size].append(measured([*command, str(path), "-o", str(out)])[0])
                removed["sabia"] = size - pq.read_metadata(out).num_rows
                seconds, text = measured([sys.executable, __file__, "--peer", str(path)])
                spent["numpy"][size].append(seconds)
                removed["numpy"] = int(text)
        report = {name: figures(spent[name], options.docs) for name in spent}
        for name, figure in report.items():
            figure["docs_per_cpu_s"] = round(1e6 / figure["slope_us"])
            figure["removed"] = removed[name]
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
