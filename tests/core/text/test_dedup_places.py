"""Sketches in a scratch directory, phases, an index of earlier runs: the same answer every way."""

import json
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import stage
from planted import VOCABULARY, make_texts, write

from sabia.core.errors import BadData, UsageError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    texts, _ = make_texts(random.Random(6), 150, 100)
    return write(tmp_path_factory.mktemp("shards"), texts, parts=4)


def run(paths: list[str], out: Path, **given: object) -> list[bytes]:
    """The bytes of the output shards after a run (or a phase of one)."""
    stage("dedup", inputs=paths, out=out, engine="numpy", **given)
    return [path.read_bytes() for path in sorted(out.glob("part-*.parquet"))]


def ids(out: Path) -> list[str]:
    return [
        name
        for path in sorted(out.glob("part-*.parquet"))
        for name in pq.read_table(path)["id"].to_pylist()
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"jobs": 2},
        {"jobs": 7},
        {"scratch": "s"},
        {"mem": 1 << 20},
        {"mem": 1 << 20, "scratch": "s"},
    ],
    ids=str,
)
def test_workers_memory_and_scratch_do_not_change_a_byte(
    shards: list[str], tmp_path: Path, given: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(shards, tmp_path / "one")
    if "mem" in given:  # so little that each band is sorted in several parts
        monkeypatch.setattr("sabia.core.text.dedup.clusters.SORT_BYTES", 1 << 17)
    given = {k: tmp_path / v if k == "scratch" else v for k, v in given.items()}
    assert len(expected) == 4
    assert run(shards, tmp_path / "other", **given) == expected


def test_phases_in_slices_give_the_bytes_of_one_job(shards: list[str], tmp_path: Path) -> None:
    expected = run(shards, tmp_path / "one", removed=tmp_path / "one.r.parquet")
    out, scratch = tmp_path / "array", tmp_path / "scratch"
    for task in (2, 0, 1):
        run(shards, out, scratch=scratch, phase="sketch", shard=f"{task}/3")
    gone = tmp_path / "array.r.parquet"
    assert not run(shards, out, scratch=scratch, phase="compare", removed=gone)
    for task in (1, 2, 0):
        run(shards, out, scratch=scratch, phase="write", shard=f"{task}/3")
    assert [path.read_bytes() for path in sorted(out.glob("part-*.parquet"))] == expected
    assert pq.read_table(gone).equals(pq.read_table(tmp_path / "one.r.parquet"))


def test_a_phase_says_what_has_to_come_before(shards: list[str], tmp_path: Path) -> None:
    scratch, out = tmp_path / "s", tmp_path / "o"
    run(shards, out, scratch=scratch, phase="sketch", shard="0/2")
    with pytest.raises(UsageError, match="run --phase sketch over all inputs"):
        run(shards, out, scratch=scratch, phase="compare")
    with pytest.raises(UsageError, match="run --phase compare"):
        run(shards, out, scratch=scratch, phase="write", shard="0/2")
    with pytest.raises(UsageError, match="--phase: only with --scratch"):
        run(shards, out, phase="sketch")
    with pytest.raises(UsageError, match="--shard"):
        run(shards, out, shard="0/2")
    with pytest.raises(UsageError, match="expected sketch, compare or write"):
        run(shards, out, scratch=scratch, phase="reduce")


def test_sketches_that_are_there_are_not_made_again(shards: list[str], tmp_path: Path) -> None:
    scratch = tmp_path / "s"
    run(shards, tmp_path / "a", scratch=scratch)
    stamps = {path: path.stat().st_mtime_ns for path in scratch.glob("*/digests")}
    lost = next(iter(stamps)).parent
    shutil.rmtree(lost)
    expected = run(shards, tmp_path / "b", scratch=scratch)
    again = {path: path.stat().st_mtime_ns for path in scratch.glob("*/digests")}
    assert stamps.keys() == again.keys()
    assert [p.parent for p in stamps if stamps[p] != again[p]] == [lost]
    assert expected == run(shards, tmp_path / "c")


def base_and_new(tmp_path: Path) -> tuple[list[str], list[str], list[str]]:
    """(indexed documents, new ones, ids of the new ones that are like nothing indexed)."""
    draw = random.Random(3)
    texts = [draw.choices(VOCABULARY, k=120) for _ in range(30)]
    longer = [[*words, "and", "more"] for words in texts[:4]]
    shorter = [words[:-2] for words in texts[4:8]]
    fresh = [draw.choices(VOCABULARY, k=120) for _ in range(5)]
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = write(tmp_path / "old", [" ".join(words) for words in texts], 2)
    new = [" ".join(words) for words in [*longer, *shorter, texts[9], *fresh]]
    table = pq.read_table(write(tmp_path / "new", new)[0])
    names = [f"n{i}" for i in range(len(new))]
    path = str(tmp_path / "new" / "n.parquet")
    pq.write_table(table.set_column(0, "id", [names]), path)
    return old, [path], names[9:]


def test_an_index_keeps_out_what_earlier_runs_kept(tmp_path: Path) -> None:
    old, new, fresh = base_and_new(tmp_path)
    index = tmp_path / "index"
    run(old, tmp_path / "a", index=index)
    gone = tmp_path / "r.parquet"
    first = run(new, tmp_path / "b", against=index, index=index, removed=gone)
    assert ids(tmp_path / "b") == fresh
    rows = {row["id"]: row for row in pq.read_table(gone).to_pylist()}
    assert [row["kept_id"] for row in rows.values()] == [*(f"d{i}" for i in range(8)), "d9"]
    assert rows["n8"]["reason"] == "exact" and rows["n0"]["reason"] == "near"
    said = (index / "index.json").read_text()
    assert [run["rows"] for run in json.loads(said)["runs"]] == [30, 5]
    shutil.rmtree(tmp_path / "b")  # a run that is in the index already meets it as it was
    assert run(new, tmp_path / "b", against=index, index=index) == first
    assert (index / "index.json").read_text() == said
    run(new, tmp_path / "c", threshold=0.71, against=index)
    assert ids(tmp_path / "c") == []  # for another run all of them are there


def test_an_index_has_no_removed_documents(tmp_path: Path) -> None:
    """As the manual says: a single run removes `d2`, which is similar only to a removed one."""
    words = random.Random(5).choices(VOCABULARY, k=130)
    texts = [" ".join(words[low : low + 100]) for low in (0, 12, 24)]
    paths = write(tmp_path, texts, 3)
    run(paths, tmp_path / "whole", keep="first")
    run(paths[:2], tmp_path / "a", index=tmp_path / "index", keep="first")
    run(paths[2:], tmp_path / "b", against=tmp_path / "index", keep="first")
    assert [ids(tmp_path / name) for name in ("whole", "a", "b")] == [["d0"], ["d0"], ["d2"]]


def test_better_documents_replace_indexed_ones(tmp_path: Path) -> None:
    old, new, fresh = base_and_new(tmp_path)
    index, listed = tmp_path / "index", tmp_path / "replaced.parquet"
    run(old, tmp_path / "a", index=index)
    run(new, tmp_path / "b", against=index, index=index, replaced=listed)
    assert ids(tmp_path / "b") == ["n0", "n1", "n2", "n3", *fresh]
    rows = pq.read_table(listed).to_pylist()
    assert [(row["id"], row["replaced_by"]) for row in rows] == [
        (f"d{i}", f"n{i}") for i in range(4)
    ]
    assert all(row["similarity"] > 0.9 for row in rows)
    run(old, tmp_path / "c", threshold=0.71, against=index, removed=tmp_path / "r.parquet")
    gone = {row["id"]: row["kept_id"] for row in pq.read_table(tmp_path / "r.parquet").to_pylist()}
    assert len(gone) == 30 and gone["d0"] == "n0" and gone["d4"] == "d4"


def test_an_index_of_other_parameters_or_bytes_is_refused(tmp_path: Path) -> None:
    old, new, _ = base_and_new(tmp_path)
    index = tmp_path / "index"
    run(old, tmp_path / "a", index=index)
    with pytest.raises(UsageError, match="index has ngram 5, this run 4"):
        run(new, tmp_path / "b", ngram=4, against=index)
    with pytest.raises(UsageError, match="no index here"):
        run(new, tmp_path / "b", against=tmp_path / "none")
    victim = next(index.glob("*/digests"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-8] + b"altered!")
    with pytest.raises(BadData, match="changed since"):
        run(new, tmp_path / "b", against=index)
    victim.write_bytes(whole[:-8])
    with pytest.raises(BadData, match="truncated"):
        run(new, tmp_path / "b", against=index)
    (index / "index.json").write_text('{"version": 99}')
    with pytest.raises(BadData, match="version 99"):
        run(new, tmp_path / "b", against=index)
