"""CPU time of `sabia report --document` on 1,000 URLs by the number of generated documents.

    python tests/bench/bench_report.py --rows 1e6,3e6,1e7

Documents have an id, a URL, a short text and a source; token rows hold three documents each.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.shards import schemas
from sabia.core.shards.outputs import open_file

PART, LENGTH, URLS = 500_000, 12, 1_000
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def hex_ids(draw: np.random.Generator, count: int) -> pa.Array:
    """Random ids of 32 hexadecimal digits."""
    random = draw.integers(0, 256, (count, 16), dtype=np.uint8)
    text = np.empty((count, 32), np.uint8)
    text[:, ::2], text[:, 1::2] = HEX[random >> 4], HEX[random & 15]
    ends = np.arange(0, 32 * count + 1, 32, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(text.tobytes())]
    )


def named_sources(draw: np.random.Generator, count: int) -> pa.Array:
    """One of two sources for each row."""
    return pa.array(np.array(["web", "books"])[draw.integers(0, 2, count)])


def lists(ends: np.ndarray, values: pa.Array) -> pa.ListArray:
    """Lists that end at these values."""
    return pa.ListArray.from_arrays(ends.astype(np.int32), values)


def generate(folder: Path, rows: int) -> list[str]:
    """Write documents and token rows; returns the URLs that are asked for."""
    draw, urls = np.random.default_rng(0), list[str]()
    for part, start in enumerate(range(0, rows, PART)):
        count = min(PART, rows - start)
        ids, number = hex_ids(draw, count), pa.array(np.arange(start, start + count)).cast("string")
        host = pa.array(draw.integers(0, 5000, count)).cast("string")
        words = "https://www.site", host, f".example/{'a-long-path-' * 4}", number, ".html", ""
        url = pc.binary_join_element_wise(*words)
        texts = pc.binary_join_element_wise("text of ", number, "")
        documents = pa.RecordBatch.from_arrays(
            [ids, texts, url, named_sources(draw, count)], ["id", "text", "url", "source"]
        )
        urls += url.take(pa.array(draw.integers(0, count, -(-URLS * count // rows)))).to_pylist()
        packed = -(-count // 3)
        pieces = np.minimum(np.arange(packed + 1) * 3, count)
        tokens = np.arange(packed + 1) * LENGTH
        numbers = draw.integers(0, 30_000, packed * LENGTH, dtype=np.int32)
        table = pa.RecordBatch.from_arrays(
            [hex_ids(draw, packed), lists(tokens, pa.array(numbers)),
             lists(pieces, pa.array(np.full(count, 4, np.int32))),
             lists(tokens, pa.array(np.ones(packed * LENGTH, bool))),
             named_sources(draw, packed), lists(pieces, ids),
             lists(pieces, pa.array(np.zeros(count, np.int32)))],
            schema=schemas.KINDS["tokens"],
        )  # fmt: skip
        for kind, batch in {"pages": documents, "tokens": table}.items():
            (folder / kind).mkdir(exist_ok=True)
            with open_file(str(folder / kind / f"part-{part:05d}.parquet"), batch.schema) as file:
                file.write(batch)
    return urls[:URLS]


def measured(folder: Path, *paths: str) -> tuple[float, int, int]:
    """(CPU seconds, documents, rows) of one call."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["--document", folder / "urls.txt", *(folder / path for path in paths), "--json", "-q"]
    call = [sys.executable, "-m", "sabia.cli.main", "report", *map(str, words)]
    done = subprocess.run(call, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(done.stdout)["documents"]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, len(answer), sum(len(one["rows"]) for one in answer)


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1e6,3e6,1e7")
    for rows in (int(float(text)) for text in parser.parse_args().rows.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "urls.txt").write_text("\n".join(generate(folder, rows)) + "\n")
            for paths in (("pages",), ("pages", "tokens")):
                seconds, count, there = measured(folder, *paths)
                print(f"{rows:,} documents, {' and '.join(paths)}: {seconds:.2f} CPU s, {count} "
                      f"documents and {there} rows shown")  # fmt: skip


if __name__ == "__main__":
    main()
