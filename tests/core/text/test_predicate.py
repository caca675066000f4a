"""The language of --where: its values against Python's own, what it refuses, and nulls."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.errors import UsageError
from sabia.core.shards.schemas import conform
from sabia.core.text.predicate import Predicate

ROWS = [
    {"id": "1", "text": "good news", "language": "pt", "scores": [("quality", 0.9), ("n", 3.0)]},
    {"id": "2", "text": "bad", "language": "en", "scores": [("quality", 0.2), ("n", 5.0)]},
    {"id": "3", "text": "", "language": None, "scores": [("quality", 0.5), ("n", 0.0)]},
    {"id": "4", "text": "no scores", "language": "pt", "scores": None},
]


@pytest.fixture(scope="module")
def batch() -> pa.RecordBatch:
    columns = {
        "id": pa.array([row["id"] for row in ROWS]),
        "text": pa.array([row["text"] for row in ROWS]),
        "language": pa.array([row["language"] for row in ROWS], pa.string()),
        "scores": pa.array([row["scores"] for row in ROWS], pa.map_(pa.string(), pa.float64())),
        "likes": pa.array([1, 2, None, 4], pa.int64()),
    }
    return conform(pa.RecordBatch.from_pydict(columns), "document")


def kept(batch: pa.RecordBatch, text: str) -> str:
    return "".join(batch.filter(pa.array(Predicate(text).evaluate(batch))).column("id").to_pylist())


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("quality >= 0.5", "13"),
        ("quality >= 0.5 and language == 'pt'", "1"),
        ("quality < 0.3 or language == 'pt'", "124"),
        ("not quality >= 0.5", "2"),
        ("0.1 < quality <= 0.5", "23"),
        ("language in ('pt', 'en')", "124"),
        ("language not in ['pt']", "2"),
        ("'news' in text", "1"),
        ("'news' not in text", "234"),
        ("language is None", "3"),
        ("scores['quality'] is not None", "123"),
        ("len(text) > 3", "14"),
        ("likes / 2 > 0.9", "24"),
        ("likes * 2 - 1 == 3", "2"),
        ("-n < -1 and n + quality > 3", "12"),
        ("scores['absent'] > 0", ""),
        ("scores['absent'] > 0 or likes == 4", "4"),
        ("True", "1234"),
        ("quality != quality", ""),
        ("url is None", "1234"),
    ],
)
def test_rows_kept(batch: pa.RecordBatch, expression: str, expected: str) -> None:
    assert kept(batch, expression) == expected


def test_comparisons_equal_python(batch: pa.RecordBatch) -> None:
    values = {row["id"]: dict(row["scores"]) for row in ROWS if row["scores"]}
    operators, limits = ("<", "<=", ">", ">=", "==", "!="), (0, 0.2, 0.5, 3, 5)
    for one, two, x, y, join in itertools.product(
        operators, operators, limits, limits, ("and", "or")
    ):
        text = f"quality {one} {x} {join} not (n {two} {y})"
        expected = [key for key, names in values.items() if eval(text, {}, dict(names))]
        assert kept(batch, text) == "".join(expected), text


@pytest.mark.parametrize(
    "text",
    [
        "", "quality >", "quality = 1", "__import__('os').system('x')", "text.upper() == 'X'",
        "(lambda: 1)()", "[x for x in text]", "scores[0]", "text[0]", "open('f')", "len(text, 1)",
        "quality if n else 1", "f'{text}'", "quality ** 9", "n % 2", "(text, n)[0]", "b'x' in text",
        "print", "1" + "+1" * 100_000, "x := 3", "scores['a']['b']", "await n", "1j < n", "...",
    ],
)  # fmt: skip
def test_anything_else_is_refused(batch: pa.RecordBatch, text: str) -> None:
    with pytest.raises(UsageError):
        predicate = Predicate(text)
        predicate.check_names(batch, "here")
        predicate.evaluate(batch)


def test_unknown_names_are_told_with_those_that_exist(batch: pa.RecordBatch) -> None:
    with pytest.raises(UsageError, match=r"'qualty' is neither .*quality"):
        Predicate("qualty > 1").check_names(batch, "a.parquet")
    Predicate("scores['sparse'] > 1 and quality > 0 and len(text) > 1").check_names(batch, "a")


def test_types_that_do_not_compare_are_a_usage_error(batch: pa.RecordBatch) -> None:
    for text in ("text > 3", "len(quality) > 1", "text", "quality is 3", "3 in text"):
        with pytest.raises(UsageError):
            Predicate(text).evaluate(batch)
    assert np.array_equal(Predicate("False").evaluate(batch), [False] * 4)
