"""`sabia report` from the shell: tokens of every kind of row back to their texts, and documents
forward to rows, steps and checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_cases import Commands, make_tokens

from sabia.core.generate.requests import Completion
from sabia.core.judge.verdict import Grade
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.recipes.report.given_outputs import open_outputs
from sabia.core.recipes.report.run_rows import TrainingRun
from sabia.core.recipes.report.token_row import read_row
from sabia.core.results import RESULTS
from sabia.core.shards.inputs import from_path
from sabia.core.text.tokenize.tokenizer import load_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "answer", "number", "tree", "ünïcödé", "漢字", "🎉"]
SHAPE = ("--shape", "d=32,layers=1,heads=2", "--steps", "7", "--batch", "6", "--save-every", "3")


def documents(seed: int, count: int) -> list[dict[str, Any]]:
    """Documents with lines and spans that others have too, copies, and exercises to rewrite."""
    draw = np.random.default_rng(seed)
    common = [" ".join(draw.choice(WORDS, 70)) for _ in range(3)]
    rows = []
    for number in range(count):
        lines = [" ".join(draw.choice(WORDS, draw.integers(3, 60))) + "." for _ in range(4)]
        if number % 3 == 0:
            lines[1] += f" {common[number % 2]}"
        if number % 4 == 0:
            lines.append("Which number is it? The answer is 7. First take 3. Then add 4.")
        if number % 5 == 0:
            lines.append("the same line at the foot of many pages")
        rows.append({"text": "\n".join(lines), "url": f"https://a.example/{seed}/{number}",
                     "source": str(draw.choice(["web", "books"]))})  # fmt: skip
    return [*rows, *({**row, "url": f"{row['url']}/copy"} for row in rows[:5])]


@pytest.fixture(scope="module")
def made(tmp_path_factory, sabia: Commands) -> Path:
    """The outputs of a pipeline from documents to trained models."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "raw").mkdir()
    for seed in range(2):
        pq.write_table(pa.Table.from_pylist(documents(seed, 60)), folder / f"raw/{seed}.parquet")
    chats = [
        {"id": f"chat-{n}", "messages": [
            {"role": role, "content": f"{role} {n} {turn}"}
            for turn in range(1 + n % 3) for role in ("user", "assistant")
        ]}
        for n in range(40)
    ]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    make_tokens(folder / "other")
    tokenizer = folder / "other" / "_tokenizer"
    calls = [
        ("dedup", "raw", "--method", "exact", "--removed", folder / "removed", "-o", "unique"),
        ("dedup", "unique", "--method", "line", "-o", "lines"),
        ("dedup", "lines", "--method", "substring", "-o", "cut"),
        ("rewrite", "cut", "-o", "rewritten"),
        ("tokenize", "rewritten", "--tokenizer", tokenizer, "--length", "48", "-o", "rows"),
        ("tokenize", "rewritten", "--tokenizer", tokenizer, "--length", "48", "--packing",
         "best-fit", "--format", "arrow", "-o", "arrow"),
        ("tokenize", "rewritten", "--tokenizer", tokenizer, "--length", "48", "--mix",
         "web=3,books=1", "--max-repeat", "2", "-o", "mixed"),
        ("pretrain", "rows", *SHAPE, "-o", "run_rows"),
        ("pretrain", "arrow", *SHAPE, "--mix", "web=1,books=2", "-o", "run_arrow"),
        ("pretrain", "mixed", *SHAPE, "-o", "run_mixed"),
        ("sft", "chats.jsonl", "--model", folder / "run_rows" / "final", "--length", "64",
         "--steps", "5", "--batch", "2", "-o", "run_chat"),
    ]  # fmt: skip
    for name, given, *words, out in calls:
        done = sabia(name, folder / given, *words, folder / out)
        assert done.returncode == 0, done.stderr
    return folder


