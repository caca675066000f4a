"""Each figure that the public article on training a 1.6T model prints, from the planner.

The rows are those of the article's text and tables; where the article rounds, the exact value
is tested, and its rounding beside it. Source: maritaca.ai/en/blog/como-treinamos-modelos.
"""

import datetime
from dataclasses import replace

import pytest

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import answer, compute, memory
from sabia.core.plan.chips import find_chip
from sabia.core.plan.money.prices import cost_usd, default_prices
from sabia.core.plan.stops import failures
from sabia.core.save_interval import best_interval_s

DAY_S = 86400.0
TODAY = datetime.date(2026, 9, 1)  # the prices on file are then a month old


def run(**settings):
    """The article's run, 1.6T total and 49B active, with some settings changed."""
    return answer.answer(PlanOptions(params=1.6e12, active=49e9, **settings), TODAY)


def figures(**settings):
    return run(**settings).report


def test_row_01_operations():
    assert compute.train_flops(4.9e10, 5e11) == pytest.approx(1.47e23, rel=1e-12)
    assert figures()["train_flops"] == pytest.approx(1.47e23, rel=1e-12)


def test_row_02_sustained_rate_of_a_b200():
    assert find_chip("b200").bf16_flops_per_s == 2.25e15
    assert figures()["flops_per_chip_s"] == pytest.approx(0.9e15, rel=1e-12)


def test_row_03_gpu_hours():
    assert figures()["chip_hours"] == pytest.approx(45_370.4, rel=1e-6)


def test_row_04_chips_by_compute_exact_rounded_and_in_nodes():
    rows = figures()["rows"]
    assert [r["deadline_s"] / DAY_S for r in rows] == [30, 14, 7]
    exact = [63.01, 135.03, 270.06]
    assert [r["compute_min_chips"] for r in rows] == pytest.approx(exact, abs=0.006)
    assert [compute.whole_chips(r["compute_min_chips"]) for r in rows] == [64, 136, 271]
    assert [r["compute_min_chips_in_nodes"] for r in rows] == [64, 136, 272]
    assert "63.01 / 135.03 / 270.06" in run().text
    assert "64 / 136 / 272" in run().text


def test_row_05_state():
    assert memory.RECIPES["adamw16"].bytes_per_param == 16
    assert figures()["state_bytes"] == pytest.approx(25.6e12, rel=1e-12)


@pytest.mark.parametrize(
    ("batch_tokens", "terabytes"), [(4e6, 3.498), (8e6, 6.996), (15e6, 13.117)]
)
def test_row_06_activations(batch_tokens, terabytes):
    size = figures(batch_tokens=batch_tokens)["activation_bytes"]
    assert size / 1e12 == pytest.approx(terabytes, rel=1e-3)


def test_row_07_chips_by_memory():
    report = figures()
    assert (report["state_min_chips"], report["memory_min_chips"]) == (134, 152)
    assert [compute.whole_chips(size / 192e9) for size in (30e12, 35e12)] == [157, 183]


def test_row_08_memory_bound_done_in_thirteen_days_not_thirty():
    rows = figures(chips=150)["rows"]
    assert rows[0]["finishes_s"] / DAY_S == pytest.approx(12.60, abs=0.01)
    assert [r["chips"] for r in rows] == [150, 150, 150]
    assert [r["meets_deadline"] for r in rows] == [True, True, False]
    assert compute.whole_chips(rows[2]["compute_min_chips"]) == 271
    assert rows[0]["bound"] == "memory"
    assert "memory-bound" in run().text


def test_row_09_cost_is_the_same_for_every_deadline():
    for row in figures()["rows"]:
        costs = [cost["cost_usd"] for cost in row["costs"]]
        assert costs == pytest.approx([199_630, 544_444], rel=1e-5)


def test_row_10_cost_of_a_day():
    row = figures(chips=150)["rows"][0]
    assert [cost["cost_usd_per_day"] for cost in row["costs"]] == pytest.approx([15_840, 43_200])
    assert "$15,840" in run(chips=150).text
    assert "$43,200" in run(chips=150).text


@pytest.fixture
def pyramid(request):
    path = request.config.rootpath / "examples" / "pyramid.toml"
    return answer.answer(PlanOptions(budget=str(path))).report


def test_row_11_hours_of_the_pyramid(pyramid):
    assert [row["chip_hours"] for row in pyramid["rows"]] == [150e3, 25e3, 80e3, 67.5e3]
    assert pyramid["chip_hours"] == 322.5e3


