"""A step of BF16 training on a CPU uses again the memory of the step before it: blocks that the
allocator returns to the system at each use would be cleared, page by page, at the next one."""

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


@pytest.mark.slow
def test_a_step_in_bf16_faults_few_pages(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1024, (64, 512))
    columns = {"id": [str(i) for i in range(64)], "input_ids": ids.tolist(),
               "document_lengths": [[512]] * 64}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    few, many = (page_faults(steps, tmp_path) for steps in STEPS)
    by_step = (many - few) / (STEPS[1] - STEPS[0])
    assert by_step < 80_000  # 44,000; with a mapping for each block of 1 MiB or more 205,000
