"""The search in arrays finds what plain loops over every layout find, for random models."""

import random
from dataclasses import replace

import layouts_by_hand as by_hand
import numpy as np
import pytest
from plain_models import attention_layer, decoder

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.candidates import front
from sabia.core.plan.device.layout import AXES, Layout, Workload, find_stack
from sabia.core.plan.device.memory import device_memory
from sabia.core.plan.device.search import HARDLY_MORE
from sabia.core.plan.device.search import search as by_question
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.device.step_time import step_time
from sabia.core.plan.device.survey import Survey
from sabia.core.plan.memory import RECIPES

H100 = find_chip("h100")
LLAMA_70B = decoder(
    "llama-3-70b", 8192, 128256, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),)
)
LLAMA_8B = decoder(
    "llama-3-8b", 4096, 128256, (replace(attention_layer(4096, 32, 8, 128, 14336), count=32),)
)


def work(model, sequence=8192, rows=512, recipe="fsdp-fp32"):
    return Workload(model, sequence, rows, RECIPES[recipe])


def search(job, chip, stack, chips, objective="time", pinned=None, **more):
    counts = [chips] if isinstance(chips, int) else chips
    return by_question(SearchProblem(job, chip, stack, pinned or {}, **more), counts, objective)


def agrees_with_loops(stack, seed, rows, counts):
    """Search a random small model, with room for two fifths of its layouts."""
    draw = random.Random(seed)
    model = by_hand.model(draw, mixture=seed % 2 == 1)
    job, preset = work(model, draw.choice([384, 1024]), rows), find_stack(stack)
    meshes, candidates, everything = by_hand.survey(job, H100, preset, counts)
    memory_limit = sorted(total for _, _, total, _ in everything)[int(candidates * 0.4)] * (
        1 + 1e-9
    )
    fitting = [one for one in everything if one[2] <= memory_limit]

    chip = replace(H100, usable_hbm_bytes=memory_limit)
    best_layouts = search(job, chip, preset, counts, share=1.0)
    seen = best_layouts.survey
    sizes = seen.meshes.total, seen.candidates, seen.fitting
    assert sizes == (meshes, candidates, len(fitting))
    best = min(seconds for seconds, _, _, _ in fitting)
    assert best_layouts.best.step_s == pytest.approx(best, rel=1e-9)
    assert best_layouts.best.layout in [one[3] for one in fitting if one[0] <= best * (1 + 1e-9)]
    expected = by_hand.front([(round(s, 12), n) for s, n, _, _ in fitting])
    assert {(round(row.step_s, 12), row.chips) for row in best_layouts.front} == expected

    cheapest = search(job, chip, preset, counts, "cost", share=1.0).best
    least = min(seconds * chips for seconds, chips, _, _ in fitting)
    assert cheapest.step_s * cheapest.chips == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(
    ("stack", "seed"), [("sabia", 2), ("megatron", 2), ("fsdp", 2), ("maxtext", 4), ("megatron", 1)]
)
def test_arrays_find_what_loops_find(stack, seed):
    agrees_with_loops(stack, seed, 6, [4, 6] if seed % 2 == 0 else [6])


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["sabia", "megatron", "fsdp", "maxtext"])
@pytest.mark.parametrize("seed", range(3, 9))
def test_arrays_find_what_loops_find_on_more_models(stack, seed):
    agrees_with_loops(stack, seed, 12 if seed % 3 else 24, [6, 8] if seed % 2 == 0 else [4, 12])


@pytest.mark.parametrize("stack", ["sabia", "megatron", "fsdp-async", "llama3", "maxtext"])
def test_what_fell_and_what_fits_are_all_meshes(stack):
    survey = Survey(SearchProblem(work(LLAMA_70B), H100, find_stack(stack), {}), [64, 96])
    kept = {number for some, _, _ in survey.parts for number in some.mesh.tolist()}
    assert sum(survey.rejected.values()) + len(kept) == survey.meshes.total


def agrees_alone_and_in_arrays(stack, seed, number):
    draw = random.Random(seed)
    model = by_hand.model(draw, mixture="2021" not in stack and seed % 2 == 1)
    problem = SearchProblem(work(model, 1024, 48), H100, find_stack(stack), {})
    parts = Survey(problem, [16, 24]).parts
    every = [(part, index) for part in parts for index in range(part[0].size)]
    for (fitting, total, seconds), index in draw.sample(every, min(number, len(every))):
        layout = fitting.one(index)
        alone = device_memory(problem.workload, layout, problem.stack).total
        assert alone == pytest.approx(total[index], rel=1e-12)
        alone = step_time(problem.workload, layout, H100, problem.stack).total_s
        assert alone == pytest.approx(seconds[index], rel=1e-12)


@pytest.mark.parametrize("stack", ["sabia", "megatron", "fsdp", "zero-2021", "megatron-2021"])
def test_a_layout_is_weighed_and_timed_alike_alone_and_in_arrays(stack):
    agrees_alone_and_in_arrays(stack, 5, 40)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["sabia", "megatron", "fsdp-async", "llama3", "maxtext"])
