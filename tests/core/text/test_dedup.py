"""Deduplication in process: planted duplicates, brute-force Jaccard, determinism, decisions."""

import json
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage
from planted import VOCABULARY, make_texts, write

from sabia.core.errors import BadData, MissingBackend, UsageError
from sabia.core.text.dedup import clusters
from sabia.kernels.runtime.dispatch import numba_available


def jaccard(a: str, b: str, n: int = 5) -> float:
    def grams(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}

    one, two = grams(a), grams(b)
    return len(one & two) / len(one | two)


def run(paths: list[str], out: Path, removed: Path | None = None, jobs: int = 1, **options) -> dict:
    """Rows kept (by id, in order) after a run into one file."""
    stage(
        "dedup", inputs=paths, out=out, removed=removed, jobs=jobs, **{"engine": "numpy"} | options
    )
    return {row["id"]: row for row in pq.read_table(out).to_pylist()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[int], Path]:
    texts, origin = make_texts(random.Random(4), 200, 120)
    path = tmp_path_factory.mktemp("corpus")
    write(path, texts, parts=5)
    return texts, origin, path


def test_planted_duplicates_are_found_and_nothing_else(corpus: tuple, tmp_path: Path) -> None:
    texts, origin, path = corpus
    kept = run([str(path)], tmp_path / "o.parquet", tmp_path / "r.parquet")
    gone = {row["id"]: row for row in pq.read_table(tmp_path / "r.parquet").to_pylist()}
    assert kept.keys() | gone.keys() == {f"d{i}" for i in range(len(texts))}
    assert not kept.keys() & gone.keys()
    for name, row in gone.items():
        i, j = int(name[1:]), int(row["kept_id"][1:])
        assert origin[i] == origin[j] and row["kept_id"] in kept
        assert row["similarity"] == pytest.approx(jaccard(texts[i], texts[j]), abs=1e-6)
        assert row["reason"] == ("exact" if texts[i] == texts[j] else "near")
        assert row["cluster"] == row["kept_id"]
        assert row["cluster_size"] == kept[row["kept_id"]]["cluster_size"]
    pairs = [
        (i, j)
        for i in range(len(texts))
        for j in range(i)
        if origin[i] == origin[j] and jaccard(texts[i], texts[j]) >= 0.7
    ]
    cluster = {name: row["cluster"] for name, row in (kept | gone).items()}
    found = sum(cluster[f"d{i}"] == cluster[f"d{j}"] for i, j in pairs)
    assert len(pairs) > 100 and found / len(pairs) > 0.97


def test_verified_clusters_hold_only_similar_documents(corpus: tuple, tmp_path: Path) -> None:
    """Every removed row has some row of its cluster at the threshold or more."""
    texts, _, path = corpus
    run([str(path)], tmp_path / "o.parquet", tmp_path / "r.parquet", threshold=0.9)
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    gone = pq.read_table(tmp_path / "r.parquet").to_pylist()
    members: dict[str, list[int]] = {}
    for row in rows + gone:
        members.setdefault(row["cluster"], []).append(int(row["id"][1:]))
    assert gone
    for row in gone:
        i = int(row["id"][1:])
        best = max(jaccard(texts[i], texts[j]) for j in members[row["cluster"]] if j != i)
        assert best >= 0.9


@pytest.mark.parametrize("method", ["minhash", "exact"])
def test_the_answer_does_not_depend_on_workers_engine_or_shards(
    corpus: tuple, tmp_path: Path, method: str
) -> None:
    texts, _, path = corpus
    first = run([str(path)], tmp_path / "a.parquet", tmp_path / "ra.parquet", method=method)
    write(tmp_path, texts, parts=1)
    engines = ["numpy", "numba"] if numba_available() else ["numpy"]
    for number, engine in enumerate(engines):
        out, gone = tmp_path / f"b{number}.parquet", tmp_path / f"rb{number}.parquet"
        one = [str(tmp_path / "in0.parquet")]
        assert run(one, out, gone, method=method, engine=engine, jobs=3) == first
        expected = pq.read_table(tmp_path / "ra.parquet").to_pylist()
        assert pq.read_table(gone).to_pylist() == expected


def test_exact_method_removes_equal_texts_only(tmp_path: Path) -> None:
    texts = ["One, two  three.", "one, TWO three .", "one two three.", "", " ", "?", "?", "1 + 2"]
    for keep in ("longest", "first"):  # exact duplicates are equally long
        out = tmp_path / f"{keep}.parquet"
        kept = run(write(tmp_path, texts), out, method="exact", keep=keep)
        assert list(kept) == ["d0", "d2", "d3", "d5", "d7"]


