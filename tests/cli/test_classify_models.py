"""`sabia classify` with models of the core and language models, as a user runs it."""

import importlib.util
import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from forked import Command

HERE = Path(__file__).parent


def _module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


openai_stub = _module(HERE.parent / "openai_stub.py")
made = _module(HERE.parent / "core" / "recipes" / "classifiers.py")
SABIA = Command("classify")
ASK = 'name = "worth"\ninstruction = "How good?"\nscale = [0, 5]\n'


def classify(*words, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([*SABIA, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs.parquet, a base encoder and a prompt."""
    root = tmp_path_factory.mktemp("models")
    made.documents(root / "docs.parquet", 300)
    made.model(root / "base", made.ENCODER)
    (root / "ask.toml").write_text(ASK)
    return root


def answer(text: str) -> str:
    return "5" if any(word in text.rsplit("\n", 1)[-1] for word in made.WORDS["good"]) else "0"


def scores(path: Path, name: str) -> np.ndarray:
    rows = pq.read_table(path).column("scores").to_pylist()
    return np.array([dict(row).get(name, np.nan) for row in rows], float)


def test_train_and_score(world: Path) -> None:
    run, docs = world / "run", world / "docs.parquet"
    done = classify(
        *("train", docs, "--label", "kind", "--model", world / "base", "-o", run, "--json"),
        *("--lr", "3e-3", "--epochs", 3, "--batch", 16, "--length", 32),
    )
    assert json.loads(done.stdout)["held_out"]["macro_f1"] > 0.9
    out = world / "scored.parquet"
    classify(docs, "--model", f"enc={run}/final", "--no-quality", "-o", out)
    good = np.array(pq.read_table(docs).column("kind").to_pylist()) == "good"
    assert ((scores(out, "enc_good") > 0.5) == good).mean() > 0.95
    for name in ("enc_good", "enc_bad"):
        assert np.isfinite(scores(out, name)).all()


def test_asking_counts_what_is_unknown(world: Path) -> None:
    docs, out = world / "docs.parquet", world / "asked.parquet"
    with openai_stub.Stub(lambda text: "dunno" if "coupon" in text else answer(text)) as stub:
        words = ("--ask", world / "ask.toml", "--lm", "stub", "--cache", world / "calls")
        words = (docs, *words, "--url", stub.url, "--no-quality", "-j", 2)
        done = classify(*words, "-o", out)
        classify(*words, "-o", world / "again.parquet")
    # a reply that cannot be read is not kept: each run requests it twice
    assert {("coupon" in content, n) for content, n in stub.delivered.items()} == {
        (False, 1), (True, 4)
    }  # fmt: skip
    values, texts = scores(out, "worth"), pq.read_table(docs).column("text").to_pylist()
    unknown = np.array(["coupon" in text for text in texts])
    np.testing.assert_array_equal(np.isnan(values), unknown)
    assert f"300 asked, {unknown.sum()} unknown" in done.stderr
    assert set(values[~unknown]) == {0.0, 5.0}


def test_distillation(world: Path) -> None:
    student = world / "student.bin"
    with openai_stub.Stub(answer) as stub:
        classify(
            *("train", world / "docs.parquet", "--ask", world / "ask.toml", "--lm", "stub"),
            *("--url", stub.url, "--cache", world / "calls2", "--sample", 250, "--label", "grade"),
            *("-o", student),
        )
    report = json.loads((world / "student.bin.distilled.json").read_text())
    assert report["labelled"] == 250 and report["unknown"] == 0
    assert all(report[pair]["pearson"] > 0.8 for pair in ("student_and_lm", "student_and_people"))
    assert pq.read_table(world / "student.bin.labels.parquet").num_rows == 250


def test_what_does_not_go_together_is_refused(world: Path) -> None:
    docs = world / "docs.parquet"
    assert "--ask" in classify(docs, "--lm", "x", code=2).stderr
    assert "is not a classifier" in classify(docs, "--model", world / "base", code=2).stderr
    words = ("train", docs, "--label", "kind", "-o", world / "m.bin")
    report = classify(*words, "--lora-rank", 4, code=2).stderr
    assert "--lora-rank: only with --model" in report
    plan = classify(*words, "--model", world / "base", "--length", 32, "--dry-run").stdout
    assert "labels: bad, good" in plan and not (world / "m.bin").exists()
