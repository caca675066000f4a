"""The whole GPU run without a GPU: every part is exercised at tiny sizes, and everything holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import reports
from cases import RESULTS, read_rows
from run import PARTS

RUN = Path(__file__).with_name("run.py")


def test_every_part_holds(tmp_path: Path) -> None:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("SABIA_", "TRITON_"))}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, str(RUN), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, (
        done.stdout[-6000:] + (tmp_path / "out/log.txt").read_text()[-3000:]
    )
    rows = reports.last(read_rows(tmp_path / "out" / RESULTS))
    held = {row["part"] for row in rows if row["status"] == "ok"}
    assert held == set(PARTS)
    assert len(list((tmp_path / "out").iterdir())) <= 6
