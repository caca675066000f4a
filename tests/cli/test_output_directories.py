"""Every stage whose output is rows: the directory is a data set to pyarrow, datasets, polars and
DuckDB, also where a shard has no row, a shard lacks a score, or the run was killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from readers import check_names, read_by_all

from sabia.core.recipes.model_source import find_tokenizer
from sabia.core.shards.arrow_arrays import as_dict, type_of
from sabia.core.shards.inputs import from_path

SABIA = Command()
PLAIN = [sys.executable, "-m", "sabia.cli.main"]
WORDS = ("the old mill stood at", "end of", "valley where", "road", "turned away", "from", "river",
         "and its wheel", "had been repaired", "by two brothers")  # fmt: skip


def sabia(*words: object, **settings) -> subprocess.CompletedProcess:
    settings = {"capture_output": True, "check": True, "timeout": 120} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


def text(draw: random.Random) -> str:
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "." for _ in range(8))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of every form: maps of scores as earlier versions wrote them, structs, JSON lines with
    an odd line, a column that only one has, copies, and no rows at all."""
    folder = tmp_path_factory.mktemp("documents") / "in"
    (folder / "more").mkdir(parents=True)
    draw = random.Random(3)
    texts = [text(draw) for _ in range(60)]
    maps = pa.map_(pa.string(), pa.float64())
    old = {"text": texts[:20], "scores": pa.array([[("q", i / 20)] for i in range(20)], maps)}
    pq.write_table(pa.table(old), folder / "a.parquet")
    lines = [{"text": t, "source": "web", "scores": {"late": 1.0}} for t in texts[20:40]]
    said = "".join(json.dumps(line) + "\n" for line in lines)
    more = "".join(json.dumps({"text": t}) + "\n" for t in (texts[3], "buy! " * 40))
    (folder / "b.jsonl").write_text(said + "{broken\n" + more)
    new = {"text": texts[40:] + texts[:5], "label": ["x"] * 25, "url": ["http://a.org/1"] * 25,
           "scores": pa.array([{"q": 0.5}] * 25, type_of("q"))}  # fmt: skip
    pq.write_table(pa.table(new), folder / "more" / "c.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "none.parquet")
    return folder


LINES = {
    "classify": ["classify"],
    "classify, filtered": ["classify", "--where", "quality < 0 or scores['late'] == 1"],
    "classify, no figures": ["classify", "--no-quality", "--pii", "mask"],
    "dedup": ["dedup"],
    "dedup by URL": ["dedup", "--method", "url", "--keep", "best:q"],
    "dedup, spans cut": ["dedup", "--method", "substring", "--span", "40"],
    "dedup, spans marked": ["dedup", "--method", "substring", "--action", "mark"],
    "dedup by line": ["dedup", "--method", "line"],
    "dedup, decisions": ["dedup", "--decisions"],
    "rewrite": ["rewrite"],
    "crawl of files": ["crawl"],
    "tokenize": ["tokenize", "--vocab-size", "300", "--length", "64"],
}


SLOW = ("classify, no figures", "dedup by URL", "dedup, spans marked", "dedup by line",
        "dedup, decisions")  # fmt: skip


@pytest.mark.parametrize(
    "stage",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LINES],
)
def test_an_output_directory_is_a_data_set(documents: Path, tmp_path: Path, stage: str) -> None:
    command, *options = LINES[stage]
    out = tmp_path / "out"
    done = sabia(command, documents, *options, "-o", f"{out}/")
    rows = read_by_all(out, tmp_path / "cache")
    assert rows and len(list(out.glob("part-*.parquet"))) == 4
    rejected = pq.read_table(f"{out}.rejects").to_pylist()
    assert any("not JSON" in row["reason"] for row in rejected)
    assert f"{out}.rejects/".encode() in done.stderr
    if stage in ("classify", "dedup", "rewrite", "crawl of files"):
        scores = [as_dict(row["scores"]) for row in rows]
        assert {0.5, 0.05} <= {row.get("q") for row in scores}
        assert sum(row.get("late") == 1 for row in scores) == 20
    again = sabia(command, documents, *options, "-o", out)
    assert b"4 shards already done" in again.stderr
    check_names(out)


