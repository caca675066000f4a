"""`sabia dedup --decontaminate` and `sabia eval --index`: one index, three verdicts."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import sabia

RNG = random.Random(8)
WORDS = sorted({"".join(RNG.choices("abcdefghilmnoprstuv", k=6)) for _ in range(900)})


def prose(count: int) -> str:
    return " ".join(RNG.choices(WORDS, k=count))


QUESTIONS = [prose(30) for _ in range(20)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task of 20 items, two shards of documents; rows 0, 3, 6 hold an item, row 7 a run."""
    monkeypatch.chdir(tmp_path)
    with open("quiz.jsonl", "w") as file:
        for question in QUESTIONS:
            file.write(json.dumps({"question": question, "answer": "12"}) + "\n")
    Path("quiz.toml").write_text(
        'name = "quiz"\nkind = "exact_match"\ndata = "quiz.jsonl"\nprompt = "{{ question }}"\n'
        "shots = 2\n"
    )
    Path("in").mkdir()
    for shard in range(2):
        with open(f"in/{shard}.jsonl", "w") as file:
            for row in range(5):
                number = shard * 5 + row
                inside = QUESTIONS[number] if number % 3 == 0 and number < 7 else ""
                inside = " ".join(QUESTIONS[9].split()[3:18]) if number == 7 else inside
                text = f"{prose(40)}.\n{inside}.\n{prose(40)}."
                file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
    return tmp_path


def call(*words: str) -> str:
    done = sabia(*words)
    assert done.exit_code == 0, done.output
    return done.output


def ids(path: str) -> list[str]:
    return pq.read_table(path).column("id").to_pylist()


def test_verdicts(folder: Path) -> None:
    call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "auto.parquet",
         "--removed", "gone.parquet")  # fmt: skip
    assert ids("auto.parquet") == ["d1", "d2", "d4", "d5", "d7", "d8", "d9"]
    gone = pq.read_table("gone.parquet").to_pylist()
    assert [(row["id"], row["reason"]) for row in gone] == [
        (f"d{n}", f"contaminated: quiz/{n}") for n in (0, 3, 6)
    ]
    rows = {row["id"]: row for row in pq.read_table("auto.parquet").to_pylist()}
    (run,) = json.loads(rows["d7"]["contamination"])
    assert run["level"] == "run" and run["item"] == "9" and run["run"] == 15
    assert QUESTIONS[9].split()[10] not in rows["d7"]["text"].split()
    assert rows["d8"]["contamination"] is None

    call("dedup", "in", "--decontaminate", "quiz.toml", "--verdict", "mask", "-o", "mask.parquet")
    masked = pq.read_table("mask.parquet").to_pylist()
    assert len(masked) == 10
    assert not any(QUESTIONS[0][:30] in row["text"] for row in masked)
    assert all(len(row["text"].split()) >= 80 for row in masked)

    call("dedup", "in", "--decontaminate", "quiz.toml", "--verdict", "keep", "-o", "keep.parquet")
    kept = pq.read_table("keep.parquet").to_pylist()
    assert QUESTIONS[0] in kept[0]["text"] and sum(bool(r["contamination"]) for r in kept) == 4


def test_a_directory_and_workers_give_the_same(folder: Path) -> None:
    call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "one.parquet")
    call("dedup", "in", "--decontaminate", "quiz.toml", "-j", "2", "-o", "many", "--removed", "out")
    parts = [f"many/part-0000{i}.parquet" for i in range(2)]
    assert [name for part in parts for name in ids(part)] == ids("one.parquet")
    assert [name for i in range(2) for name in ids(f"out/part-0000{i}.parquet")] == [
        "d0", "d3", "d6"]  # fmt: skip


def test_removed_rows_are_written_though_the_output_is_there(folder: Path) -> None:
    call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "many")
    call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "many", "--removed", "out")
    assert [name for i in range(2) for name in ids(f"out/part-0000{i}.parquet")] == [
        "d0", "d3", "d6"]  # fmt: skip


def test_an_array_gives_the_parts_of_one_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "one")
    for task in range(2):
        for name, value in (("ID", task), ("COUNT", 2), ("MIN", 0), ("STEP", 1)):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "array", "--shard", "auto")
    for part in ("part-00000.parquet", "part-00001.parquet"):
        assert ids(f"array/{part}") == ids(f"one/{part}")


def test_eval_writes_the_index_and_sees_it_drift(folder: Path) -> None:
    call("eval", "--task", "quiz.toml", "--index", "bench.parquet")
    call("dedup", "in", "--decontaminate", "bench.parquet", "-o", "by_index.parquet")
    call("dedup", "in", "--decontaminate", "quiz.toml", "-o", "by_task.parquet")
    assert pq.read_table("by_index.parquet") == pq.read_table("by_task.parquet")
    assert "1 of 1 tasks" in call("eval", "--task", "quiz.toml", "--index", "bench.parquet")
    with open("quiz.jsonl", "a") as file:
        file.write(json.dumps({"question": prose(30), "answer": "13"}) + "\n")
    said = call("eval", "--task", "quiz.toml", "--index", "bench.parquet")
    assert "quiz has other items" in said
    Path("new.toml").write_text(Path("quiz.toml").read_text().replace('quiz"', 'new"', 1))
    assert "new is not in" in call("eval", "--task", "new.toml", "--index", "bench.parquet")


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    for words, said in (
        (["--decontaminate", "quiz.toml", "--threshold", "0.8"], "--threshold: only with --method"),
        (["--decontaminate", "quiz.toml", "--method", "minhash"], "--method: only without --deco"),
        (["--decontaminate", "none.toml"], "--decontaminate: none.toml: No such file"),
        (["--overlap", "0.8"], "--overlap"),
        (["--decontaminate", "quiz.toml", "--verdict", "burn"], "--verdict"),
        (["--decontaminate", "in"], "no task in it"),
        (["--decontaminate", "quiz.jsonl"], "expected TASK.toml"),
    ):
        done = sabia("dedup", "in", "-o", "x.parquet", *words)
        assert done.exit_code == 2 and said in done.output, done.output
    Path("bad.parquet").write_bytes(b"no parquet")
    done = sabia("dedup", "in", "-o", "x.parquet", "--decontaminate", "bad.parquet")
    assert done.exit_code == 65 and "not an index" in done.output