@pytest.mark.parametrize("seed", [6, 7])
def test_many_layouts_are_weighed_and_timed_alike(stack, seed):
    agrees_alone_and_in_arrays(stack, seed, 200)


def test_more_memory_is_never_slower():
    times = []
    for memory in (50e9, 60e9, 80e9, 141e9, 400e9):
        chip = replace(H100, usable_hbm_bytes=memory)
        times.append(search(work(LLAMA_8B), chip, find_stack("fsdp"), 32).best.step_s)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_more_candidates_are_never_worse():
    job, stack = work(LLAMA_8B), find_stack("megatron")
    free = search(job, H100, stack, 32)
    for pinned in (
        {"tensor": 4},
        {"micro_batch": 1},
        {"recompute": "full"},
        {"pipe": 2, "data": 4},
    ):
        held = search(job, H100, stack, 32, pinned=pinned)
        assert held.best.step_s >= free.best.step_s
        assert all(getattr(held.best.layout, name) == value for name, value in pinned.items())
        assert held.survey.candidates < free.survey.candidates
    both = search(job, H100, stack, [32, 64])
    assert both.best.step_s <= free.best.step_s
    other = search(job, H100, stack, 64)
    assert both.survey.candidates == free.survey.candidates + other.survey.candidates


def test_rows_are_ranked_and_priced():
    best_layouts = search(work(LLAMA_8B), H100, find_stack("fsdp"), [8, 16, 32, 64])
    assert [row.step_s for row in best_layouts.front] == sorted(
        row.step_s for row in best_layouts.front
    )
    assert best_layouts.front[0].step_s == best_layouts.best.step_s
    meshes = [tuple(getattr(row.layout, axis) for axis in AXES) for row in best_layouts.ranked]
    assert len(set(meshes)) == len(meshes) == 10
    for row in best_layouts.front:
        assert row.memory.total <= H100.usable_hbm_bytes
    limit_s = best_layouts.best.step_s
    slower, late = best_layouts.cheapest_in_time(
        [limit_s * 3, limit_s * 0.99], lambda row: (row.step_s, row.step_s * row.chips)
    )
    in_time = [row for row in best_layouts.front if row.step_s <= best_layouts.best.step_s * 3]
    least = min(row.step_s * row.chips for row in in_time)
    alike = [row.chips for row in in_time if row.step_s * row.chips <= least * HARDLY_MORE]
    assert slower.chips == min(alike) and slower in in_time
    assert late == best_layouts.front[0]


def test_a_small_model_is_not_cut_over_layers_or_heads():
    best = search(work(LLAMA_8B), H100, find_stack("fsdp"), 8).best.layout
    assert best.pipe == 1 and best.tensor * best.context <= 2


def test_fsdp_and_tensor_share_a_pod_as_the_scaling_book_says():
    """X = sqrt(2 B N / F) ranks of fsdp (jax-ml.github.io/scaling-book, training): here 1547."""
    job = work(LLAMA_70B, 2048, 2048, "jax10")
    ideal = (2 * job.batch_tokens * 8192 / 28672) ** 0.5
    best_layouts = search(job, find_chip("v5p"), find_stack("maxtext"), 8192)
    for row in best_layouts.ranked[:2]:
        assert ideal / 2 < row.layout.fsdp < ideal * 2 and row.layout.pipe == 1
        assert row.layout.fsdp * row.layout.tensor == 8192


def test_the_trainer_pays_for_masked_scores_across_context_ranks():
    job, alone = work(LLAMA_8B), Layout(fsdp=8)
    halves = replace(alone, fsdp=4, context=2)
    for stack, ratio in (("sabia", 2), ("megatron", 1)):
        times = [
            step_time(job, one, H100, find_stack(stack)).parts["attention"]
            for one in (alone, halves)
        ]
        assert times[1] == pytest.approx(ratio * times[0], rel=1e-3)
    assert search(job, H100, find_stack("sabia"), 8).best.layout.context == 1


def test_what_no_layout_has_is_refused():
    job, stack = work(LLAMA_8B), find_stack("sabia")
    with pytest.raises(UsageError, match="tensor=6 does not divide 32 heads; use 4 or 8"):
        search(job, H100, stack, 8, pinned={"tensor": 6})
    with pytest.raises(UsageError, match=r"virtual=2 \(expected 1"):
        search(job, H100, stack, 8, pinned={"virtual": 2})
    with pytest.raises(Infeasible, match="13 h100 have no layout"):
        search(job, H100, stack, 13)


def test_front_is_what_no_other_beats():
    draw = np.random.default_rng(3)
    for columns in (2, 3):
        table = draw.integers(0, 12, (200, columns)).astype(float)
        rows = {tuple(row) for row in table.tolist()}
        beaten = {
            a
            for a in rows
            for b in rows
            if b != a and all(x <= y for x, y in zip(b, a, strict=True))
        }
        kept = front(*table.T)
        assert {tuple(row) for row in table[kept].tolist()} == rows - beaten
        assert len(kept) == len(rows - beaten)
