"""`--executor ray` on a Ray cluster of this machine: the rows of one job, through deaths."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted import make_texts, write

from sabia.core.errors import ExitCode

SABIA = [sys.executable, "-m", "sabia.cli.main"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
METHODS = {
    "exact": [], "minhash": [], "substring": ["--span", "80"], "url": ["--keep", "first"],
    "line": ["--unit", "sentences"],
}  # fmt: skip


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """The option for a cluster of this machine."""
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    options = ["--head", "--port=0", "--num-cpus=2", "--include-dashboard=false",
               "--disable-usage-stats", "--object-store-memory=100000000"]  # fmt: skip
    subprocess.run([*RAY, "start", *options], check=True, env=environment, capture_output=True)
    yield "ray=auto"
    subprocess.run([*RAY, "stop", "--force", "--grace-period=1"], check=True, capture_output=True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts, origin = make_texts(random.Random(3), 900, 500)
    texts = [text.replace("word1", ". Word1") for text in texts]
    path = tmp_path_factory.mktemp("página um")
    write(path, texts, 7, url=[f"http://a.org/{i}" for i in origin])
    return path


def sabia(*words: object, code: int = 0, **options: object) -> str:
    """The messages of a call, which must end with the code."""
    done = subprocess.run([*SABIA, *map(str, words)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == code, done.stderr
    return str(done.stderr)


def rows(path: Path) -> dict[str, pa.Table]:
    """The table of each part, without what says where it was made."""
    return {
        file.name: pq.read_table(file).replace_schema_metadata()
        for file in sorted(path.glob("*.parquet"))
    }


def tasks_of(out: Path) -> list[int]:
    """Processes of slices that write to `out`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(out).encode() in words and b"--executor=local" in words:
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_slices_give_the_rows_of_one_job(ray: str, shards: Path, tmp_path: Path) -> None:
    line = ["classify", shards, "--where", "word_count > 100", "--removed"]
    sabia(*line, tmp_path / "r1", "-o", tmp_path / "one", "--quiet")
    call = [*line, tmp_path / "r2", "-o", tmp_path / "ray", "--executor", ray, "-j", "3"]
    said = sabia(*call)
    assert "1,400 rows in" in said and "share kept" not in said, said
    assert rows(tmp_path / "ray") == rows(tmp_path / "one") and len(rows(tmp_path / "ray")) == 7
    assert rows(tmp_path / "r2") == rows(tmp_path / "r1")
    said = sabia(*call, "--json")
    assert '"rows_in": 0' in said and '"shards_skipped": 7' in said, said


def test_what_cannot_be_sliced_is_refused(shards: Path, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "out"]
    for words, expected in (
        (["dedup", shards, *out], "give --scratch DIR"),
        (["classify", shards, "-o", tmp_path / "x.parquet"], "give -o DIR"),
        (["classify", "-", *out], "not stdin"),
        (["classify", shards, *out, "--shard", "0/2"], "--shard: ray gives each task its slice"),
    ):
        assert expected in sabia(*words, "--executor", "ray", code=ExitCode.USAGE)
    said = sabia("classify", shards, *out, "--executor", "slurm", code=ExitCode.USAGE)
    assert "expected local, ray or ray=ADDRESS" in said
    (tmp_path / "ray.py").write_text("raise ImportError")
    hidden = os.environ | {"PYTHONPATH": str(tmp_path)}
    line = ["classify", shards, *out, "--executor", "ray"]
    assert "pip install 'sabia[ray]'" in sabia(*line, code=ExitCode.MISSING, env=hidden)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_phases_with_deaths_give_the_rows_of_one_job(
    ray: str, shards: Path, tmp_path: Path, method: str
) -> None:
    line = ["dedup", shards, "--method", method, *METHODS[method]]
    if method != "url":
        line += ["--engine", "numpy"]
    sabia(*line, "-o", tmp_path / "one", "--removed", tmp_path / "r1")
    out = tmp_path / "ray"
    words = [*line, "-o", out, "--removed", tmp_path / "r2", "--scratch", tmp_path / "s",
             "--executor", ray]  # fmt: skip
    call = subprocess.Popen([*SABIA, *map(str, words)], stderr=subprocess.PIPE, text=True)
    killed = dict[bytes, int]()
    while call.poll() is None:  # in each phase a slice's process, then the worker of another
        for pid in tasks_of(out):
            try:
                phase = next(w for w in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                             if w.startswith(b"--phase="))  # fmt: skip
                if killed.get(phase, 0) < 2:
                    time.sleep(random.Random(pid).uniform(0.0, 0.6))
                    os.kill(parent(pid) if killed.get(phase) else pid, signal.SIGKILL)
                    killed[phase] = killed.get(phase, 0) + 1
            except (OSError, StopIteration):  # it has ended
                continue
        time.sleep(0.02)
    assert call.returncode == 0, call.communicate()[1]
    assert set(killed) == {b"--phase=sketch", b"--phase=compare", b"--phase=write"}, killed
    assert rows(out) == rows(tmp_path / "one") and rows(tmp_path / "r2") == rows(tmp_path / "r1")
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_stopped_call_ends_its_slices_and_goes_on(ray: str, shards: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "bpe", tmp_path / "tokens"
    sabia("tokenize", shards, "--train-tokenizer", "--vocab-size", "400", "--save-tokenizer", model,
          "-o", tmp_path / "first")  # fmt: skip
    sabia("rewrite", shards, "-o", tmp_path / "r1")
    sabia("rewrite", shards, "-o", tmp_path / "r2", "--executor", ray)
    assert rows(tmp_path / "r1") == rows(tmp_path / "r2")
    line = ["tokenize", shards, "--tokenizer", model]
    sabia(*line, "-o", tmp_path / "one")
    words = [*line, "-o", out, "--executor", ray, "-j", "7"]
    call = subprocess.Popen([*SABIA, *map(str, words)], stderr=subprocess.PIPE, text=True)
    while not tasks_of(out):
        assert call.poll() is None, call.communicate()[1]
        time.sleep(0.02)
    call.send_signal(signal.SIGTERM)
    assert call.wait() == ExitCode.INTERRUPTED, call.communicate()[1]
    for _ in range(100):
        if not tasks_of(out):
            break
        time.sleep(0.1)
    assert not tasks_of(out)
    sabia(*words)
    assert rows(out) == rows(tmp_path / "one")
    wrong = ["classify", shards, "--text-column", "body", "-o", out, "--executor", ray, "--force"]
    printed = sabia(*wrong, code=ExitCode.BAD_DATA)
    assert "slices failed; slice " in printed and "no column 'body'" in printed, printed
