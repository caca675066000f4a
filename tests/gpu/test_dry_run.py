"""The GPU run without a GPU: its parts are exercised at tiny sizes, and everything holds."""

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


SKIPPED = {"models-compiled"}  # without a GPU
# these have no other test; the others take most of the time
SHORT = ("codes", "decoding", "gptq")


@pytest.mark.parametrize("parts", [SHORT, pytest.param(tuple(PARTS), marks=pytest.mark.slow)])
def test_the_parts_hold(parts: tuple[str, ...], tmp_path: Path) -> None:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("SABIA_", "TRITON_"))}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    out = tmp_path / "out"
    words = [sys.executable, str(RUN), "--out", str(out), "--only", ",".join(parts)]
    done = subprocess.run(words, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + (out / "log.txt").read_text()[-3000:]
    rows = reports.last(read_rows(out / RESULTS))
    assert {row["part"] for row in rows if row["status"] == "ok"} == set(parts) - SKIPPED
    assert len(list(out.iterdir())) <= 6
