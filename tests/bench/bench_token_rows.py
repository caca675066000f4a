"""What it costs to open token rows, and the first batch of them.

usage: python tests/bench/bench_token_rows.py FOLDER TOKENS [SHARDS] [new_file | new_stream]

Makes sparse Arrow shards of rows of 2,048 tokens in FOLDER (about 40 bytes per row on disk), as
streams of other programs, or as files or streams with our index, opens
them three times, each time in a process that has imported what it
needs, and reads a batch of 256 rows of the data order. Prints CPU seconds, private memory
(RssAnon), and the bytes that were read. The hash of a shard, which is known from
its digests or from an earlier start, is not computed.
"""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import pyarrow.compute
from sparse_rows import sparse_rows

from sabia.core.shards.inputs import from_path
from sabia.core.shards.order import DataOrder
from sabia.core.shards.token_rows import row_store
from sabia.core.shards.token_rows.arrow_messages import FileBytes
from sabia.core.train.token_rows import TokenRows

LENGTH, BATCH_ROWS = 2048, 500


def private_mb() -> float:
    """Private memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def measure(folder: Path) -> None:
    """Open the rows of a folder, and read a batch."""
    row_store.content_hash = lambda name, _open: name
    read: list[int] = []
    plain = FileBytes.read_some

    def counted(self: FileBytes, position: int, size: int) -> bytes:
        read.append(size)
        return plain(self, position, size)

    FileBytes.read_some = counted
    since, memory = time.process_time(), private_mb()
    files = row_store.open_row_files(from_path(str(folder / "in"), "tokens"), folder / "cache", 1,
                                     lambda *_: None)  # fmt: skip
    rows = TokenRows(tuple(files))
    opened = time.process_time()
    batch = rows.batch(DataOrder(rows.source_sizes, 0).rows(0, 256))
    ended = time.process_time()
    assert batch["input_ids"].shape == (256, LENGTH)
    shards = sorted((folder / "in").iterdir())
    size = sum(path.stat().st_size for path in shards)
    touched = sum(read)
    print(f"{rows.tokens / 1e9:.2f} G tokens: open {opened - since:.3f} s, batch "
          f"{ended - opened:.3f} s, {private_mb() - memory:.0f} MB more private memory, read "
          f"{touched / 1e6:.1f} MB = {touched / size:.3%} of {size / 1e9:.1f} GB")  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        measure(folder)
        return
    tokens, shards = float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    (folder / "in").mkdir(parents=True)
    batches = round(tokens / shards / LENGTH / BATCH_ROWS)
    index = getattr(pyarrow.ipc, sys.argv[4]) if len(sys.argv) > 4 else None
    for number in range(shards):
        path = folder / "in" / f"{number:05d}.arrow"
        sparse_rows(path, batches, BATCH_ROWS, LENGTH, index)
    for _ in range(3):
        subprocess.run([sys.executable, __file__, str(folder)], check=True)


if __name__ == "__main__":
    main()
