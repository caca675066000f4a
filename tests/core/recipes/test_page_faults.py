"""A step of BF16 training on a CPU faults few pages: most memory is used again, and blocks that
the allocator returns to the system consist of huge pages (where Linux grants them)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SHAPE = "d=256,layers=4,heads=4,vocab=16384"
STEPS = (2, 8)


def page_faults(steps: int, folder: Path) -> int:
    """Minor page faults of a run of `sabia pretrain`."""
    words = [sys.executable, "-m", "sabia.cli.main", "pretrain", "rows.parquet", "--shape", SHAPE,
             "--steps", str(steps), "--batch", "4", "--precision", "bf16", "--peak-flops", "1T",
             "-o", f"run{steps}", "-q", "--to", "jsonl"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    assert run.returncode == 0
    return usage.ru_minflt


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.slow
@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages"
)
def test_a_step_in_bf16_faults_few_pages(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1024, (64, 512))
    columns = {"id": [str(i) for i in range(64)], "input_ids": ids.tolist(),
               "document_lengths": [[512]] * 64}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    few, many = (page_faults(steps, tmp_path) for steps in STEPS)
    by_step = (many - few) / (STEPS[1] - STEPS[0])
    assert by_step < 15_000  # 2,800; with pages of 4 KiB 67,000
