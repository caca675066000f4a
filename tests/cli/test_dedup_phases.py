"""Phases of dedup in processes that are killed, and the example that submits them to Slurm."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from planted import make_texts, write

ROOT = Path(__file__).parent.parent.parent
SABIA = [sys.executable, "-m", "sabia.cli.main", "dedup"]
METHODS = {
    "exact": ["--engine", "numpy"],
    "minhash": ["--engine", "numpy"],
    "substring": ["--span", "80", "--engine", "numpy"],
    "line": ["--unit", "sentences", "--engine", "numpy"],
    "url": ["--keep", "first"],
    "semantic": ["--embeddings", "vector"],
}
KILLS = 3  # of each phase, before it may end
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts, origin = make_texts(random.Random(2), 700, 500)
    texts = [text.replace("word1", ". Word1") for text in texts]
    centres = np.random.default_rng(1).normal(size=(700, 6))
    path = tmp_path_factory.mktemp("shards")
    write(path, texts, 6, vector=centres[origin].tolist(),
          url=[f"http://a.org/{i}" for i in origin])  # fmt: skip
    return path


def files(out: Path) -> dict[str, bytes]:
    """The shards and removed rows of an output; every file that is there can be read."""
    paths = [*out.glob("o/part-*.parquet"), *out.glob("r/part-*.parquet")]
    for path in paths:
        pq.read_table(path)
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def killed(words: list[str], source: random.Random, longest_s: float) -> None:
    """Run a command, killed at random moments a few times, then to its end."""
    for _ in range(KILLS):
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        time.sleep(source.uniform(0.3, 1.0) * longest_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("phased", [True, False], ids=["phases", "scratch"])
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_random_moments_and_run_again(
    shards: Path, tmp_path: Path, method: str, phased: bool
) -> None:
    line = [*SABIA, str(shards), "--method", method, *METHODS[method]]
    whole, out = tmp_path / "whole", tmp_path / "out"
    begun = time.monotonic()
    subprocess.run([*line, "-o", whole / "o", "--removed", whole / "r"], check=True)
    longest_s = time.monotonic() - begun
    expected, source = files(whole), random.Random(method)
    assert len([name for name in expected if name.startswith("o/")]) == 6
    line += ["-o", str(out / "o"), "--removed", str(out / "r"), "--scratch", str(tmp_path / "s")]
    if not phased:
        killed(line, source, 1.3 * longest_s)
    for phase in ("sketch", "compare", "write") if phased else ():
        slices = ["0/2", "1/2"] if phase != "compare" else [""]
        for part in slices:
            words = [*line, "--phase", phase, *(["--shard", part] if part else [])]
            killed(words, source, longest_s)
            assert files(out).items() <= expected.items()
    assert files(out) == expected
    assert subprocess.run([*line[: line.index("--scratch")]], check=True).returncode == 0
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
