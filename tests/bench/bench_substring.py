"""Exact substrings beside a suffix array: MB a CPU second, peak memory, and the same bytes cut.

    python tests/bench/bench_substring.py [--mb 20,60] [--span 100] [--rounds 2] [--peer PYTHON]

The text is Python source of this machine (standard library and installed packages, in an order
drawn by a seed). PYTHON is an interpreter with pydivsufsort, NumPy and pyarrow: reading,
divsufsort, Kasai's LCP, groups of equal windows and the bytes they cover, without writing anything.
Ours is the command, with start-up, spools, and Parquet written. In turns, one process each; CPU
seconds of processes and their children, medians; the slope between sizes leaves start-up out. What
is covered is compared byte by byte, in whole characters.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def make_corpus(path: Path, size: int) -> None:
    """Write files of Python source, `size` bytes of them or a little more."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    random.Random(7).shuffle(files)
    texts, total = [], 0
    for file in files:
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        texts.append(text)
        total += len(text.encode())
        if total >= size:
            break
    ids = [str(i) for i in range(len(texts))]
    pq.write_table(pa.table({"id": ids, "text": texts}), path, row_group_size=1000)


def peer(corpus: Path, span: int) -> str:
    """Digest of the covered bytes by a suffix array; runs in the peer's interpreter."""
    import pydivsufsort

    texts = [text.encode() for text in pq.read_table(corpus)["text"].to_pylist()]
    starts = np.cumsum([0, *map(len, texts)])
    units = np.frombuffer(bytearray(b"".join(texts)), np.uint8)  # it wants to be able to write
    order = pydivsufsort.divsufsort(units)
    common = pydivsufsort.kasai(units, order)  # of order[i] and order[i + 1]
    ends = np.repeat(starts[1:], np.diff(starts))
    inside = np.flatnonzero(order + span <= ends[order])
    shared = np.minimum.reduceat(common, inside)[:-1]  # over windows that cross documents
    same = np.concatenate(([False], shared >= span))
    order = order[inside].astype(np.int64)
    heads = np.flatnonzero(~same)
    first = np.minimum.reduceat(order, heads)[np.cumsum(~same) - 1]
    repeats = order[first + span <= order]
    steps = np.bincount(repeats, minlength=len(units) + 1)
    steps[span:] -= np.bincount(repeats, minlength=len(units) + 1)[: len(units) + 1 - span]
    return digest(np.cumsum(steps)[:-1] > 0, units)


def digest(covered: np.ndarray, units: np.ndarray) -> str:
    """Of bool[n]: bytes covered together with all the others of their character."""
    lead = np.flatnonzero((units & 0xC0) != 0x80)
    whole = np.minimum.reduceat(covered, lead)
    mask = np.repeat(whole, np.diff(np.append(lead, len(units))))
    said = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()[:16]
    return f"{said} {int(mask.sum())}"


def ours(marked: Path) -> str:
    """The same digest from the spans that `--action mark` wrote."""
    rows = pq.read_table(marked, columns=["text", "duplicate_spans"]).to_pylist()
    units = np.frombuffer("".join(row["text"] for row in rows).encode(), np.uint8)
    covered, base = np.zeros(len(units), bool), 0
    for row in rows:
        for one in row["duplicate_spans"]:
            covered[base + one["start"] : base + one["start"] + one["length"]] = True
        base += len(row["text"].encode())
    return digest(covered, units)


def measured(words: list[str]) -> tuple[float, int, str]:
    """(CPU seconds of a process and its children, its peak kB, its stdout)."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-c", code, *words]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, text=True, capture_output=True, env=alone)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, int(done.stderr.split()[-1]), done.stdout.strip()


def main() -> None:
    """Run and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", default="20,60")
    parser.add_argument("--span", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", default="")
    parser.add_argument("--phase", metavar="CORPUS")
    options = parser.parse_args()
    if options.phase:
        print(peer(Path(options.phase), options.span))
        return
    report: dict = {"span": options.span}
    with tempfile.TemporaryDirectory() as scratch:
        for size in map(int, options.mb.split(",")):
            report[f"{size} MB"] = one_size(Path(scratch), size, options)
    sizes = [report[name] for name in report if name.endswith("MB")]
    for name in ("sabia", "divsufsort") if options.peer and len(sizes) > 1 else ():
        more = [last - first for first, last in zip(sizes[0][name], sizes[-1][name], strict=True)]
        report[f"{name} MB/CPU-s, slope"] = round(
            (sizes[-1]["bytes"] - sizes[0]["bytes"]) / 1e6 / statistics.median(more), 1
        )
    print(json.dumps(report, indent=1))


def one_size(scratch: Path, size: int, options: argparse.Namespace) -> dict:
    """CPU seconds of each round, peaks, and whether the same bytes are covered."""
    corpus, out = scratch / f"{size}.parquet", scratch / "out.parquet"
    make_corpus(corpus, size * 1_000_000)
    command = [sys.executable, "-m", "sabia.cli.main", "dedup", "--method", "substring", "--span",
               str(options.span), "--force", "-q", str(corpus), "-o", str(out)]  # fmt: skip
    texts = pq.read_table(corpus)["text"]
    found: dict = {"bytes": sum(len(text.as_py().encode()) for text in texts), "sabia": []}
    subprocess.run([*command, "--action", "mark"], check=True)
    said = ours(out)
    found["bytes covered"] = int(said.split()[1])
    words = [options.peer, __file__, "--phase", str(corpus), "--span", str(options.span)]
    for _ in range(options.rounds):
        spent, peak, _ = measured(command)
        found["sabia"].append(round(spent, 2))
        found["sabia peak MB"] = peak // 1000
        if options.peer:
            spent, peak, answer = measured(words)
            found.setdefault("divsufsort", []).append(round(spent, 2))
            found["divsufsort peak MB"], found["equal"] = peak // 1000, answer == said
    return found


if __name__ == "__main__":
    main()
