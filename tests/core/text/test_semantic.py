"""Documents that mean the same: brute force where all are compared, recall where clusters are."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.errors import BadData, UsageError
from sabia.core.text.dedup import semantic_method


def planted(count: int, copies: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(unit vectors, the original of each): Gaussian topics, copies at cosines around .95."""
    draw = np.random.default_rng(seed)
    topics = draw.normal(size=(20, width))
    base = topics[draw.integers(0, 20, count)] + draw.normal(size=(count, width))
    origin = np.concatenate((np.arange(count), draw.integers(0, count, copies)))
    noise = draw.normal(size=(copies, width)) * draw.uniform(0, 0.6, (copies, 1))
    vectors = np.concatenate((base, base[origin[count:]] + noise))
    order = draw.permutation(len(vectors))
    return semantic_method.normalized(vectors[order]), origin[order]


def by_brute_force(vectors: np.ndarray, worth: list[float], threshold: float) -> dict[int, set]:
    """row that goes -> kept rows as similar as the most similar one, in order of worth."""
    kept: list[int] = []
    gone: dict[int, set] = {}
    for i in sorted(range(len(vectors)), key=lambda i: (-worth[i], i)):
        cosines = vectors[kept] @ vectors[i]
        if len(kept) and cosines.max() >= threshold:
            gone[i] = set(np.array(kept)[cosines >= cosines.max() - 1e-6].tolist())
        else:
            kept.append(i)
    return gone


