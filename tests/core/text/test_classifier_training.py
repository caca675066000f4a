"""Training fastText models: every input ends in a model or in one line, one thread is exact."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("fasttext", reason="training needs fasttext-numpy2")

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.options.classify_train import ClassifyTrainOptions, FastText
from sabia.core.shards.job import Job
from sabia.core.text.classify import fasttext_model, train_stage
from sabia.core.text.classify.train_stage import Settings, run, settings_for


def documents(path: Path, count: int = 600, classes: int = 2, **columns: Any) -> str:
    """Texts whose words tell their label, one in ten of them mislabelled; two languages."""
    source = random.Random(6)
    labels, texts = [], []
    for i in range(count):
        kind = i % classes
        words = [f"k{kind}w{source.randrange(40)}" for _ in range(8)]
        texts.append(" ".join(words + [f"c{source.randrange(200)}" for _ in range(8)]) + "\nend")
        labels.append(f"class {kind}" if source.random() > 0.1 else "class 0")
    table = {"id": [str(i) for i in range(count)], "text": texts, "label": labels,
             "language": ["pt" if i % 3 else None for i in range(count)]} | columns  # fmt: skip
    pq.write_table(pa.table(table), path)
    return str(path)


def train(given: str, out: Path, **values: Any) -> dict[str, Any]:
    options = ClassifyTrainOptions(out=str(out), **values)
    run(Job("classify train", inputs=(given,), out=str(out)), options)
    return json.loads(Path(f"{out}.json").read_text())


def test_training_learns_and_repeats_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = documents(tmp_path / "d.parquet")
    report = train(given, tmp_path / "a.bin", label="label")
    figures = report["labels"]
    assert [one["label"] for one in figures] == ["class_0", "class_1"]
    assert report["held_out"] == sum(one["documents"] for one in figures) > 30
    assert figures[1]["f1"] > 0.8 and figures[1]["auc"] > 0.8 < report["accuracy"]
    assert {row["language"] for row in report["languages"]} == {"pt", "und"}
    assert sum(row["documents"] for row in report["languages"]) == report["held_out"]
    assert report["size_bytes"] < 3e6
    train(given, tmp_path / "b.bin", label="label")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    before = (tmp_path / "a.bin").stat().st_mtime_ns
    assert "already trained" not in capsys.readouterr().err
    again = train(given, tmp_path / "a.bin", label="label")
    assert again == report and (tmp_path / "a.bin").stat().st_mtime_ns == before
    assert "already trained" in capsys.readouterr().err
    (tmp_path / "a.bin").write_bytes(b"damaged")
    train(given, tmp_path / "a.bin", label="label")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_positive_names_two_labels_after_the_model(tmp_path: Path) -> None:
    given = documents(tmp_path / "d.parquet", classes=3, stars=[i % 3 for i in range(600)])
    report = train(given, tmp_path / "best.v2.bin", positive="stars == 2")
    assert set(report["label_counts"]) == {"best", "not_best"}
    assert report["accuracy"] > 0.95
    with pytest.raises(UsageError, match=r"--positive: 'star' is neither"):
        train(given, tmp_path / "x.bin", positive="star == 2")


def test_quantized_model_is_smaller_and_as_good(tmp_path: Path) -> None:
    given = documents(tmp_path / "d.parquet")
    whole = train(given, tmp_path / "a.bin", label="label")
    small = train(given, tmp_path / "a.ftz", label="label", quantize_model=True)
    assert small["size_bytes"] < 0.4 * whole["size_bytes"]
    assert small["accuracy"] > whole["accuracy"] - 0.1


ODD_INPUTS = {
    "three words": [(f"{'ab'[i % 2]}", "xyz"[i % 3]) for i in range(60)],
    "all the same text": [(f"{'ab'[i % 2]}", "same text") for i in range(40)],
    "empty texts": [("ab"[i % 2], "") for i in range(40)],
    "unicode labels": [(["não é", "日本 語"][i % 2], f"w{i % 7}") for i in range(60)],
    "labels inside texts": [("ab"[i % 2], f"__label__c x{i % 2} </s> y") for i in range(60)],
    "one long text": [("ab"[i % 2], f"w{i % 2} " * (20_000 if i < 2 else 3)) for i in range(20)],
    "few documents": [("a", "x"), ("b", "y"), ("a", "z"), ("b", "x"), ("a", "v"), ("b", "u")],
    "control characters": [("ab"[i % 2], f"a\0b\r\n\x0bc{i % 2}") for i in range(40)],
}


@pytest.mark.parametrize("name", ODD_INPUTS)
@pytest.mark.parametrize("how", [{}, {"dim": 16, "ngrams": 1, "subwords": "2-4"}], ids=str)
def test_odd_inputs_end_in_a_model(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    labels, texts = zip(*ODD_INPUTS[name], strict=True)
    table = pa.table({"id": [f"{name}{i}" for i in range(len(texts))], "text": texts, "l": labels})
    pq.write_table(table, tmp_path / "d.parquet")
    report = train(str(tmp_path / "d.parquet"), tmp_path / "m.bin", label="l", **how)
    model = fasttext_model.load(str(tmp_path / "m.bin"))
    scores = fasttext_model.score_array(model, pa.array([*texts, "", "never seen"]))
    assert np.isfinite(scores).all()
    assert set(model.labels) == {"_".join(label.split()) for label in set(labels)}
    assert report["documents"] + report["held_out"] == len(texts)


@pytest.mark.slow
def test_ten_thousand_labels(tmp_path: Path) -> None:
    rows = [(f"label {i % 10_000}", f"w{i % 10_000} v{i % 10_000}") for i in range(60_000)]
    labels, texts = zip(*rows, strict=True)
    table = pa.table({"id": [str(i) for i in range(len(texts))], "text": texts, "l": labels})
    pq.write_table(table, tmp_path / "d.parquet")
    report = train(str(tmp_path / "d.parquet"), tmp_path / "m.bin", label="l")
    assert report["settings"]["loss"] == "hs" and report["accuracy"] > 0.9


def test_nan_is_met_with_safer_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "t.txt"
    lines.write_text("".join(f"__label__{'ab'[i % 2]} {'xy'[i % 2]}\n" for i in range(40)))
    library = train_stage.library()
    used: list[dict[str, Any]] = []
    real = library.train_supervised

    def fails_at_first(**settings: Any) -> Any:
        used.append(settings)
        if len(used) <= failures:
            raise RuntimeError("Encountered NaN.")
        return real(**settings)

    monkeypatch.setattr(library, "train_supervised", fails_at_first)
    failures, settings = 3, Settings(5, 4096, thread=2)
    final = train_stage.fit(str(lines), settings, str(tmp_path / "m.bin"))
    assert final.lr < 0.01 and final.maxn == 4 and final.thread == 1 and final.dim == 16
    assert capsys.readouterr().err.count("training ended in NaN; trying again with") == 3
    used.clear()
    failures = 99
    with pytest.raises(Failed, match="NaN with every setting"):
        train_stage.fit(str(lines), settings, str(tmp_path / "n.bin"))
    assert not (tmp_path / "n.bin").exists()


def test_settings_follow_the_data() -> None:
    toy = settings_for(100, 6_000, 2, FastText(), 0, 1)
    large = settings_for(5_000_000, 3_000_000_000, 2, FastText(), 0, 1)
    assert (toy.epoch, toy.bucket, toy.minCount, toy.dim) == (50, 8192, 1, 32)
    assert (large.epoch, large.bucket, large.minCount) == (5, 1 << 20, 5)
    assert settings_for(100, 100, 5_000, FastText(dim=7, epochs=3), 0, 1).epoch == 3


def test_what_cannot_be_trained(tmp_path: Path) -> None:
    one, out = documents(tmp_path / "d.parquet", 50, classes=1), tmp_path / "m.bin"
    with pytest.raises(BadData, match="1 different labels"):
        train(one, out, label="label")
    with pytest.raises(UsageError, match="no column 'kind'"):
        train(one, out, label="kind")
    blank = documents(tmp_path / "e.parquet", 6, label=[" ", None, "", "\0", None, ""])
    with pytest.raises(BadData, match="0 different labels"):
        train(blank, out, label="label")
    lists = documents(tmp_path / "f.parquet", 2, label=[["a"], ["b"]])
    with pytest.raises(UsageError, match="is list"):
        train(lists, out, label="label")
    two = documents(tmp_path / "g.parquet", 60)
    with pytest.raises(UsageError, match="--quantize-model"):
        train(two, out, label="label", quantize_model=True, ngrams=1)
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_files_with_the_labels_in_turn_train_as_shuffled_ones(tmp_path: Path) -> None:
    rows = [(f"label {i % 1500}", f"w{i % 1500} v{i % 1500}") for i in range(9000)]
    accuracy = []
    for name, order in (
        ("turn", range(9000)),
        ("mixed", random.Random(5).sample(range(9000), 9000)),
    ):
        labels, texts = zip(*(rows[i] for i in order), strict=True)
        table = pa.table({"id": [str(i) for i in order], "text": texts, "l": labels})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        given, model = str(tmp_path / f"{name}.parquet"), tmp_path / f"{name}.bin"
        accuracy.append(train(given, model, label="l", epochs=5)["accuracy"])
    assert abs(accuracy[0] - accuracy[1]) < 0.05 and min(accuracy) > 0.4, accuracy
