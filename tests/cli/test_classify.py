"""`sabia classify` as a user runs it: scores, filters, slices, classifiers, refusals."""

import json
import os
import random
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from forked import Command

from sabia.core.shards.arrow_arrays import as_dict

SABIA = Command("classify")
ENGLISH = (
    "The harbour was quiet that evening, and the fishermen had already brought in their nets."
    " Someone was singing behind the warehouse, where the lamps had not yet been lit. A boy ran"
    " along the quay with a letter in his hand, looking for the captain, who was not to be found"
    " anywhere. Number {} had won again."
)
PORTUGUESE = (
    "O porto estava calmo naquela tarde, e os pescadores já tinham recolhido as redes. Alguém"
    " cantava atrás do armazém, onde ainda não se tinham acendido as lâmpadas. Um rapaz corria"
    " pelo cais com uma carta na mão, à procura do capitão, que não se encontrava em parte"
    " alguma. O número {} tinha ganhado outra vez."
)
SPAM = "buy cheap watches online cheap watches buy now {} " * 12


def classify(*words, **settings) -> subprocess.CompletedProcess:
    settings = {"capture_output": True, "timeout": 60} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """shards/ with 4 files of 30 documents, their labels, and all.parquet with the same rows."""
    root = tmp_path_factory.mktemp("classify")
    (root / "shards").mkdir()
    kinds = [("en", ENGLISH), ("pt", PORTUGUESE), ("spam", SPAM)]
    rows = [
        {
            "id": f"d{i}",
            "text": text.replace("{}", str(i)),
            "label": "spam" if name == "spam" else "ham",
        }
        for i in range(40)
        for name, text in kinds
    ]
    rows = [row | {"id": f"{row['id']}{n}"} for n, row in enumerate(rows)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, root / "all.parquet", row_group_size=50)
    for part in range(4):
        pq.write_table(table.slice(part * 30, 30), root / "shards" / f"s{part}.parquet")
    return root


def rows(path: Path) -> list[dict]:
    names = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    return [row for name in names for row in pq.read_table(name).to_pylist()]


def test_scores_language_and_filter(world: Path, tmp_path: Path) -> None:
    keep = "quality >= 0.5 and language == 'pt'"
    done = classify(world / "all.parquet", "-o", tmp_path / "k.parquet", "--where", keep,
                    "--removed", tmp_path / "r.parquet", "--stats", tmp_path / "s.json",
                    check=True)  # fmt: skip
    kept, removed = rows(tmp_path / "k.parquet"), rows(tmp_path / "r.parquet")
    assert len(kept) == 40 and len(removed) == 80 and b"not kept 80" in done.stderr
    assert all(row["language"] == "pt" and row["text"][0] == "O" for row in kept)
    assert dict(kept[0]["scores"])["quality"] == 1.0 and kept[0]["label"] == "ham"
    assert {row["reason"] for row in removed} == {f"not {keep}"}
    figures = json.loads((tmp_path / "s.json").read_text())
    assert figures["rejected"] == 0 and figures["counters"]["not kept"] == 80


def test_workers_slices_and_pipes_give_the_same_rows(world: Path, tmp_path: Path) -> None:
    expected = rows_of(classify(world / "all.parquet", "--to", "jsonl", check=True))
    classify(world / "shards", "-o", tmp_path / "j2", "-j", 2, check=True)
    for task in range(2):
        array = {"TASK_ID": task, "TASK_COUNT": 2, "TASK_MIN": 0, "TASK_MAX": 1, "TASK_STEP": 1}
        slurm = {f"SLURM_ARRAY_{name}": str(value) for name, value in array.items()}
        completed = classify(
            world / "shards", "-o", tmp_path / "array", "--shard", "auto", env=os.environ | slurm
        )
        assert completed.returncode == 0 and b"2 of 4 shards" in completed.stderr
    for name in ("j2", "array"):
        assert [row["id"] for row in rows(tmp_path / name)] == [row["id"] for row in expected]
        scores = [as_dict(row["scores"]) for row in rows(tmp_path / name)]
        assert scores == [row["scores"] for row in expected]


