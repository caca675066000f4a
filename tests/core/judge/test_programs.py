"""The verifier `code`: what the program of a text is, what the tests of a record are."""

import json

import pytest

from sabia.core.errors import BadData, MissingBackend
from sabia.core.judge import programs, rewards, verifiers
from sabia.core.judge.programs import code_blocks, program_of
from sabia.core.judge.rewards import Case, Grader
from sabia.core.judge.rubric import parse_rubric
from sabia.core.judge.verifiers import check_reference, explained, explained_all
from sabia.core.sandbox.isolated import Box, boxes
from sabia.core.sandbox.limits import Pool

MBPP = {
    "test_list": ["assert double(2) == 4", "assert double('a') == 'aa'"],
    "test_setup_code": "", "challenge_test_list": ["not read"], "task_id": 7,
}  # fmt: skip
HUMAN_EVAL = {
    "prompt": "from typing import List\n\ndef half(x: int) -> float:\n    return x / 2\n\n\n"
    'def mean(xs: List[int]) -> float:\n    """The mean."""\n',
    "entry_point": "mean",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == half(3)\n"
    "    assert candidate([4]) == 4\n",
}


@pytest.fixture
def isolated():
    try:
        with boxes.one() as box:
            box.check()
    except MissingBackend as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("text", "reference", "passed"),
    [
        ("def double(x): return x + x", "assert double(2) == 4", True),
        ("def double(x): return 4", json.dumps(MBPP), False),
        ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", json.dumps(MBPP), True),
        ("```\ndef double(x): return 2 * x\n```\nUse:\n```\nprint(double(2))\n```",
         json.dumps(MBPP), True),
        ("```python\ndef double(x): return 2 * x", json.dumps(MBPP), True),
        ("I cannot.", json.dumps(MBPP), False),
        ("", json.dumps(MBPP), False),
        ("    return sum(xs) / len(xs)\n", json.dumps(HUMAN_EVAL), True),
        ("def mean(xs): return half(2 * sum(xs)) / len(xs)", json.dumps(HUMAN_EVAL), True),
        ("def mean(xs: List[int]): return sum(xs)", json.dumps(HUMAN_EVAL), False),
        ("def f(): return [1]", json.dumps(["assert f() == [1]", "assert len(f()) == 1"]), True),
        ("import os\nos._exit(0)", "assert double(2) == 4", False),
        ("print('passed')\nraise SystemExit(0)", "assert double(2) == 4", False),
    ],
)  # fmt: skip
def test_programs(isolated, text, reference, passed):
    tested = explained("code", text, reference)
    assert tested.passed is passed, tested.detail
    assert bool(tested.detail) is not passed


def test_a_program_past_the_limit_of_time_has_failed(isolated, monkeypatch):
    """As in published pass@1; nor can a sampled program avoid a low reward in this way."""
    monkeypatch.setattr(programs, "boxes", Pool(lambda: Box(1)))
    tested = explained("code", "def f():\n    while True: pass", "assert f() == 1")
    assert tested.passed is False and "of CPU time (limit 1 s)" in tested.detail
    graded = Grader({"code": 1.0}).grade([Case([], "while True: pass", "assert f() == 1")])
    assert graded[0].score == 0.0
    with programs.boxes.one() as box:
        box.close()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("x = (", "not Python"), ("f(1)", "no assert"), ("", "no assert"),
        ("[1]", "expected a text"),
        ('{"test": 1}', "expected a text"), ('{"prompt": "x", "entry_point": "f", "test": "a"}',
                                             "does not define the entry point"),
    ],
)  # fmt: skip
def test_references_that_are_no_tests(isolated, reference, reason):
    with pytest.raises(BadData, match=reason):
        check_reference("code", reference)


def test_names_that_tests_take_from_the_program():
    tests = programs.tests_of(
        "import math\nk = 2\nfor i in range(k):\n    assert f(i) == math.pi * g"
    )
    assert tests.names == ("f", "g")
    blocks = "```py\ndef g(): pass\n```\n~~~\ndef h(): pass\n~~~\n```json\n{}\n```\n"
    assert code_blocks(blocks) == ["def g(): pass\n", "def h(): pass\n"]
    assert program_of(blocks, tests) == "def g(): pass\n"


def test_many_programs_keep_their_order(isolated):
    pairs = [(f"def f(): return {n}", f"assert f() == {n - n % 2}") for n in range(12)]
    assert [tested.passed for tested in explained_all("code", pairs)] == [True, False] * 6


def test_rewards_and_rubrics(isolated):
    rubric = json.dumps([{"id": "a", "kind": "code", "reference": "assert f() == 1"}])
    grader = Grader({"code": 0.5, "rubric": 0.5})
    parsed = grader.check("assert f() == 2", rubric)
    assert parsed == parse_rubric(rubric)
    (grade,) = grader.grade([Case([], "def f(): return 1", "assert f() == 2", parsed)])
    assert grade.score == 0.5


def test_where_programs_cannot_be_isolated_code_is_refused(monkeypatch):
    for module in (verifiers, rewards, programs):
        monkeypatch.setattr(module, "boxes", Pool(lambda: Box(methods=[])))
    with pytest.raises(MissingBackend, match="permits no isolation"):
        Grader({"code": 1.0})
    with pytest.raises(MissingBackend, match="permits no isolation"):
        check_reference("code", "assert f()")
    with pytest.raises(MissingBackend, match="permits no isolation"):
        explained("code", "def f(): pass", "assert f()")
