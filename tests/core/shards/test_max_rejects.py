"""The summary of a stage: counts in full, and `--max-rejects`, a gate on the share of rejects."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sabia.core.errors import Infeasible
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map
from sabia.core.shards.summary import Summary


def kept(tmp_path: Path, share: float | None) -> int:
    """Rows written of four lines, one of which is no document."""
    lines = [json.dumps({"text": f"Page {n}."}) for n in range(3)]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join([*lines, "no JSON"]) + "\n")
    job = Job("rewrite", inputs=(str(source),), out=str(out), max_rejects=share, force=True)
    try:
        run_map(job, lambda batches, _context: batches)
    finally:
        rows = pq.read_metadata(out).num_rows
    return rows


@pytest.mark.parametrize("share", [None, 0.25, 1.0])
def test_a_share_that_is_allowed_passes(tmp_path: Path, share: float | None) -> None:
    assert kept(tmp_path, share) == 3


@pytest.mark.parametrize("share", [0.0, 0.24])
def test_a_larger_share_is_a_red_gate(tmp_path: Path, share: float) -> None:
    with pytest.raises(Infeasible, match="--max-rejects: 1 of 4 rows"):
        kept(tmp_path, share)
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 3


def test_large_counts_are_printed_in_full(capsys) -> None:
    counters = {"near duplicates": 12_345_678.0, "share kept": 1 / 3, "odd": float("nan")}
    Summary(rows_in=1, counters=counters).report(Job("dedup"))
    said = capsys.readouterr().err
    assert "near duplicates 12,345,678, odd nan, share kept 0.333333 (" in said
