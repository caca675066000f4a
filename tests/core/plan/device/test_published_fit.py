"""Layouts that were run fit: every published one on GPUs, by the planner's limit, or has a reason.

Memory that the driver reports, the stack's share of it, and the state in the precision that the
source's recipe has. Where a source does not print the recomputation, some recomputation must fit.
"""

from dataclasses import replace

import pytest
from judged_steps import judged_cases
from step_cases import Case, calibration_cases, further_cases, mixture_cases

from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.layout import RECOMPUTE, Layout, find_stack
from sabia.core.plan.device.memory import device_memory
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.memory import RECIPES, StateRecipe

# rows of the fitted tables whose `recipe` is not what the source's recipe keeps
PRECISION = {
    "nemo-24.07": RECIPES["adamw16"],  # grad_sync_dtype bf16
    "automodel": StateRecipe("bf16", 2, 2, 4, 6),  # torch's Adam on BF16 weights
}
BUBBLES = "tensors are freed early and the pipeline's schedule is its own (arXiv 2407.21783, 3.3.2)"
REASONS = {
    ("llama3-405b", "llama-3-405b"): BUBBLES,
    (
        "deepseek-v3",
        "deepseek-v3-mtp",
    ): "norms and up-projections are recomputed, inputs kept in FP8",
    ("zoo-qwen3-long", "qwen3-235b-a22b"): "its distributed optimizer is also split over context",
    ("zoo-qwen3-gb", "qwen3-235b-a22b"): "which modules it recomputes is not printed",
    ("automodel", "gpt-oss-20b"): "what its loss and its experts keep is not known",
    ("automodel", "gpt-oss-120b"): "as gpt-oss-20b",
}


def cases() -> list[Case]:
    rows = [row for row in judged_cases() if isinstance(row, Case)]
    rows += [*calibration_cases(), *mixture_cases(), *further_cases()]
    return [row for row in rows if row.chip.family == "GPU"]


def fits(case: Case) -> bool:
    recipe = PRECISION.get(case.table, case.workload.recipe)
    workload = replace(case.workload, recipe=recipe)
    limit = SearchProblem(workload, case.chip, case.stack, {}).memory_limit_bytes
    unknown = "unknown" in case.label or case.table.startswith("bridge")
    tried = RECOMPUTE if unknown else (case.layout.recompute,)
    layouts = (replace(case.layout, recompute=policy) for policy in tried)
    return any(device_memory(workload, one, case.stack).total <= limit for one in layouts)


def test_published_layouts_fit_or_have_a_reason():
    every = cases()
    outside = [row for row in every if not fits(row)]
    keys = {(row.table, row.workload.architecture.name) for row in outside}
    assert keys == set(REASONS)
    assert len(every) >= 444 and len(outside) <= 0.03 * len(every)


def test_whole_gradients_between_micro_batches_are_counted():
    """8B on 8 devices: 32 GB of FP32 gradients instead of 4 GB, with several micro-batches only."""
    case = next(row for row in cases() if row.table == "titan-1")
    stacks = find_stack("fsdp"), find_stack("fsdp-no-sync")

    def gradients(rows, stack):
        work = replace(case.workload, batch_rows=rows)
        layout = Layout(fsdp=8, micro_batch=2, zero=3, recompute="full")
        return device_memory(work, layout, stack)["gradients"]

    alone, several = ([gradients(rows, stack) for stack in stacks] for rows in (16, 64))
    assert alone[0] == alone[1] == several[0] == pytest.approx(several[1] / 8)
    assert several[1] == pytest.approx(4 * case.workload.architecture.params)


def test_a_limit_is_the_stack_s_share_of_what_the_driver_reports():
    case = next(row for row in cases() if row.table == "titan-1")
    h100 = find_chip("h100")
    assert h100.usable_hbm_bytes == 81_559 * 2**20
    for name, share in (("fsdp", 1.0), ("sabia", 0.9)):
        problem = SearchProblem(case.workload, h100, find_stack(name), {})
        assert problem.memory_limit_bytes == pytest.approx(share * 81_559 * 2**20)
        assert replace(problem, share=0.5).memory_limit_bytes == 81_559 * 2**19