def rows_of(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_removed_rows_of_a_directory(world: Path, tmp_path: Path) -> None:
    line = [world / "shards", "-o", tmp_path / "o", "--where", "quality > 0.5"]
    classify(*line, "-j", 2, "--removed", tmp_path / "r", check=True)
    assert len(rows(tmp_path / "o")) == 80 and len(rows(tmp_path / "r")) == 40
    again = classify(*line, "--removed", tmp_path / "r")
    assert b"4 shards already done" in again.stderr and len(rows(tmp_path / "r")) == 40
    whole = rows(tmp_path / "r")
    for out, removed in (("o", "x.parquet"), ("o.parquet", "x")):
        line[2] = tmp_path / out
        classify(*line, "--removed", tmp_path / removed, check=True)
        assert len(rows(tmp_path / out)) == 80 and rows(tmp_path / removed) == whole
    line[2] = tmp_path / "o"
    classify(*line, "--removed", tmp_path / "x.parquet", check=True)
    (tmp_path / "o" / "part-00002.parquet").unlink()
    classify(*line, "--removed", tmp_path / "x.parquet", check=True)
    assert rows(tmp_path / "x.parquet") == whole and len(rows(tmp_path / "o")) == 80
    wrong = classify(*line, "--removed", tmp_path / "y.parquet", "--shard", "0/2")
    assert wrong.returncode == 2 and b"--removed" in wrong.stderr and b"directory" in wrong.stderr
    wrong = classify(*line, "--removed", tmp_path / "r.csv")
    assert wrong.returncode == 2 and b"--removed" in wrong.stderr


def test_train_then_predict(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="classifiers need fasttext-numpy2")
    model = tmp_path / "spam.bin"
    trained = classify("train", world / "shards", "--label", "label", "-o", model)
    assert trained.returncode == 0 and not trained.stdout
    assert b"held out: spam: precision 1.000, recall 1.000" in trained.stderr
    scored = classify(world / "all.parquet", "--model", model, "--where", "spam < 0.5",
                      "--no-quality", "--to", "jsonl", check=True)  # fmt: skip
    kept = rows_of(scored)
    assert len(kept) == 80 and all(row["label"] == "ham" for row in kept)
    assert set(kept[0]["scores"]) == {"ham", "spam"} and kept[0]["language"] is None


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A score with noise around a label, in two languages that need different thresholds."""
    draw = random.Random(1)
    rows = []
    for i in range(1200):
        language, kind = "pt" if i % 2 else "en", i % 3 == 0
        value = (0.75 if kind else 0.4) - 0.2 * (language == "pt") + draw.gauss(0, 0.08)
        rows.append({"id": f"d{i}", "text": f"text {i}", "language": language, "edu": value,
                     "kind": "edu" if kind else "no"})  # fmt: skip
    root = tmp_path_factory.mktemp("scored")
    pq.write_table(pa.Table.from_pylist(rows), root / "scored.parquet")
    return root / "scored.parquet"


def test_threshold_then_calibration(scored: Path, tmp_path: Path) -> None:
    decision = tmp_path / "edu.json"
    done = classify("threshold", scored, "--score", "edu", "--label", "kind", "--precision", "95%",
                    "-o", decision, check=True)  # fmt: skip
    assert b"calibration:" in done.stdout and b"pt" in done.stdout
    report = json.loads(decision.read_text())
    limits = report["thresholds"]
    assert limits["pt"] + 0.1 < limits["other"] < limits["en"] + 0.1
    assert report["languages"]["en"]["precision"] >= 0.95
    assert report["expected_calibration_error"] < 0.05
    line = [scored, "--no-quality", "--calibration", decision, "--where", "edu_ok and edu > 0"]
    completed = classify(*line, "--price-per-hour", "$0.05", "--to", "jsonl", "--stats",
                    tmp_path / "s.json", check=True)  # fmt: skip
    kept = rows_of(completed)
    right = [row["kind"] == "edu" for row in kept]
    assert sum(right) >= 0.95 * len(right) and sum(right) > 300
    assert all(0 <= row["scores"]["edu_probability"] <= 1 for row in kept)
    assert b"edu_probability 0 " in completed.stderr
    figures = json.loads((tmp_path / "s.json").read_text())["counters"]
    assert figures["usd per 1e9"] == pytest.approx(0.05 * figures["cpu hours per 1e9"])
    assert figures["share kept"] == len(kept) / 1200
    assert sum(v for k, v in figures.items() if k.startswith("edu_ok[")) == 1200


def test_drift(scored: Path, tmp_path: Path) -> None:
    table = pq.read_table(scored)
    moved = pa.compute.add(table["edu"], 0.1)
    pq.write_table(table.set_column(3, "edu", moved), tmp_path / "later.parquet")
    done = classify("drift", scored, tmp_path / "later.parquet", "--score", "edu", "--json")
    (row,) = json.loads(done.stdout)
    assert row["verdict"] == "much" and row["ks"] > 0.15
    same = classify("drift", scored, scored, "--score", "edu", check=True)
    assert b"none" in same.stdout
    alone = classify("drift", scored)
    assert alone.returncode == 2 and b"expected two" in alone.stderr


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["--label", "kind"], 2, b"--score: is missing"),
        (["--score", "edu"], 2, b"--label: is missing; give --label or --positive"),
        (["--score", "nope", "--label", "kind"], 2, b"no row has a score 'nope'"),
        (["--score", "edu", "--label", "edu"], 2, b"--positive"),
        (["--score", "edu", "--positive", "edu > 9"], 65, b"0 of them positive"),
        (
            ["--score", "edu", "--label", "kind", "--precision", "100%", "--sure"],
            3,
            b"with 95 % confidence",
        ),
        (
            ["--score", "edu", "--label", "kind", "--precision", ".9", "--recall", ".9"],
            2,
            b"not together",
        ),
        (["--score", "edu", "--label", "kind", "--sure"], 2, b"--sure: only with --precision or"),
        (["--score", "ed", "--label", "kind"], 2, b"no row has a score 'ed'; did you mean edu?"),
    ],
)
def test_refusals_of_threshold(scored: Path, words: list[str], code: int, hint: bytes) -> None:
    refused = classify("threshold", scored, *words)
    assert refused.returncode == code and hint in refused.stderr and not refused.stdout
    assert len(lines_of_error(refused.stderr)) == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--calibration", "none.json"], b"No such file"),
        (["--where", "open('x')"], b"not allowed"),
        (["--where", "qualty > 1"], b"all.parquet; did you mean quality"),
        (["--where", "quality>>"], b"is not an expression (expected such as quality >= 0.5"),
        (["--where", "text > 1"], b"cannot be computed"),
        (["--removed", "r.parquet"], b"--removed: only with --where"),
        (["--model", "none.bin"], b"No such file"),
        (["--pii", "hide"], b"--pii: 'hide' (expected count or mask)"),
        (["--long", "foo"], b"--long: 'foo' (expected truncate or windows)"),
        (["--precision", "fp9"], b"--precision: 'fp9' (expected fp32 or bf16)"),
        (["--long", "truncate"], b"--long: only with --model"),
        (["--length", "77"], b"--length: only with --model"),
        (["--backend", "torch"], b"--backend: only with --model or --ask"),
        (["--concurrency", "3"], b"--concurrency: only with --url"),
        (["--max-usd", "5"], b"--max-usd: only with --prices"),
        (["--max-requests", "5"], b"--max-requests: only with --url"),
        (["--cache", "c"], b"--cache: only with --ask"),
        (["--lm", "x"], b"--lm: only with --ask"),
        (["--ask", "a.toml"], b"--lm: is missing"),
        (["--ask", "none", "--lm", "x"], b"--ask: none: No such file or directory"),
        (["--ask", "a", "--lm", "x", "--concurrency", "16"], b"--concurrency: only with --url"),
        (["--ask", "a", "--lm", "x", "--url", "http://h/v1", "--backend", "jax"], b"without --url"),
    ],
)
def test_refusals(world: Path, tmp_path: Path, words: list[str], hint: bytes) -> None:
    refuses([world / "all.parquet", *words], hint, tmp_path)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], b"--out: is missing"),
        (["-o", "m.bin"], b"--label: is missing; give --label, --positive or --ask"),
        (["--label", "label", "-o", "-"], b"--out: - (expected the name of a model"),
        (["--label", "label", "-o", "m.bin", "--lr", "5e-5"], b"--lr: only with --model"),
        (["--label", "label", "-o", "m.bin", "--mesh", "data=1"], b"--mesh: only with --model"),
        (["--label", "label", "-o", "m.bin", "--sample", "10k"], b"--sample: only with --ask"),
        (["--label", "l", "-o", "m", "--model", "d", "--dim", "8"], b"--dim: only without --model"),
        (["--label", "l", "-o", "m", "--model", "d", "-j", "2"], b"--jobs: only without --model"),
        (["--ask", "a", "--lm", "d", "-o", "m", "--positive", "x"], b"only without --model or"),
        (
            ["--label", "l", "-o", "m", "--model", "d", "--steps", "3", "--epochs", "2"],
            b"--steps: not together with --epochs",
        ),
        (["--label", "kind", "-o", "m.bin"], b"no column 'kind'"),
        (["--where", "x > 1"], b"no such option"),
        (["--label", "label", "--subwords", "4", "-o", "m.bin"], b"expected MIN-MAX"),
    ],
)
def test_refusals_of_train(world: Path, tmp_path: Path, words: list[str], hint: bytes) -> None:
    refused = classify("train", world / "all.parquet", *words, cwd=tmp_path)
    assert refused.returncode == 2 and hint in refused.stderr and not refused.stdout
    assert not list(tmp_path.iterdir())


def lines_of_error(stderr: bytes) -> list[bytes]:
    """Lines on stderr, without the note that a file of another program has no digests."""
    return [line for line in stderr.splitlines() if b"has no digests" not in line]


def refuses(words: list, hint: bytes, tmp_path: Path) -> None:
    refused = classify(*words, cwd=tmp_path)
    assert refused.returncode == 2 and hint in refused.stderr and not refused.stdout
    assert len(lines_of_error(refused.stderr)) == 1 and not list(tmp_path.iterdir())
