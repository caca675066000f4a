"""Which layouts are valid: abilities of the training software, and divisors of the model's sizes.

Abilities (`can` in data/stacks.toml) by name of the software's preset:

sabia(-cpu)    core.parallel of this project: weights split along their dimensions (so fsdp divides
               the hidden size), always ZeRO-3, no interleaving; pipelines in torch only
fsdp(-no-sync) torchtitan: FSDP2 with or without resharding, and all other axes; a row is split into
               twice as many pieces as context ranks, to balance a causal mask
fsdp-2023(-a100)  PyTorch's first FSDP only, over flat shards
megatron(-graphs)  Megatron-Core: distributed optimizer, sequence parallelism, interleaving, experts
               over the tensor ranks, key and value heads copied where tensor exceeds them; the
               embedding and the head may count as a layer each
megatron-2021  arXiv 2104.04473: data, tensor and interleaved pipelines
llama3         arXiv 2407.21783: weights stay whole between forward and backward (ZeRO-2)
maxtext        JAX and GSPMD: arrays split evenly; pipelines of repeated stages
zero-2021      DeepSpeed ZeRO-3 only

A rule checks the product of some fields of a layout: `tensor` must divide the heads, `context`
times `tensor` the tokens of a row. The search filters arrays with the rules. `--fixed-layout`
(`fsdp=8,tensor=4,micro-batch=2,recompute=full,zero=3`) checks one layout with them, and an error
names the nearest valid values.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.device.layout import AXES, RECOMPUTE, Abilities, Layout, Stack, Workload
from sabia.core.plan.elementwise import Number

Pinned = Mapping[str, Any]  # field of a layout → the value that it must have


@dataclass(frozen=True)
class SearchProblem:
    """Input of a search, without the numbers of chips.

    pinned: fields of a layout with a fixed value. share: of a chip's memory that may be used (None:
    that of the software).
    """

    workload: Workload
    chip: Chip
    stack: Stack
    pinned: Pinned
    share: float | None = None

    @property
    def utilisation(self) -> float:
        """Share of a chip's memory that may be used."""
        return self.stack.utilisation if self.share is None else self.share

    @property
    def memory_limit_bytes(self) -> float:
        """Bytes that may be used on a device."""
        return self.chip.usable_hbm_bytes * self.utilisation

    @property
    def can(self) -> Abilities:
        """Abilities of the software on this chip."""
        if self.stack.name == "sabia" and self.chip.family == "TPU":  # which JAX drives
            return replace(self.stack.can, axes=AXES[:-1])
        return self.stack.can


NUMBERS = (*AXES, "micro_batch", "virtual")
CHOICES = ("recompute", "zero", "experts_over_tensor", "sequence_parallel")
FIELDS = (*NUMBERS, *CHOICES)
PADDING = 1 / 8  # largest share of missing layers, where stages have unequal numbers of layers
FARTHEST = 1 << 16  # larger values are not proposed
ROW = "tokens of a row"
MOST_STAGES = 12  # virtual stages of one device; more have not been published


@dataclass(frozen=True)
class LayoutRule:
    """A condition on the product of `fields`; `message`: the error if it does not hold.

    advice: a layout that breaks it would run, but slowly; only the search applies it.
    """

    fields: tuple[str, ...]
    message: str
    fits: Callable[[Number], Number]
    advice: bool = False

    @property
    def reason(self) -> str:
        """Why a layout is rejected, in words."""
        return f"{' x '.join(self.fields)} {self.message}"

    @property
    def mesh_fields(self) -> set[str]:
        """The fields that are axes; the others count as 1 where they are not given."""
        return {*self.fields} & {*AXES}

    def product(self, values: Mapping[str, Number]) -> Number:
        """The product of the fields; 1 for a field that is not given."""
        return math.prod(values.get(field, 1) for field in self.fields)


def divides(fields: tuple[str, ...], count: int, what: str) -> LayoutRule:
    """The product of the fields divides `count` things."""
    return LayoutRule(fields, f"does not divide {count:,} {what}", lambda n: count % n == 0)


def copies(fields: tuple[str, ...], count: int, what: str) -> LayoutRule:
    """The product of the fields divides `count` things, or is a multiple of them."""
    message = f"neither divides {count:,} {what} nor copies them"
    return LayoutRule(fields, message, lambda n: (count % n == 0) | (n % count == 0))