def test_whom_to_keep(tmp_path: Path) -> None:
    base = " ".join(VOCABULARY[:200])
    texts = [base, base + " and more", base + " x", "something else altogether, quite short"]
    scores = [[("q", 0.1)], [("q", 0.2)], [("q", 0.9)], None]
    kind = pa.map_(pa.string(), pa.float64())
    paths = write(tmp_path, texts, scores=pa.array(scores, kind))
    for keep, expected in (("longest", "d1"), ("first", "d0"), ("best:q", "d2")):
        kept = run(paths, tmp_path / f"{keep}.parquet", keep=keep)
        assert list(kept) == [expected, "d3"]
        assert [row["cluster_size"] for row in kept.values()] == [3, 1]
        assert [row["cluster"] for row in kept.values()] == [expected, "d3"]
    with pytest.raises(BadData, match="no document has this score"):
        run(paths, tmp_path / "x.parquet", keep="best:absent")


@pytest.mark.parametrize("method", ["minhash", "exact", "url"])
def test_spaces_and_unicode_forms_make_no_text_longer(tmp_path: Path, method: str) -> None:
    text = " ".join(f"ação número {i}" for i in range(40))
    wide = "".join(chr(ord(c) + 0xFEE0) if c.isascii() and c.isalnum() else c for c in text)
    forms = [text, text.replace(" ", " \n\u3000 "), unicodedata.normalize("NFD", text), wide,
             text.replace("o", "o\u00ad")]  # fmt: skip
    (tmp_path / "in").mkdir()
    for extra, wanted in ((" ", "d0"), (" more", "d5")):
        paths = write(tmp_path / "in", [*forms, text + extra], 2, url=["http://a.org/"] * 6)
        options = {} if method == "url" else {"engine": "numpy"}
        out = tmp_path / f"{wanted}.parquet"
        stage("dedup", inputs=paths, out=out, method=method, keep="longest", **options)
        kept = pq.read_table(out)["id"].to_pylist()
        assert kept == (["d0", "d5"] if (method, wanted) == ("exact", "d5") else [wanted])


def test_input_order_decides_ties(tmp_path: Path) -> None:
    text = " ".join(VOCABULARY[:50])
    paths = write(tmp_path, [text] * 6, parts=3)
    assert list(run(paths, tmp_path / "a.parquet")) == ["d0"]
    assert list(run(paths[::-1], tmp_path / "b.parquet")) == ["d4"]


def test_unverified_similarity_is_an_estimate(corpus: tuple, tmp_path: Path) -> None:
    texts, _, path = corpus
    run([str(path)], tmp_path / "o.parquet", tmp_path / "r.parquet", verify=False)
    errors = [
        row["similarity"] - jaccard(texts[int(row["id"][1:])], texts[int(row["kept_id"][1:])])
        for row in pq.read_table(tmp_path / "r.parquet").to_pylist()
        if row["similarity"] is not None
    ]
    assert len(errors) > 50
    assert abs(np.mean(errors)) < 0.06 and np.std(errors) < 0.1


def test_a_chain_of_near_duplicates_is_one_cluster(tmp_path: Path) -> None:
    words = VOCABULARY[:400]
    texts = [" ".join(words[i * 20 : i * 20 + 200]) for i in range(8)]
    assert jaccard(texts[0], texts[1]) > 0.7 > jaccard(texts[0], texts[7])
    kept = run(write(tmp_path, texts), tmp_path / "o.parquet", keep="first")
    assert list(kept) == ["d0"]


def test_odd_texts_and_no_rows(tmp_path: Path) -> None:
    source = random.Random(0)
    han = "".join(chr(source.randrange(0x4E00, 0x9FFF)) for _ in range(300))
    texts = ["\x00", han, han + "仮", "a" * 500_000, "👍", "🤷", "\u200b", han[:150] + "。"]
    kept = run(write(tmp_path, texts), tmp_path / "o.parquet", keep="first")
    assert list(kept) == ["d0", "d1", "d3", "d4", "d5", "d7"]  # NUL and U+200B are both nothing
    empty = pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "none.parquet")
    assert run([str(tmp_path / "none.parquet")], tmp_path / "e.parquet") == {}


