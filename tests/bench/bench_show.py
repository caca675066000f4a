"""CPU time and bytes read for the first screen of `sabia show` on directories of a terabyte.

    python tests/bench/bench_show.py --folder DIR

The directories have 10,000 names of one shard of documents of 105 MB, with a manifest and without,
100 names of one sparse Arrow file of 10 GB of token rows, and a sparse file of JSON lines of 1 TB.
The pager is `head -24`, in a terminal of 80 columns.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import struct
import sys
import tempfile
import termios
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from sparse_rows import sparse_rows

from sabia.core.shards import schemas
from sabia.core.shards.atomic import write_json
from sabia.core.shards.outputs import open_file

NAMES, SPARSE_NAMES, TEXT = 10_000, 100, 10_000
MEASURED = """
import resource, sys
from sabia.cli import main
main.end_process = lambda code: None
try:
    main.program()
finally:
    read = next(int(line.split()[1]) for line in open("/proc/self/io") if line[:5] == "rchar")
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open({path!r}, "w") as file:
        print(used.ru_utime + used.ru_stime, read, used.ru_maxrss, file=file)
"""


def documents(folder: Path) -> None:
    """10,000 names of a shard of random texts, which do not compress well."""
    draw = np.random.default_rng(0)
    letters = np.frombuffer(
        b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+- ", "u1"
    )
    shard = folder / "part-00000.parquet"
    with open_file(str(shard), schemas.KINDS["document"], {"command": "crawl"}) as file:
        for start in range(0, 14_000, 1_000):
            rows = [
                {"text": letters[draw.integers(0, len(letters), TEXT)].tobytes().decode(),
                 "id": f"{n:032x}", "url": f"https://a.example/{n}"}
                for n in range(start, start + 1_000)
            ]  # fmt: skip
            batch = pa.RecordBatch.from_pylist(rows, schema=schemas.KINDS["document"])
            file.write(batch)
    size = shard.stat().st_size
    listed = [{"name": f"part-{n:05d}.parquet", "rows": 14_000, "size_bytes": size}
              for n in range(NAMES)]  # fmt: skip
    write_json(folder / "_manifest.json", {"command": "crawl", "shards": listed})
    link(shard, folder, NAMES)


def link(path: Path, folder: Path, names: int) -> None:
    """Names of a file in a directory."""
    for number in range(names):
        name = folder / f"part-{number:05d}{path.suffix}"
        if name != path:
            os.link(path, name)


def generate(folder: Path) -> dict[str, Path]:
    """The directories and files by what they are."""
    places = {name: folder / name for name in ("documents", "bare", "tokens")}
    for place in places.values():
        place.mkdir()
    documents(places["documents"])
    link(places["documents"] / "part-00000.parquet", places["bare"], NAMES)
    first = places["tokens"] / "part-00000.arrow"
    sparse_rows(first, 2_500)
    link(first, places["tokens"], SPARSE_NAMES)
    lines = folder / "lines.jsonl"
    lines.write_text(
        "".join(json.dumps({"id": str(n), "text": "word " * 500}) + "\n" for n in range(1_000))
    )
    os.truncate(lines, 10**12)
    return places | {"lines": lines}


def first_screen(words: list[str], folder: Path) -> tuple[float, int, int]:
    """(CPU seconds, bytes read, peak memory in bytes) of a call until its pager ends."""
    figures = folder / "figures"
    child, terminal = pty.fork()
    if child == 0:
        environment = dict(os.environ, SABIA_PAGER="head -24", TERM="xterm")
        code = MEASURED.format(path=str(figures))
        os.execve(sys.executable, [sys.executable, "-c", code, "show", *words], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
    os.waitpid(child, 0)
    cpu, read, memory = figures.read_text().split()
    return float(cpu), int(read), int(memory) << 10


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as scratch:
        folder = Path(scratch)
        places = generate(folder)
        calls = {
            "documents": [str(places["documents"])],
            "documents, --where": [
                str(places["documents"]), "--where", "url == 'https://a.example/9000'",
            ],
            "documents, --sample 1": [str(places["documents"]), "--sample", "1"],
            "documents without a manifest, --sample 1": [str(places["bare"]), "--sample", "1"],
            "token rows": [str(places["tokens"])],
            "JSON lines": [str(places["lines"])],
        }  # fmt: skip
        for words in calls.values():
            first_screen(words, folder)  # once to compile and to fill caches
        print("| | size | CPU s | MB read | peak MB |\n| --- | --- | --- | --- | --- |")
        for name, words in calls.items():
            place = Path(words[0])
            files = place.iterdir() if place.is_dir() else [place]
            size = sum(path.stat().st_size for path in files)
            cpu, read, memory = first_screen(words, folder)
            figures = f"{cpu:.2f} | {read / 1e6:.1f} | {memory / 1e6:.0f}"
            print(f"| {name} | {size / 1e12:.2f} TB | {figures} |")


if __name__ == "__main__":
    main()
