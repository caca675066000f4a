"""What commands find: folders, partitions, globs, lists, FIFOs; and files of other libraries."""

import gzip
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import BadData, MissingBackend, UsageError
from sabia.core.shards.inputs import expand, from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map


def keep(batches, _context):
    yield from batches


def rows_of(given: object, kind: str = "document") -> list[dict]:
    sources = from_path(str(given), kind)
    return [row for s in sources for batch in s.batches() for row in batch.to_pylist()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """310 rows: 40 at the top, 90 in each of three partitions, in files of several endings."""
    tree = tmp_path / "tree"
    for folder, rows in (("", 40), ("language=pt", 90), ("language=en/day=1", 90), ("plain", 90)):
        (tree / folder).mkdir(parents=True, exist_ok=True)
        third = rows // 2
        lines = "".join(json.dumps({"text": f"{folder} {i}"}) + "\n" for i in range(third))
        (tree / folder / "a.ndjson").write_text(lines)
        texts = [f"{folder} {i}" for i in range(third, rows)]
        pq.write_table(pa.table({"text": texts}), tree / folder / "B.PARQUET")
    for hidden in ("_tmp", ".cache", "old.rejects"):
        (tree / hidden).mkdir()
        pq.write_table(pa.table({"text": ["no"]}), tree / hidden / "part-0.parquet")
    for i in range(9):
        (tree / f"notes{i}.txt").write_text("not rows")
    return tree


def test_every_row_of_a_folder_is_read(tree: Path, capsys) -> None:
    rows = rows_of(tree)
    assert len(rows) == len({row["text"] for row in rows}) == 310
    for row in rows:
        assert (
            row["language"] == {"l": row["text"][9:11]}.get(row["text"][0]) or row["text"][0] != "l"
        )
        assert row.get("day") == ("1" if "day=1" in row["text"] else None)
    note = capsys.readouterr().err
    assert note.count("left out") == 1 and "left out 11 files or folders: _tmp/, notes0.txt" in note
    assert " and 6 more\n" in note


def test_globs_and_lists_give_the_rows_and_keys_of_the_folder(tree: Path, tmp_path: Path) -> None:
    whole = sorted(json.dumps(row, default=str) for row in rows_of(tree))
    found = sorted(str(p) for p in tree.rglob("*") if p.suffix in (".ndjson", ".PARQUET"))
    (tmp_path / "list").write_text("\n".join(found))
    os.mkfifo(tmp_path / "fifo")
    listed = threading.Thread(target=lambda: (tmp_path / "fifo").write_text("\n".join(found)))
    listed.start()
    job = Job("classify", inputs=(f"{tree}/**/*.ndjson", f"{tree}/**/*.PARQUET"))
    for sources in (open_inputs(job, "document"), from_path(str(tmp_path / "fifo"), "document")):
        rows = [r for s in sources for b in s.batches() for r in b.to_pylist()]
        assert sorted(json.dumps(row, default=str) for row in rows) == whole
    listed.join(10)


def test_globs_leave_out_rejects_and_hidden_folders(tmp_path: Path) -> None:
    for folder in ("out", "out.rejects", "_x"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / folder / "part-0.parquet")
    assert expand(f"{tmp_path}/*/part-*.parquet") == [f"{tmp_path}/out/part-0.parquet"]
    assert expand(f"{tmp_path}/_*/*.parquet") == [f"{tmp_path}/_x/part-0.parquet"]


def test_a_value_in_the_file_wins_over_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "language=pt" / "n=7"
    folder.mkdir(parents=True)
    columns = {"text": ["a", "b"], "language": ["en", None], "n": pa.array([1, None], pa.int64())}
    pq.write_table(pa.table(columns), folder / "a.parquet")
    assert [(r["language"], r["n"]) for r in rows_of(tmp_path)] == [("en", 1), ("pt", 7)]
    os.rename(folder, folder.parent / "n=x")
    with pytest.raises(BadData, match="folder n=x: the column"):
        rows_of(tmp_path)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "in" / "closed").mkdir(parents=True)
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadData, match="closed: Permission denied"):
        expand(str(tmp_path / "in"))


META = [{"a": 1, "tags": ["x", None]}, None, {"a": 2, "tags": []}]
SCORES = [{"q": 1, "p": 0.5}, {"q": None, "p": 2.0}, None]


def nested(**more) -> pa.Table:
    return pa.table({"text": pa.array(["a", "b", "c"], pa.large_string()), "meta": META,
                     "scores": SCORES, **more})  # fmt: skip


