"""fastText: training with held-out figures, the NaN guard, prediction as scores."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("fasttext", reason="classifiers need fasttext-numpy2")

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.shards.inputs import from_path
from sabia.core.text import fasttext_model


def documents(path: Path, count: int = 600, classes: int = 2) -> str:
    """Texts whose words tell their label, one in ten of them mislabelled."""
    source = random.Random(6)
    labels, texts = [], []
    for i in range(count):
        kind = i % classes
        words = [f"k{kind}w{source.randrange(40)}" for _ in range(8)]
        texts.append(" ".join(words + [f"c{source.randrange(200)}" for _ in range(8)]) + "\nend")
        labels.append(f"class {kind}" if source.random() > 0.1 else "class 0")
    table = pa.table({"id": [str(i) for i in range(count)], "text": texts, "label": labels})
    pq.write_table(table, path)
    return str(path)


def test_training_learns_and_repeats_itself(tmp_path: Path) -> None:
    sources = from_path(documents(tmp_path / "d.parquet"), "document")
    figures = fasttext_model.train(sources, "label", str(tmp_path / "a.bin"), 0, 1)
    assert [one.label for one in figures] == ["class_0", "class_1"]
    assert 30 < sum(one.documents for one in figures) < 100
    assert figures[1].precision > 0.8 and figures[1].recall > 0.8
    fasttext_model.train(sources, "label", str(tmp_path / "b.bin"), 0, 1)
    models = [fasttext_model.load(str(tmp_path / name)) for name in ("a.bin", "b.bin")]
    texts = ["k0w1 k0w2 k0w3", "k1w1\nk1w2 k1w9", "", "\x00\r\n"]
    one, two = (fasttext_model.predict(model, texts) for model in models)
    assert set(one) == {"class_0", "class_1"}
    for label in one:
        assert np.array_equal(one[label], two[label])
    assert one["class_1"][1] > 0.9 > 0.1 > one["class_1"][0]
    assert one["class_0"] + one["class_1"] == pytest.approx(1, abs=1e-3)


def test_nan_on_tiny_vocabularies_is_met_with_safer_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "t.txt"
    lines.write_text("".join(f"__label__{'ab'[i % 2]} {'xy'[i % 2]}\n" for i in range(40)))
    library = fasttext_model._library()
    used: list[dict[str, Any]] = []
    real = library.train_supervised

    def fails_at_first(**settings: Any) -> Any:
        used.append(settings)
        if len(used) <= failures:
            raise RuntimeError("Encountered NaN.")
        return real(**settings)

    monkeypatch.setattr(library, "train_supervised", fails_at_first)
    failures = 2
    model = fasttext_model.fit(str(lines), 5, 0, 1, [])
    assert sorted(model.labels) == ["__label__a", "__label__b"]
    assert used[-1]["minn"] == 2 and used[-1]["lr"] < used[0]["lr"]
    assert capsys.readouterr().err.count("NaN") == 2
    used.clear()
    failures = 9
    with pytest.raises(Failed, match="NaN with every setting"):
        fasttext_model.fit(str(lines), 5, 0, 1, [])


@pytest.mark.parametrize("words", [1, 3, 30])
def test_tiny_vocabularies_train(words: int, tmp_path: Path) -> None:
    source = random.Random(words)
    lines = tmp_path / "t.txt"
    rows = (f"__label__{'ab'[i % 2]} w{source.randrange(words)}" for i in range(50))
    lines.write_text("\n".join(rows) + "\n")
    model = fasttext_model.fit(str(lines), 50, 0, 1, ["w0"])
    assert all(np.isfinite(v).all() for v in fasttext_model.predict(model, ["w0", "new"]).values())


def test_what_cannot_be_trained_or_loaded(tmp_path: Path) -> None:
    one = from_path(documents(tmp_path / "d.parquet", 50, classes=1), "document")
    out = str(tmp_path / "m.bin")
    with pytest.raises(BadData, match="1 different labels"):
        fasttext_model.train(one, "label", out, 0, 1)
    with pytest.raises(UsageError, match="no column 'kind'"):
        fasttext_model.train(one, "kind", out, 0, 1)
    assert not Path(out).exists()
    with pytest.raises(UsageError, match="No such file"):
        fasttext_model.load(str(tmp_path / "none.bin"))
    (tmp_path / "bad.bin").write_bytes(b"not a model")
    with pytest.raises(BadData, match="not a fastText model"):
        fasttext_model.load(str(tmp_path / "bad.bin"))
