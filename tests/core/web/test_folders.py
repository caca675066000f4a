"""Folders of mixed files: what cannot be read is rejected with a reason, the rest is read."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sabia.core.errors import BadData
from sabia.core.options.crawl import CrawlOptions
from sabia.core.shards.job import Job
from sabia.core.web.run import run

GOOD = {
    "page.html": b"<p>" + b"A page about rivers and their fish. " * 30,
    "notes.txt": b"Um rio, uma canoa e um peixe.\n",
    "utf16.txt": "A note with a mark of its order.".encode("utf-16"),
    "rows.jsonl": b'{"text": "a good line"}\nbroken\n{"other": 1}\n',
}
BAD = {
    "noise.txt": bytes(range(256)) * 4,
    "noise.html.gz": b"\x00\x01" * 500,
    "empty.jsonl": b"",
    "cut.parquet": b"PAR1" + b"x" * 100,
    "noise.parquet": b"no such thing",
    "noise.warc": b"\x00" * 100,
}


def read(tmp_path, stats=None, force=False, inputs=("in",), exclude=""):
    out = str(tmp_path / "out.parquet")
    names = tuple(str(tmp_path / name) for name in inputs)
    job = Job("crawl", inputs=names, out=out, stats=stats, force=force)
    summary = run(job, CrawlOptions(exclude=exclude))
    rejects = tmp_path / "out.rejects.parquet"
    return summary, pq.read_table(out).to_pylist(), (
        pq.read_table(rejects).to_pylist() if rejects.exists() else [])  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    os.mkdir(tmp_path / "in")
    for name, data in (GOOD | BAD).items():
        (tmp_path / "in" / name).write_bytes(data)
    return tmp_path


def test_bad_files_are_rejected_and_the_rest_is_read(folder):
    summary, rows, rejects = read(folder)
    assert sorted(row["text"][:6] for row in rows) == ["A note", "A page", "Um rio", "a good"]
    refused = {os.path.basename(json.loads(row["record"]).get("url", "")) for row in rejects}
    assert refused == {*BAD, ""}  # "" are the two lines of rows.jsonl
    assert summary.rejected == len(rejects) == len(BAD) + 2
    assert all(row["reason"] for row in rejects)


def test_excluded_paths_are_seen_from_the_folder(folder):
    for place in ("in/eval", "in/deep/eval", "in/deep/draft"):
        os.makedirs(folder / place)
        (folder / place / "some.txt").write_text(f"Some text in {place}.\n")
    for given, left in (("", 3), ("eval", 2), ("*/eval,*draft", 1), ("deep/", 1)):
        _, rows, _ = read(folder, force=True, exclude=given)
        assert sum("Some text" in row["text"] for row in rows) == left


def test_a_file_that_is_named_must_be_readable(folder):
    with pytest.raises(BadData, match="empty file"):
        read(folder, inputs=("in/empty.jsonl",))


def test_figures_of_the_run_that_did_the_work_stay(folder):
    stats = str(folder / "stats.json")
    read(folder, stats)
    first = json.loads(Path(stats).read_text())
    summary, _, _ = read(folder, stats)
    assert summary.shards_skipped and json.loads(Path(stats).read_text()) == first
    read(folder, stats, force=True)
    assert json.loads(Path(stats).read_text())["rows_out"] == first["rows_out"]
