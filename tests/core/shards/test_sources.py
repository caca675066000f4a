"""Reading: formats, sniffing, rejects, truncation, bounded memory."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from sabia.core.errors import BadData, UsageError
from sabia.core.shards import schemas
from sabia.core.shards.arrow_arrays import plain
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import from_path

ROWS = [{"text": f"página {i} – ünïcode 日本", "source": "s", "n": i, "scores": {"q": i / 2}}
        for i in range(5000)]  # fmt: skip


def lines(rows=ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(path: Path, kind: str = "document", **settings):
    (source,) = from_path(str(path), kind)
    return pa.Table.from_batches(list(source.batches(**settings)))


def write_parquet(path: Path) -> pa.Table:
    source = path.with_suffix(".jsonl")
    source.write_bytes(lines())
    table = read(source)
    pq.write_table(table, path, row_group_size=1000)
    return table


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_all_formats_give_the_same_rows(tmp_path: Path, form: str) -> None:
    table = write_parquet(tmp_path / "a.parquet")
    path = tmp_path / f"b.{form}"
    if form == "parquet":
        path = tmp_path / "a.parquet"
    elif form == "arrow":
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    else:
        pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[form]
        path.write_bytes(pack(lines()))
    assert read(path).equals(table)
    assert table.schema.names[: len(schemas.document())] == schemas.document().names
    assert table.column("n").type == pa.int64()
    assert table.num_rows == 5000 and table.column("id").null_count == 0
    assert dict(table.column("scores")[3].as_py()) == {"q": 1.5}


def test_ids_are_hashes_of_source_and_text(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet")
    assert table.column("id")[0].as_py() == schemas.document_id("s", ROWS[0]["text"])
    assert schemas.document_id("a", "bc") != schemas.document_id("ab", "c")


def test_selected_columns_still_get_ids(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "two"]})
    pq.write_table(table, tmp_path / "a.parquet")
    got = read(tmp_path / "a.parquet", columns=["id"])
    assert got.column_names == ["id"]
    assert got.column("id").to_pylist() == [schemas.document_id(None, t) for t in ("one", "two")]


def test_bad_lines_are_rejected_with_reasons(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [b"{broken\n", b'{"text": null}\n', b'{"text": 3}\n', b"[1]\n", b'{"other": 1}\n',
           b'{"text": "\xff\xfe"}\n', b'{"text": "x", "scores": [1]}\n',
           b'{"text": "\\ud800"}\n']  # fmt: skip
    path.write_bytes(lines(ROWS[:3]) + b"".join(bad))
    reasons = []
    table = read(path, reject=lambda row, reason: reasons.append(reason))
    assert table.num_rows == 3
    assert len(reasons) == len(bad)


def test_null_text_in_parquet_is_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    reasons = []
    got = read(tmp_path / "a.parquet", reject=lambda row, reason: reasons.append(reason))
    assert got.column("text").to_pylist() == ["a", "b"] and reasons == ["text is null"]


def test_truncation_is_never_a_shorter_result(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet")
    arrow = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(arrow), table.schema) as stream:
        for batch in table.to_batches(max_chunksize=500):
            stream.write_batch(batch)
    for path in (tmp_path / "a.parquet", arrow):
        whole = path.read_bytes()
        for share in (0.3, 0.9, 0.999):
            path.write_bytes(whole[: int(len(whole) * share)])
            with pytest.raises(BadData):
                read(path)
    packed = gzip.compress(lines())
    (tmp_path / "c.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadData):
        read(tmp_path / "c.jsonl.gz")


def test_arrow_stream_cut_at_a_message_edge_is_bad(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "a.parquet")
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadData, match="end mark"):
        read(path)


def test_joined_parquet_files_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data + data)
    with pytest.raises(BadData, match="joined"):
        read(tmp_path / "b.parquet")


def test_wrong_records_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(BadData, match="text"):
        read(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet").column("text").to_pylist() == ["1", "2"]
    pq.write_table(pa.table({"text": [{"a": 1}]}), tmp_path / "c.parquet")
    with pytest.raises(BadData, match="struct"):
        read(tmp_path / "c.parquet")


def test_empty_missing_and_strange_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "noise.parquet").write_bytes(b"\x00\x01noise" * 10)
    for name in ("empty.jsonl", "noise.parquet"):
        with pytest.raises(BadData):
            from_path(str(tmp_path / name), "document")
    for name in ("none.parquet", "*.none"):
        with pytest.raises(UsageError):
            from_path(str(tmp_path / name), "document")


def test_directories_globs_and_urls(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(ROWS[:2]))
    names = [s.name for s in from_path(str(tmp_path), "document")]
    assert [Path(n).name for n in names] == ["a.jsonl", "b.jsonl"]
    assert len(from_path(str(tmp_path / "*.jsonl"), "document")) == 2
    (source,) = from_path(f"file://{tmp_path}/a.jsonl", "document")
    assert sum(b.num_rows for b in source.batches()) == 2


def test_batches_are_bounded(tmp_path: Path) -> None:
    big = pa.table({"text": ["x" * 1_000_000] * 40})
    pq.write_table(big, tmp_path / "a.parquet")
    (source,) = from_path(str(tmp_path / "a.parquet"), "document")
    assert max(batch.nbytes for batch in source.batches()) <= 9 << 20


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines())
    (source,) = from_path(str(path), "document")
    first = source.fingerprint()
    assert source.fingerprint() == first
    path.write_bytes(lines().replace(b"1234", b"4321"))
    assert source.fingerprint() != first


def test_chat_records_from_json(tmp_path: Path) -> None:
    call = [{"name": "add", "arguments": {"a": 1}}]
    message = {"role": "assistant", "content": "ok", "tool_calls": call}
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [message], "kind": "x"}) + "\n")
    row = read(tmp_path / "c.jsonl", "chat").to_pylist()[0]
    assert json.loads(row["messages"][0]["tool_calls"]) == call
    assert row["kind"] == "x"


def test_views_and_runs_are_read_as_plain_columns(tmp_path: Path) -> None:
    views = pa.list_view(pa.string_view())
    columns = {
        "text": pa.array(["one", "two", "three"]).cast(pa.string_view()),
        "names": pa.DictionaryArray.from_arrays(
            pa.array([0, None, 1]), pa.array(["a", "b"]).cast(pa.string_view())
        ),
        "lists": pa.array([["x", "y"], None, ["z"]], views),
        "nested": pa.array(
            [{"v": [["p"], []]}, {"v": None}, None], pa.struct([("v", pa.large_list_view(views))])
        ),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), ["r", "s"]),
    }
    rows = pa.table(columns)
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema) as file:
        file.write_table(rows.slice(0, 2))
        file.write_table(rows.slice(2))
    (source,) = unified(from_path(str(tmp_path / "a.arrow"), "document"))
    table = pa.Table.from_batches(source.batches(rows=2))
    table.validate(full=True)
    assert table.select(list(columns)).to_pylist() == [
        {
            "text": "one",
            "names": "a",
            "lists": ["x", "y"],
            "nested": {"v": [["p"], []]},
            "runs": "r",
        },
        {"text": "two", "names": None, "lists": None, "nested": {"v": None}, "runs": "s"},
        {"text": "three", "names": "b", "lists": ["z"], "nested": None, "runs": "s"},
    ]
    assert table.take([2, 0])["text"].to_pylist() == ["three", "one"]


def test_plain_columns_are_left_as_they_are() -> None:
    item = pa.field("element", pa.int32(), nullable=False)
    kinds = [pa.list_(item), pa.large_list(item), pa.struct([pa.field("a", pa.list_(item))])]
    batch = pa.RecordBatch.from_arrays([pa.nulls(2, kind) for kind in kinds], names=["a", "b", "c"])
    assert plain(batch) is batch


def test_blank_lines_before_json_of_any_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 200_000 + lines())
    assert read(tmp_path / "a.jsonl").num_rows == len(ROWS)


def test_meta_that_is_a_text_is_kept_beside_nested_fields(tmp_path: Path) -> None:
    row = {"text": "a", "meta": "by hand", "tags": ["x"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    table = read(tmp_path / "a.jsonl")
    assert json.loads(table["meta"][0].as_py()) == {"meta": "by hand", "tags": ["x"]}
