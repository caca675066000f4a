"""Rubrics: parsing, the score, and what happens to items without a verdict."""

import json

import pytest

from sabia.core.errors import BadData
from sabia.core.judge.rubric import parse_rubric
from sabia.core.judge.verdict import Verdict

MET, UNMET, UNKNOWN = Verdict.MET, Verdict.UNMET, Verdict.UNKNOWN


@pytest.fixture
def rubric():
    items = [
        {"id": "a", "text": "says so", "weight": 3},
        {"id": "b", "weight": 1, "kind": "contains", "reference": "so"},
        {"id": "bad", "text": "insults", "weight": -2},
    ]
    return parse_rubric(json.dumps({"id": "r", "version": 2, "items": items}))


@pytest.mark.parametrize(
    ("verdicts", "score"),
    [
        ((MET, MET, UNMET), 1.0),
        ((MET, UNMET, UNMET), 0.75),
        ((MET, MET, MET), 0.5),
        ((UNMET, MET, MET), 0.0),
        ((UNKNOWN, MET, UNMET), None),
        ((MET, MET, UNKNOWN), None),
    ],
)
def test_score(rubric, verdicts, score):
    assert rubric.score(dict(zip(("a", "b", "bad"), verdicts, strict=True))) == score


def test_missing_items_are_unknown_not_zero(rubric):
    assert rubric.score({}) is None
    assert rubric.score({"a": MET, "bad": UNMET}) is None
    assert rubric.score({"a": MET, "bad": UNMET}, max_unknown=0.3) == 1.0
    assert rubric.score({"b": MET, "bad": UNMET}, max_unknown=0.3) is None
    grade = rubric.grade({"a": MET})
    assert grade.score is None
    assert sum(verdict is Verdict.UNKNOWN for _, verdict, _ in grade.verdicts) == 2
    assert [item["verdict"] for item in grade.items()] == ["met", "unknown", "unknown"]
    assert [item["points"] for item in grade.items()] == [3.0, 0.0, 0.0]


def test_bare_list_gets_ids_and_a_stable_name():
    items = [{"text": "is kind"}, {"kind": "number", "reference": 7}]
    rubric = parse_rubric(items)
    assert [item.id for item in rubric.items] == ["1", "2"]
    assert rubric.items[1].reference == "7"
    assert rubric.needs_judge
    assert not parse_rubric(items[1:]).needs_judge
    assert rubric.id == parse_rubric(json.dumps(items)).id != parse_rubric(items[:1]).id


@pytest.mark.parametrize(
    "value",
    [
        "{", "3", "{}", '{"items": []}', '[{"text": ""}]', '[{"text": "x", "weight": "1"}]',
        '[{"text": "x", "weight": -1}]', '[{"text": "x", "kind": "magic"}]', '["x"]',
        '[{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]',
    ],
)  # fmt: skip
def test_not_a_rubric(value):
    with pytest.raises(BadData):
        parse_rubric(value)
