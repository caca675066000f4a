"""Formats within a budget of bits: the expected losses, the search, the recipe that is found."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import BadData, Infeasible, UsageError  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant import allocation, sensitivity  # noqa: E402
from sabia.core.quant.allocation import Choice, Unit  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.recipe import Recipe, RecipeRule, load_recipe, plan  # noqa: E402
from sabia.core.spec import from_config, new_config  # noqa: E402

OPS = load_ops("torch")
SEEN = 30  # of the 40 rows
FOUR, EIGHT = Choice("w4a16"), Choice("w8a16")


def measured(model: Any, rows: list, recipe: Recipe) -> float:
    """KL of the original to the quantized model on rows after those it is calibrated on."""
    spec, params = model
    made = quantize(spec, params, recipe, OPS, batches(rows[:SEEN]))
    pair = (OPS.to_device(x, "float32") for x in (params, made.params))
    return divergence(spec, *pair, (), batches(rows[SEEN:])).kl_nats


def units_with_losses(model: Any, rows: list, recipe: Recipe, formats: str) -> list[Unit]:
    spec, params = model
    made = allocation.units(spec, recipe, allocation.parse_choices(formats))
    of = frozenset(t.name for unit in made for t in unit.tensors)

    def read(layer: int | None) -> dict[str, np.ndarray]:
        return {t.name: params[t.name] for t in spec.tensors() if t.layer == layer}

    for part in sensitivity.fisher(spec, read, of, batches(rows[:SEEN], 64), 0, OPS):
        allocation.add_losses(spec, made, part, recipe)
    return made


@pytest.fixture(scope="module", params=["rtn", "gptq"])
def four_and_more(request, tiny, token_rows) -> tuple[Recipe, list[Unit]]:
    recipe = allocation.with_components_of(load_recipe("w4"), tiny[0])
    recipe = replace(recipe, rounding=request.param)
    return recipe, units_with_losses(tiny, token_rows, recipe, "w4a16,w4a16:32,w8a16,bf16")


def test_expected_losses_are_near_the_measured_divergence(tiny, token_rows, four_and_more) -> None:
    recipe, units = four_and_more
    nothing = replace(recipe, components={})
    pairs = []
    for unit in units[:5]:  # those of the first layer, and the second's q, k and v
        alone = allocation.found_recipe(nothing, [unit], [FOUR], "alone")
        pairs.append((unit.losses[FOUR], measured(tiny, token_rows, alone)))
    expected, found = np.log(np.array(pairs).T)
    assert np.abs(expected - found).max() < np.log(4)  # they differ by a factor of 30
    assert np.corrcoef(expected, found)[0, 1] > 0.9


def test_a_budget_beats_one_format_of_its_size(tiny, token_rows, four_and_more) -> None:
    recipe, units = four_and_more
    uniform = [Choice("w4a16", 32)] * len(units)
    uniform[-1] = EIGHT  # the head, as in w4
    bits = allocation.stored_bits(units, uniform)
    chosen = allocation.allocate(units, bits)
    assert allocation.stored_bits(units, chosen) <= bits
    assert len(set(chosen)) > 1
    mixed = measured(tiny, token_rows, _found(recipe, units, chosen))
    assert mixed < 0.8 * measured(tiny, token_rows, _found(recipe, units, uniform))


def _found(recipe: Recipe, units: list[Unit], chosen: list[Choice]) -> Recipe:
    return allocation.found_recipe(recipe, units, chosen, "found")


def test_nan_is_named(tiny, token_rows) -> None:
    spec, params = tiny
    for name in ("layers.1.mlp.up", "final_norm"):
        broken = params | {name: np.full_like(params[name], np.nan)}
        with pytest.raises(BadData, match=rf"{name} has [\d,]+ NaN or infinite values"):
            units_with_losses((spec, broken), token_rows, load_recipe("w4"), "w4a16,w8a16")


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_least_loss(seed, monkeypatch) -> None:
    rng = np.random.default_rng(seed)
    linears = plan(from_config(new_config(hidden=8, layers=2, heads=2, vocab=9)), load_recipe("w8"))
    names = [Choice(str(n)) for n in range(4)]
    units = []
    for linear in linears[:5]:
        costs = rng.choice(np.arange(1, 40), 4, replace=False).tolist()
        losses = np.sort(rng.random(4))[::-1][np.argsort(np.argsort(costs))]
        if seed % 3 == 0:  # a larger format may be worse
            rng.shuffle(losses)
        tables = (dict(zip(names, x, strict=True)) for x in (costs, losses.tolist()))
        units.append(Unit([linear], *tables))
    weights = sum(math.prod(unit.linears[0].matrix) for unit in units)

    def sums(chosen: Any) -> tuple[int, float]:
        pairs = [(u.costs[c], u.losses[c]) for u, c in zip(units, chosen, strict=True)]
        return sum(cost for cost, _ in pairs), sum(loss for _, loss in pairs)

    every = [sums(chosen) for chosen in itertools.product(names, repeat=5)]
    least = min(cost for cost, _ in every)
    for budget in (least, least + 10, least + 40, least + 90):
        chosen = allocation.allocate(units, (budget + 0.5) / weights)
        cost, loss = sums(chosen)
        assert cost <= budget
        assert loss == pytest.approx(min(b for a, b in every if a <= budget), abs=1e-12)
    # with steps of more than a bit, the costs that a unit is rounded up by may be left over
    monkeypatch.setattr(allocation, "_STEPS", 20)
    cost, loss = sums(allocation.allocate(units, (least + 90.5) / weights))
    assert cost <= least + 90
    assert loss <= min(b for a, b in every if a <= least + 90 - 5 * 5) + 1e-12
    with pytest.raises(Infeasible, match="expected at least"):
        allocation.allocate(units, (least - 1) / weights)


def test_rules_of_the_recipe_stay_and_joined_matrices_share_a_format(tiny) -> None:
    spec = tiny[0]
    recipe = replace(load_recipe("mixed"), rules=(RecipeRule(r"layers\.1\.mlp", "w8a8"),))
    recipe = allocation.with_components_of(recipe, spec)
    units = allocation.units(spec, recipe, (FOUR, EIGHT))
    names = [{t.name.rpartition(".")[2] for t in unit.tensors} for unit in units]
    assert {"q", "k", "v"} in names and {"gate", "up"} in names
    assert not any(t.layer == 1 and ".mlp." in t.name for u in units for t in u.tensors)
    chosen = [(FOUR, EIGHT)[number % 2] for number in range(len(units))]
    found = allocation.found_recipe(recipe, units, chosen, "found")
    schemes = {t.name: x.scheme for x in plan(spec, found) for t in x.tensors}
    assert all(schemes[f"layers.1.mlp.{n}"].name == "w8a8" for n in ("gate", "up", "down"))
    for unit, choice in zip(units, chosen, strict=True):
        assert {schemes[t.name].name for t in unit.tensors} == {choice.name}
    cost = sum(8 * x.stored_bytes for u in units for x in plan(spec, found)
               if x.tensor in u.tensors)  # fmt: skip
    assert cost == sum(unit.costs[c] for unit, c in zip(units, chosen, strict=True))


@pytest.mark.parametrize("text", ["w4a16", "w4a16,w4a16", "w8a16:32,bf16", "w4a16:x,bf16", "w5"])
def test_wrong_lists_of_formats_are_refused(text) -> None:
    with pytest.raises(UsageError, match="expected"):
        allocation.parse_choices(text)
