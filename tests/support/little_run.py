"""A corpus of two minutes' training, and the losses of a run on it."""

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def tokens(folder: Path) -> Path:
    """A little corpus as token rows, with its tokenizer."""
    texts = [
        f"{i} and {i + 1} make {2 * i + 1}, said the owl of house {i % 7}." for i in range(900)
    ]
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    words = ["sabia", "tokenize", "texts.parquet", "--train-tokenizer", "--vocab-size", "400",
             "--length", "64", "-o", "tokens"]  # fmt: skip
    subprocess.run(words, cwd=folder, check=True)
    return folder / "tokens"


def tokens_once(folder: Path) -> Path:
    return folder / "tokens" if (folder / "tokens").exists() else tokens(folder)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["loss"] for row in rows if "loss" in row}
    return [by_step[step] for step in sorted(by_step)]
