"""JSON in every layout that tools write gives the same rows; what is damaged is counted."""

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from sabia.core.errors import BadData
from sabia.core.shards import records
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map


def keep(batches, _context):
    yield from batches


def read(path: Path) -> tuple[list[dict], list[tuple[dict, str]]]:
    """(rows, rejects)"""
    rejects: list[tuple[dict, str]] = []
    batches = [
        batch
        for source in from_path(str(path), "document")
        for batch in source.batches(reject=lambda row, reason: rejects.append((row, reason)))
    ]
    return [row for batch in batches for row in batch.to_pylist()], rejects


def row(draw: random.Random, i: int) -> dict:
    odd = draw.choice(['"', "\\", "}{", "][", "\u2028", "ação", "\U0001f600", ",\n", "a" * 3_000])
    made = {"id": str(i), "text": f"{odd} {i}", "meta": {"a": [1, {"b": None}], "c": odd}}
    if draw.random() < 0.5:
        made["scores"] = {draw.choice("pq"): draw.random()}
    return made


LAYOUTS = {
    "lines": lambda rows: "".join(json.dumps(r) + "\n" for r in rows),
    "windows": lambda rows: "\ufeff" + "".join(json.dumps(r) + "\r\n" for r in rows),
    "array": lambda rows: json.dumps(rows, ensure_ascii=False),
    "pretty array": lambda rows: json.dumps(rows, indent=2),
    "array of lines": lambda rows: "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n",
    "pretty": lambda rows: "".join(json.dumps(r, indent=1) + "\n" for r in rows),
    "one line": lambda rows: "".join(map(json.dumps, rows)),
    "with commas": lambda rows: ",\n".join(map(json.dumps, rows)) + ",\n",
    "arrays": lambda rows: "\n" + json.dumps(rows[:7]) + json.dumps(rows[7:], indent=3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_layouts(layout: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    rows = [row(draw, i) for i in range(draw.choice([1, 40, 2_500]))]
    data = LAYOUTS[layout](rows).encode()
    files = {"a.json": data, "a.json.gz": gzip.compress(data, 1),
             "a.jsonl.zst": zstandard.compress(data)}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        made, rejects = read(tmp_path / name)
        assert not rejects
        for one, other in zip(made, rows, strict=True):
            assert (one["id"], one["text"]) == (other["id"], other["text"])
            assert json.loads(one["meta"]) == other["meta"]
    job = Job("classify", inputs=(str(tmp_path / "a.json"),), out=str(tmp_path / "o.jsonl"))
    assert run_map(job, keep).rows_out == len(rows)  # with the names of all scores
    scores = [json.loads(line)["scores"] for line in (tmp_path / "o.jsonl").read_text().split("\n")
              if line]  # fmt: skip
    assert [s or {} for s in scores] == [r.get("scores", {}) for r in rows]


@pytest.mark.parametrize("seed", range(30))
def test_damaged_lines_are_rejected_one_by_one(seed: int, tmp_path: Path) -> None:
    """Each damaged line is one reject, and no other row is lost."""
    draw = random.Random(seed)
    lines, good, bad = [], [], 0
    for i in range(60):
        whole = json.dumps({"text": f"row {i} {'}{' * draw.randint(0, 1)}"})
        if draw.random() < 0.8:
            good.append(json.loads(whole)["text"])
        else:
            bad += 1
            cut = draw.randint(1, len(whole) - 1)
            whole = draw.choice([whole[:cut], whole[:-1], "garbage", whole + " x", "[1, 2]", "7",
                                 '{"a": [', '{"a": {"b": 1}', '{"a": ', '"x', "}"])  # fmt: skip
        lines.append(whole)
    lines[0] = json.dumps({"text": "first"})
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n" * draw.randint(0, 1))
    made, rejects = read(tmp_path / "a.jsonl")
    kept = [one["text"] for one in made]
    assert kept[0] == "first" and {*good[1:]} <= {*kept}
    assert len(kept) + len(rejects) == len(lines)


def test_damage_among_objects_of_several_lines(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(20)]
    pretty = [json.dumps(r, indent=2) for r in rows]
    pretty[11] = "garbage"
    (tmp_path / "a.json").write_text("\n".join(pretty))
    made, rejects = read(tmp_path / "a.json")
    assert [r["text"] for r in made] == [r["text"] for r in rows if r["text"] != "row 11"]
    assert [reason.split(":")[0] for _, reason in rejects] == ["not JSON"]


@pytest.mark.parametrize("cut", [1, 2, 60, 900])
def test_an_array_that_is_cut_short_is_bad_data(cut: int, tmp_path: Path) -> None:
    text = json.dumps([{"text": f"row {i}"} for i in range(100)])
    (tmp_path / "a.json").write_text(text[:-cut])
    with pytest.raises(BadData, match=r"a\.json: (the JSON array has no end|not JSON)"):
        read(tmp_path / "a.json")


def test_elements_that_are_no_objects_are_rejects(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, 1, null, [], "x", {"no": 1}]')
    made, rejects = read(tmp_path / "a.json")
    assert len(made) == 1 and len(rejects) == 5


def test_an_array_is_read_in_bounded_memory(tmp_path: Path) -> None:
    element = json.dumps({"text": "word " * 200})
    with open(tmp_path / "a.json", "w") as file:
        file.write("[" + ",".join([element] * 40_000) + "]")
    source = from_path(str(tmp_path / "a.json"), "document")[0]
    tracemalloc.start()
    rows = sum(batch.num_rows for batch in source.batches())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 40_000 and peak < (tmp_path / "a.json").stat().st_size


@pytest.mark.parametrize("out", ["out", "out.parquet", "out.jsonl"])
def test_a_run_without_a_usable_row_is_bad_data(out: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"content": "a"}, {"content": "b"}]')
    (tmp_path / "b.json").write_text('{"content": "c"}')
    inputs = (str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    job = Job("classify", inputs=inputs, out=str(tmp_path / out))
    for _ in range(2):  # a repeated run says it again
        with pytest.raises(BadData, match="all 3 rows were rejected"):
            run_map(job if out != "out.jsonl" else Job(**vars(job) | {"force": True}), keep)
    (tmp_path / "b.json").write_text('{"text": "c"}')
    summary = run_map(Job(**vars(job) | {"force": True}), keep)
    assert (summary.rows_in, summary.rows_out, summary.rejected) == (3, 1, 2)


def test_fields_of_messages_that_are_not_read_are_named_once(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(records, "_unread", set())
    turn = {"role": "assistant", "content": "a", "weight": 0, "refusal": None, "audio": []}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [turn, turn]}) + "\n")
    (source,) = from_path(str(tmp_path / "a.jsonl"), "chat")
    assert sum(batch.num_rows for batch in source.batches()) == 1
    said = capsys.readouterr().err
    assert said.count("not read") == 1
    assert "field 'weight' of messages is not read" in said


@pytest.mark.parametrize("nested", [False, True])
def test_answers_with_a_label_are_preferences_of_one_side(tmp_path: Path, nested: bool) -> None:
    """As JSON and as Parquet of another library; a record with both answers keeps them."""
    rows: list[dict] = [
        {"prompt": f"p{i}", "completion": f"a{i}", "label": label}
        for i, label in enumerate((True, False, None))
    ]
    if nested:
        for one in rows:
            one["completion"] = [{"role": "assistant", "content": one["completion"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    both = [
        *rows,
        {"prompt": "p", "chosen": "c", "rejected": "r", "completion": "x", "label": True},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in both))
    for name, last in (("rows.parquet", []), ("rows.jsonl", [("c", "r")])):
        answers = [
            (one["chosen"], one["rejected"])
            for source in from_path(str(tmp_path / name), "preference")
            for batch in source.batches()
            for one in batch.to_pylist()
        ]
        texts = [json.dumps(one["completion"]) if nested else one["completion"] for one in rows]
        assert answers == [(texts[0], None), (None, texts[1]), (None, None), *last]