def test_row_12_money_of_the_pyramid(pyramid):
    assert [row["cost_usd"] / 1e6 for row in pyramid["rows"]] == pytest.approx(
        [0.660, 0.110, 0.352, 0.297]
    )
    assert pyramid["cost_usd"] / 1e6 == pytest.approx(1.419)
    shares = [100 * row["share"] for row in pyramid["rows"]]
    assert shares == pytest.approx([46.5, 7.8, 24.8, 20.9], abs=0.06)
    assert shares == pytest.approx([46, 8, 25, 21], abs=1)


def test_row_13_small_models_and_more_tokens(pyramid):
    assert pyramid["groups"][0]["group"] == "small"
    assert 100 * pyramid["groups"][0]["share"] == pytest.approx(54.3, abs=0.05)
    assert figures(tokens=32e12)["train_flops"] / figures()["train_flops"] == pytest.approx(64)


def test_row_14_big_cloud_is_almost_three_times_neocloud():
    neocloud, big = (price.usd_per_chip_hour for price in default_prices("b200"))
    assert big / neocloud == pytest.approx(2.73, abs=0.005)
    assert any("2.73 times" in note for note in run().notes)


def test_row_15_usual_utilization():
    assert (compute.MFU_RANGES["dense"].low, compute.MFU_RANGES["dense"].high) == (0.5, 0.6)
    assert (compute.MFU_RANGES["sparse"].low, compute.MFU_RANGES["sparse"].high) == (0.2, 0.4)
    report = figures()
    assert (report["mfu"], report["mfu_usual_low"], report["mfu_usual_high"]) == (0.4, 0.2, 0.4)
    assert any("outside the 20% to 40%" in note for note in run(mfu=0.55).notes)


def test_row_16_lora():
    full, report = figures(), figures(lora=True, chips=20, deadline="10w")
    assert report["train_flops"] / full["train_flops"] == pytest.approx(2 / 3)
    assert report["state_bytes"] == pytest.approx(3.2e12)
    assert report["state_min_chips"] == 17
    assert report["rows"][0]["chips_in_nodes"] == 24
    weeks = report["rows"][0]["finishes_s"] / DAY_S / 7
    assert weeks == pytest.approx(9.0, abs=0.005)
    assert "9.0 weeks" in run(lora=True, chips=20, deadline="10w").text


@pytest.mark.parametrize(("bucket_gb_s", "minutes"), [(5, 64), (8, 40), (10, 32)])
def test_row_17_a_checkpoint_every_30_to_60_minutes(bucket_gb_s, minutes):
    report = figures(chips=300, bucket_gbps=bucket_gb_s, preempt=6 * 3600.0)["stops"]
    assert report["checkpoint_bytes"] == pytest.approx(19.2e12)
    assert report["interval_s"] / 60 == pytest.approx(minutes)
    assert report["spot_share"] == 0.5


def test_row_17_rates_of_a_v5p_and_why_the_bucket_sets_the_interval():
    chip = find_chip("v5p")
    assert chip.host_bytes_per_s == 16e9
    assert chip.network_bytes_per_s == pytest.approx(6e9, rel=0.05)
    model = failures.StopModel(bucket_bytes_per_s=float("inf"))
    run = failures.StoppedRun(model, replace(chip, network_bytes_per_s=6e9), 300, 19.2e12, 1e6)
    assert failures.saving(run).upload_s == pytest.approx(10.7, abs=0.1)
    assert best_interval_s(60, 0, 12 * 3600) / 60 == pytest.approx(38, abs=0.1)


@pytest.mark.parametrize(
    ("chips", "days", "percent"), [(10, 100, 3), (150, 6.67, 36), (300, 3.33, 59)]
)
def test_row_18_failures_at_a_thousandth_per_chip_and_day(chips, days, percent):
    mean_s = failures.mean_time_between(chips, 0.001, None)
    assert mean_s / DAY_S == pytest.approx(days, abs=0.01)
    assert 100 * failures.failure_probability(mean_s, 3 * DAY_S) == pytest.approx(percent, abs=0.5)


def test_row_18_through_a_plan():
    report = figures(chips=150, failure_rate=0.001)["stops"]
    assert report["mean_time_between_failures_s"] / DAY_S == pytest.approx(6.67, abs=0.01)
    assert report["failure_probability"] == pytest.approx(0.362, abs=0.001)


def test_row_19_half_the_utilization_doubles_time_and_cost():
    good, bad = figures(chips=150), figures(chips=150, mfu=0.2)
    assert bad["chip_hours"] / good["chip_hours"] == pytest.approx(2)
    assert bad["rows"][0]["finishes_s"] / good["rows"][0]["finishes_s"] == pytest.approx(2)
    costs = [report["rows"][0]["costs"][0]["cost_usd"] for report in (bad, good)]
    assert costs[0] / costs[1] == pytest.approx(2)
    assert cost_usd(2 * 3600, 4.4) == pytest.approx(8.8)