def at_most(field: str, count: int, what: str, advice: bool = False) -> LayoutRule:
    """The field is at most `count`."""
    return LayoutRule((field,), f"is above {count:,} {what}", lambda n: n <= count, advice)


def check_pinned(workload: Workload, chip: Chip, can: Abilities, values: Mapping[str, Any]) -> None:
    """Raise UsageError if values of a layout's fields break a rule, naming the nearest valid ones.

    Rules whose fields are not all given are not checked, nor those that are advice.
    """
    if can.recipes and workload.recipe.name not in can.recipes:
        raise UsageError(
            f"--state-recipe: {workload.recipe.name} is not the recipe of this software (expected "
            f"{can.recipes[0]})"
        )
    for field, value in values.items():
        if field in CHOICES and value not in can.choices(field):
            known = ", ".join(str(choice) for choice in can.choices(field))
            raise UsageError(f"layout: {field}={value} (expected one of {known})")
    for field in AXES:
        value = values.get(field, 1)
        if value > 1 and field not in can.axes:
            raise UsageError(
                f"layout: {field}={value} is not supported by this software (only "
                f"{', '.join(can.axes)} may be above 1)"
            )
    needed = {
        "virtual": (can.interleaved, "this software has no interleaving"),
        "expert": (has_experts(workload.architecture), "the model has no experts"),
    }
    for field, (possible, why) in needed.items():
        if values.get(field, 1) > 1 and not possible:
            raise UsageError(f"layout: {field}={values[field]} (expected 1: {why})")
    rules = [r for r in rules_of(workload, chip, can) if not r.advice]
    for rule in rules:
        if rule.mesh_fields <= {*values} and not rule.fits(rule.product(values)):
            raise UsageError(f"layout: {_broken(rule, rules, values)}")


def _broken(rule: LayoutRule, rules: list[LayoutRule], values: Mapping[str, Any]) -> str:
    """'tensor=6 does not divide 64 heads; use 4 or 8'."""
    product = rule.product(values)
    given = {field: values.get(field, 1) for field in rule.fields}
    named = [f"{field}={value}" for field, value in given.items() if value > 1]
    alike = [other for other in rules if other.fields == rule.fields]
    text = " or ".join(str(n) for n in _nearest(product, alike))
    total = f" = {product}" if len(named) > 1 else ""
    return f"{' x '.join(named)}{total} {rule.message}" + (f"; use {text}" if text else "")


def _nearest(value: int, rules: list[LayoutRule]) -> Iterator[int]:
    """The next number below `value` that passes all the rules, and the next above it."""
    below = range(min(value - 1, FARTHEST), 0, -1)
    above = range(value + 1, min(5 * value + 64, FARTHEST))
    for numbers in (below, above):
        yield from next(([n] for n in numbers if all(rule.fits(n) for rule in rules)), [])


