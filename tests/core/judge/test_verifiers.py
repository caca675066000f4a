"""Verifiers: what counts as the right answer, and what must not."""

import random
import threading
import time
from fractions import Fraction

import pytest

from sabia.core.errors import BadData
from sabia.core.judge import bounded_regex
from sabia.core.judge.numbers import final_number, readings
from sabia.core.judge.rewards import Case, Grader
from sabia.core.judge.rubric import parse_rubric
from sabia.core.judge.verdict import Verdict
from sabia.core.judge.verifiers import verify


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
        (r"\frac{1}{2}", "0.5", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"so \boxed{\frac{1}{2}} of 7", "0.5", True),
        (r"\boxed{2\frac12}", "2.5", True),
        (r"\tfrac{1}{-4}", "-0.25", True),
        (r"\frac{1}{0}", "1", False),
        (r"\boxed{\frac{\sqrt{3}}{2}}", "2", False),
        (r"3 times \sqrt{2}", "2", False),
        (r"3 times \sqrt{2}", "3", False),
        (r"\frac{\frac{1}{2", "2", False),
        (r"\boxed{ {7} }", "7", True),
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


def test_written_fractions_have_their_value():
    chosen = random.Random(0)
    for _ in range(2000):
        top, bottom, whole = (chosen.randint(1, 60) for _ in range(3))
        sign, command = chosen.choice(("", "-")), chosen.choice(("frac", "dfrac", "tfrac"))
        mixed = chosen.random() < 0.3
        value = (whole if mixed else 0) + Fraction(top, bottom)
        text = f"{sign}{whole if mixed else ''}\\{command}{{{top}}}{{{bottom}}}"
        reference = repr(float(-value if sign else value))
        for form in (text, f"we get 12 and then \\boxed{{{text}}}", f"3 \n#### {text}"):
            assert verify("number", form, reference) is True
            assert verify("number", form, repr(float(value) + 1)) is False


HOSTILE = [r"(a+)+$", r"(a|aa)+$", r"(a|a?)+$", r"([a-z]*)*[0-9]"]


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(bounded_regex, "CPU_S", 0.1)
    bounded_regex._children.clear()  # the next one has this limit
    yield
    bounded_regex._children.clear()


def test_a_regular_expression_has_a_limit(short_limit, monkeypatch):
    since = time.monotonic()
    assert [verify("regex", "a" * 60 + "!", pattern) for pattern in HOSTILE[:2]] == [None, None]
    assert time.monotonic() - since < 30 * bounded_regex.CPU_S
    assert verify("regex", "aaa", HOSTILE[0]) is True  # the next request is answered
    monkeypatch.setattr(bounded_regex, "WALL_S", 0.05)  # a child that hangs is killed
    assert verify("regex", "a" * 60 + "!", HOSTILE[0]) is None
    monkeypatch.setattr(bounded_regex, "WALL_S", 60.0)
    assert verify("regex", "aaa", HOSTILE[0]) is True


def test_regular_expressions_are_those_of_re():
    import re

    chosen = random.Random(1)
    for _ in range(500):
        text = "".join(chosen.choices("ab1\n \u00e7\U0001f600\udc80", k=chosen.randint(0, 12)))
        pattern = chosen.choice((r"^(\d)$", "a(b)?", "[\u00e7\U0001f600]+", "(a|b)", "^$", r"\s"))
        every = list(re.finditer(pattern, text, re.MULTILINE))
        for pick, at in (("first", 0), ("last", -1)):
            answer = None
            if every:
                match = every[at]
                answer = (match[0], match[1] if match.re.groups else None)
            assert bounded_regex.find(pattern, text, pick) == answer


def test_threads_get_their_own_answers():
    wrong = []

    def ask(number):
        for n in range(40):
            text = str(1000 * number + n)
            if bounded_regex.find(r"\d+", text) != (text, None):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_past_the_limit_a_sample_has_no_reward(short_limit):
    evil = parse_rubric([{"id": "x", "kind": "regex", "reference": HOSTILE[0]}])
    case = Case([], "a" * 60 + "!", HOSTILE[0], evil)
    for weights in ({"regex": 1.0}, {"regex": 0.5, "contains": 0.5}, {"rubric": 1.0}):
        (grade,) = Grader(weights).grade([case])
        assert grade.score is None
        assert grade.verdicts[0][1] == Verdict.UNKNOWN


def test_deep_json_is_not_json():
    assert verify("json", "[" * 100_000, "") is False
