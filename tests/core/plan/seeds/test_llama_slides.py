"""The slides on training Llama 3 405B: one calculation from operations to tons, rows 21 to 24.

Also the paper's and the model card's own figures (arXiv 2407.21783; huggingface.co/meta-llama).
"""

import datetime

import pytest

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import answer, compute
from sabia.core.plan.chips import find_chip
from sabia.core.plan.money import carbon, scaling
from sabia.core.plan.money.prices import cost_usd
from sabia.core.plan.stops import failures

TODAY = datetime.date(2026, 9, 1)
DAY_S, HOUR_S = 86400.0, 3600.0
CARD_HOURS = 30.84e6
MFU = 400e12 / 989e12


def run(**settings):
    asked = {"params": 405e9, "tokens": 15.6e12, "chip": "h100", "price": "2", "mfu": MFU}
    return answer.answer(PlanOptions(**asked | settings), TODAY).report


def test_row_21_operations():
    assert compute.train_flops(405e9, 15.6e12) == pytest.approx(3.791e25, rel=1e-4)
    assert run(deadline="100d")["train_flops"] == pytest.approx(3.8e25, rel=0.005)


def test_row_22_hours_days_dollars():
    report = run(chips=16_000, deadline="100d")
    assert report["chip_hours"] == pytest.approx(26.33e6, rel=1e-3)
    assert report["rows"][0]["finishes_s"] / DAY_S == pytest.approx(68.6, abs=0.05)
    assert report["rows"][0]["costs"][0]["cost_usd"] == pytest.approx(52.7e6, rel=1e-3)
    at_16384 = run(chips=16_384, deadline="100d")["rows"][0]["finishes_s"] / DAY_S
    assert at_16384 == pytest.approx(67.0, abs=0.06)
    row = report["rows"][0]
    mine = [report["chip_hours"], row["finishes_s"] / DAY_S, row["costs"][0]["cost_usd"]]
    assert mine == pytest.approx([26e6, 70, 52e6], rel=0.05)  # as the slides round


def test_row_22_tons():
    hours = run(deadline="100d")["chip_hours"]
    assert carbon.footprint(hours, 700, 1.0, 0.24)["tons_co2e"] == pytest.approx(4423, abs=1)
    assert carbon.footprint(26e6, 700, 1.0, 0.24)["tons_co2e"] == pytest.approx(4368)


def test_row_22_the_model_card_implies_another_grid():
    assert carbon.footprint(CARD_HOURS, 700, 1.0, 0.414)["tons_co2e"] == pytest.approx(
        8930, rel=0.002
    )


@pytest.mark.parametrize(
    ("hours", "mwh", "tons"), [(1_022_362, 449, 173), (809_472, 356, 137), (82_432, 36, 14)]
)
def test_llama_1_footprints(hours, mwh, tons):
    emissions = carbon.footprint(hours, 400, 1.1, 0.385)
    assert (int(emissions["energy_kwh"] / 1e3), round(emissions["tons_co2e"])) == (mwh, tons)


def test_row_23_the_whole_run_had_a_goodput_of_its_own():
    """Operations at the published rate explain 85 % of the hours; the rest is not MFU."""
    assert run(deadline="100d")["chip_hours"] / CARD_HOURS == pytest.approx(0.854, abs=0.001)


def test_row_23_stops_alone_leave_more_than_ninety_percent():
    model = failures.StopModel(failures_per_chip_day=0.000474, bucket_bytes_per_s=2e12)
    work_s = CARD_HOURS * HOUR_S / 16_384
    stopped = failures.StoppedRun(model, find_chip("h100"), 16_384, 405e9 * 12, work_s)
    seen = failures.forecast(stopped)
    assert 0.85 < seen.work_s / seen.wall_s < 0.97  # the paper: higher than 90 %


def test_row_24_tokens_a_parameter():
    assert scaling.RULE_TOKENS_PER_PARAM == 20
    assert scaling.Pair(8.03e9, 15e12).tokens_per_param == pytest.approx(1868, abs=0.5)  # "~1900"
    assert scaling.Pair(405e9, 15.6e12).tokens_per_param == pytest.approx(38.5, abs=0.05)  # "~40"
    law = scaling.BESIROGLU
    with_inference = scaling.cheapest_pair(law, law.loss(8e9, 160e9), 1e14)
    assert with_inference.tokens_per_param > 150  # "in practice use larger"


def test_row_29_a_failure_every_three_hours():
    rate = 419 / 54 / 16_384
    assert 100 * rate == pytest.approx(0.0474, abs=5e-5)
    mean_s = failures.mean_time_between(16_384, rate, None)
    assert mean_s / HOUR_S == pytest.approx(3.09, abs=0.005)
    assert 0.001 / rate == pytest.approx(2.1, abs=0.05)  # the article's 0.1 % is twice that


def test_published_bills_of_frontier_runs():
    """A model of 400B to 600B does not cost 100 to 500 million dollars to train."""
    assert cost_usd(CARD_HOURS * HOUR_S, 2) == pytest.approx(61.7e6, rel=1e-3)
    assert cost_usd(2.788e6 * HOUR_S, 2) == pytest.approx(5.576e6)
