"""The same columns in all shards of an output, whatever the shards of its input hold."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import BadData
from sabia.core.shards.arrow_arrays import MAP, MOST_NAMES, as_dict, fit, type_of
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.shards.json_lines import TYPING_LINES
from sabia.core.shards.mapping import run_map

SCORES = [[("a", 1.0), ("b", 2.0)], None, [], [("b", 5.0), ("b", 6.0)], [("c", None)]]
AS_DICTS = [{"a": 1.0, "b": 2.0}, {}, {}, {"b": 6.0}, {}]


def upper(batches, _context):
    """A stage in small, which gives what it gets, in capitals."""
    for batch in batches:
        yield batch.set_column(1, "text", pc.utf8_upper(batch.column("text")))


def dicts(column) -> list[dict[str, float]]:
    return [as_dict(row) for row in column.to_pylist()]


def write(path: Path, scores: list | None, kind: pa.DataType = MAP) -> None:
    rows = len(scores) if scores is not None else 1
    columns = {"text": [f"{path.name} {i}" for i in range(rows)]}
    if scores is not None:
        columns["scores"] = pa.array(scores, kind)
    pq.write_table(pa.table(columns), path)


def test_maps_become_structs_row_by_row() -> None:
    column = fit(pa.array(SCORES, MAP))
    assert column.type == type_of(["a", "b", "c"]) and dicts(column) == AS_DICTS
    wider = fit(pa.array(SCORES, MAP), ["a", "b", "c", "d"])
    assert wider.type == type_of("abcd") and dicts(wider) == AS_DICTS
    assert dicts(fit(column, ["a", "b", "c", "z"])) == AS_DICTS
    assert fit(pa.array(SCORES, MAP).slice(3)).to_pylist() == [
        {"b": 6.0, "c": None}, {"b": None, "c": None},
    ]  # fmt: skip
    assert fit(pa.nulls(2)).type == pa.null() and fit(pa.nulls(1), ["a"]).type == type_of("a")
    integers = pa.array([{"n": 3}, None], pa.struct([("n", pa.int32())]))
    assert fit(integers).to_pylist() == [{"n": 3.0}, None]


def test_maps_agree_with_dictionaries_on_random_and_sliced_columns() -> None:
    source = random.Random(5)
    for _ in range(60):
        rows = [
            None if source.random() < 0.2
            else [(k, source.choice([None, source.random()])) for k in source.choices("abcd", k=3)]
            for _ in range(source.randrange(1, 12))
        ]  # fmt: skip
        start = source.randrange(len(rows))
        column = pa.array(rows, MAP).slice(start)
        last = [{k: v for k, v in dict(row or []).items() if v is not None} for row in rows]
        assert dicts(fit(column)) == last[start:]


@pytest.mark.parametrize("odd", [pa.array([[1.0]]), pa.array(["x"]),
                                 pa.array([{"label": "good"}])])  # fmt: skip
def test_other_types_are_refused(odd: pa.Array) -> None:
    with pytest.raises(BadData, match="expected a"):
        fit(odd)


def test_names_are_bounded() -> None:
    rows = pa.array([[(f"document {i}", 1.0)] for i in range(MOST_NAMES + 1)], MAP)
    with pytest.raises(BadData, match="more than 1,000 names"):
        fit(rows)


def make(folder: Path) -> None:
    """Shards as earlier versions wrote them and as this one does, JSON lines, one without rows."""
    folder.mkdir()
    write(folder / "0.parquet", SCORES)
    write(folder / "1.parquet", [{"b": 1.0, "x": 2.0}], type_of("bx"))
    write(folder / "2.parquet", None)
    late = TYPING_LINES + 10
    lines = [
        {"text": f"3 {i}", "scores": {"late": i} if i == late else None} for i in range(late + 1)
    ]
    (folder / "3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "4.parquet")


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_shard_has_the_names_of_all(tmp_path: Path, jobs: int) -> None:
    make(tmp_path / "in")
    job = Job("classify", inputs=(str(tmp_path / "in"),), out=str(tmp_path / "out"), jobs=jobs)
    run_map(job, upper)
    shards = sorted((tmp_path / "out").glob("part-*.parquet"))
    schemas = [pq.read_schema(path).remove_metadata() for path in shards]
    assert len(shards) == 5 and all(schema.equals(schemas[0]) for schema in schemas)
    assert schemas[0].field("scores").type == type_of(["a", "b", "c", "x", "late"])
    table = pq.read_table(tmp_path / "out")
    found = dicts(table.column("scores"))
    assert found[:7] == [*AS_DICTS, {"b": 1.0, "x": 2.0}, {}]
    assert found[-1] == {"late": TYPING_LINES + 10} and not any(found[7:-1])
    one = replace(job, out=str(tmp_path / "one.parquet"))
    run_map(one, upper)
    assert pq.read_table(tmp_path / "one.parquet").equals(table)
    assert run_map(job, upper).shards_skipped == 5


def test_a_new_name_makes_every_shard_anew(tmp_path: Path) -> None:
    make(tmp_path / "in")
    job = Job("classify", inputs=(str(tmp_path / "in"),), out=str(tmp_path / "out"))
    run_map(job, upper)
    write(tmp_path / "in" / "5.parquet", [{"new": 1.0}], type_of(["new"]))
    assert run_map(job, upper).shards_done == 6
    for path in (tmp_path / "out").glob("part-*.parquet"):
        assert pq.read_schema(path).field("scores").type.get_field_index("new") >= 0


def test_a_slice_reads_the_first_rows_of_the_others(tmp_path: Path) -> None:
    make(tmp_path / "in")
    job = Job("classify", inputs=(str(tmp_path / "in"),), out=str(tmp_path / "out"))
    for index in (0, 1, 2, 4):
        run_map(replace(job, shard=(index, 5)), upper)
        kind = pq.read_schema(tmp_path / "out" / f"part-{index:05d}.parquet").field("scores").type
        assert kind == type_of("abcx")
    with pytest.raises(BadData, match=r"3\.jsonl: score 'late' does not occur in the first rows"):
        run_map(replace(job, shard=(3, 5)), upper)


def test_readers_of_some_columns_get_the_same_scores(tmp_path: Path) -> None:
    make(tmp_path / "in")
    for source in unified(from_path(str(tmp_path / "in"), "document")):
        for batch in source.batches(columns=["id", "scores"]):
            assert batch.schema.names == ["id", "scores"]
            assert batch.schema.field("scores").type == type_of(["a", "b", "c", "x", "late"])


def test_json_lines_leave_out_what_is_null(tmp_path: Path, capfdbinary) -> None:
    write(tmp_path / "in.parquet", SCORES)
    run_map(Job("classify", inputs=(str(tmp_path / "in.parquet"),), to="jsonl"), upper)
    lines = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["scores"] or {} for line in lines] == AS_DICTS
    (tmp_path / "again.jsonl").write_bytes(
        b"\n".join(lines) + b'\n{"text": "n", "scores": {"a": null}}\n'
    )
    (source,) = from_path(str(tmp_path / "again.jsonl"), "document")
    (batch,) = source.batches()
    assert dicts(batch.column("scores")) == [*AS_DICTS, {}]


def test_column_types_are_widened_together(tmp_path: Path) -> None:
    kinds = {"0": pa.array([1], pa.int32()), "1": pa.array([2.5]), "2": pa.nulls(1),
             "3": pa.array([3], pa.int64()), "4": pa.array([np.float32(4)])}  # fmt: skip
    for name, values in kinds.items():
        texts = pa.array(["x"]).dictionary_encode()
        pq.write_table(
            pa.table({"text": ["t"], "n": values, "d": texts}), tmp_path / f"{name}.parquet"
        )
    sources = unified(from_path(str(tmp_path), "document"))
    batches = [batch for source in sources for batch in source.batches()]
    assert [batch.column("n")[0].as_py() for batch in batches] == [1.0, 2.5, None, 3.0, 4.0]
    assert all(batch.schema.equals(sources[0].schema, check_metadata=True) for batch in batches)