def test_finished_work_is_not_done_again(corpus: tuple, tmp_path: Path) -> None:
    path = corpus[2]
    out, gone = tmp_path / "o.parquet", tmp_path / "r.parquet"
    run([str(path)], out, gone)
    stamps = out.stat().st_mtime_ns, gone.stat().st_mtime_ns
    run([str(path)], out, gone)
    assert (out.stat().st_mtime_ns, gone.stat().st_mtime_ns) == stamps
    gone.unlink()
    run([str(path)], out, gone)
    assert gone.exists()
    run([str(path)], out, gone, threshold=0.8)
    assert out.stat().st_mtime_ns != stamps[0]


def test_columns_that_only_some_shards_have(tmp_path: Path) -> None:
    text = " ".join(VOCABULARY[:50])
    pq.write_table(pa.table({"id": ["a", "b"], "text": [text] * 2}), tmp_path / "1.parquet")
    extra = {"id": ["c"], "text": [text], "likes": [3]}
    pq.write_table(pa.table(extra), tmp_path / "2.parquet")
    inputs = [str(tmp_path / "1.parquet"), str(tmp_path / "2.parquet")]
    removed = tmp_path / "r.parquet"
    stage("dedup", inputs=inputs, out=tmp_path / "o", removed=removed, engine="numpy")
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [(row["id"], row["likes"]) for row in rows] == [("b", None), ("c", 3)]


def test_first_of_equal_is_the_first() -> None:
    source = np.random.default_rng(1)
    exact = source.integers(0, 20, (300, 2)).astype(np.uint64)
    keys = [tuple(row) for row in exact.tolist()]
    assert clusters.first_of_equal(exact).tolist() == [keys.index(key) for key in keys]


@pytest.mark.parametrize(
    "options",
    [{"method": "x"}, {"threshold": 0}, {"threshold": 1.5}, {"ngram": 0}, {"keep": "best:"},
     {"keep": "shortest"}, {"engine": "cuda"}, {"permutations": 0}, {"mem": "1MB"}],
)  # fmt: skip
def test_options_that_make_no_sense(corpus: tuple, tmp_path: Path, options: dict) -> None:
    with pytest.raises(UsageError):
        run([str(corpus[2])], tmp_path / "o.parquet", **options)


def test_without_numba_the_reference_runs_and_says_so(
    corpus: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    expected = run([str(corpus[2])], tmp_path / "a.parquet", engine="numpy")
    monkeypatch.setattr("sabia.core.text.dedup.first_pass.numba_available", lambda: False)
    assert run([str(corpus[2])], tmp_path / "b.parquet", engine="auto") == expected
    assert "engine numpy, about 10x slower" in capsys.readouterr().err
    with pytest.raises(MissingBackend, match="pip install"):
        run([str(corpus[2])], tmp_path / "c.parquet", engine="numba")


@pytest.mark.parametrize("method", ["minhash", "substring", "url"])
@pytest.mark.parametrize("out", ["o.parquet", "o"])
def test_removed_rows_in_a_file_or_a_directory(tmp_path: Path, method: str, out: str) -> None:
    texts = make_texts(random.Random(8), 30, 15)[0] + [f"no copy {i} of this" for i in range(9)]
    paths = write(tmp_path, texts, 5, url=[f"http://a.org/{i % 27}" for i in range(len(texts))])
    options = {} if method == "url" else {"engine": "numpy"}

    def removed_to(name: str) -> None:
        stage("dedup", inputs=paths, out=tmp_path / out, method=method, removed=tmp_path / name,
              **options)  # fmt: skip

    for name in ("r.parquet", "r", "r.jsonl"):
        removed_to(name)
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    parts = sorted((tmp_path / "r").glob("part-*.parquet"))
    by_part = {path.name: pq.read_table(path).to_pylist() for path in parts}
    assert [row for own in by_part.values() for row in own] == rows and len(parts) >= 2
    of_source = [set(pq.read_table(path)["id"].to_pylist()) for path in paths]
    assert all({r["id"] for r in own} <= of_source[int(n[5:10])] for n, own in by_part.items())
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    stamps = [path.stat().st_mtime_ns for path in parts]
    removed_to("r")
    assert [path.stat().st_mtime_ns for path in parts] == stamps
    parts[0].unlink()
    (tmp_path / "r" / "_manifest.json").unlink()  # as a run that is killed leaves it
    removed_to("r")
    parts = sorted((tmp_path / "r").glob("part-*.parquet"))
    assert [row for path in parts for row in pq.read_table(path).to_pylist()] == rows


def test_removed_has_an_ending_that_can_be_written(corpus: tuple, tmp_path: Path) -> None:
    for wrong in ("removed.csv", "o.parquet"):
        with pytest.raises(UsageError, match="--removed"):
            run([str(corpus[2])], tmp_path / "o.parquet", tmp_path / wrong)
