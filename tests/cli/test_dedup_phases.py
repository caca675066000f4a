"""Phases of dedup in processes that are killed, and the example that submits them to Slurm."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kills import left_over, through_kills
from planted import make_texts, write

ROOT = Path(__file__).parent.parent.parent
SABIA = [sys.executable, "-m", "sabia.cli.main", "dedup"]
METHODS = {
    "exact": ["--engine", "numpy"],
    "minhash": ["--engine", "numpy"],
    "substring": ["--span", "80", "--engine", "numpy"],
    "line": ["--unit", "sentences", "--engine", "numpy"],
    "line paragraph": ["--unit", "paragraph", "--engine", "numpy"],
    "url": ["--keep", "first"],
    "semantic": ["--embeddings", "vector"],
}
KILLS = {"phases": 10, "scratch": 5, "file": 5}  # in all calls together, before each may end
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts, origin = make_texts(random.Random(2), 700, 500)
    texts = [text.replace("word1", ". Word1").replace("word2", "\n\nword2") for text in texts]
    centres = np.random.default_rng(1).normal(size=(700, 6))
    path = tmp_path_factory.mktemp("shards")
    write(path, texts, 6, vector=centres[origin].tolist(),
          url=[f"http://a.org/{i}" for i in origin])  # fmt: skip
    return path


def files(out: Path) -> dict[str, bytes]:
    """The shards and removed rows of an output; every file that is there can be read."""
    paths = sorted(out.rglob("*.parquet"))
    for path in paths:
        pq.read_table(path)
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("how", KILLS)
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_random_moments_and_run_again(
    shards: Path, tmp_path: Path, method: str, how: str
) -> None:
    line = [*SABIA, str(shards), "--method", method.split()[0], *METHODS[method]]
    whole, out, scratch = tmp_path / "whole", tmp_path / "out", tmp_path / "s"
    o, r = ("o.parquet", "r.parquet") if how == "file" else ("o", "r")
    more = ["-j", "2"] if how == "file" else []
    begun = time.monotonic()
    subprocess.run([*line, "-o", whole / o, "--removed", whole / r, *more], check=True)
    longest_s = time.monotonic() - begun
    expected, draw = files(whole), random.Random(method)
    assert len(expected) == (2 if how == "file" else 12)
    line += ["-o", str(out / o), "--removed", str(out / r)]
    phased = [*line, "--scratch", str(scratch)]
    calls = [[*line, *more]] if how == "file" else [phased]
    if how == "phases":
        slices = [("sketch", "0/2"), ("sketch", "1/2"), ("compare",), ("write", "0/2"),
                  ("write", "1/2")]  # fmt: skip
        calls = [[*phased, "--phase", *" --shard ".join(words).split()] for words in slices]
    for words in calls:
        through_kills(words, KILLS[how] // len(calls), draw, 1.2 * longest_s, tmp_path / "t")
        assert files(out).items() <= expected.items()
        assert not left_over(out, tmp_path)
    assert files(out) == expected
    assert subprocess.run([*line, *more], check=True).returncode == 0
    assert files(out) == expected  # one job finds the outputs of the phases complete


FAKE_SBATCH = """#!/bin/bash
# As sbatch: runs the tasks of a job one after another, and the jobs in their order.
set -eu
array= after= script=
while [ $# -gt 0 ]; do
    case $1 in
        --array=0-*) array=${1#--array=0-} ;;
        --dependency=afterok:*) after=${1#--dependency=afterok:} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
number=$(($(cat "$JOBS/last" 2>/dev/null || echo 0) + 1))
echo $number > "$JOBS/last"
if [ -n "$after" ]; then [ -e "$JOBS/$after.ok" ]; fi
for task in $(seq 0 "${array:-0}"); do
    if [ -n "$array" ]; then
        export SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_STEP=1
        export SLURM_ARRAY_TASK_COUNT=$((array + 1))
    fi
    bash "$@" >> "$JOBS/$number.log" 2>&1
done
touch "$JOBS/$number.ok"
echo "$number;cluster"
"""


@pytest.mark.parametrize("method", ["line", "minhash"])
def test_the_slurm_example_gives_the_bytes_of_one_job(
    shards: Path, tmp_path: Path, method: str
) -> None:
    whole, out, programs = tmp_path / "whole", tmp_path / "out", tmp_path / "bin"
    line = [str(shards), "--method", method, *METHODS[method]]
    subprocess.run([*SABIA, *line, "-o", whole / "o", "--removed", whole / "r"], check=True)
    programs.mkdir()
    (programs / "sbatch").write_text(FAKE_SBATCH)
    (programs / "sabia").write_text(f'#!/bin/bash\nexec {sys.executable} -m sabia.cli.main "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "JOBS": str(tmp_path)}
    words = [ROOT / "examples/slurm/dedup.sh", "3", tmp_path / "s", *line, "-o", out / "o",
             "--removed", out / "r"]  # fmt: skip
    done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True)
    logs = [path.read_text() for path in sorted(tmp_path.glob("*.log"))]
    assert done.returncode == 0 and done.stdout == "3;cluster\n", [done.stderr, *logs]
    assert files(out) == files(whole)
    assert "slice 2 of 3: 2 of 6 shards" in logs[2]
    (out / "o" / "part-00003.parquet").unlink()
    done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and files(out) == files(whole)
    assert "2 of 2 shards already sketched" in (tmp_path / "4.log").read_text()


def test_the_slurm_example_shows_its_usage() -> None:
    done = subprocess.run([ROOT / "examples/slurm/dedup.sh", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage:" in done.stderr
