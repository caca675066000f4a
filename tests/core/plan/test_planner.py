"""Plans by deadline, plans that cannot be, and the mend that the error names."""

import re

import pytest

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner, request
from sabia.core.plan.counting.counts import given_counts

BIG = {"params": 1.6e12, "active": 49e9}
SMALL = {"params": 8e9}


def plan(model=BIG, **settings):
    asked = request.build(PlanOptions(**(model | settings)))
    return planner.plan(asked.run, asked.cluster, asked.deadlines_s)


def test_memory_counts_all_experts_not_the_active_ones():
    dense = plan({"params": 49e9, "layers": 61, "hidden": 7168})
    sparse = plan(BIG | {"layers": 61, "hidden": 7168})
    assert sparse.work_chip_s == dense.work_chip_s
    assert sparse.run.state_bytes / dense.run.state_bytes == pytest.approx(1.6e12 / 49e9)


def test_best_is_the_smallest_cluster_on_time():
    assert plan().best.chips == 152
    assert plan(deadline="7d,30d").best.deadline_s == 30 * 86400
    assert plan(deadline="3d").best.chips == 631


def test_a_fast_deadline_is_bound_by_compute():
    rows = plan(deadline="30d,7d").rows
    assert [row.bound for row in rows] == ["memory", "compute"]
    assert rows[1].chips == rows[1].chips_needed == 271


def test_too_few_chips_for_the_state_names_the_number_that_does_it():
    with pytest.raises(Infeasible, match="--chips: 133 b200") as caught:
        plan(chips=133)
    fixed = int(re.search(r"use --chips (\d+)", str(caught.value))[1])
    assert fixed == 134
    assert plan(chips=fixed).best.chips == fixed


def test_the_named_number_also_meets_a_deadline():
    with pytest.raises(Infeasible) as caught:
        plan(chips=100, deadline="7d")
    fixed = int(re.search(r"use --chips (\d+)", str(caught.value))[1])
    assert fixed == 271
    plan(chips=fixed, deadline="7d")
    with pytest.raises(Infeasible):
        plan(chips=fixed - 1, deadline="7d")


def test_no_deadline_met_names_chips_and_a_deadline_that_would():
    with pytest.raises(Infeasible, match="meets no deadline") as caught:
        plan(chips=150, deadline="7d,10d")
    chips = int(re.search(r"use --chips (\d+)", str(caught.value))[1])
    deadline = re.search(r"or --deadline (\w+)", str(caught.value))[1]
    plan(chips=chips, deadline="7d,10d")
    plan(chips=150, deadline=deadline)


def test_one_deadline_met_is_enough():
    rows = plan(chips=150).rows
    assert [row.meets_deadline for row in rows] == [True, True, False]


def test_the_exact_deadline_is_met():
    chips = 100
    asked = request.build(PlanOptions(**SMALL, chips=chips))
    work = planner.plan(asked.run, asked.cluster, asked.deadlines_s).work_chip_s
    exact = planner.plan(asked.run, asked.cluster, [work / chips])
    assert exact.best.chips == exact.best.chips_needed == chips


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"tokens": 0}, "--tokens"),
        ({"mfu": 0}, "--mfu"),
        ({"hbm": 0}, "--hbm"),
        ({"price": "0"}, "--price"),
        ({"deadline": "0d"}, "--deadline"),
        ({"batch_tokens": 1000}, "--batch-tokens"),
        ({"chip": "b201"}, "--chip"),
        ({"state_recipe": "muon", "lora": True}, "--state-recipe"),
    ],
)
def test_settings_that_describe_no_run_are_refused(settings, flag):
    with pytest.raises(UsageError, match=flag):
        plan(**settings)


@pytest.mark.parametrize(("params", "active"), [(None, None), (49e9, 1.6e12), (0, None)])
def test_counts_that_describe_no_model_are_refused(params, active):
    with pytest.raises(UsageError, match="--params"):
        given_counts(params, active, None, None)


def test_every_default_is_listed_as_an_assumption():
    bare = " ".join(request.build(PlanOptions(**BIG)).assumed)
    for words in ("500B tokens", "8192", "4M tokens", "b200", "192 GB", "every byte usable",
                  "40% MFU", "30d, 14d, 7d", "prices seen 20"):  # fmt: skip
        assert words in bare
    given = PlanOptions(
        **BIG, tokens=1e12, seq=4096, batch_tokens=1e6, chip="h100", hbm=80e9, mfu=0.5,
        deadline="5d", price="2",
    )  # fmt: skip
    assert request.build(given).assumed == ()


@pytest.mark.parametrize(
    ("params", "active", "layers", "hidden"),
    [
        (1.6e12, 49e9, 61, 7168),
        (8e9, None, 32, 4096),
        (70e9, None, 80, 8192),
        (30e9, 3e9, 48, 2048),
    ],
)
def test_the_shape_is_that_of_the_nearest_published_model(params, active, layers, hidden):
    counts = given_counts(params, active, None, None)
    assert (counts.layers, counts.hidden) == (layers, hidden)
    assert counts.origin.startswith("assumed")


def test_a_given_shape_is_taken():
    counts = given_counts(8e9, None, 10, 1000)
    assert (counts.layers, counts.hidden, counts.origin) == (10, 1000, "given")
