"""Evaluations: tokens times prices, chip time at full load, judges, tables of a budget file."""

import pytest
from published_generation import architecture, load

from sabia.core.errors import BadData, UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.serving.asked import (
    Suite,
    evaluate,
    table_cost,
)
from sabia.core.plan.serving.decode import Replica
from sabia.core.plan.serving.traffic import full_load

SHAPES, _ = load()
H100 = find_chip("h100")
ENGINE = Replica(architecture(SHAPES["llama-3-8b"]), H100)
SUITE = Suite(1000, 500, 800, 3, judge_calls=12, judge_prompt_tokens=2500, judge_output_tokens=50)


def test_an_api_is_paid_by_the_token():
    evaluation = evaluate(SUITE, (0.5, 1.5), (2.0, 8.0))
    answers = 3000 * (500 * 0.5 + 800 * 1.5) / 1e6
    verdicts = 36_000 * (2500 * 2 + 50 * 8) / 1e6
    assert [bill.api_usd for bill in evaluation.bills] == pytest.approx([answers, verdicts])
    assert evaluation.chip_hours == 0
    assert evaluation.cost_usd(99.0) == evaluation.api_usd == pytest.approx(answers + verdicts)


def test_own_chips_work_at_full_load():
    evaluation = evaluate(SUITE, ENGINE, ENGINE)
    answer = full_load(ENGINE, 500, 800).request_chip_s
    verdict = full_load(ENGINE, 2500, 50).request_chip_s
    assert evaluation.chip_hours == pytest.approx((3000 * answer + 36_000 * verdict) / 3600)
    assert evaluation.cost_usd(2.5) == pytest.approx(2.5 * evaluation.chip_hours)


TABLE = {"items": "20K", "prompt_tokens": 1000, "output_tokens": 2000, "params": "8B"}
JUDGE = {"judge_calls": 10, "judge_prompt_tokens": 3000, "judge_output_tokens": 100}


def test_a_budget_table_is_worked_out():
    plain = table_cost(TABLE, H100, "item")
    assert plain.chip_hours > 0 and plain.api_usd == 0
    judged = table_cost(
        TABLE | JUDGE | {"judge_usd_per_million": [0.5, 2.0], "repeats": 2}, H100, "item"
    )
    assert judged.chip_hours == pytest.approx(2 * plain.chip_hours)
    assert judged.api_usd == pytest.approx(400e3 * (3000 * 0.5 + 100 * 2) / 1e6)
    own = table_cost(TABLE | JUDGE | {"judge_params": "32B"}, H100, "item")
    assert own.chip_hours > 5 * plain.chip_hours


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"itms": 3}, BadData, "unknown itms"),
        ({"items": None}, BadData, "lacks items"),
        ({"params": None}, BadData, "needs params or usd_per_million"),
        ({"usd_per_million": [1, 2]}, BadData, "needs params or usd_per_million"),
        ({"params": None, "usd_per_million": 3}, UsageError, "expected two prices"),
        (JUDGE, BadData, "needs judge_params or judge_usd_per_million"),
        ({"items": "many"}, UsageError, "item items"),
    ],
)
def test_faulty_tables_are_refused(changed, error, words):
    table = {key: value for key, value in (TABLE | changed).items() if value is not None}
    with pytest.raises(error, match=words):
        table_cost(table, H100, "item")
