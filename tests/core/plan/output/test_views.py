"""Views of a plan: what each adds, and that text, JSON and rows are of the same figures."""

import json

import pytest

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import answer
from sabia.core.plan.output import report

BIG = {"params": 1.6e12, "active": 49e9, "chips": 150}
SMALL = {"params": 8e9, "tokens": 1e12, "chip": "h100", "price": "2"}


def ask(base=SMALL, **settings):
    return answer(PlanOptions(**(base | settings)))


def test_a_view_is_only_there_when_asked_for():
    assert not set(report.VIEWS) & set(ask().report)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"preempt": 6 * 3600.0}, "stops"),
        ({"carbon": True}, "carbon"),
        ({"max_cost": 1e6}, "limit"),
        ({"serve_tokens": 1e12}, "scaling"),
        ({"search": True, "chips": 64}, "layout"),
    ],
)
def test_each_group_of_options_adds_its_view(settings, key):
    if key == "layout":
        pytest.importorskip("numpy", reason="a search needs numpy")
    output, plain = ask(**settings), ask(chips=settings.get("chips"))
    assert set(output.report) - set(plain.report) == {key}
    json.dumps(output.report)  # plain values only
    assert output.text.count("\n") > plain.text.count("\n")


def test_carbon_is_that_of_the_plan_s_chip_hours():
    output = ask(carbon=True, pue=1.2, carbon_intensity=0.1).report
    energy = output["chip_hours"] * 0.7 * 1.2
    assert output["carbon"]["energy_kwh"] == pytest.approx(energy)
    assert output["carbon"]["tons_co2e"] == pytest.approx(energy * 0.1 / 1000)


def test_a_limit_just_above_the_bill_passes_and_just_below_does_not():
    usd = ask().report["rows"][0]["costs"][0]["cost_usd"]
    assert ask(max_cost=usd * 1.001).report["limit"]["left_usd"] == pytest.approx(usd * 0.001)
    with pytest.raises(Infeasible, match="--max-cost"):
        ask(max_cost=usd * 0.999)


def test_the_tokens_that_a_limit_names_cost_no_more():
    with pytest.raises(Infeasible) as caught:
        ask(max_cost=10_000)
    named = str(caught.value).split("--tokens ")[1].split()[0].rstrip(",")
    tokens = PlanOptions.read({"tokens": named}).tokens
    assert ask(tokens=tokens, max_cost=10_000).report["limit"]["left_usd"] >= 0


def test_stops_by_every_option():
    output = ask(
        BIG, preempt=6 * 3600.0, capacity_wait=3600.0, repair=4 * 3600.0, spare_nodes=1,
        job_limit=86400.0, queue=600.0, simulate=200, seed=3, checkpoint_copies=2,
    )  # fmt: skip
    stops = output.report["stops"]
    assert (stops["spare_nodes"], stops["billed_chips"]) == (1, 158)
    assert stops["waited_capacity_s"] > 0 and stops["waited_queue_s"] > 0
    drawn = stops["simulated"]
    assert (drawn["runs"], drawn["seed"]) == (200, 3)
    assert drawn["wall_s"]["mean"] == pytest.approx(stops["wall_s"], rel=0.03)
    assert "simulated 200 runs" in output.text and "waiting for capacity" in output.text


def test_standing_still_for_saves_takes_longer():
    at_once = ask(BIG, preempt=6 * 3600.0).report["stops"]
    still = ask(BIG, preempt=6 * 3600.0, synchronous=True).report["stops"]
    assert still["upload_s"] == 0 and still["wall_s"] > at_once["wall_s"]


def test_spot_prices_against_on_demand_ones():
    output = ask({"params": 8e9, "chip": "h100"}, spot=True, preempt=6 * 3600.0)
    spot = output.report["stops"]["spot"]
    assert all(price["spot"] for price in output.report["prices"])
    assert spot["spot_usd"] < spot["on_demand_usd"]
    assert "less; cheaper" in output.text


def test_a_provider_s_prices_and_no_others():
    output = ask({"params": 8e9, "chip": "h100"}, provider="nebius").report
    assert {price["provider"] for price in output["prices"]} == {"Nebius"}
    with pytest.raises(UsageError, match="--provider: not together with --price"):
        ask(provider="nebius")


@pytest.mark.parametrize("stage", ["serve", "grpo", "eval"])
def test_stages_answer_in_every_form(stage):
    output = ask({"params": 8e9, "chip": "h100", "price": "2"}, stage=stage)
    assert output.report["stage"] == stage and output.report["schema_version"] == 2
    (row,) = output.rows
    assert row["chip"] == "h100" and not [v for v in row.values() if isinstance(v, dict | list)]
    assert "verdict" in output.text
    json.dumps(output.report)
