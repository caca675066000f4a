"""Repeated windows: both engines against a dictionary of all windows, on texts made to be hard."""

import random

import numpy as np
import pytest

from sabia.kernels.runtime.dispatch import numba_available
from sabia.kernels.substring.interface import file_windows, find_repeats

ENGINES = ["numpy", "numba"] if numba_available() else ["numpy"]


def by_dictionary(documents: list[bytes], span: int) -> dict[int, int]:
    """window -> its first occurrence, for windows whose first occurrence ends before them."""
    first: dict[bytes, int] = {}
    windows, base = {}, 0
    for text in documents:
        for i in range(len(text) - span + 1):
            at = first.setdefault(text[i : i + span], base + i)
            if at + span <= base + i:
                windows[base + i] = at
        base += len(text)
    return windows


def laid_out(documents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, documents)])
    return np.frombuffer(b"".join(documents), np.uint8), offsets


def settle(documents: list[bytes], span: int, engine: str, dtype: str, passes: int) -> dict:
    units, offsets = laid_out(documents)
    units = units.astype(dtype)
    records = file_windows(units, offsets, span, engine)
    assert records["count"].sum() == sum(max(0, len(d) - span + 1) for d in documents)
    records = records[np.lexsort((records["start"], records["value"]))]
    heads = np.flatnonzero(np.append(True, np.diff(records["value"]) != 0)[: len(records)])
    starts = np.append(heads, len(records))
    runs = find_repeats(units, records, starts, span, passes, engine)
    windows = {}
    for start, count, first in zip(*(column.tolist() for column in runs), strict=True):
        windows |= {start + i: first + i for i in range(count)}
    return windows


def hard_texts(source: random.Random) -> list[bytes]:
    """Few letters, copies, copies of parts, periods, runs of one letter, and short texts."""
    letters = bytes(source.sample(range(256), source.choice([1, 2, 4, 200])))
    texts: list[bytes] = []
    for _ in range(source.randrange(1, 12)):
        text = bytes(source.choices(letters, k=source.randrange(0, 150)))
        if texts and source.random() < 0.6:
            other = source.choice(texts)
            low = source.randrange(len(other) + 1)
            cut = source.randrange(len(text) + 1)
            text = text[:cut] + other[low : low + source.randrange(1, 120)] + text[cut:]
        if source.random() < 0.2:
            text = text[: source.randrange(1, 9)] * 30
        texts.append(text)
    return texts


@pytest.mark.parametrize("engine", ENGINES)
def test_repeats_are_those_of_a_dictionary_of_windows(engine: str) -> None:
    source, seen = random.Random(5), 0
    for round_ in range(150):
        texts, span = hard_texts(source), source.choice([1, 2, 3, 5, 8, 20, 33])
        dtype = source.choice(["uint8", "int32"])
        passes = source.choice([1, 1, 3])
        expected = by_dictionary(texts, span)
        assert settle(texts, span, engine, dtype, passes) == expected, (round_, span)
        seen += len(expected)
    assert seen > 10_000


def test_engines_give_the_same_records_and_runs() -> None:
    if len(ENGINES) < 2:
        pytest.skip("numba is missing")
    source = random.Random(6)
    for _ in range(40):
        units, offsets = laid_out(hard_texts(source))
        both = [file_windows(units, offsets, 12, engine) for engine in ENGINES]
        assert np.array_equal(*both)


def test_records_are_few_and_a_run_of_one_letter_is_one_record() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 200_000).astype(np.uint8)
    ends = np.array([0, len(noise)])
    engine = ENGINES[-1]
    made = len(file_windows(noise, ends, 100, engine))
    assert made / len(noise) == pytest.approx(2 / 52, rel=0.05)  # 2 / (grams of a window + 1)
    assert len(file_windows(np.zeros_like(noise), ends, 100, engine)) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_poor_hashes_make_no_wrong_answer(engine: str) -> None:
    """All records in one file, as if every k-gram had the same hash: windows are still compared."""
    texts = hard_texts(random.Random(8)) * 2
    units, offsets = laid_out(texts)
    records = file_windows(units, offsets, 6, engine)
    starts = np.array([0, len(records)])
    runs = find_repeats(units, records, starts, 6, 1, engine)
    windows = {
        start + i: first + i
        for start, count, first in zip(*(c.tolist() for c in runs), strict=True)
        for i in range(count)
    }
    assert windows == by_dictionary(texts, 6)
