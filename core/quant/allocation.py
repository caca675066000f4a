"""Number formats by sensitivity, within a budget of stored bits (`--bits`).

The matrices that a recipe quantizes and that none of its rules names are free. Matrices that
servers join (q, k, v; gate and up; the experts of a layer) get one format. Of each such unit and
format the cost is its stored bits, scales included, and the loss the divergence that
`core.quant.sensitivity` expects of it, rounded as the recipe says: GPTQ gains more in some formats
and matrices than in others. The formats with the least loss within the budget are found by dynamic
programming over the units.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from sabia.core import stop
from sabia.core.errors import Infeasible, UsageError
from sabia.core.numerics.schemes import Scheme, scheme_named, served_together
from sabia.core.quant.hessians import Hessians
from sabia.core.quant.quantize import check_finite, expert_windows, hessian_of, in_window
from sabia.core.quant.recipe import (
    Linear,
    Recipe,
    RecipeRule,
    check_one_method,
    component_of,
    name_in_layer,
    plan,
    stored_form,
)
from sabia.core.quant.rounding import store
from sabia.core.quant.sensitivity import LayerFisher, expected
from sabia.core.spec import ModelSpec
from sabia.core.spec.tensors import TensorSpec

_STEPS = 1 << 16  # of the budget


@dataclass(frozen=True)
class Choice:
    """A format by name, and the columns of a group (None: the recipe's)."""

    name: str
    group: int | None = None

    def rule(self, match: str) -> RecipeRule:
        """The rule of a recipe that applies it."""
        return RecipeRule(match, self.name, self.group)


@dataclass
class Unit:
    """Matrices that get one format. costs: stored bits by choice; losses: nats of a token."""

    linears: list[Linear]
    costs: dict[Choice, int]
    losses: dict[Choice, float]

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors of its matrices."""
        return list(dict.fromkeys(t for linear in self.linears for t in linear.tensors))


def parse_choices(names: str) -> tuple[Choice, ...]:
    """`w4a16:32,w8a16,bf16`: formats, and perhaps columns of a group. Raises UsageError."""
    made = []
    for text in names.split(","):
        name, colon, group = text.strip().partition(":")
        if colon and not (group.isdecimal() and scheme_named(name).sizes_groups):
            raise UsageError(
                f"--formats: {text!r} (expected a format such as w4a16, or w4a16:32 with the "
                "columns of a group, which formats of integers in groups have)"
            )
        scheme_named(name)
        made.append(Choice(name, int(group) if colon else None))
    check_one_method("--formats", {scheme_named(choice.name) for choice in made})
    if len(set(made)) < 2 or len(set(made)) < len(made):
        raise UsageError(f"--formats: {names!r} (expected two or more different formats)")
    return tuple(made)


def units(spec: ModelSpec, recipe: Recipe, choices: Sequence[Choice]) -> list[Unit]:
    """The free units of a model with the costs of the formats that fit them."""
    grouped: dict[Any, list[Linear]] = {}
    for linear in plan(stored_form(spec, recipe), recipe):
        named = any(re.search(r.match, t.name) for r in recipe.rules for t in linear.tensors)
        if linear.scheme.quantizes and not named:
            grouped.setdefault(_unit_key(linear.tensor), []).append(linear)
    made = []
    for linears in grouped.values():
        schemes = {c: s for c in choices if (s := _schemes(linears, recipe, c)) is not None}
        costs = {c: _bits(linears, own) for c, own in schemes.items()}
        made.append(Unit(linears, costs, dict.fromkeys(costs, 0.0)))
        if not costs:
            names = ", ".join(choice.name for choice in choices)
            raise UsageError(f"--formats: none of {names} fits {linears[0].tensor.name}")
    if not made:
        raise UsageError(
            f"--bits: recipe {recipe.name} leaves no matrix to choose a format for (expected "
            "components with a format, and rules that do not name all of their matrices)"
        )
    return made


def add_losses(spec: ModelSpec, units: Sequence[Unit], part: LayerFisher, recipe: Recipe) -> None:
    """Set the losses of the units of a layer, rounded as the recipe says by the inputs of every
    other batch of `part`, for those of the others, to which GPTQ's errors are not fitted.

    Raises BadData for NaN and infinite values.
    """
    own = [unit for unit in units if unit.linears[0].tensor.layer == part.layer]
    linears = [linear for unit in own for linear in unit.linears]
    wanted = {t.name for linear in linears for t in linear.tensors}
    every = recipe.experts == "all"
    for experts in expert_windows(spec, recipe, linears):
        seen, others = (
            part.inputs(Hessians(experts, experts.start == 0, wanted, False, every), half)
            for half in (slice(0, None, 2), slice(1, None, 2))
        )
        for unit in own:
            for linear in unit.linears:
                if in_window(linear, experts):
                    hessians = hessian_of(linear, seen), others.of(*linear.key)
                    _add_loss(unit, linear, part, recipe, *hessians)


def _add_loss(
    unit: Unit,
    linear: Linear,
    part: LayerFisher,
    recipe: Recipe,
    seen: torch.Tensor | None,
    others: torch.Tensor | None,
) -> None:
    weight, fisher = linear.weight(part.values), linear.weight(part.fisher)
    check_finite(linear.tensor.name, weight)
    for choice in unit.costs:
        stop.check()
        scheme = _scheme(linear, recipe, choice)
        if scheme.quantizes:
            (stored,) = store([weight], scheme, recipe, seen, linear.tensor.name)
            on = seen if others is None else others
            unit.losses[choice] += expected(stored.decoded - weight, fisher, on)


def allocate(units: Sequence[Unit], bits: float) -> list[Choice]:
    """The choice of each unit with the least sum of losses within `bits` for each weight.

    Costs are counted in steps of their greatest common divisor, or where there are more than _STEPS
    of these within the budget in larger ones, rounded up. Raises Infeasible for a budget below the
    smallest formats.
    """
    weights = sum(_weights(unit.linears) for unit in units)
    least = [min(unit.costs.values()) for unit in units]
    left = int(bits * weights) - sum(least)
    if left < 0:
        raise Infeasible(
            f"--bits: {bits:g} (expected at least {sum(least) / weights:.4f}, the stored bits of "
            "the smallest of --formats with their scales)"
        )
    more = [
        {c: cost - low for c, cost in unit.costs.items()}
        for unit, low in zip(units, least, strict=True)
    ]
    step = math.gcd(*(cost for costs in more for cost in costs.values())) or 1
    step *= -(-left // (step * _STEPS)) or 1
    best, choices = np.zeros(left // step + 1), list[np.ndarray]()  # by the steps that are spent
    for unit, costs in zip(units, more, strict=True):
        sums = np.full((len(costs), len(best)), np.inf)
        for row, (choice, cost) in zip(sums, costs.items(), strict=True):
            steps = -(-cost // step)
            row[steps:] = best[: max(0, len(best) - steps)] + unit.losses[choice]
        choices.append(sums.argmin(0))
        best = sums.min(0)
    chosen, at = list[Choice](), len(best) - 1
    for costs, numbers in zip(reversed(more), reversed(choices), strict=True):
        choice = [*costs][numbers[at]]
        chosen.append(choice)
        at -= -(-costs[choice] // step)
    return chosen[::-1]


def found_recipe(
    recipe: Recipe, units: Sequence[Unit], chosen: Sequence[Choice], name: str
) -> Recipe:
    """The recipe with the formats that were chosen, as rules before its own."""
    tensors = [(t, c) for unit, c in zip(units, chosen, strict=True) for t in unit.tensors]
    by_choice: dict[tuple[str, Choice], list[str]] = {}  # layers by name in the layer
    for tensor, choice in tensors:
        layer = "" if tensor.layer is None else str(tensor.layer)
        by_choice.setdefault((name_in_layer(tensor), choice), []).append(layer)
    rules = []
    for (role, choice), layers in by_choice.items():
        numbers = "|".join(filter(None, layers))
        before = rf"layers\.({numbers})\." if numbers else ""
        rules.append(choice.rule(f"^{before}{re.escape(role)}$"))
    return replace(recipe, name=name, rules=(*rules, *recipe.rules))


def to_toml(recipe: Recipe, comment: str) -> str:
    """The file of a recipe."""
    lines = [f"# {line}" for line in comment.splitlines()]
    apart = ("components", "rules", "container")  # --format is an option
    own = {k: v for k, v in asdict(recipe).items() if k not in apart}
    lines += [*_keys(own), "", "[components]", *_keys(recipe.components)]
    for rule in recipe.rules:
        lines += ["", "[[rules]]", *_keys(asdict(rule))]
    return "\n".join(lines) + "\n"


def _keys(values: Mapping[str, Any]) -> list[str]:
    return [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None]


def with_components_of(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """The recipe without formats of components that no matrix of the model has, as a file may not
    have them."""
    own = {component_of(t) for x in plan(stored_form(spec, recipe), recipe) for t in x.tensors}
    components = {k: v for k, v in recipe.components.items() if k in own}
    return replace(recipe, components=components)


def stored_bits(units: Sequence[Unit], chosen: Iterable[Choice]) -> float:
    """Stored bits of a weight, scales included."""
    spent = sum(unit.costs[c] for unit, c in zip(units, chosen, strict=True))
    return spent / sum(_weights(unit.linears) for unit in units)


def _unit_key(tensor: TensorSpec) -> tuple[str, frozenset[str]]:
    part, together = served_together(tensor.name)
    return part, frozenset() if tensor.stacked else together


def _schemes(linears: Sequence[Linear], recipe: Recipe, choice: Choice) -> list[Scheme] | None:
    """The schemes of matrices by a choice; None where it does not fit one of them."""
    try:
        return [_scheme(linear, recipe, choice) for linear in linears]
    except UsageError:
        return None


def _scheme(linear: Linear, recipe: Recipe, choice: Choice) -> Scheme:
    return replace(recipe, rules=(choice.rule(""),)).scheme_of(linear.tensor)


def _bits(linears: Sequence[Linear], schemes: Sequence[Scheme]) -> int:
    pairs = zip(linears, schemes, strict=True)
    return sum(8 * replace(x, scheme=s).stored_bytes if s.quantizes else 16 * _weights([x])
               for x, s in pairs)  # fmt: skip


def _weights(linears: Sequence[Linear]) -> int:
    return sum(rows * columns for rows, columns in (linear.matrix for linear in linears))


def by_format(units: Sequence[Unit], chosen: Sequence[Choice]) -> Mapping[str, float]:
    """The share of the weights in each format."""
    total, shares = sum(_weights(unit.linears) for unit in units), dict[str, float]()
    for unit, choice in zip(units, chosen, strict=True):
        name = choice.name if choice.group is None else f"{choice.name}:{choice.group}"
        shares[name] = shares.get(name, 0.0) + _weights(unit.linears) / total
    return shares
