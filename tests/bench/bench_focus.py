"""Harvest of focused crawls on a labelled web of 10,000 pages, against breadth-first.

    OMP_NUM_THREADS=1 python tests/bench/bench_focus.py [--seeds 3] [--budget 1000] [--jobs 2]

Each web (tests/support/labelled_graph.py) is written as WARC and crawled by `sabia crawl --replay`
by a fastText model of 300 labelled texts, once best-first with a soft and once with a hard focus,
and breadth-first. Harvest is by the labels, which no crawler sees: the share
of wanted pages among those fetched.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from labelled_graph import Graph

POLICIES = {
    "best, soft": (),
    "best, hard": ("--hard",),
    "breadth": ("--order", "breadth"),
}
PLACES = (100, 500, 1000, 2500, 5000)


def harvest(folder: Path, graph: Graph, policy: str, budget: int, jobs: int) -> list[float]:
    """Shares of wanted pages among the first pages fetched, at PLACES up to the budget."""
    out = folder / "out.parquet"
    sabia = Path(sys.executable).with_name("sabia")
    words = [sabia, "crawl", folder / "seeds.txt", "--replay", folder / "web.warc.gz",
             "--classifier", folder / "judge.bin", "--budget", str(budget), "-j", str(jobs),
             *POLICIES[policy], "--force", "-q", "-o", out]  # fmt: skip
    subprocess.run(words, check=True)
    rows = pq.read_table(out, columns=["url", "meta"]).to_pylist()
    rows.sort(key=lambda row: json.loads(row["meta"])["order"])
    good = [row["url"] in graph.wanted for row in rows]
    return [sum(good[:n]) / n for n in PLACES if n <= budget]


def train_judge(folder: Path, graph: Graph) -> None:
    """judge.bin, from texts that are no pages of the web."""
    rows = "".join(json.dumps(row) + "\n" for row in graph.labelled())
    (folder / "labelled.jsonl").write_text(rows)
    words = [Path(sys.executable).with_name("sabia"), "classify", "train",
             folder / "labelled.jsonl", "--label", "label", "-o", folder / "judge.bin"]  # fmt: skip
    subprocess.run(words, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pages", type=int, default=10_000)
    given = parser.parse_args()
    for seed in range(given.seeds):
        graph = Graph(given.pages, seed)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            graph.write_warc(folder / "web.warc.gz")
            (folder / "seeds.txt").write_text("\n".join(graph.seeds()) + "\n")
            train_judge(folder, graph)
            for policy in POLICIES:
                found = harvest(folder, graph, policy, given.budget, given.jobs)
                shares = " | ".join(f"{share:.3f}" for share in found)
                print(f"| {seed} | {len(graph.wanted)} | {policy} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
