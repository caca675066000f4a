"""A pipe of stages on text that is made on the fly: peak memory of each process, and CPU time.

    python tests/bench/bench_pipes.py [--megabytes 200,800] [--classify "FLAGS"] [--files]

A process writes documents of about 2 kB as an Arrow stream; a tenth of them repeat an earlier one.
`classify | dedup | tokenize` reads it with SABIA_PIPE=arrow. Printed: the peak of resident memory
and the CPU seconds of each process, for each size. With `--files` the same stages also run one
after the other through Parquet files, in turns with the pipe.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

SABIA = str(Path(sys.executable).parent / "sabia")
VOCABULARY, ROWS, WORDS = 50_000, 1_000, 330
REPEATED = 0.1  # share of the documents that are copies
STAGES = ("source", "classify", "dedup", "tokenize")


def produce(megabytes: float, target: str) -> None:
    """Write documents of so many bytes of text in all to a path, as an Arrow stream."""
    draw = np.random.default_rng(7)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    words = ["".join(draw.choice(letters, n)) for n in draw.integers(2, 10, VOCABULARY)]
    words[:8] = ["the", "of", "and", "to", "be", "that", "have", "with"]
    vocabulary = np.array(words, object)
    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("source", pa.string())])
    made, count, earlier = 0, 0, [""]
    with open(target, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while made < megabytes * 1e6:
            ranks = np.minimum(draw.zipf(1.3, (ROWS, WORDS)) - 1, VOCABULARY - 1)
            texts = [f"{' '.join(row)}.\n" for row in vocabulary[ranks]]
            for copy in range(int(ROWS * REPEATED)):
                texts[copy] = earlier[copy % len(earlier)]
            earlier = texts[-100:]
            made += sum(map(len, texts))
            ids = [f"d{count + i}" for i in range(ROWS)]
            count += ROWS
            writer.write_batch(pa.record_batch([ids, texts, ["made"] * ROWS], schema=schema))


def waited(processes: list[subprocess.Popen[bytes]]) -> list[tuple[float, float]]:
    """(CPU seconds, peak resident MiB) of each process, with its children."""
    figures = []
    for process in processes:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{process.args}: exit code {process.returncode}")
        figures.append((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))
    return figures


def run(
    work: Path, megabytes: float, flags: str, through: str
) -> tuple[list[tuple[float, float]], float]:
    """The figures of one run through a "pipe" or "files", and its seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SABIA_PIPE": "arrow"}
    source = [sys.executable, __file__, "--produce", str(megabytes)]
    words = [source, [SABIA, "classify", *shlex.split(flags)], [SABIA, "dedup"],
             [SABIA, "tokenize", "--tokenizer", str(work / "tokenizer")]]  # fmt: skip
    started, figures, before = time.monotonic(), list[tuple[float, float]](), None
    processes = list[subprocess.Popen[bytes]]()
    for number, (stage, line) in enumerate(zip(STAGES, words, strict=True)):
        out, last = work / f"{stage}.parquet", number == len(words) - 1
        piped = not last and (through == "pipe" or number == 0)
        if not piped:
            line = [*line, "--force", "-q", "-o", str(out)]
        elif number:
            line = [*line, "-q"]
        process = subprocess.Popen(line, stdin=before, cwd=work, env=environment,
                                   stdout=subprocess.PIPE if piped else None)  # fmt: skip
        processes.append(process)
        if before is not None:
            before.close()
        before = process.stdout
        if not piped:
            figures += waited(processes)
            processes = []
            if not last:
                before = open(out, "rb")  # noqa: SIM115 - of the next process
    return figures, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="200,800")
    parser.add_argument("--classify", default="", metavar="FLAGS")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--produce", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce:
        produce(given.produce, "/dev/stdout")
        return
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        work = Path(name)
        produce(4, str(work / "sample.arrows"))
        subprocess.run([SABIA, "tokenize", "sample.arrows", "--vocab-size", "8000", "-o", "rows/"],
                       cwd=work, check=True)  # fmt: skip
        os.rename(work / "rows" / "_tokenizer", work / "tokenizer")
        print("MB of text | through | seconds |", " | ".join(f"{s}: CPU s, MiB" for s in STAGES))
        for megabytes in map(float, given.megabytes.split(",")):
            for through in ("pipe", "files") if given.files else ("pipe",):
                figures, seconds = run(work, megabytes, given.classify, through)
                cells = " | ".join(f"{cpu:.1f}, {peak:.0f}" for cpu, peak in figures)
                total = sum(cpu for cpu, _ in figures[1:])
                print(f"{megabytes:g} | {through} | {seconds:.0f} | {cells} | {total:.1f} CPU s",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
