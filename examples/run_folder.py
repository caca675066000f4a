"""Functions that the examples' reports share: reading the files of a run, and tables as text.

A run folder holds what the commands wrote: rows in Parquet, figures of `--stats` in JSON, metrics
in JSON lines, scores of `sabia eval`, and times.tsv (step, seconds, branch) from the script.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core.bench.result_summary import Summary, summarise
from sabia.core.bench.score_rows import Score, from_batch
from sabia.core.svg import Series


@dataclass(frozen=True)
class RunFolder:
    """A folder with the files of one run."""

    folder: Path

    def rows(self, name: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """All rows of a Parquet file or of an Arrow stream (`.arrow`)."""
        if not name.endswith(".arrow"):
            return pq.read_table(self.folder / name, columns=columns).to_pylist()
        table = pa.ipc.open_stream((self.folder / name).read_bytes()).read_all()
        return (table.select(columns) if columns else table).to_pylist()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All rows of a JSON lines file."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def stats(self, name: str) -> dict[str, Any]:
        """The figures that a command wrote with `--stats`."""
        return json.loads((self.folder / name).read_text())

    def scores(self, name: str = "scores.parquet") -> list[Score]:
        """Score rows of the evaluation."""
        batches = pq.ParquetFile(self.folder / name).iter_batches()
        return [score for batch in batches for score in from_batch(batch, "")]

    def summary(self, name: str = "scores.parquet") -> Summary:
        """Values, intervals and comparisons of the evaluation."""
        return summarise(self.scores(name))

    def size_bytes(self, model: str) -> int:
        """Bytes of a model's weights."""
        return sum(p.stat().st_size for p in (self.folder / model).glob("*.safetensors"))

    def curve(self, run: str, key: str, label: str) -> Series:
        """A figure of a run directory's metrics over its steps."""
        rows = [r for r in self.lines(f"{run}/metrics.jsonl") if key in r and "step" in r]
        return Series(label, [(float(r["step"]), float(r[key])) for r in rows])

    def times(self) -> list[tuple[str, float, str]]:
        """(step, seconds, branch) of the script's steps."""
        lines = (self.folder / "times.tsv").read_text().splitlines()
        cells = (line.split("\t") for line in lines)
        return [(name, float(seconds), branch) for name, seconds, branch in cells]


def percent(value: float) -> str:
    """0.934 → '93.4 %'."""
    return f"{100 * value:.1f} %"


def aligned(rows: Sequence[Sequence[Any]]) -> str:
    """A table as text in columns."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = (
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as Markdown."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
