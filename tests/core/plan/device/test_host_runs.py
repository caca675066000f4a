"""Whole runs of the trainer beside the planner's memory for them, a process each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "bench_plan_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("run", ["8192; 4 x 512; optimizer muon", "4 x 512; remat matmuls"])
def test_a_runs_peak_is_within_a_tenth(run):
    words = [sys.executable, str(BENCH), "--only", run]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    error = re.search(r"worst ([\d.]+)%, 1 of 1 within", printed)
    assert error and float(error[1]) <= 10, printed
