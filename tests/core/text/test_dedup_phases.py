"""Phases over a scratch directory, for every method: the bytes of one job, and what is refused."""

import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from in_process import stage
from planted import make_texts, write

from sabia.core.errors import BadData, UsageError
from sabia.core.text.tokenize.tokenizer_training import train_bpe

METHODS = {
    "exact": {},
    "minhash": {"engine": "numpy"},
    "substring": {"span": 60, "engine": "numpy"},
    "line": {"unit": "sentences", "engine": "numpy"},
    "url": {"keep": "first"},
    "semantic": {"embeddings": "vector"},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five shards: documents with copies, URLs, and vectors that some documents do not have."""
    texts, origin = make_texts(random.Random(7), 60, 40)
    texts = [text.replace("word1", ". Word1") for text in texts]
    draw = np.random.default_rng(1)
    centres = draw.normal(size=(200, 6))
    vectors = [
        None if i % 11 == 3 else (centres[o] + draw.normal(size=6) * 0.01).tolist()
        for i, o in enumerate(origin)
    ]
    urls = [f"http://a.org/{o}?utm_id={i}" for i, o in enumerate(origin)]
    path = tmp_path_factory.mktemp("shards")
    return write(path, texts, 5, vector=vectors, url=urls)


def run(paths: list[str], out: Path, method: str, **given: object) -> dict[str, bytes]:
    """The bytes of the output shards after a run (or a phase of one)."""
    stage("dedup", inputs=paths, out=out, method=method, **METHODS[method] | given)
    return {path.name: path.read_bytes() for path in sorted(out.glob("part-*.parquet"))}


@pytest.mark.parametrize("method", METHODS)
def test_phases_in_slices_give_the_bytes_of_one_job(
    shards: list[str], tmp_path: Path, method: str
) -> None:
    expected = run(shards, tmp_path / "one", method, removed=tmp_path / "one.r.parquet")
    assert len(expected) == 5 and pq.read_table(tmp_path / "one.r.parquet").num_rows > 10
    out, scratch = tmp_path / "array", tmp_path / "scratch"
    for task in (2, 0, 1):
        assert not run(shards, out, method, scratch=scratch, phase="sketch", shard=f"{task}/3")
    gone = tmp_path / "array.r.parquet"
    assert not run(shards, out, method, scratch=scratch, phase="compare", removed=gone)
    for task in (1, 2, 0):
        got = run(shards, out, method, scratch=scratch, phase="write", shard=f"{task}/3")
    assert got == expected
    assert pq.read_table(gone).equals(pq.read_table(tmp_path / "one.r.parquet"))
    sketches = sorted(scratch.glob("sketch-*"))
    stamps = [path.stat().st_mtime_ns for path in sketches]
    assert run(shards, tmp_path / "again", method, scratch=scratch, jobs=2) == expected
    assert [path.stat().st_mtime_ns for path in sketches] == stamps and len(stamps) == 5
    assert sorted(scratch.glob("sketch-*")) == sketches


@pytest.mark.parametrize("method", METHODS)
def test_a_phase_says_what_has_to_come_before(
    shards: list[str], tmp_path: Path, method: str
) -> None:
    scratch, out = tmp_path / "s", tmp_path / "o"
    run(shards, out, method, scratch=scratch, phase="sketch", shard="0/2")
    with pytest.raises(UsageError, match="run --phase sketch over all inputs"):
        run(shards, out, method, scratch=scratch, phase="compare")
    run(shards, out, method, scratch=scratch, phase="sketch", shard="1/2")
    with pytest.raises(UsageError, match="run --phase compare"):
        run(shards, out, method, scratch=scratch, phase="write", shard="0/2")
    run(shards, out, method, scratch=scratch, phase="compare")
    options = {"substring": {"share": 0.4}, "line": {"min_copies": 3}}
    other = options.get(method, {"keep": "newest" if method == "url" else "first"})
    if method in ("substring", "line"):  # these sketches serve other options of the comparison
        run(shards, out, method, scratch=scratch, phase="compare", share=0.9)
        assert len(list(scratch.glob("plan-*"))) == 2
    with pytest.raises(UsageError, match="run --phase compare"):
        run(shards, out, method, scratch=scratch, phase="write", **other)


def test_options_of_a_sketch_are_part_of_its_name(shards: list[str], tmp_path: Path) -> None:
    changes = [
        ("substring", {"span": 61}), ("line", {"min_words": 3}), ("line", {"unit": "line"}),
        ("url", {"keep": "longest"}), ("semantic", {"keep": "first"}), ("minhash", {"seed": 1}),
    ]  # fmt: skip
    for number, (method, changed) in enumerate(changes):
        scratch = tmp_path / str(number)
        run(shards, tmp_path / "o", method, scratch=scratch, phase="sketch")
        with pytest.raises(UsageError, match="computed from other bytes or with other options"):
            run(shards, tmp_path / "o", method, scratch=scratch, phase="compare", **changed)


def test_tokens_in_phases(shards: list[str], tmp_path: Path) -> None:
    train_bpe(["word1 word2 . Word1 word10"] * 9, 300).save(tmp_path / "tokenizer")
    given = {"tokenizer": tmp_path / "tokenizer", "span": 40}
    expected = run(shards, tmp_path / "one", "substring", **given)
    for phase in ("sketch", "compare", "write"):
        got = run(shards, tmp_path / "o", "substring", scratch=tmp_path / "s", phase=phase, **given)
    assert got == expected


def test_a_damaged_sketch_is_bad_data(shards: list[str], tmp_path: Path) -> None:
    scratch = tmp_path / "s"
    run(shards, tmp_path / "o", "url", scratch=scratch, phase="sketch")
    damaged = sorted(scratch.glob("sketch-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(BadData, match="delete it and run again"):
        run(shards, tmp_path / "o", "url", scratch=scratch, phase="compare")
