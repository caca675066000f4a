"""Plans by predicted speed: rows from layouts, what was fixed, what is refused."""

import pytest

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import placed
from sabia.core.plan.device.search import HARDLY_MORE
from sabia.core.plan.placed import plan_of

pytest.importorskip("numpy", reason="a search needs numpy")
SMALL = {"params": 8e9, "tokens": 1e12, "chip": "h100", "price": "2"}
DAY_S = 86400


def plan(**settings):
    return plan_of(PlanOptions(**(SMALL | settings)))[1]


@pytest.fixture(scope="module")
def over_counts():
    return plan(search=True)


@pytest.mark.parametrize(
    ("rows", "rounded"),
    [(488.28, 512), (15625, 16384), (1000, 1024), (96, 96), (48, 48), (512, 512), (1, 1),
     (100, 100), (2304, 2304), (1.4, 1), (7, 7)],
)  # fmt: skip
def test_batches_are_rounded_to_what_chips_can_share(rows, rounded):
    assert placed.round_rows(rows) == rounded


def test_a_fixed_layout_keeps_a_whole_batch_and_a_search_rounds_it():
    rough = {"batch_tokens": 15625 * 4096, "seq": 4096}
    fixed = plan(**rough, fixed_layout="fsdp=25", stack="fsdp", deadline="200d")
    assert fixed.problem.workload.batch_rows == 15625
    assert plan(**rough, search=True, chips=64).problem.workload.batch_rows == 16384


def test_each_row_follows_from_its_layout(over_counts):
    plan_by_deadline = over_counts
    for row in plan_by_deadline.rows:
        laid, steps = row.layout, 1e12 / (512 * 8192)
        assert row.finishes_s == pytest.approx(steps * laid.step_s)
        assert row.chips == laid.chips
        flops = 6 * 8e9 * 512 * 8192 / laid.step_s
        assert row.mfu == pytest.approx(flops / (row.chips * 989e12))
        assert laid.memory.total <= 0.9 * plan_by_deadline.cluster.chip.usable_hbm_bytes


def test_a_shorter_deadline_takes_more_chips_and_is_met(over_counts):
    rows = over_counts.rows
    assert all(row.meets_deadline for row in rows)
    assert rows[0].chips < rows[1].chips < rows[2].chips


def test_no_searched_number_in_time_is_much_cheaper(over_counts):
    search_result = over_counts.searched
    for row in over_counts.rows:
        limit = row.deadline_s / over_counts.run.optimizer_steps
        in_time = [other for other in search_result.front if other.step_s <= limit]
        least = min(other.step_s * other.chips for other in in_time)
        assert row.layout.step_s * row.layout.chips <= least * HARDLY_MORE
        fewer = [o for o in in_time if o.chips < row.chips]
        assert all(other.step_s * other.chips > least * HARDLY_MORE for other in fewer)


def test_the_best_layout_fixed_is_as_fast_as_when_it_was_found():

    searched = plan(search=True, chips=64).best
    fixed = plan(fixed_layout=searched.layout_words).best
    assert fixed.finishes_s == searched.finishes_s
    assert fixed.layout.memory.total == searched.layout.memory.total


def test_pinned_values_stay_in_a_search():
    best = plan(search=True, chips=64, recompute="full", micro_batch=2, fixed_layout="fsdp=16").best
    layout = best.layout.layout
    assert (layout.recompute, layout.micro_batch, layout.fsdp) == ("full", 2, 16)


def test_less_memory_changes_the_layout():
    most = plan(search=True, chips=16, deadline="400d").best.layout
    less = plan(search=True, chips=16, utilisation=0.4, deadline="400d").best.layout
    assert most.memory.total > 0.4 * 80e9 >= less.memory.total
    assert less.step_s >= most.step_s


def test_adapters_need_less_memory_and_time():
    whole = plan(search=True, chips=16, deadline="400d").best
    adapted = plan(search=True, chips=16, lora_rank=16, deadline="400d").best
    assert adapted.layout.memory.total < whole.layout.memory.total * 1.01
    assert adapted.layout.step_s < whole.layout.step_s


@pytest.mark.parametrize(
    ("settings", "kind", "hint"),
    [
        ({"search": True, "mfu": 0.4}, UsageError, "--mfu"),
        ({"search": True, "lora": True}, UsageError, "--lora-rank"),
        ({"fixed_layout": "fsdp=16", "chips": 24}, UsageError, "24"),
        ({"fixed_layout": "data=8", "deadline": "900d"}, Infeasible, "add --search"),
        ({"search": True, "chips": 8, "deadline": "5d"}, Infeasible, r"use --deadline \d+d"),
        ({"search": True, "params": 405e9, "chips": 8}, Infeasible, "use --chips"),
        ({"search": True, "recompute": "full", "fixed_layout": "recompute=none"}, UsageError,
         "--fixed-layout has recompute=none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_mend(settings, kind, hint):
    with pytest.raises(kind, match=hint):
        plan(**settings)


def test_the_deadline_that_an_error_names_is_met():
    with pytest.raises(Infeasible) as caught:
        plan(search=True, chips=8, deadline="5d")
    named = str(caught.value).split("--deadline ")[1].split(",")[0].split()[0]
    assert plan(search=True, chips=8, deadline=named).best.meets_deadline
