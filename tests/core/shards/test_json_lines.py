"""JSON lines that somebody else wrote: no line ends the reading, and every row is accounted for."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sabia.core.errors import BadData
from sabia.core.shards import json_lines
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import from_path
from sabia.core.shards.rejects import Rejects

GOOD = b'{"text": "kept"}\n'
NESTED = 985  # near the limit of Python's parser: some levels pass it and fail in the writer


def read(path: Path, kind: str = "document") -> tuple[int, list[tuple[dict[str, Any], str]]]:
    """(rows, rejects) of a file, with the columns of all rows as a stage reads them."""
    (source,) = unified(from_path(str(path), kind))
    refused: list[tuple[dict[str, Any], str]] = []
    kept = source.batches(reject=lambda row, reason: refused.append((row, reason)))
    return sum(batch.num_rows for batch in kept), refused


@pytest.mark.parametrize("depth", [1_000, 100_000, 1_000_000])
@pytest.mark.parametrize("pattern", ["[", '{"a":', '{"text": "x", "meta": '])
def test_deep_nesting_is_one_reject(tmp_path: Path, depth: int, pattern: str) -> None:
    path = tmp_path / "a.jsonl"
    deep = (pattern * depth + "\n").encode()
    path.write_bytes(GOOD + deep + GOOD)
    rows, refused = read(path)
    assert rows == 2 and [reason for _, reason in refused] == [json_lines.TOO_DEEP]
    record = refused[0][0]
    assert record["line"] == 2 and record["bytes"].encode() == deep[: json_lines.EXCERPT_BYTES]
    assert record.get("size") == (len(deep) if len(deep) > json_lines.EXCERPT_BYTES else None)


def test_a_line_beyond_the_limit_is_one_reject(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 10_000)
    monkeypatch.setattr(json_lines, "EXCERPT_BYTES", 100)
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 512)
    for size in (9_999, 10_000, 10_001, 10_512, 30_000):
        long = b'{"text": "' + b"x" * (size - 13) + b'"}\n'
        assert len(long) == size
        path = tmp_path / f"{size}.jsonl"
        path.write_bytes(GOOD + long + GOOD)
        rows, refused = read(path)
        if size <= 10_000:
            assert (rows, refused) == (3, [])
            continue
        assert rows == 2
        record = {"line": 2, "bytes": long[:100].decode(), "size": size}
        assert refused == [(record, "longer than 0 MiB")]
    path.write_bytes(GOOD + long.rstrip())  # cut in the long line
    assert read(path)[0] == 1


@pytest.mark.slow
def test_a_line_of_257_mib_in_a_command(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD + b'{"text": "')
        for _ in range(257):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + GOOD)
    words = ["classify", str(path), "-o", str(tmp_path / "o.parquet")]
    done = subprocess.run([sys.executable, "-m", "sabia.cli.main", *words], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"3 rows in, 2 out" in done.stderr and b"1 rejected" in done.stderr
    assert os.path.getsize(tmp_path / "o.rejects.parquet") < 1 << 20


NAMES = ("text", "id", "url", "source", "language", "crawl_time", "scores", "meta", "extra",
         "messages", "tools", "rubric", "answer", "input_ids", "document_lengths", "\ud800",
         "")  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 10**400, -(10**30), 2**63, 1e308, float("nan"), float("inf"), 1.5, 0, "", "abc",
    "\ud800", "\x00", "2020-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00+23:00", "2020-13-01", '{"k": [1, 2]}', "[" * 980, "[" * 100_000,
    {str(i): 1.0 for i in range(1_500)}, {"\ud800": 1.0}, {"a": None, "b": "x"},
    [{"role": "user", "content": 3}], [[1], {"a": [None]}], [1, 2**40], {"": {"": []}},
)  # fmt: skip


def random_row(choice: random.Random, kind: str) -> str:
    row = {name: choice.choice((*VALUES, f"@{NESTED + choice.randrange(12)}@"))
           for name in choice.sample(NAMES, choice.randrange(len(NAMES)))}  # fmt: skip
    if choice.random() < 0.9:
        row |= {"text": "words", "messages": [{"role": "user", "content": "words"}],
                "input_ids": [1, 2], "document_lengths": [2]}  # fmt: skip
    return re.sub(r'"@(\d+)@"', lambda m: "[" * int(m[1]) + "1" + "]" * int(m[1]), json.dumps(row))


@pytest.mark.parametrize("seed", range(6))
def test_random_rows_are_kept_or_rejected(seed: int, tmp_path: Path) -> None:
    choice = random.Random(seed)
    for number in range(12):
        kind = choice.choice(("document", "document", "chat", "prompt", "tokens"))
        lines = [random_row(choice, kind) for _ in range(choice.randrange(1, 40))]
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        rows, refused = read(path, kind)
        assert rows + len(refused) == len(lines)
        with Rejects(str(tmp_path / "r.parquet")) as rejects:
            for row, reason in refused:
                assert reason
                rejects.add(row, reason, "shard")


def bomb(path: Path, megabytes: int, block: bytes) -> Path:
    """A compressed file of one good row and the block again and again."""
    pack = zstandard.ZstdCompressor().stream_writer if path.suffix == ".zst" else gzip.GzipFile
    with open(path, "wb") as file:
        packed = pack(file) if path.suffix == ".zst" else pack(fileobj=file, mode="wb")
        with packed as out:
            out.write(GOOD)
            for _ in range(megabytes):
                out.write(block)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("block", [b"\n" * (1 << 20), b"x" * (1 << 20)])
def test_a_decompression_bomb_is_an_error(tmp_path: Path, ending: str, block: bytes) -> None:
    path = bomb(tmp_path / f"a.jsonl.{ending}", 1_000, block)
    assert path.stat().st_size < 1_100_000
    started = time.process_time()
    with pytest.raises(BadData, match=r"a\.jsonl\.\w+: its first .* decompress to more than .*MB"):
        read(path)
    assert time.process_time() - started < 30


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_the_budgets_of_decompression(tmp_path: Path, ending: str, monkeypatch) -> None:
    monkeypatch.setattr(json_lines, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 1 << 14)
    with pytest.raises(BadData, match="decompress"):
        read(bomb(tmp_path / f"a.jsonl.{ending}", 4, b"\n" * (1 << 20)))
    text = random.Random(0).randbytes(400).hex()  # 16 digits: halved, then repeated at a distance
    row = json.dumps({"text": text}).encode() + b"\n"
    spread = b"".join(json.dumps({"text": random.Random(i).randbytes(40).hex()}).encode() + b"\n"
                      for i in range(20_000))  # fmt: skip
    assert read(bomb(tmp_path / f"b.jsonl.{ending}", 1, row * 1_000 + spread))[0] == 21_001


def test_blank_lines_answer_a_stop_signal(tmp_path: Path) -> None:
    """Uncompressed: there is no budget for these."""
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD)
        for _ in range(64):
            file.write(b"\n" * (1 << 20))
    process = subprocess.Popen(
        [sys.executable, "-m", "sabia.cli.main", "classify", str(path), "-o", "o.parquet"],
        cwd=tmp_path, stderr=subprocess.PIPE,
    )  # fmt: skip
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert process.wait(30) == 75 and time.monotonic() - sent < 4
    assert not (tmp_path / "o.parquet").exists()
