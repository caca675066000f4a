"""The view of layouts: its table, its terms, and the JSON that says the same."""

import re

import pytest

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import answer
from sabia.core.plan.output.table import words

pytest.importorskip("numpy", reason="a search needs numpy")
SMALL = {"params": 8e9, "tokens": 1e12, "chip": "h100", "price": "2", "search": True}


@pytest.fixture(scope="module")
def searched():
    return answer(PlanOptions(**SMALL, chips=64, explain=True))


def test_terms_and_parts_add_up_to_their_totals(searched):
    best = searched.report["layout"]["best"]
    assert sum(best["memory_terms_bytes"].values()) == pytest.approx(best["memory_bytes"])
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    assert best["step_low_s"] < best["step_s"] < best["step_high_s"]
    assert best["binding"] == max(best["parts_s"], key=lambda name: best["parts_s"][name])


def test_the_explained_bytes_are_those_of_the_json(searched):
    best = searched.report["layout"]["best"]
    for name, size in best["memory_terms_bytes"].items():
        if size:
            (shown,) = re.findall(rf"(?m)^{re.escape(name)} +([\d.]+) GiB", searched.text)
            assert float(shown) == pytest.approx(size / 2**30, abs=6e-4)
    for name, seconds in best["parts_s"].items():
        if seconds > 1e-4:
            assert re.search(rf"(?m)^{name} +{seconds:.4f} s", searched.text)


def test_the_best_is_marked_and_the_first_by_time(searched):
    rows = [line for line in searched.text.splitlines() if re.match(r"\d+ ", line)]
    assert rows[0].startswith("1 *") and not any("*" in row for row in rows[1:])
    steps = [layout["step_s"] for layout in searched.report["layout"]["layouts"]]
    assert steps == sorted(steps)


def test_the_plan_and_the_layout_tell_the_same_speed(searched):
    report = searched.report
    assert report["mfu"] == pytest.approx(report["layout"]["best"]["mfu"])
    assert report["chip_hours"] == pytest.approx(report["layout"]["best"]["chip_hours"])
    bill = report["rows"][0]["costs"][0]["cost_usd"]
    assert bill == pytest.approx(report["chip_hours"] * 2)
    assert f"{report['mfu']:.0%} predicted MFU" in searched.text


def test_the_front_holds_no_layout_that_another_beats():
    front = answer(PlanOptions(**SMALL)).report["layout"]["pareto"]
    assert len(front) > 3
    for one in front:
        beaten = [o for o in front if o["step_s"] < one["step_s"] and o["chips"] <= one["chips"]]
        assert not beaten


def test_the_objective_decides_the_best():
    time = answer(PlanOptions(**SMALL, chips=64)).report["layout"]["best"]
    cost = answer(PlanOptions(**SMALL, chips=64, objective="cost")).report["layout"]["best"]
    assert cost["chip_hours"] <= time["chip_hours"] * (1 + 1e-9)
    assert time["step_s"] <= cost["step_s"] * (1 + 1e-9)


@pytest.mark.parametrize("stack", ["megatron", "fsdp", "maxtext"])
def test_another_software_has_no_line_for_our_trainer(stack):
    output = answer(PlanOptions(**SMALL, chips=64, stack=stack, deadline="90d"))
    assert "sabia pretrain" not in output.text and "pretrain_flags" not in output.report["layout"]
    assert f"software  {stack}," in output.text


def test_fp8_is_faster_where_the_chip_has_it():
    slow = answer(PlanOptions(**SMALL, chips=64)).report["layout"]["best"]
    fast = answer(PlanOptions(**SMALL, chips=64, precision="fp8")).report["layout"]["best"]
    assert fast["parts_s"]["matmul"] < slow["parts_s"]["matmul"]


def test_steps_are_counted_once(searched):
    report, best = searched.report, searched.report["layout"]["best"]
    assert report["optimizer_steps"] == pytest.approx(report["layout"]["steps"])
    assert report["batch_tokens"] == report["layout"]["batch_tokens"] == 512 * 8192
    (row,) = answer(PlanOptions(**{**SMALL, "chip": None}, chips=64, compare="h100")).report["rows"]
    assert row["step_s"] == pytest.approx(best["step_s"])
    took = report["rows"][0]["finishes_s"]
    assert took == pytest.approx(report["optimizer_steps"] * best["step_s"])


def test_every_part_of_a_step_waits_for_a_named_resource(searched):
    best = searched.report["layout"]["best"]
    named = {part: words(f"resource_{part}") for part in best["parts_s"]}
    last = next(line for line in searched.text.splitlines() if line.startswith("bound by"))
    assert best["binding"] in last and named[best["binding"]] in last