def report(sabia: Commands, *words: Any) -> dict[str, Any]:
    done = sabia("report", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


STAGES = ("rewritten", "cut", "lines", "unique", "removed", "raw")


@pytest.mark.parametrize("run, rows", [("run_rows", "rows"), ("run_arrow", "arrow"),
                                       ("run_mixed", "mixed")])  # fmt: skip
def test_a_token_of_a_run_is_found_in_its_text(
    made: Path, sabia: Commands, run: str, rows: str
) -> None:
    """Its characters give the token, and the row is the one that --list-read names."""
    paths = [made / rows, *(made / stage for stage in STAGES)]
    outputs, _ = open_outputs([str(path) for path in paths])
    trained = TrainingRun(made / run, outputs)
    mix = ("--mix", "web=1,books=2") if run == "run_arrow" else ()
    listed = sabia("pretrain", made / rows, *SHAPE, *mix, "-o", made / run, "--list-read", "--to",
                   "jsonl")  # fmt: skip
    read = [json.loads(line) for line in listed.stdout.splitlines()]
    assert len(read) == 42
    draw = np.random.default_rng(0)
    for one in (read[int(n)] for n in draw.choice(len(read), 6, replace=False)):
        step, row = one["step"], one["sample"] % 6
        source, number = trained.located(trained.row_of(step, row))
        there = read_row(source, number)
        assert one["name"] == f"{there.shard}:{there.id}"
        position = int(draw.integers(0, sum(p.end - p.start for p in there.pieces)))
        answer = report(sabia, "--token", f"{made / run}:{step}:{row}:{position}", *paths)
        assert answer["token_id"] == there.ids[position]
        document = answer["document"]
        assert [stage["output"] for stage in document["stages"]][-1] == str(made / "rewritten")
        text = json_text(made / "rewritten", document["id"])
        (ids,), (spans,) = load_tokenizer(
            made / "other" / "_tokenizer"
        ).encode_ordinary_with_offsets([text])
        if not document.get("end_of_document"):
            assert ids[document["token"]] == answer["token_id"]
            assert list(spans[document["token"]]) == document["characters"]


def test_a_directory_stands_for_the_outputs_in_it(made: Path, sabia: Commands) -> None:
    (made / "settings.json").write_text('{\n  "several": "lines"\n}\n')
    paths = [made / stage for stage in ("rows", "rewritten", "cut", "lines", "unique")]
    question = ("--token", f"{made / 'run_rows'}:2:1:7")
    named, whole = report(sabia, *question, *paths), report(sabia, *question, made)
    assert whole["document"]["characters"] == named["document"]["characters"]
    assert {stage["output"] for stage in whole["document"]["stages"]} >= {
        str(path) for path in paths[1:]
    }
    name = named["document"]["id"]
    (about,) = report(sabia, "--document", name, made)["documents"]
    assert str(made / "run_rows") in json.dumps(about)


def json_text(folder: Path, name: str) -> str:
    table = pq.read_table(folder)
    return table.filter(pa.compute.equal(table["id"], name))["text"][0].as_py()


@pytest.mark.parametrize("rows", ["rows", "arrow", "mixed"])
def test_every_address_is_right(made: Path, rows: str) -> None:
    """All tokens of all rows: encoding the named document again gives each of them."""
    tokenizer = load_tokenizer(made / "other" / "_tokenizer")
    texts = pq.read_table(made / "rewritten", columns=["id", "text"]).to_pylist()
    encoded = {row["id"]: [*tokenizer.encode_ordinary(row["text"]), tokenizer.eos_id]
               for row in texts}  # fmt: skip
    seen: dict[str, set[int]] = {name: set() for name in encoded}
    tokens = 0
    for source in from_path(str(made / rows), "tokens"):
        for batch in source.batches():
            for row in batch.to_pylist():
                at = 0
                for size, name, offset in zip(row["document_lengths"], row["document_ids"],
                                              row["document_offsets"], strict=True):  # fmt: skip
                    assert row["input_ids"][at : at + size] == encoded[name][offset : offset + size]
                    seen[name].update(range(offset, offset + size))
                    at, tokens = at + size, tokens + size
    assert tokens > 5_000
    if rows != "mixed":
        assert {n: len(numbers) for n, numbers in seen.items()} == {
            name: len(ids) for name, ids in encoded.items()
        }


def test_a_token_of_a_conversation(made: Path, sabia: Commands) -> None:
    for step, row in ((1, 0), (3, 1), (5, 0)):
        answer = report(sabia, "--token", f"{made / 'run_chat'}:{step}:{row}:9",
                        made / "chats.jsonl")  # fmt: skip
        document = answer["document"]
        assert document["id"].startswith("chat-") and document["text_of"]
        assert document["context"].count("[") >= 1


def test_the_rows_of_a_run_of_earlier_results(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the results that the run records names its rows, not the current one."""
    monkeypatch.setitem(RESULTS, "sft", RESULTS["sft"] + 1)
    trained = TrainingRun(made / "run_chat", ())
    assert all(Path(source.name).is_file() for source in trained.sources)


def test_a_document_is_followed_to_steps_and_checkpoints(made: Path, sabia: Commands) -> None:
    outputs, _ = open_outputs([str(made / "rows")])
    trained = TrainingRun(made / "run_rows", outputs)
    texts = pq.read_table(made / "rewritten", columns=["id", "url"]).to_pylist()
    reads: dict[str, set[int]] = {}
    for step in range(1, 8):
        for row in range(6):
            there = read_row(*trained.located(trained.row_of(step, row)))
            for piece in there.pieces:
                reads.setdefault(str(piece.document), set()).add(step)
    listed = made / "urls.txt"
    listed.write_text("\n".join([row["url"] for row in texts] + ["https://nowhere.example/"]))
    answer = report(sabia, "--document", listed, made / "rows", made / "run_rows",
                    *(made / stage for stage in STAGES))  # fmt: skip
    assert answer["not_found"] == ["https://nowhere.example/"]
    steps = {
        one["id"]: {step for row in one["rows"] for read in row["read"] for step in read["steps"]}
        for one in answer["documents"]
    }
    assert {name: document for name, document in steps.items() if document} == reads
    checkpoints = {c for one in answer["documents"] for row in one["rows"]
                   for read in row["read"] for c in read["checkpoints"]}  # fmt: skip
    assert checkpoints == set(trained.checkpoints)


def test_a_removed_copy_is_found_with_the_reason(made: Path, sabia: Commands) -> None:
    answer = report(sabia, "--document", "https://a.example/0/1/copy", made / "raw",
                    made / "removed", made / "unique")  # fmt: skip
    (document,) = answer["documents"]
    kinds = {output["kind"]: output for output in document["outputs"]}
    assert set(kinds) == {"document", "removed"}
    assert kinds["removed"]["reason"] and kinds["removed"]["kept_id"]
    assert document["rows"] == []


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_a_rejected_document_is_found_with_the_reason(
    sabia: Commands, tmp_path: Path, ending: str
) -> None:
    rows = [{"id": "kept", "text": "some text"}, {"id": "refused", "text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokens(tmp_path / "other") / "_tokenizer"
    out = tmp_path / f"rows.{ending}"
    done = sabia("tokenize", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "-o", out)
    assert done.returncode == 0, done.stderr
    answer = report(sabia, "--document", "refused", tmp_path / f"rows.rejects.{ending}", out)
    (document,) = answer["documents"]
    assert [output["reason"] for output in document["outputs"]] == ["empty text"]
    assert document["rows"] == [] and answer["not_found"] == []
    assert report(sabia, "--document", "kept", out)["documents"][0]["rows"]


def test_rows_without_addresses_are_named(made: Path, sabia: Commands, tmp_path: Path) -> None:
    """Rows of earlier versions are read; the answer says how to get addresses."""
    table = pq.read_table(made / "rows" / "part-00000.parquet")
    old = table.drop_columns(["document_ids", "document_offsets"])
    pq.write_table(old, tmp_path / "old.parquet")
    name = old["id"][0].as_py()
    answer = report(sabia, "--row", name, tmp_path / "old.parquet", made / "rewritten")
    assert "--force" in answer["rows"][0]["documents"][0]["address"]
    done = sabia("report", "--document", "some-id", tmp_path / "old.parquet")
    assert done.returncode == 0 and b"no addresses" in done.stderr


@pytest.mark.parametrize("words, text", [
    (("--token", "run_rows:8:0:0"), "step 8 of"),
    (("--token", "run_rows:1:6:0"), "row 6 of a step"),
    (("--token", "run_rows:1:0:48"), "position 48"),
    (("--token", "run_rows:1:0"), "expected RUN:STEP:ROW:POSITION"),
    (("--token", "nowhere:1:0:0"), "no run directory"),
    (("--row", "0" * 32), "no token row"),
    (("--tokenizer", "x"), "only with --row, --token or --document"),
])  # fmt: skip
def test_questions_without_an_answer(
    made: Path, sabia: Commands, words: tuple[str, ...], text: str
) -> None:
    words = tuple(w.replace("run_rows", str(made / "run_rows")) for w in words)
    done = sabia("report", *words, made / "rows")
    assert done.returncode in (2, 65) and text in done.stderr.decode()


def test_another_output_than_the_one_trained_on_is_refused(made: Path, sabia: Commands) -> None:
    done = sabia("report", "--token", f"{made / 'run_arrow'}:1:0:0", made / "rows")
    assert done.returncode == 2 and b"not among the given paths" in done.stderr


def test_a_token_of_a_sample(sabia: Commands, tmp_path: Path) -> None:
    """A sample of a GRPO run names its prompt, whose record is shown; and the other way."""
    run = tmp_path / "run"
    journal = Journal(run / "samples")
    samples = [
        (Completion(request_id=f"r{n}", sample=0, tokens=[5, 6, n], logprobs=[-1.0] * 3,
                    raw_logprobs=[-1.0] * 3, finish_reason="stop", text="t"), Grade(1.0, ()))
        for n in range(3)
    ]  # fmt: skip
    journal.finish(1, 0, ["a", "b", "a"], samples, [{"role": "assistant", "content": "t"}] * 3)
    (run / "run.json").write_text(json.dumps({"identity": {"command": "grpo"}}))
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": name, "messages": [{"role": "user", "content": name}]} for name in "ab"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = report(sabia, "--token", f"{run}:2:1:2", prompts)
    assert (answer["token_id"], answer["sampled"]["prompt_id"]) == (1, "b")
    assert answer["stages"][0]["columns"]["id"] == "b"
    (document,) = report(sabia, "--document", "a", prompts, run)["documents"]
    assert document["samples"] == [{"run": str(run), "steps": [2], "checkpoints": []}]
