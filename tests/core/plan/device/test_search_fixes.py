"""Where nothing fits, what the message says to do makes it fit; sizes are those on offer."""

import itertools
import re
from dataclasses import replace

import pytest
from plain_models import attention_layer, decoder

from sabia.core.errors import Infeasible
from sabia.core.plan.chips import find_chip
from sabia.core.plan.device import search_fixes
from sabia.core.plan.device.layout import Workload, find_stack
from sabia.core.plan.device.search import HARDLY_MORE
from sabia.core.plan.device.search import search as by_question
from sabia.core.plan.device.search_fixes import coarse, rentable
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.device.survey import Survey
from sabia.core.plan.memory import RECIPES

H100 = find_chip("h100")
LLAMA_70B = decoder(
    "llama-3-70b", 8192, 128256, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),)
)
JOB = Workload(LLAMA_70B, 8192, 512, RECIPES["megatron18"])
FSDP = find_stack("fsdp")


def search(job, chip, stack, chips, objective="time", pinned=None, **more):
    counts = [chips] if isinstance(chips, int) else chips
    return by_question(SearchProblem(job, chip, stack, pinned or {}, **more), counts, objective)


def refusal(job, chip, stack, chips, **more):
    with pytest.raises(Infeasible) as error:
        search(job, chip, stack, chips, **more)
    return str(error.value)


def test_the_first_advice_costs_nothing_where_a_pinned_field_is_to_blame():
    rows = dict.fromkeys(("context", "tensor", "pipe"), 1)
    text = refusal(JOB, H100, FSDP, 64, pinned=rows | {"recompute": "none"})
    policy = re.search(r"--recompute (\w+)", text)[1]
    search(JOB, H100, FSDP, 64, pinned=rows | {"recompute": policy})
    text = refusal(JOB, H100, FSDP, 64, pinned=rows | {"fsdp": 1})
    fixes = dict(re.findall(r"(\w+)=(\d+) in --fixed-layout", text.split("; use")[1]))
    for field, value in fixes.items():
        search(JOB, H100, FSDP, 64, pinned=rows | {"fsdp": 1} | {field: int(value)})
    assert "fsdp" in fixes


def test_all_advice_is_true_and_the_number_of_chips_is_the_smallest():
    text = refusal(JOB, H100, FSDP, 8)
    assert "at least" in text and "100% of 85.5 GB may be used" in text
    chips = int(re.search(r"--chips (\d+)(?=,|$)", text.split("; use")[1])[1])
    search(JOB, H100, FSDP, chips)
    for fewer in rentable(H100, chips - 1, 9):
        refusal(JOB, H100, FSDP, fewer)
    larger = find_chip(re.search(r"--chip (\S+)", text)[1])
    search(JOB, larger, FSDP, 8)
    assert larger.usable_hbm_bytes > H100.usable_hbm_bytes


def test_a_leaner_recipe_is_named_where_it_is_enough():
    model = decoder(
        "m", 4096, 32000, (replace(attention_layer(4096, 32, 8, 128, 14336), count=32),)
    )
    job = Workload(model, 4096, 64, RECIPES["megatron18"])
    need, _ = Survey(SearchProblem(job, H100, FSDP, {}), [8]).least
    chip = replace(H100, usable_hbm_bytes=need * 0.978)
    text = refusal(job, chip, FSDP, 8)
    name = re.search(r"use --state-recipe ([\w-]+)", text)[1]
    search(replace(job, recipe=RECIPES[name]), chip, FSDP, 8)
    own = replace(job, recipe=RECIPES["fsdp-fp32"])
    assert "--state-recipe" not in refusal(
        own, replace(chip, usable_hbm_bytes=need / 1.2), find_stack("sabia"), 8
    )


def test_shorter_sequences_are_named_where_activations_are_to_blame():
    model = decoder("m", 2048, 32000, (replace(attention_layer(2048, 16, 8, 128, 8192), count=8),))
    job = Workload(model, 1 << 18, 8, RECIPES["fsdp-fp32"])
    chip = replace(H100, usable_hbm_bytes=24e9)
    pinned = {"data": 8}
    text = refusal(job, chip, FSDP, 8, pinned=pinned)
    length = int(re.search(r"--seq (\d+)", text)[1])
    shorter = replace(job, sequence=length, batch_rows=8 * (1 << 18) // length)
    search(shorter, chip, FSDP, 8, pinned=pinned)
    longer = replace(job, sequence=2 * length, batch_rows=8 * (1 << 18) // (2 * length))
    refusal(longer, chip, FSDP, 8, pinned=pinned)


def test_a_batch_that_nothing_divides_is_named():
    rows_only = dict.fromkeys(("context", "tensor", "pipe"), 1)
    text = refusal(replace(JOB, batch_rows=487), H100, FSDP, 512, pinned=rows_only)
    assert "have no layout for this model" in text and "rows of a batch" in text
    tokens = int(re.search(r"--batch-tokens (\d+)", text)[1])
    search(replace(JOB, batch_rows=tokens // 8192), H100, FSDP, 512, pinned=rows_only)


def test_numbers_of_chips_are_those_on_offer():
    assert list(rentable(H100, 40)) == [8, 16, 24, 32, 40]
    assert list(rentable(H100, 40, 17)) == [24, 32, 40]
    assert list(rentable(find_chip("v6e"), 600)) == [1, 4, 8, 16, 32, 64, 128, 256, 512]
    assert list(rentable(find_chip("v5e"), 20, 5)) == [8, 16]
    assert list(rentable(find_chip("v5p"), 256)) == [4, 8, 16, 32, 64, 128, 192, 256]
    sizes = coarse(H100, 16384)
    assert {*sizes} <= {*rentable(H100, 16384)} and len(sizes) < 100
    assert sizes[:16] == list(rentable(H100, 128)) and sizes[-1] == 16384
    assert max(b / a for a, b in itertools.pairwise(sizes[8:])) <= 1.126


def test_over_numbers_of_chips_the_front_trades_time_for_cost():
    best_layouts = search(JOB, H100, FSDP, [32, 64, 96, 512])
    assert len(best_layouts.front) == 4
    chips = [row.chips for row in best_layouts.front]
    assert chips == sorted(chips, reverse=True) and chips[0] == best_layouts.front[0].chips
    each = {n: search(JOB, H100, FSDP, n) for n in (64, 512)}
    for row in best_layouts.front:
        if row.chips in each:
            assert row.step_s == each[row.chips].best.step_s
    limit = each[64].best.step_s
    (cheap,) = best_layouts.cheapest_in_time(
        [limit], lambda row: (row.step_s, row.step_s * row.chips)
    )
    assert (
        cheap.step_s <= limit
        and cheap.step_s * cheap.chips <= each[64].best.step_s * each[64].best.chips * HARDLY_MORE
    )


def test_of_thousands_of_sizes_only_round_ones_are_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(search_fixes, "_fits", lambda problem, sizes: tried.append(sizes))
    assert not list(search_fixes._more_chips(SearchProblem(JOB, H100, FSDP, {}), [6144]))
    assert tried and max(map(len, tried)) <= search_fixes.MOST_SIZES
    assert min(tried[0]) > 6144 and max(tried[-1]) == search_fixes.MOST_CHIPS
    tried.clear()
    assert not list(search_fixes._more_chips(SearchProblem(JOB, H100, FSDP, {}), [64]))
    assert tried[0] == list(rentable(H100, 128, 65))
