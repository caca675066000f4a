"""The quickstart as a newcomer runs it, on three seeds: it ends well and its figures hold.

Each seed takes some minutes; the bars are those that the README and the report speak of.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def load_report():
    """examples/quickstart_report.py as a module."""
    path = ROOT / "examples" / "quickstart_report.py"
    spec = importlib.util.spec_from_file_location("quickstart_report", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def quickstart(folder: Path, *options: str) -> str:
    environment = os.environ | {"SABIA_VENV": sys.prefix}
    words = ["bash", str(ROOT / "examples" / "quickstart.sh"), *options, str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accuracy_rises_by_grpo_and_survives_quantization(tmp_path: Path, seed: int) -> None:
    quickstart(tmp_path / "q", "--seed", str(seed))
    scores = load_report().Run(tmp_path / "q").scores()
    values = {name: scores.result(name, "sums").interval.value for name in scores.models}
    assert scores.result("grpo", "sums").items >= 2000
    assert 0.35 <= values["sft"] <= 0.55
    assert values["grpo"] >= 0.85
    assert abs(values["w8"] - values["grpo"]) <= 0.03
    assert abs(values["mixed"] - values["grpo"]) <= 0.03


@pytest.mark.slow
def test_fast_quickstart_writes_a_whole_report(tmp_path: Path) -> None:
    said = quickstart(tmp_path / "q", "--fast")
    report = (tmp_path / "q" / "report.html").read_text()
    assert report.endswith("</html>\n") and report.count("<svg") >= 5
    counters = json.loads((tmp_path / "q" / "dedup.json").read_text())["counters"]
    assert counters["exact duplicates"] == 15 and "44 planted copies" in said


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    words = ["bash", str(ROOT / "examples" / "quickstart.sh"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "other files" in done.stderr
    assert (tmp_path / "mine.txt").exists()