def write(path: Path, vectors: np.ndarray, parts: int = 1, kind: pa.DataType | None = None):
    texts = [f"text {'x' * (i % 13)}" for i in range(len(vectors))]
    column = pa.array(list(vectors.astype(float)), kind or pa.list_(pa.float32()))
    table = pa.table({"id": [f"d{i}" for i in range(len(texts))], "text": texts, "vector": column})
    size, paths = -(-max(len(texts), 1) // parts), []
    for part in range(parts):
        paths.append(str(path / f"in{part}.parquet"))
        pq.write_table(table.slice(part * size, size), paths[-1], row_group_size=701)
    return paths


def run(paths: list[str], out: Path, removed: Path | None = None, jobs: int = 1, **options):
    options = {"method": "semantic", "keep": "first", "embeddings": "vector", "seed": 3} | options
    stage("dedup", inputs=paths, out=out, removed=removed, jobs=jobs, **options)
    return {row["id"]: row for row in pq.read_table(out).to_pylist()}


@pytest.mark.parametrize("keep", ["first", "longest"])
def test_one_cluster_is_brute_force(tmp_path: Path, keep: str) -> None:
    vectors, _ = planted(900, 300, 24, 1)
    paths = write(tmp_path, vectors, 3)
    kept = run(paths, tmp_path / "o.parquet", tmp_path / "r.parquet", keep=keep, threshold=0.9)
    worth = [i % 13 if keep == "longest" else 0 for i in range(len(vectors))]
    expected = by_brute_force(vectors, worth, 0.9)
    gone = {row["id"]: row for row in pq.read_table(tmp_path / "r.parquet").to_pylist()}
    assert gone.keys() == {f"d{i}" for i in expected} and 100 < len(gone) < 400
    assert kept.keys() == {f"d{i}" for i in range(len(vectors))} - gone.keys()
    for i, near in expected.items():
        row = gone[f"d{i}"]
        j = int(row["kept_id"][1:])
        assert j in near and row["reason"] == "semantic"
        assert row["similarity"] == pytest.approx(float(vectors[i] @ vectors[j]), abs=1e-5)
        assert row["cluster_size"] == kept[row["kept_id"]]["cluster_size"]
    sizes = sum(row["cluster_size"] for row in kept.values())
    assert sizes == len(vectors)


def test_clusters_find_nearly_all_and_nothing_else(tmp_path: Path) -> None:
    vectors, _ = planted(6000, 2000, 32, 2)
    paths = write(tmp_path, vectors)
    whole = run(paths, tmp_path / "a.parquet", clusters=1)
    parted = run(paths, tmp_path / "b.parquet", tmp_path / "r.parquet")  # 89 clusters
    gone = len(vectors) - len(whole)
    assert gone > 700 and (len(vectors) - len(parted)) / gone > 0.93
    for row in pq.read_table(tmp_path / "r.parquet").to_pylist():
        cosine = float(vectors[int(row["id"][1:])] @ vectors[int(row["kept_id"][1:])])
        assert cosine == pytest.approx(row["similarity"], abs=1e-5) and cosine > 0.95 - 1e-5


def test_workers_and_shards_do_not_matter(tmp_path: Path) -> None:
    vectors, _ = planted(2500, 500, 16, 4)
    first = run(write(tmp_path, vectors), tmp_path / "a.parquet", clusters=30)
    many = write(tmp_path, vectors, 4)
    assert run(many, tmp_path / "b.parquet", clusters=30, jobs=3) == first
    assert len(first) < 2700


def test_k_means_finds_separate_groups() -> None:
    draw = np.random.default_rng(0)
    topics = np.eye(8)[:, :8]
    groups = np.repeat(np.arange(8), [5, 10, 50, 100, 100, 200, 300, 2000])
    vectors = semantic_method.normalized(topics[groups] + draw.normal(size=(len(groups), 8)) * 0.02)
    nearest = semantic_method.assign(vectors, semantic_method.centres(vectors, 8, seed=1), 2)
    assert len(np.unique(nearest)) >= 7  # of eight; the least may share a centre
    for number in np.unique(nearest):
        assert len(np.unique(groups[nearest == number])) <= 2
    again = semantic_method.centres(vectors, 8, seed=1)
    assert np.array_equal(again, semantic_method.centres(vectors, 8, seed=1))


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float64()), pa.list_(pa.float32(), 3), pa.large_list(pa.int32()),
     pa.list_(pa.float16())],
)  # fmt: skip
def test_kinds_of_columns_and_rows_without_a_vector(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [[1, 2, 2], [2, 4, 4], None, [0, 0, 0], [2, -1, 0], None, [0, 0, 0]]
    if pa.types.is_float16(kind.value_type):
        rows = [row and [np.float16(x) for x in row] for row in rows]
    table = pa.table({"id": list("abcdefg"), "text": ["t"] * 7, "vector": pa.array(rows, kind)})
    pq.write_table(table, tmp_path / "in.parquet")
    kept = run([str(tmp_path / "in.parquet")], tmp_path / "o.parquet")
    assert list(kept) == ["a", "c", "d", "e", "f", "g"] and kept["a"]["cluster_size"] == 2


def test_one_vector_a_thousand_times(tmp_path: Path) -> None:
    vectors = np.repeat(planted(1, 0, 8, 0)[0], 3000, axis=0)
    kept = run(write(tmp_path, vectors), tmp_path / "o.parquet", clusters=7)
    assert sum(row["cluster_size"] for row in kept.values()) == 3000 and len(kept) <= 7


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    vectors = planted(10, 2, 4, 0)[0]
    paths = write(tmp_path, vectors)
    for wrong in ({"threshold": 0}, {"threshold": 1.5}, {"clusters": -1}, {"keep": "x"},
                  {"embeddings": ""}, {"model": "m"}):  # fmt: skip
        with pytest.raises(UsageError):
            run(paths, tmp_path / "o.parquet", **wrong)
    for column, said in (("absent", "no column 'absent'"), ("text", "expected a list of numbers")):
        with pytest.raises(BadData, match=said):
            run(paths, tmp_path / "o.parquet", embeddings=column)
    ragged = pa.table({"text": ["a", "b"], "vector": [[1.0, 2.0], [1.0]]})
    pq.write_table(ragged, tmp_path / "ragged.parquet")
    with pytest.raises(BadData, match="expected one length"):
        run([str(tmp_path / "ragged.parquet")], tmp_path / "o.parquet")
    zeros = pa.table({"text": ["a"], "vector": [[0.0]]})
    pq.write_table(zeros, tmp_path / "zeros.parquet")
    with pytest.raises(BadData, match="no document has a vector"):
        run([str(tmp_path / "zeros.parquet")], tmp_path / "o.parquet")
    with pytest.raises(BadData, match="before: 4"):
        run([*paths, str(tmp_path / "zeros.parquet")], tmp_path / "o.parquet")
    pq.write_table(zeros.slice(0, 0), tmp_path / "none.parquet")
    assert run([str(tmp_path / "none.parquet")], tmp_path / "n.parquet") == {}
