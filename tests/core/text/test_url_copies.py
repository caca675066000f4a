"""One document of each canonical URL, and the rules for whom to keep."""

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.errors import BadData, UsageError
from sabia.core.text.dedup import keep_rules

URLS = [
    "http://Example.org/a?utm_source=x", "https://example.org/a", "http://example.org/a#top",
    "http://example.org:80/%61", None, "ftp://example.org/a", None, "http://example.org/a?page=2",
]  # fmt: skip
DAYS = [1, 2, 9, None, 4, 5, 6, 7]
QUALITY = [0.2, 0.4, None, 0.9, None, None, 0.5, 0.6]


def write(path: Path, parts: int = 1) -> list[str]:
    times = [d and datetime.datetime(2026, 1, d, tzinfo=datetime.UTC) for d in DAYS]
    table = pa.table({
        "id": [f"d{i}" for i in range(8)], "text": ["é" * (i % 4) for i in range(8)], "url": URLS,
        "crawl_time": pa.array(times, pa.timestamp("us", tz="UTC")),
        "scores": pa.array([[("q", q)] if q else None for q in QUALITY],
                           pa.map_(pa.string(), pa.float64())),
    })  # fmt: skip
    paths, size = [], -(-8 // parts)
    for part in range(parts):
        paths.append(str(path / f"in{part}.parquet"))
        pq.write_table(table.slice(part * size, size), paths[-1])
    return paths


def run(paths: list[str], out: Path, rule: str, removed: str = "", jobs: int = 1) -> list[dict]:
    stage("dedup", inputs=paths, out=out, method="url", keep=rule, removed=removed, jobs=jobs)
    return pq.read_table(out).to_pylist()


@pytest.mark.parametrize(
    ("rule", "kept"), [("first", 0), ("longest", 3), ("newest", 2), ("best:q", 3)]
)
def test_one_of_each_url_stays(tmp_path: Path, rule: str, kept: int) -> None:
    rows = run(write(tmp_path), tmp_path / "o.parquet", rule, str(tmp_path / "r.parquet"))
    assert [row["id"] for row in rows] == sorted(["d1", f"d{kept}", "d4", "d5", "d6", "d7"])
    sizes = {row["id"]: row["cluster_size"] for row in rows}
    assert sizes.pop(f"d{kept}") == 3 and set(sizes.values()) == {1}
    gone = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert {row["id"] for row in gone} == {"d0", "d2", "d3"} - {f"d{kept}"}
    assert {(row["reason"], row["kept_id"]) for row in gone} == {("url", f"d{kept}")}


def test_workers_and_shards_do_not_matter(tmp_path: Path) -> None:
    one = run(write(tmp_path), tmp_path / "a.parquet", "newest")
    assert run(write(tmp_path, 3), tmp_path / "b.parquet", "newest", jobs=2) == one


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path)
    for rule in ("best", "best:", "shortest", "first:x", ""):
        with pytest.raises(UsageError, match="--keep"):
            run(paths, tmp_path / "o.parquet", rule)
    with pytest.raises(BadData, match="no document has this score"):
        run(paths, tmp_path / "o.parquet", "best:absent")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "bare.parquet")
    with pytest.raises(BadData, match="no document has an http"):
        run([str(tmp_path / "bare.parquet")], tmp_path / "o.parquet", "first")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert run([str(tmp_path / "none.parquet")], tmp_path / "n.parquet", "newest") == []
    assert keep_rules.columns("first") == [] and keep_rules.columns("best:q") == ["scores"]