def written(table: pa.Table, folder: Path) -> dict[str, Path]:
    """Files as other libraries write them."""
    import datasets
    import duckdb
    import polars

    paths = {name: folder / name for name in ("a.parquet", "polars.parquet", "polars.arrow",
             "polars.ndjson", "duck.parquet", "duck.json", "f.feather", "s.arrows")}  # fmt: skip
    frame = polars.from_arrow(table)
    pq.write_table(table, paths["a.parquet"])
    frame.write_parquet(paths["polars.parquet"])
    frame.write_ipc(paths["polars.arrow"])
    frame.write_ndjson(paths["polars.ndjson"])
    rows = table  # noqa: F841 - DuckDB finds it by its name
    duckdb.sql("SELECT * FROM rows").write_parquet(str(paths["duck.parquet"]))
    duckdb.sql(f"COPY (SELECT * FROM rows) TO '{paths['duck.json']}' (FORMAT json, ARRAY true)")
    pyarrow.feather.write_feather(table, str(paths["f.feather"]))
    with pa.ipc.new_stream(str(paths["s.arrows"]), table.schema) as stream:
        stream.write_table(table)
    data = datasets.Dataset(table.cast(pa.schema(
        [f.with_type(pa.string()) if f.name == "text" else f for f in table.schema])))  # fmt: skip
    data.save_to_disk(str(folder / "saved"))
    data.to_parquet(str(folder / "hf.parquet"))
    data.to_json(str(folder / "hf.jsonl"))
    paths |= {name: folder / name for name in ("saved", "hf.parquet", "hf.jsonl")}
    return paths


def test_nested_columns_of_other_libraries(tmp_path: Path) -> None:
    for name, path in written(nested(), tmp_path).items():
        rows = rows_of(path)
        assert [row["text"] for row in rows] == ["a", "b", "c"], name
        metas = [json.loads(row["meta"]) if row["meta"] else None for row in rows]
        assert [m and m["a"] for m in metas] == [1, None, 2], name
        assert metas[0]["tags"] == ["x", None], name
        scores = [{k: v for k, v in (row["scores"] or {}).items() if v is not None} for row in rows]
        assert scores == [{"q": 1.0, "p": 0.5}, {"p": 2.0}, {}], name


def test_maps_and_messages_of_other_libraries(tmp_path: Path) -> None:
    pairs = pa.array([[("k", 1), ("j", 2)], None], pa.map_(pa.string(), pa.int32()))
    table = pa.table({"text": ["a", "b"], "meta": pairs, "scores": pairs})
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = rows_of(tmp_path / "a.parquet")
    assert json.loads(first["meta"]) == {"k": 1, "j": 2} and second["meta"] is None
    assert first["scores"] == {"j": 2.0, "k": 1.0}
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [[{"role": "user", "content": "hi", "weight": 1, "tool_calls": [call]}]]
    pq.write_table(pa.table({"messages": messages, "tools": [[{"type": "f"}]]}),
                   tmp_path / "chat.parquet")  # fmt: skip
    chat = rows_of(tmp_path / "chat.parquet", "chat")[0]
    assert chat["messages"][0]["content"] == "hi"
    assert json.loads(chat["messages"][0]["tool_calls"]) == [call]
    assert json.loads(chat["tools"]) == [{"type": "f"}]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl"])
def test_the_text_may_be_in_another_column(name: str, tmp_path: Path) -> None:
    table = pa.table({"content": ["x", "y"], "n": [1, 2]})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    elif name == "a.arrow":
        pyarrow.feather.write_feather(table, str(tmp_path / name))
    else:
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    job = Job("classify", inputs=(str(tmp_path / name),), text_column="content",
              out=str(tmp_path / "out.parquet"))  # fmt: skip
    assert run_map(job, keep).rows_out == 2
    made = pq.read_table(tmp_path / "out.parquet")
    assert made.column("text").to_pylist() == ["x", "y"] and "content" not in made.column_names
    assert [row["text"] for s in open_inputs(job, "document") for b in s.batches(["text"])
            for row in b.to_pylist()] == ["x", "y"]  # fmt: skip
    if name != "a.jsonl":
        with pytest.raises(BadData, match=r"no column 'text' among content, n .*--text-column"):
            rows_of(tmp_path / name)
        with pytest.raises(BadData, match="no column 'body' among content, n"):
            list(open_inputs(Job("classify", inputs=job.inputs, text_column="body"),
                             "document")[0].batches())  # fmt: skip
        with pytest.raises(BadData, match="no column 'content' among id, text"):
            list(open_inputs(replace(job, inputs=(str(tmp_path / "out.parquet"),)), "document")[0]
                 .batches())  # fmt: skip


