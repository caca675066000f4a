"""Number formats by sensitivity, within a budget of stored bits (`--bits`).

The matrices that a recipe quantizes and that none of its rules names are free. Matrices that
servers join (q, k, v; gate and up; the experts of a layer) get one format. Of each such unit and
format the cost is its stored bits, scales included, and the loss the divergence that
`core.quant.sensitivity` expects of rounding to nearest. The formats with the least loss within the
budget are found on the lower convex hull of each unit, by the largest fall of the loss for each
bit; what is left of the budget is spent on single changes that still fit.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.errors import Infeasible, UsageError
from sabia.core.numerics.schemes import Scheme, scheme_named, served_together
from sabia.core.quant.quantize import check_finite
from sabia.core.quant.recipe import (
    Linear,
    Recipe,
    RecipeRule,
    component_of,
    name_in_layer,
    plan,
    stored_form,
)
from sabia.core.quant.rounding import store
from sabia.core.quant.sensitivity import LayerFisher
from sabia.core.spec import ModelSpec
from sabia.core.spec.tensors import TensorSpec

CHOICES = ("w4a16", "w8a16", "bf16")


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


def add_losses(units: Sequence[Unit], part: LayerFisher, recipe: Recipe) -> None:
    """Set the losses of the units of a layer. Raises BadData for NaN and infinite values."""
    for unit in units:
        if unit.linears[0].tensor.layer != part.layer:
            continue
        for linear in unit.linears:
            weight, fisher = linear.weight(part.values), linear.weight(part.fisher)
            check_finite(linear.tensor.name, weight)
            for choice in unit.costs:
                stop.check()
                scheme = _scheme(linear, recipe, choice)
                if scheme.quantizes:
                    off = store(weight, scheme, replace(recipe, rounding="rtn")).decoded - weight
                    # ½ Σ F (W' - W)²
                    unit.losses[choice] += 0.5 * float(np.sum(fisher * off * off, dtype=np.float64))


def allocate(units: Sequence[Unit], bits: float) -> list[Choice]:
    """The choice of each unit with the least sum of losses found within `bits` for each weight.

    Raises Infeasible for a budget below the smallest formats.
    """
    weights = sum(_weights(unit.linears) for unit in units)
    budget = int(bits * weights)
    hulls = [_hull(unit) for unit in units]
    chosen = [hull[0] for hull in hulls]
    spent = sum(unit.costs[c] for unit, c in zip(units, chosen, strict=True))
    if spent > budget:
        raise Infeasible(
            f"--bits: {bits:g} (expected at least {spent / weights:.4f}, the stored bits of the "
            "smallest of --formats with their scales)"
        )
    steps = [
        (-_gain(unit, low, high), number, index + 1)
        for number, (unit, hull) in enumerate(zip(units, hulls, strict=True))
        for index, (low, high) in enumerate(pairwise(hull))
    ]
    for _, number, index in sorted(steps):  # falls of a hull shrink, so that its steps are in order
        unit, hull = units[number], hulls[number]
        if chosen[number] != hull[index - 1]:
            continue  # a step before it did not fit
        more = unit.costs[hull[index]] - unit.costs[chosen[number]]
        if spent + more <= budget:
            chosen[number], spent = hull[index], spent + more
    return _refined(units, chosen, budget - spent)


def _refined(units: Sequence[Unit], chosen: list[Choice], left: int) -> list[Choice]:
    """Single changes that fit into what is left, the largest fall of the loss first."""
    while True:
        best: tuple[float, int, Choice] | None = None
        for number, unit in enumerate(units):
            for choice, cost in unit.costs.items():
                fits = cost - unit.costs[chosen[number]] <= left
                fall = unit.losses[chosen[number]] - unit.losses[choice]
                if fits and fall > 0 and (best is None or fall > best[0]):
                    best = fall, number, choice
        if best is None:
            return chosen
        _, number, choice = best
        left -= units[number].costs[choice] - units[number].costs[chosen[number]]
        chosen[number] = choice


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


def _hull(unit: Unit) -> list[Choice]:
    """The choices on the lower convex hull of the losses over the costs, the smallest first."""
    order = sorted(unit.costs, key=lambda c: (unit.costs[c], unit.losses[c]))
    hull = [order[0]]
    for choice in order[1:]:
        if unit.losses[choice] >= unit.losses[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(unit, hull[-2], hull[-1]) <= _gain(unit, hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(unit: Unit, low: Choice, high: Choice) -> float:
    """The fall of the loss for each bit."""
    more = max(1, unit.costs[high] - unit.costs[low])
    return (unit.losses[low] - unit.losses[high]) / more


def by_format(units: Sequence[Unit], chosen: Sequence[Choice]) -> Mapping[str, float]:
    """The share of the weights in each format."""
    total, shares = sum(_weights(unit.linears) for unit in units), dict[str, float]()
    for unit, choice in zip(units, chosen, strict=True):
        name = choice.name if choice.group is None else f"{choice.name}:{choice.group}"
        shares[name] = shares.get(name, 0.0) + _weights(unit.linears) / total
    return shares
