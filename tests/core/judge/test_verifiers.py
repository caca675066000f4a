"""Verifiers: what counts as the right answer, and what must not."""

import pytest

from sabia.core.errors import BadData
from sabia.core.judge.verifiers import final_number, readings, verify


@pytest.mark.parametrize(
    ("text", "reference", "met"),
    [
        ("095", "095", True),
        (" 095\n", "095", True),
        ("95", "095", False),
        ("cafe\u0301", "caf\u00e9", True),
        ("0950", "095", False),
        ("", "095", False),
    ],
)
def test_exact(text, reference, met):
    assert verify("exact", text, reference) is met


@pytest.mark.parametrize(
    ("text", "reference", "met"),
    [
        ("The answer is 42.", "42", True),
        ("42 is wrong, it is 43", "42", False),
        ("first 7, so \\boxed{42} of 50", "42", True),
        ("5 + 5 = 10\n#### 1,234", "1234", True),
        ("72", "48/2 = 24, 48 + 24 = 72\n#### 72", True),
        ("24", "48/2 = 24, 48 + 24 = 72\n#### 72", False),
        ("1234", "1,234", True),
        ("R$ 1.234,50", "1234.5", True),
        ("1,234,567", "1234567", True),
        ("-3", "3", False),
        ("\u22123", "-3", True),
        ("0.5", "1/2", True),
        ("1/2", "0.5", True),
        ("40%", "40", True),
        ("3.0", "3", True),
        ("3.1", "3", False),
        ("1e3", "1000", True),
        ("version2", "2", False),
        ("none", "2", False),
        ("1.2.3", "123", False),
        ("the set is 12, 13, and 14.", "14", True),
    ],
)
def test_number(text, reference, met):
    assert verify("number", text, reference) is met


def test_number_readings_and_marks():
    assert readings("1.234") == {1.234, 1234.0}
    assert readings("0.123") == {0.123}
    assert readings("1.234,5") == {1234.5}
    assert readings("1/0") == set()
    assert final_number("a 1 b 2 c") == "2"
    assert final_number("no digits") is None


@pytest.mark.parametrize(
    ("kind", "text", "reference", "met"),
    [
        ("contains", "Olá, MUNDO", "mundo", True),
        ("contains", "Olá", "mundo", False),
        ("regex", "a\n12\nb", r"^\d{2}$", True),
        ("regex", "a 12", r"^\d{2}$", False),
        ("choice", "I think (B) is right. Answer: C", "C", True),
        ("choice", "Answer: C", "b", False),
        ("choice", "resposta: (b)", "B", False),
        ("choice", "ABBA", "A", False),
        ("json", '{"a": 1, "b": 2}', '{"a": 1}', True),
        ("json", '```json\n{"a": 1}\n```', '["a"]', True),
        ("json", '{"a": 1}', '["a", "c"]', False),
        ("json", '{"a": 1', "", False),
        ("json", 'so {"a": 1}', "", False),
        ("json", "[1]", "", True),
    ],
)
def test_other_kinds(kind, text, reference, met):
    assert verify(kind, text, reference) is met


def test_bad_references_are_errors_not_grades():
    for kind, reference in (("regex", "("), ("number", "many"), ("number", "[0-9]"), ("json", "{")):
        with pytest.raises(BadData):
            verify(kind, "{}" if kind == "json" else "1", reference)
    with pytest.raises(BadData, match="no verifier"):
        verify("vibes", "a", "a")
