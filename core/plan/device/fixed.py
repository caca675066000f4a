"""One layout as text: `--fixed-layout fsdp=8,tensor=4,micro-batch=2,recompute=full,zero=3`.

It is taken as it is, without a search: published runs are judged with it. What the model or the
software cannot do is refused, with the nearest values that would do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.layout import RECOMPUTE, Layout
from sabia.core.plan.device.search_abilities import Abilities, abilities_of
from sabia.core.plan.device.search_rules import (
    CHOICES,
    NUMBERS,
    check_pinned,
)
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload

SWITCHES = ("experts_over_tensor", "sequence_parallel")
FIELDS = (*NUMBERS, *CHOICES)
SHORT = {
    "dp": "data", "ep": "expert", "cp": "context", "tp": "tensor", "pp": "pipe",
    "mb": "micro_batch", "vpp": "virtual",
}  # fmt: skip
YES_NO = {"yes": True, "no": False}


def parse_fields(text: str) -> dict[str, Any]:
    """'fsdp=8,micro-batch=2' → {"fsdp": 8, "micro_batch": 2}; short names as well (tp, pp, mb).

    Raises UsageError.
    """
    found: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        field = name.strip().lower().replace("-", "_")
        field = SHORT.get(field, field)
        if field not in FIELDS or field in found:
            known = ", ".join(field.replace("_", "-") for field in FIELDS)
            raise UsageError(
                f"--fixed-layout: {part!r} (expected FIELD=VALUE, each of {known} at most once)"
            )
        found[field] = _value(field, value.strip(), part)
    return found


def _value(field: str, value: str, part: str) -> Any:
    if field == "recompute" and value in RECOMPUTE:
        return value
    if field in SWITCHES and value in YES_NO:
        return YES_NO[value]
    if field == "zero" and value in ("0", "1", "2", "3"):
        return int(value)
    if field in NUMBERS and value.isdigit() and int(value) > 0:
        return int(value)
    wanted = "a whole number, 1 or more"
    if field == "recompute":
        wanted = ", ".join(RECOMPUTE)
    elif field in SWITCHES or field == "zero":
        wanted = "yes or no" if field in SWITCHES else "0, 1, 2 or 3"
    raise UsageError(f"--fixed-layout: {part!r} (expected {wanted})")


def fixed_layout(
    fields: Mapping[str, Any], workload: Workload, chip: Chip, stack: Stack, chips: int | None
) -> Layout:
    """The layout of these fields; what they leave out is 1, or as the software does it.

    With `chips`, data takes what the other axes leave, unless it is given. Raises UsageError where
    the number of chips is another one, and on what the model or the software cannot do.
    """
    can = abilities_of(stack, chip)
    layout = Layout(**(_usual(can) | {**fields}))
    _check(layout, workload, chip, can)
    if chips is not None and "data" not in fields and chips % layout.chips == 0:
        layout = replace(layout, data=chips // layout.chips)
    if chips is not None and layout.chips != chips:
        raise UsageError(
            f"--fixed-layout: is of {layout.chips} chips (expected --chips {layout.chips}, or axes "
            f"whose product is {chips})"
        )
    _check(layout, workload, chip, can)
    return layout


def _usual(can: Abilities) -> dict[str, Any]:
    """What the software does where nothing is said."""
    return {"zero": can.zero[-1], "sequence_parallel": can.sequence_parallel}


def _check(layout: Layout, workload: Workload, chip: Chip, can: Abilities) -> None:
    """Raise UsageError where the model or the software cannot be laid out so."""
    numbers = {field: getattr(layout, field) for field in NUMBERS}
    choices = {field: getattr(layout, field) for field in CHOICES}
    check_pinned(workload, chip, can, numbers | choices)
    if layout.virtual > 1 and layout.pipe == 1:
        raise UsageError(f"layout: virtual={layout.virtual} with pipe=1 (expected pipe above 1)")