def test_the_lines_of_the_readme_read_an_output(
    documents: Path, tmp_path: Path, monkeypatch
) -> None:
    names = {
        name: pytest.importorskip(name) for name in ("datasets", "duckdb", "polars", "pyarrow")
    }
    __import__("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names["datasets"].config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    sabia("classify", documents, "-o", "pages/")
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (block,) = (part for part in readme.split("```python\n")[1:] if "pages/" in part)
    lines = block.partition("```")[0].splitlines()
    found = [eval(line, names) for line in lines]
    assert len(found) == 4
    rows, features, good, by_quality = found
    assert rows.num_rows == len(features) == 67 and features[5]["scores"]["q"] == 0.25
    figures = [row["quality"] for row in rows.column("scores").to_pylist()]
    assert len(good) == sum(figure >= 0.5 for figure in figures) < 67
    assert [row[1] for row in by_quality.fetchall()] == sorted(figures, reverse=True)


def test_the_parts_of_rows_removed_are_a_data_set(documents: Path, tmp_path: Path) -> None:
    sabia("classify", documents, "--where", "scores['q'] > 0.4", "--removed", tmp_path / "gone",
          "-o", tmp_path / "out")  # fmt: skip
    kept = read_by_all(tmp_path / "out", tmp_path / "cache")
    gone = read_by_all(tmp_path / "gone", tmp_path / "cache2")
    assert len(kept) + len(gone) == 67 and all(row["reason"] for row in gone)


def test_an_output_is_the_input_of_the_next_stage(documents: Path, tmp_path: Path) -> None:
    """Scores of one stage are those of the next; the tokenizer of rows is found beside them."""
    one, two, three, rows = (tmp_path / name for name in ("one", "two", "three", "rows"))
    sabia("classify", documents, "-o", one)
    sabia("dedup", one, "--keep", "best:quality", "-o", two)
    sabia("rewrite", two, "-o", three)
    found = read_by_all(three, tmp_path / "cache")
    assert {"q", "late", "quality", "word_count"} <= set(found[0]["scores"])
    sabia("tokenize", three, "--vocab-size", "300", "--length", "32", "-o", rows)
    assert (rows / "_tokenizer" / "tokenizer.json").is_file()
    plan = sabia("pretrain", rows, "--shape", "d=32,layers=1,heads=2", "--steps", "1", "--batch",
                 "2", "--dry-run", "-o", tmp_path / "run")  # fmt: skip
    assert b"part-" not in plan.stderr  # no shard was left out


def test_a_mix_is_a_data_set(documents: Path, tmp_path: Path) -> None:
    sabia("tokenize", documents, "--vocab-size", "300", "--length", "32", "--mix", "web=1",
          "-o", tmp_path / "out")  # fmt: skip
    assert read_by_all(tmp_path / "out", tmp_path / "cache")


def test_removed_rows_and_tokenizers_do_not_lie_among_the_shards(
    documents: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for words in (
        ("dedup", "--removed", out / "removed.parquet"),
        ("classify", "--where", "quality > 0", "--removed", out / "removed"),
        ("classify", "--rejects", out / "rejects"),
        ("tokenize", "--save-tokenizer", out / "tokenizer"),
    ):
        command, *options = words
        done = sabia(command, documents, *options, "-o", out, check=False)
        said = done.stderr.decode()
        assert done.returncode == 2 and f"is in the directory of -o {out}" in said, said


def test_a_directory_of_an_earlier_version_goes_on(documents: Path, tmp_path: Path) -> None:
    """Rows of tokens are what they were: their shards stay, and what lies beside them moves."""
    out, words = tmp_path / "out", ("tokenize", documents, "--vocab-size", "300", "--length", "64")
    sabia(*words, "-o", out)
    rows = pq.read_table(out)
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    os.rename(out / "_tokenizer", out / "tokenizer")
    os.rename(out / "_manifest.json", out / "manifest.json")
    os.rename(f"{out}.rejects", out / "rejects")
    assert place_of_tokenizer(out) == str(out / "tokenizer")
    planned = sabia(*words, "-o", out, "--dry-run").stdout.decode().splitlines()
    actions = [word for word in (line.split()[0] for line in planned) if word in ("keep", "write")]
    assert actions == ["keep"] * 4
    done = sabia(*words, "-o", out)
    assert b"4 shards already done" in done.stderr and b"already trained" in done.stderr
    assert stamps == {path: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    check_names(out)
    assert pq.read_table(out).equals(rows) and pq.read_table(f"{out}.rejects").num_rows == 1
    assert place_of_tokenizer(out) == str(out / "_tokenizer")
    wrong = sabia("tokenize", documents, "--tokenizer", out / "tokenizer", "-o", tmp_path / "o",
                  check=False)  # fmt: skip
    assert wrong.returncode == 2 and f"there is {out}/_tokenizer".encode() in wrong.stderr


def place_of_tokenizer(rows: Path) -> str:
    """Where a trainer finds the tokenizer of token rows, also of rows that were moved."""
    moved = rows.with_name("moved")
    os.rename(rows, moved)
    sources = from_path(str(moved), "tokens")
    assert len(sources) == 4
    found = find_tokenizer("", "", sources)
    os.rename(moved, rows)
    return found.replace(str(moved), str(rows))


def test_a_killed_run_leaves_whole_shards_and_goes_on(tmp_path: Path) -> None:
    """kill -9 in the middle: what is there opens everywhere, and a run again makes the rest."""
    draw, folder, out = random.Random(7), tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for part in range(12):
        pq.write_table(
            pa.table({"text": [text(draw) for _ in range(400)]}), folder / f"{part}.parquet"
        )
    words = ("classify", folder, "-o", out)
    with subprocess.Popen([*PLAIN, *map(str, words)], stderr=subprocess.DEVNULL) as process:
        while len(list(out.glob("part-*.parquet"))) < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    there = len(list(out.glob("part-*.parquet")))
    assert 2 <= there < 12
    assert len(read_by_all(out, tmp_path / "cache")) == 400 * there
    assert f"{there} shards already done".encode() in sabia(*words).stderr
    assert len(read_by_all(out, tmp_path / "cache2")) == 12 * 400
