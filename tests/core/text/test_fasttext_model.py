"""fastText models: scores are the library's, and what cannot be read is refused."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("fasttext", reason="the judge is fasttext-numpy2")

from sabia.core.errors import BadData, UsageError
from sabia.core.text.classify import fasttext_model
from sabia.core.text.classify.scorers import FastTextScorer, check_names, score_column, with_prefix
from sabia.core.text.classify.train_stage import library, zeroed_memory
from sabia.kernels.fasttext.interface import score
from sabia.kernels.fasttext.model_file import read_classifier

LETTERS = ["a", "é", "ß", "本", "😀", "b", "ç", "z", "-", "\u00a0", "\u2028", "\x85"]
ODD = [
    b"", b" ", b"</s>", b"k0 </s> k1 k2", b"</s>x", b"__label__c1 k1", b"__label__new k1",
    b"__label__", b"k0\tk1\vk2\fk3\rk4\0k5", "k0\u00a0k1 \u2028".encode(), b"\x1f k1 \x7f",
    ("é" * 3000).encode(), b"k0 new " * 3000, b"<", b">", b"<k0>", b"\xff\xfe k0", b"k0\xc3 \x80k1",
    b"\xe6\x9c", "本本 k1".encode(), b"a",
]  # fmt: skip


def lines(seed: int, count: int, classes: int = 3) -> list[str]:
    source = random.Random(seed)
    words = ["".join(source.choices(LETTERS, k=source.randint(1, 7))) for _ in range(250)]
    words += [f"k{i}" for i in range(20)]
    return [
        f"__label__c{i % classes} "
        + " ".join(words[(i % classes * 40 + source.randrange(190)) % 270] for _ in range(12))
        for i in range(count)
    ]


def buffers(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, texts)])
    return np.frombuffer(b"".join(texts), np.uint8), offsets.astype(np.int64)


def judge(model: Any, texts: list[bytes]) -> np.ndarray:
    """The library's scores float64[n, labels], at most 1; NaN rows where it says nothing."""
    result = np.full((len(texts), len(model.labels)), np.nan)
    for row, text in zip(result, texts, strict=True):
        predicted = model.f.predict(text + b"\n", -1, 0.0, "strict")
        if predicted:
            row[:] = 0
        for probability, label in predicted:
            row[model.labels.index(label)] = min(probability, 1)
    return result


CASES = [
    ({"loss": "softmax", "wordNgrams": 1}, None),
    ({"loss": "softmax", "wordNgrams": 5, "bucket": 999}, None),
    ({"loss": "softmax", "wordNgrams": 2, "minn": 2, "maxn": 4, "bucket": 700}, None),
    ({"loss": "ova", "wordNgrams": 3, "minn": 1, "maxn": 3, "bucket": 700}, None),
    ({"loss": "ns", "wordNgrams": 2, "bucket": 300}, None),
    ({"loss": "hs", "wordNgrams": 4, "bucket": 500}, None),
    ({"loss": "softmax", "wordNgrams": 2, "bucket": 400}, {}),
    ({"loss": "hs", "minn": 2, "maxn": 3, "bucket": 600}, {"qnorm": True, "dsub": 3}),
    ({"loss": "ova", "wordNgrams": 2, "bucket": 800}, {"cutoff": 300, "qnorm": True}),
    ({"loss": "softmax", "minn": 2, "maxn": 4, "bucket": 800}, {"cutoff": 260}),
    ({"loss": "softmax", "wordNgrams": 2, "bucket": 400}, {"qout": True}),
]


@pytest.mark.parametrize(("settings", "quantized"), CASES, ids=str)
def test_scores_are_the_librarys(
    settings: dict[str, Any], quantized: dict[str, Any] | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    classes = 300 if quantized and "qout" in quantized else 3
    rows = lines(1, 600, classes)
    (tmp_path / "t.txt").write_text("\n".join(rows) + "\n")
    given = {"dim": 11, "epoch": 3, "lr": 0.2, "thread": 1, "verbose": 0} | settings
    with zeroed_memory():
        model = library().train_supervised(str(tmp_path / "t.txt"), **given)
        if quantized is not None:
            model.quantize(**quantized)
    path = str(tmp_path / "m.bin")
    model.save_model(path)
    texts = [row.partition(" ")[2].encode() for row in lines(2, 60)] + ODD
    expected = judge(library().load_model(path), texts)
    data, offsets = buffers(texts)
    for unpack_below in (0, 1 << 30):  # quantized rows as codes, and written out
        monkeypatch.setattr("sabia.kernels.fasttext.model_file.UNPACK_BELOW_BYTES", unpack_below)
        classifier, labels, _ = read_classifier(path)
        assert [f"__label__{label}" for label in labels] == model.labels
        for engine in ("numba", "numpy"):
            predicted = score(data, offsets, classifier, engine)
            assert np.array_equal(np.isnan(predicted), np.isnan(expected))
            assert np.nanmax(np.abs(predicted - expected)) < 1e-5, engine
    opened = fasttext_model.load(path)  # with subwords folded into words, where that is done
    folded = score(data, offsets, opened.classifier, "numba")
    assert np.nanmax(np.abs(folded - expected)) < 1e-5


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("small")
    (folder / "t.txt").write_text("\n".join(lines(3, 100, 2)) + "\n")
    with zeroed_memory():
        model = library().train_supervised(str(folder / "t.txt"), dim=5, thread=1, verbose=0)
    model.save_model(str(folder / "m.bin"))
    return str(folder / "m.bin")


def test_a_document_is_one_line_whose_breaks_are_blanks(small: str) -> None:
    model = fasttext_model.load(small)
    broken, whole = fasttext_model.score_array(model, pa.array(["k0 k1\nk2\r\nk3", "k0 k1 k2  k3"]))
    assert np.array_equal(broken, whole)


def test_scorer_reads_slices_of_arrays_and_says_names(small: str) -> None:
    scorer = with_prefix(FastTextScorer(small), "mine")
    texts = pa.array(["other", "k0 k1", "k2", ""])
    assert scorer.names == ("mine_c0", "mine_c1")
    sliced = score_column(scorer, texts.slice(1, 2))
    again = scorer.score(["k0 k1", "k2"])
    assert all(np.array_equal(sliced[name], again[name]) for name in scorer.names)
    assert sliced["mine_c0"].dtype == np.float32
    with pytest.raises(UsageError, match="two models give the score 'c0'"):
        check_names([FastTextScorer(small), FastTextScorer(small)])


def test_what_is_no_model(small: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        fasttext_model.load(str(tmp_path / "none.bin"))
    whole = Path(small).read_bytes()
    path = tmp_path / "bad.bin"
    source = random.Random(0)
    cut = [whole[: source.randrange(len(whole))] for _ in range(60)]
    for content in [b"", b"not a model", *cut, whole[:4] + struct.pack("<i", 9) + whole[8:]]:
        path.write_bytes(content)
        fasttext_model._load.cache_clear()
        with pytest.raises(BadData, match="not a fastText model"):
            fasttext_model.load(str(path))


def test_word_vectors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(lines(3, 50)) + "\n")
    with zeroed_memory():
        model = library().train_unsupervised(
            str(tmp_path / "t.txt"), dim=4, epoch=1, minCount=1, bucket=50, thread=1, verbose=0
        )
    model.save_model(str(tmp_path / "v.bin"))
    with pytest.raises(BadData, match="word vectors"):
        fasttext_model.load(str(tmp_path / "v.bin"))
