"""Which layouts exist: into what a model can be cut, by a training software that can do so much.

A rule looks at the product of some fields of a layout: `tensor` must divide the heads, `context`
times `tensor` the tokens of a row. The search filters arrays with the rules; `--fixed-layout`
checks one layout with them and names the nearest values that fit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.device.layout import AXES
from sabia.core.plan.device.search_abilities import Abilities
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number

NUMBERS = (*AXES, "micro_batch", "virtual")
CHOICES = ("recompute", "zero", "experts_over_tensor", "sequence_parallel")
PADDING = 1 / 8  # of the layers that a stage is given, the most that may be missing
FARTHEST = 1 << 16  # beyond which no value is proposed
MOST_STAGES = 12  # on one device; interleaving further has not been published


@dataclass(frozen=True)
class Rule:
    """A condition on the product of `fields`; `says`: what is wrong where it does not hold.

    advice: a layout that breaks it would run, only not well: the search alone applies it.
    """

    fields: tuple[str, ...]
    says: str
    fits: Callable[[Number], Number]
    advice: bool = False

    @property
    def reason(self) -> str:
        """Why a layout fell, in words."""
        return f"{' x '.join(self.fields)} {self.says}"

    @property
    def mesh_fields(self) -> set[str]:
        """The fields that are axes; the others count as 1 where they are not given."""
        return {*self.fields} & {*AXES}

    def product(self, values: Mapping[str, Number]) -> Number:
        """Of the fields, 1 where one is not given."""
        found: Number = 1
        for field in self.fields:
            found = found * values.get(field, 1)
        return found


def divides(fields: tuple[str, ...], count: int, what: str) -> Rule:
    """The product of the fields divides `count` things."""
    return Rule(fields, f"does not divide {count:,} {what}", lambda n: count % n == 0)


def at_most(field: str, count: int, what: str, advice: bool = False) -> Rule:
    """The field is at most `count`."""
    return Rule((field,), f"is above {count:,} {what}", lambda n: n <= count, advice)


def check_pinned(
    workload: Workload, chip: Chip, can: Abilities, values: Mapping[str, Any], advice: bool = False
) -> None:
    """Raise UsageError where the values of a layout's fields break a rule, naming near ones.

    Rules over fields that are not all given are left alone; with `advice` its rules count, too.
    """
    if can.recipes and workload.recipe.name not in can.recipes:
        raise UsageError(
            f"--state-recipe: {workload.recipe.name} is not how this software holds its state "
            f"(expected {can.recipes[0]})"
        )
    _check_names(can, values)
    for field in NUMBERS:
        value = values.get(field, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"layout: {field}={value!r} (expected a whole number, 1 or more)")
        if value > 1 and field in AXES and field not in can.axes:
            raise UsageError(
                f"layout: {field}={value} is beyond this software (expected one of "
                f"{', '.join(can.axes)} above 1)"
            )
    if values.get("virtual", 1) > 1 and not can.interleaved:
        raise UsageError(
            f"layout: virtual={values['virtual']} (expected 1: this software does not interleave)"
        )
    if values.get("expert", 1) > 1 and not has_experts(workload.architecture):
        raise UsageError(f"layout: expert={values['expert']} with a model without experts")
    rules = [r for r in rules_of(workload, chip, can) if advice or not r.advice]
    for rule in rules:
        if rule.mesh_fields <= {*values} and not rule.fits(rule.product(values)):
            raise UsageError(f"layout: {_broken(rule, rules, values)}")


def _check_names(can: Abilities, values: Mapping[str, Any]) -> None:
    for field, value in values.items():
        if field in CHOICES and value not in can.choices(field):
            known = ", ".join(str(choice) for choice in can.choices(field))
            raise UsageError(f"layout: {field}={value} (expected one of {known})")
        if field not in (*NUMBERS, *CHOICES):
            known = ", ".join((*NUMBERS, *CHOICES))
            raise UsageError(f"layout: {field!r} is no field of it (expected one of {known})")


def _broken(rule: Rule, rules: list[Rule], values: Mapping[str, Any]) -> str:
    """'tensor=6 does not divide 64 heads; use 4 or 8'."""
    product = rule.product(values)
    given = {field: values.get(field, 1) for field in rule.fields}
    named = [f"{field}={value}" for field, value in given.items() if value > 1]
    alike = [other for other in rules if other.fields == rule.fields]
    text = " or ".join(str(n) for n in _nearest(product, alike))
    total = f" = {product}" if len(named) > 1 else ""
    return f"{' x '.join(named)}{total} {rule.says}" + (f"; use {text}" if text else "")


def _nearest(value: int, rules: list[Rule]) -> Iterator[int]:
    """The next number below `value` that all the rules let pass, and the next above it."""
    below = range(min(value - 1, FARTHEST), 0, -1)
    above = range(value + 1, min(5 * value + 64, FARTHEST))
    for numbers in (below, above):
        yield from next(([n] for n in numbers if all(rule.fits(n) for rule in rules)), [])


def rules_of(workload: Workload, chip: Chip, can: Abilities) -> tuple[Rule, ...]:
    """Every rule that a layout of this work on this chip with this software keeps.

    Those of one field come first, the most restrictive of each first.
    """
    model = workload.architecture
    return (
        *_tensor_rules(model, chip, can),
        *_context_rules(workload, can),
        *_pipe_rules(model, can),
        *_expert_rules(model),
        *([divides(("fsdp",), model.hidden, "hidden units")] if can.even_hidden else []),
        *_joint_rules(workload, can),
    )


def _tensor_rules(model: Architecture, chip: Chip, can: Abilities) -> Iterator[Rule]:
    yield at_most("tensor", chip.scale_up_domain, "chips of the fast domain", advice=True)
    for count in _sizes(model, "heads"):
        yield divides(("tensor",), count, "heads")
    for count in _sizes(model, "kv_heads"):
        if can.copied_heads:
            yield _divides_or_copies(count)
        else:
            yield divides(("tensor",), count, "key-value heads")
    for count in _sizes(model, "mlp_width"):
        yield divides(("tensor",), count, "units of a feed-forward layer")
    if True not in can.experts_over_tensor:
        for count in _sizes(model, "expert_width"):
            yield divides(("tensor",), count, "units of an expert")


def _divides_or_copies(count: int) -> Rule:
    def fits(n: Number) -> Number:
        return (count % n == 0) | (n % count == 0)

    return Rule(("tensor",), f"neither divides {count:,} key-value heads nor copies them", fits)


def _context_rules(workload: Workload, can: Abilities) -> Iterator[Rule]:
    if can.halves:
        yield divides(("context",), workload.sequence // 2, "pairs of tokens of a row")
    else:
        yield divides(("context",), workload.sequence, "tokens of a row")


def _pipe_rules(model: Architecture, can: Abilities) -> Iterator[Rule]:
    depth = model.depth
    yield at_most("pipe", depth, "layers")
    if can.loose_stages:
        says = f"stages of {depth} layers would be idle for more than {PADDING:.0%}"
        yield Rule(("pipe",), says, lambda n: -(-depth // n) * n <= depth * (1 + PADDING), True)
    else:
        yield even_stages(depth, can.outer)


def even_stages(depth: int, outer: int) -> Rule:
    """pipe x virtual divides the layers, or with one or `outer` more that stand for the ends."""
    extra = f" (or {depth + outer})" if outer else ""

    def fits(n: Number) -> Number:
        found = depth % n == 0
        for more in range(1, outer + 1):
            found = found | ((depth + more) % n == 0)
        return found

    says = f"does not divide {depth} layers{extra}"
    return Rule(("pipe", "virtual"), says, fits, advice=bool(outer))


def _expert_rules(model: Architecture) -> Iterator[Rule]:
    for count in _sizes(model, "experts"):
        yield divides(("expert",), count, "experts")


def _joint_rules(workload: Workload, can: Abilities) -> Iterator[Rule]:
    model = workload.architecture
    heads = {kind.kv_heads for kind in model.layers if kind.state_products}
    for count in sorted(heads):  # of recurrent mixers, each of which runs along whole rows
        yield divides(("context", "tensor"), count, "key heads of recurrent layers")
    if can.sequence_parallel:
        yield divides(("context", "tensor"), workload.sequence, "tokens of a row")
    yield divides(("data", "fsdp", "expert", "micro_batch"), workload.batch_rows, "rows of a batch")


def _sizes(model: Architecture, name: str) -> list[int]:
    """The different values above 0 of a field over the kinds of layers, smallest first."""
    return sorted({getattr(kind, name) for kind in model.layers} - {0})


def has_experts(model: Architecture) -> bool:
    """Whether any layer is a mixture."""
    return any(kind.experts for kind in model.layers)
