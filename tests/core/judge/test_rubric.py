"""Rubrics: parsing, the score, and what happens to items without a verdict."""

import json

import pytest

from sabia.core.errors import BadData, UsageError
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


CHAIN = parse_rubric(
    [
        {"id": "explains", "text": "explains it", "weight": 2, "depends_on": "cites"},
        {"id": "cites", "text": "cites it"},
        {"id": "wrong", "text": "is wrong", "weight": -1, "depends_on": ["explains", "cites"]},
    ]
)


@pytest.mark.parametrize(
    ("verdicts", "settled", "score"),
    [
        ((MET, MET, UNMET), (MET, MET, UNMET), 1.0),
        ((MET, MET, MET), (MET, MET, MET), 2 / 3),
        ((MET, UNMET, MET), (UNMET, UNMET, UNMET), 0.0),
        ((UNMET, MET, MET), (UNMET, MET, UNMET), 1 / 3),
        ((MET, UNKNOWN, MET), (UNKNOWN, UNKNOWN, UNKNOWN), None),
        ((UNKNOWN, MET, MET), (UNKNOWN, MET, UNKNOWN), None),
    ],
)
def test_an_item_counts_where_those_it_depends_on_are_met(verdicts, settled, score):
    names = ("explains", "cites", "wrong")
    given = dict(zip(names, verdicts, strict=True))
    assert CHAIN.settle(given) == dict(zip(names, settled, strict=True))
    assert CHAIN.score(given) == (score if score is None else pytest.approx(score))
    assert [verdict for _, verdict, _ in CHAIN.grade(given).verdicts] == list(settled)


def test_an_unmet_condition_decides_before_an_unknown_one():
    items = [{"id": n, "text": n} for n in "ab"]
    rubric = parse_rubric([*items, {"id": "c", "text": "c", "depends_on": ["a", "b"]}])
    for a, b, c in ((UNKNOWN, UNMET, UNMET), (UNMET, UNKNOWN, UNMET), (UNKNOWN, MET, UNKNOWN),
                    (MET, MET, MET)):  # fmt: skip
        assert rubric.settle({"a": a, "b": b, "c": MET})["c"] is c


def test_failing_a_condition_never_pays():
    """Over all verdicts: a better verdict on the condition gives no lower score."""
    items = [{"id": "a", "text": "a"}, {"id": "b", "text": "b", "weight": 10, "depends_on": "a"},
             {"id": "c", "text": "c"}]  # fmt: skip
    rubric = parse_rubric(items)
    for b in (MET, UNMET):
        for c in (MET, UNMET):
            low = rubric.score({"a": UNMET, "b": b, "c": c})
            assert rubric.score({"a": MET, "b": b, "c": c}) > low


def test_the_items_of_a_cycle_are_named():
    items = [{"id": n, "text": n, "depends_on": d} for n, d in (("a", "b"), ("b", "c"), ("c", "a"))]
    with pytest.raises(UsageError, match=r"depend on each other: .* → .* → .*") as caught:
        parse_rubric(items)
    assert all(name in str(caught.value) for name in "abc")
    with pytest.raises(UsageError, match="a → a"):
        parse_rubric([{"id": "a", "text": "a", "depends_on": ["a"]}])
    with pytest.raises(BadData, match="depends on 'z'"):
        parse_rubric([{"id": "a", "text": "a", "depends_on": ["z"]}])
    with pytest.raises(BadData, match="depends_on 3"):
        parse_rubric([{"id": "a", "text": "a", "depends_on": 3}])


def test_ids_of_rubrics_without_conditions_are_those_of_earlier_versions():
    assert parse_rubric([{"id": "a", "text": "is kind"}]).id == "2c83ea10deb9ab15"