def rules_of(workload: Workload, chip: Chip, can: Abilities) -> Iterator[LayoutRule]:
    """Every rule for layouts of this workload on this chip with this software.

    Rules of one field come first, the most restrictive of each field first.
    """
    model, sequence = workload.architecture, workload.sequence
    yield at_most("tensor", chip.scale_up_domain, "chips of the fast domain", advice=True)
    split = {"heads": "heads", "kv_heads": "key-value heads"}
    split["mlp_width"] = "units of a feed-forward layer"
    if True not in can.experts_over_tensor:
        split["expert_width"] = "units of an expert"
    for field, what in split.items():
        for count in _sizes(model, field):
            copied = can.copied_heads and field == "kv_heads"
            yield (copies if copied else divides)(("tensor",), count, what)
    pieces = (sequence // 2, "pairs of tokens of a row") if can.halves else (sequence, ROW)
    yield divides(("context",), *pieces)
    depth = model.depth
    yield at_most("pipe", depth, "layers")
    if can.loose_stages:
        message = f"stages of {depth} layers would be idle for more than {PADDING:.0%}"
        most = depth * (1 + PADDING)
        yield LayoutRule(("pipe",), message, lambda n: -(-depth // n) * n <= most, advice=True)
    else:
        yield even_stages(depth, can.outer)
    for count in _sizes(model, "experts"):
        yield divides(("expert",), count, "experts")
    if can.even_hidden:
        yield divides(("fsdp",), model.hidden, "hidden units")
    heads = {kind.kv_heads for kind in model.layers if kind.state_products}
    for count in sorted(heads):  # of recurrent mixers, which need whole rows
        yield divides(("context", "tensor"), count, "key heads of recurrent layers")
    if can.sequence_parallel:
        yield divides(("context", "tensor"), sequence, ROW)
    yield divides(("data", "fsdp", "expert", "micro_batch"), workload.batch_rows, "rows of a batch")


def even_stages(depth: int, outer: int) -> LayoutRule:
    """pipe x virtual divides the layers, also with 1 to `outer` more for embedding and head."""
    extra = f" (or {depth + outer})" if outer else ""

    def fits(n: Number) -> Number:
        return reduce(or_, ((depth + more) % n == 0 for more in range(outer + 1)))

    message = f"does not divide {depth} layers{extra}"
    return LayoutRule(("pipe", "virtual"), message, fits, advice=bool(outer))


def _sizes(model: Architecture, name: str) -> list[int]:
    """The different values above 0 of a field in all kinds of layers, smallest first."""
    return sorted({getattr(kind, name) for kind in model.layers} - {0})


def has_experts(model: Architecture) -> bool:
    """Whether the model has MoE layers."""
    return any(kind.experts for kind in model.layers)


SHORT = {
    "dp": "data", "ep": "expert", "cp": "context", "tp": "tensor", "pp": "pipe",
    "mb": "micro_batch", "vpp": "virtual",
}  # fmt: skip
# field that is not a number of devices → its values for --fixed-layout, in words and as a mapping
VALUES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "recompute": (", ".join(RECOMPUTE), {name: name for name in RECOMPUTE}),
    "zero": ("0, 1, 2 or 3", {str(level): level for level in range(4)}),
    "experts_over_tensor": ("yes or no", {"yes": True, "no": False}),
    "sequence_parallel": ("yes or no", {"yes": True, "no": False}),
}


def parse_fields(text: str) -> dict[str, object]:
    """'fsdp=8,micro-batch=2' → {"fsdp": 8, "micro_batch": 2}; short names as well (tp, pp, mb).

    Raises UsageError.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        field = name.strip().lower().replace("-", "_")
        field = SHORT.get(field, field)
        if field not in FIELDS or field in values:
            known = ", ".join(field.replace("_", "-") for field in FIELDS)
            raise UsageError(
                f"--fixed-layout: {part!r} (expected FIELD=VALUE, each of {known} at most once)"
            )
        values[field] = _value(field, value.strip(), part)
    return values


def _value(field: str, value: str, part: str) -> Any:
    wanted, named = VALUES.get(field, ("a whole number, 1 or more", {}))
    if value in named:
        return named[value]
    if field in NUMBERS and value.isdigit() and int(value) > 0:
        return int(value)
    raise UsageError(f"--fixed-layout: {part!r} (expected {wanted})")


def fixed_layout(problem: SearchProblem, chips: int | None) -> Layout:
    """The layout of the pinned fields; other fields are 1, or the default of the software.

    With `chips`, data has the remaining chips unless it is given. Raises UsageError if the number
    of chips differs, and on a layout that the model or the software cannot have.
    """
    can = problem.can
    usual = {"zero": can.zero[-1], "sequence_parallel": can.sequence_parallel}
    layout = Layout(**(usual | {**problem.pinned}))
    _check(layout, problem)
    if chips is not None and "data" not in problem.pinned and chips % layout.chips == 0:
        layout = replace(layout, data=chips // layout.chips)
    if chips is not None and layout.chips != chips:
        raise UsageError(
            f"--fixed-layout: has {layout.chips} chips (expected --chips {layout.chips}, or axes "
            f"whose product is {chips})"
        )
    _check(layout, problem)
    return layout


def _check(layout: Layout, problem: SearchProblem) -> None:
    """Raise UsageError on a layout that the model or the software cannot have."""
    check_pinned(problem.workload, problem.chip, problem.can, vars(layout))
    if layout.virtual > 1 and layout.pipe == 1:
        raise UsageError(f"layout: virtual={layout.virtual} with pipe=1 (expected pipe above 1)")