def test_outputs_in_an_input_folder_are_no_inputs_of_the_next_call(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n{{"broken\n')
    out, below = tmp_path / "good" / "out", str(tmp_path / "**" / "*")
    for given in (str(tmp_path), str(tmp_path), below):
        job = Job("classify", inputs=(given,), out=str(out), rejects=str(tmp_path / "bad.jsonl"))
        assert run_map(job, keep).rows_out == 2
    assert [p.name for p in sorted(out.glob("part*"))] == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    part, line = str(out / "part-00000.parquet"), str(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="an input among the outputs"):
        run_map(Job("classify", inputs=(line, part), out=str(out)), keep)
    # a call that replaces its input, and an output above an input
    assert (
        run_map(Job("classify", inputs=(str(out),), out=str(out), force=True), keep).rows_out == 2
    )
    named = Job("classify", inputs=(line, str(out)), out=str(tmp_path))
    assert run_map(named, keep).rows_out == 3


def test_process_substitution_and_lists_of_arguments(tmp_path: Path) -> None:
    for name, data in (("a.jsonl", b'{"text": "a"}\n'), ("b.json", b'[{"text": "b"}]')):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    sabia = f"{sys.executable} -m sabia.cli.main classify --no-quality --to jsonl"
    line = f"{sabia} <(zcat a.jsonl.gz) <(cat b.json.gz) <(ls b.json.gz)"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, check=True)
    assert [json.loads(one)["text"] for one in done.stdout.splitlines()] == ["a", "b", "b"]


def test_a_url_without_its_package_names_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingBackend, match=r"pip install 'sabia\[s3\]'"):
        expand("s3://bucket/key")
    with pytest.raises(UsageError, match="nowhere"):
        expand("nowhere://bucket/key")


@pytest.mark.parametrize(("variable", "near"), [
    ("SABIA_CLASSIFY_WERE", "SABIA_CLASSIFY_WHERE"), ("SABIA_CLASIFY_PII", "SABIA_CLASSIFY_PII"),
    ("SABIA_PIP", "SABIA_PIPE"), ("SABIA_CLASSIFY_NOTHING_LIKE_IT", ""),
    ("SABIA_JOBS", "SABIA_CLASSIFY_JOBS"),
])  # fmt: skip
def test_a_misspelt_variable_is_reported(variable: str, near: str) -> None:
    from sabia.core.options.classify import ClassifyOptions
    from sabia.core.options.table import check_environment

    calls = ["classify", "classify train", "dedup"]
    with pytest.raises(UsageError, match=rf"\${variable}: sabia classify has no .*{near}"):
        check_environment(ClassifyOptions, "classify", calls, {variable: "x"})
    for other in ("SABIA_CLASSIFY_TRAIN_LABEL", "SABIA_DEDUP_KEEP", "SABIA_DATA", "SABIA_PIPE"):
        check_environment(ClassifyOptions, "classify", calls, {other: "x", variable: ""})


def test_arrow_streams_and_files_that_were_joined(tmp_path: Path) -> None:
    """As `xargs sabia classify --to arrow > all.arrows` and `cat` join them."""
    tables = [pa.table({"text": [f"{n} {i}" for i in range(n)]}) for n in (3, 2_500, 1)]
    streams, files = [], []
    for table in tables:
        for kind, made in ((pa.ipc.new_stream, streams), (pa.ipc.new_file, files)):
            sink = pa.BufferOutputStream()
            with kind(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=1_000)
            made.append(sink.getvalue().to_pybytes())
    (tmp_path / "a.arrows").write_bytes(b"".join(streams))
    assert len(rows_of(tmp_path / "a.arrows")) == 2_504
    for joined in (files, files[:1] * 2):
        (tmp_path / "a.arrow").write_bytes(b"".join(joined))
        with pytest.raises(BadData):
            rows_of(tmp_path / "a.arrow")
    (tmp_path / "a.arrow").write_bytes(files[1])
    assert len(rows_of(tmp_path / "a.arrow")) == 2_500
    other = pa.BufferOutputStream()
    with pa.ipc.new_stream(other, pa.schema([("text", pa.string()), ("n", pa.int64())])):
        pass
    (tmp_path / "a.arrows").write_bytes(streams[0] + other.getvalue().to_pybytes())
    with pytest.raises(BadData, match="different columns"):
        rows_of(tmp_path / "a.arrows")
