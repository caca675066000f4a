"""Every method that cuts parts of documents, compared with plain Python on generated corpora."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage
from naive_cuts import UNITS, expected, folded, make_corpus, without_repeats
from planted import write

from sabia.core.text.dedup.span_cuts import CUT, check_cuts


def cut_like_naive(folder: Path, unit: str, source: random.Random, most: int, engine: str) -> int:
    """Compare one corpus; returns the number of spans that were removed."""
    texts = make_corpus(source, most)
    folder.mkdir()
    given: dict = {"engine": engine, "removed": folder / "removed.parquet"}
    if unit == "substring":
        span = source.choice([2, 5, 11, 30])
        given |= {"method": unit, "span": span}
        left = without_repeats(texts, span)
    else:
        copies, words = source.choice([2, 2, 3]), source.choice([1, 1, 0, 2])
        given |= {"method": "line", "unit": unit, "min_copies": copies, "min_words": words}
        pieces = [UNITS[unit].pieces_of(text) for text in texts]
        assert ["".join(piece) for piece in pieces] == texts
        left = expected(pieces, UNITS[unit].run, copies, words)
    paths = write(folder, texts, source.choice([1, 1, 3]))
    mem = source.choice([1 << 14, 1 << 30])
    stage("dedup", {"mem": mem}, inputs=paths, out=folder / "o.parquet", **given)
    kept = pq.read_table(folder / "o.parquet", columns=["id", "text"]).to_pylist()
    wanted = [
        {"id": f"d{i}", "text": now}
        for i, (text, now) in enumerate(zip(texts, left, strict=True))
        if now.strip() or now == text
    ]
    assert kept == wanted
    spans = pq.read_table(folder / "removed.parquet").to_pylist()
    return check_spans(texts, {row["id"]: row["text"] for row in kept}, spans, unit)


def check_spans(texts: list[str], kept: dict[str, str], rows: list[dict], unit: str) -> int:
    """Removed rows and kept texts make the texts again, and the named copies are equal."""
    raw = {f"d{i}": text.encode() for i, text in enumerate(texts)}
    spans: dict[str, list[dict]] = {}
    for row in rows:
        if row["reason"] != unit:
            assert row["id"] not in kept and row["text"].encode() == raw[row["id"]]
            continue
        spans.setdefault(row["id"], []).append(row)
        copy = raw[row["kept_id"]][row["kept_start"] :]
        if unit == "substring":
            # a last character of which a half belongs to the next span has another copy
            whole = row["text"][:-1].encode() if len(row["text"]) > 1 else b""
            assert copy[: len(whole)] == whole
        else:
            split = UNITS[unit].pieces_of
            count = len(split(row["text"]))
            assert folded("".join(split(copy.decode())[:count])) == folded(row["text"])
    for name, text in kept.items():
        mine = spans.get(name, [])
        edges = [0, *(e for s in mine for e in (s["start"], s["start"] + s["length"]))]
        edges.append(len(raw[name]))
        assert all(a <= b for a, b in pairwise(edges))
        parts = [raw[name][a:b].decode() for a, b in pairwise(edges)]
        assert "".join(parts[::2]) == text
        assert parts[1::2] == [row["text"] for row in mine]
    return len(rows)


@pytest.mark.parametrize("unit", [*UNITS, "substring"])
def test_small_corpora_are_cut_like_the_naive_ones(tmp_path: Path, unit: str) -> None:
    source = random.Random(unit)
    removed = [
        cut_like_naive(tmp_path / str(i), unit, source, most, "numpy")
        for i, most in enumerate([5] * 8 + [60] * 4 + [400] * 2)
    ]
    assert sum(removed) > 50


@pytest.mark.slow
@pytest.mark.parametrize("unit", [*UNITS, "substring"])
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_many_corpora_are_cut_like_the_naive_ones(tmp_path: Path, unit: str, engine: str) -> None:
    source, removed = random.Random(f"{unit} {engine}"), 0
    for i in range(150):
        most = source.choice([20, 200, 2000])
        removed += cut_like_naive(tmp_path / str(i), unit, source, most, engine)
    assert removed > 4_000


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 1, 2)],  # within é
        [(0, 0, 1)],
        [(0, -1, 2)],
        [(0, 2, 2)],
        [(1, 0, 3)],  # beyond the end
        [(0, 0, 3), (0, 2, 4)],
        [(1, 0, 1), (0, 0, 2)],
    ],
)
def test_a_cut_that_would_corrupt_a_document_is_an_error(cuts: list[tuple]) -> None:
    texts = pa.array(["before", "ééé", "ab", "after"]).slice(1, 2)
    check_cuts(texts, np.array([(0, 0, 2, 0, 0), (0, 4, 6, 0, 0), (1, 0, 2, 0, 0)], CUT), "a")
    bad = np.array([(*cut, 0, 0) for cut in cuts], CUT)
    with pytest.raises(AssertionError, match=r"in\.parquet: the cut bytes .* of a text of"):
        check_cuts(texts, bad, "in.parquet")
