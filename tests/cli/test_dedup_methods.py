"""`sabia dedup --method substring`, `line`, `url`, `semantic` as a user runs them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command

SABIA = Command("dedup")
PLAIN = [sys.executable, "-m", "sabia.cli.main", "dedup"]


def dedup(*words, **settings) -> subprocess.CompletedProcess:
    settings = {"capture_output": True, "timeout": 60, "text": True} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty pages in three shards: a menu, a text of their own, a long licence; ten URLs."""
    root = tmp_path_factory.mktemp("pages")
    for part in range(3):
        rows = range(10 * part, 10 * part + 10)
        own = ["".join(f"Page {i} says {i * k} things.\n" for k in range(9)) for i in rows]
        texts = [f"Home\nAbout us\n{text}{'All rights are kept here. ' * 12}" for text in own]
        table = pa.table({"id": [f"p{i}" for i in rows], "text": texts,
                          "vector": [[float(i % 3 == k) for k in range(3)] for i in rows],
                          "url": [f"http://a.org/{i % 10}?utm_id={i}" for i in rows]})  # fmt: skip
        pq.write_table(table, root / f"s{part}.parquet")
    return root


def test_methods_and_their_summaries(pages: Path, tmp_path: Path) -> None:
    done = dedup(pages, "--method", "substring", "-o", tmp_path / "s.parquet", "--removed",
                 tmp_path / "r.parquet", "--engine", "numpy", "-j", 2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept, gone = pq.read_table(tmp_path / "s.parquet"), pq.read_table(tmp_path / "r.parquet")
    assert kept.num_rows == 30 and gone.num_rows >= 29
    cut = sum(gone["length"].to_pylist())
    assert f"bytes in spans {cut:,}" in done.stderr and f"spans {gone.num_rows}" in done.stderr
    done = dedup(pages, "--method", "line", "--min-copies", 5, "--to", "jsonl", "--engine", "numpy")
    assert done.returncode == 0 and done.stdout.count("About us") == 1
    done = dedup(pages, "--method", "url", "-o", tmp_path / "u")
    assert done.returncode == 0 and "url duplicates 20" in done.stderr
    done = dedup(pages, "--method", "semantic", "--embeddings", "vector", "--threshold", 0.9,
                 "-o", tmp_path / "v.parquet")  # fmt: skip
    assert done.returncode == 0 and "semantic duplicates 27" in done.stderr, done.stderr
    again = dedup(pages, "--method", "url", "-o", tmp_path / "u")
    assert "3 shards already done" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "substring", "--keep", "first"], "--keep: only with --method minhash, exact"),
        (["--method", "exact", "--span", "9"], "--span: only with --method substring"),
        (
            ["--method", "line", "--unit", "word"],
            "--unit: 'word' (expected line, paragraph or sentences)",
        ),
        (
            ["--method", "substring", "--tokenizer", "/nowhere"],
            "--tokenizer: /nowhere has no token",
        ),
        (["--method", "line", "--action", "mark", "--removed", "r.parquet"], "removes nothing"),
        (
            ["--method", "semantic"],
            "--embeddings: is missing (--method semantic needs --embeddings or --model)",
        ),
        (
            ["--method", "semantic", "--model", "/nowhere"],
            "--model: /nowhere: not a model",
        ),
        (["--method", "url", "--keep", "best"], "--keep: 'best' (expected longest, first, newest"),
    ],
)
def test_refusals(pages: Path, words: list[str], said: str) -> None:
    done = dedup(pages, *words)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_pipe_and_an_empty_pipe(pages: Path) -> None:
    first = subprocess.Popen([*PLAIN, str(pages), "--method", "url"], stdout=subprocess.PIPE)
    done = dedup("--method", "line", "--to", "jsonl", "--engine", "numpy", stdin=first.stdout)
    assert first.wait() == 0 and done.returncode == 0 and len(done.stdout.splitlines()) == 10
    assert dedup("--method", "substring", stdin=subprocess.DEVNULL).returncode == 65


@pytest.mark.slow
@pytest.mark.parametrize("method", ["substring", "line", "url"])
def test_killed_at_any_time_and_run_again(tmp_path: Path, pages: Path, method: str) -> None:
    words = [str(pages), "--method", method, "-o", str(tmp_path / "o"), "-j", "2"]
    whole = dedup(*words[:3], "-o", tmp_path / "whole")
    assert whole.returncode == 0
    for delay in (0.2, 0.5, 0.8, 1.1, 1.4, 1.8, 2.3):
        process = subprocess.Popen([*PLAIN, *words], stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert dedup(*words).returncode == 0
    for part in range(3):
        name = f"part-{part:05d}.parquet"
        assert pq.read_table(tmp_path / "o" / name) == pq.read_table(tmp_path / "whole" / name)
    left = sorted(path.name for path in (tmp_path / "o").iterdir() if "part-" not in path.name)
    assert [name for name in left if not name.startswith(".")] == ["_manifest.json"]
