"""`sabia crawl --markdown`: from files, from an archive, and where it is refused."""

import json
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forked import Command
from labelled_graph import record
from markdown_pages import page, parsed

SABIA = Command("crawl")
COUNT = 6


def crawl(*words: object, code: int = 0) -> str:
    done = subprocess.run([*SABIA, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stderr


def texts(path: Path) -> list[str]:
    rows = pq.read_table(path, columns=["url", "text"]).to_pylist()
    return [row["text"] for row in sorted(rows, key=lambda row: row["url"])]


@pytest.fixture(scope="module")
def made() -> list[object]:
    return [page(seed) for seed in range(COUNT)]


def test_files(made: list, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    for number, one in enumerate(made):
        (folder / f"{number}.html").write_text(one.source)
    (folder / "z.txt").write_text("# plain *text*")
    crawl(folder, "--markdown", "-o", tmp_path / "markdown.parquet")
    crawl(folder, "-o", tmp_path / "plain.parquet")
    *found, plain = texts(tmp_path / "markdown.parquet")
    assert [parsed(text) for text in found] == [(one.tables, one.code) for one in made]
    assert plain == "# plain *text*"
    assert not any("| --- |" in text for text in texts(tmp_path / "plain.parquet"))


def test_replay_and_its_state(made: list, tmp_path: Path) -> None:
    links = "".join(f"<a href=/{number}>p</a>" for number in range(COUNT))
    with (tmp_path / "web.warc.gz").open("wb") as file:
        for number, one in enumerate(made):
            source = one.source.replace("</body>", f"{links}</body>")
            file.write(record(f"http://h.test/{number}", source.encode()))
    seed = ("http://h.test/0", "--replay", tmp_path / "web.warc.gz", "-o", tmp_path / "out.parquet")
    crawl(*seed, "--markdown")
    found = [parsed(text) for text in texts(tmp_path / "out.parquet")]
    assert found == [(one.tables, one.code) for one in made]
    assert "the state of another crawl" in crawl(*seed, code=2)  # of the state
    crawl(*seed, "--force")
    assert not any("| --- |" in text for text in texts(tmp_path / "out.parquet"))


def test_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a", "text": "b"}) + "\n")
    out = ("-o", tmp_path / "out.parquet")
    said = crawl(tmp_path / "a.jsonl", "--markdown", *out, code=2)
    assert "--markdown: only with pages as INPUT" in said
    said = crawl("http://h.test/", "--markdown", "--no-extract", "--warc", tmp_path / "w",
                 "--contact", "a@b.c", code=2)  # fmt: skip
    assert "--markdown: only without --no-extract" in said
