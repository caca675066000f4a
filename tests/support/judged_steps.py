"""The tables of published_steps.toml in the planner's terms, decided from layout fields alone.

What the words of each source mean here:
  torchtitan   stack fsdp (fsdp-async where row or title say async TP), Meta's 96 GB H100; defaults
               of its pipelines at 6b03ffa32: as many micro-batches as ranks, two stages a rank if
               interleaved
  MPT          stack fsdp-2023 (on A100 fsdp-2023-a100); zero and recompute as printed
  NeMo, Bridge stack megatron; plain data parallelism has a distributed optimizer (zero 1), fsdp
               above 0 is zero 3; experts lie whole on tensor ranks; recompute, not printed, is
               none; gradients are in BF16 (grad_sync_dtype, grad_reduce_in_fp32 = False in their
               recipes of performance); experts are balanced, as the pages say; in MoE
               models graphs, overlap and dispatch are those that the recipes of the release set
               (bridge_software.py); virtual, where not printed, 1; LoRA of rank 32 is about
               0.5 % of the parameters; where samples of SQuAD are packed, about 200 tokens
               each, attention stays within them
  MaxText      stack maxtext; mbs is per device, so tensor ranks have theirs together; a TPU v7 chip
               has two devices; "keep" names tensors, "minimal" keeps every product; slices are
               pods of chips / slices
A row whose figures do not determine a step is refused with the reason.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bridge_software import software
from published_steps import UNKNOWN, Row, load
from step_cases import Case, architecture, label_of, seconds_of, step_flops

from sabia.core.plan.chips import Chip, find_chip
from sabia.core.plan.device.layout import Layout, Stack, Workload, find_stack
from sabia.core.plan.memory import RECIPES

KEPT = {
    "x": ("input",), "q": ("query",), "k": ("key",), "v": ("value",), "a": ("attended",),
    "o": ("middle",), "d": (),
}  # fmt: skip
PRODUCTS = (
    "input", "query", "key", "value", "middle", "gate", "up", "expert_gate", "expert_up",
)  # fmt: skip
LORA_SHARE = 0.005
SAMPLE = 200


@dataclass(frozen=True)
class Refused:
    """A row that cannot be predicted."""

    table: str
    label: str
    reason: str


def judged_cases() -> Iterator[Case | Refused]:
    """Every row that is not a calibration row."""
    shapes, tables = load()
    for table in tables:
        for row in table["expanded"]:
            if not row.get("calibration", False):
                yield _case(table, row, shapes[row["model"]])


def _case(table: dict[str, Any], row: Row, shape: Row) -> Case | Refused:
    reason = _why_not(row, shape)
    if reason:
        return Refused(table["id"], label_of(row), reason)
    chip, stack = _chip(row), _stack(table, row, shape)
    layout, stack = _layout(table, row, stack)
    model = architecture(shape, row["seq"] if shape.get("learned_positions") else 0)
    if row.get("packed"):
        model = replace(model, layers=tuple(replace(k, window=SAMPLE) for k in model.layers))
    recipe = {"maxtext": "jax10", "megatron": "adamw16"}.get(stack.name, "fsdp-fp32")
    adapters = LORA_SHARE * model.params if row.get("kind") == "lora" else None
    workload = Workload(
        model, row["seq"], row["gbs"], RECIPES[recipe], _precision(row),
        None if adapters is None else round(adapters),
    )  # fmt: skip
    flops = step_flops(row, shape)
    measured = seconds_of(row, flops, chip)
    return Case(table["id"], label_of(row), workload, layout, chip, stack, measured, flops)


def _why_not(row: Row, shape: Row) -> str:
    """Which figure is missing, if one is."""
    if not shape.get("complete", True):
        return f"the shape of {shape['name']} is not known: {shape['missing']}"
    for field in ("gbs", "mbs", "data", "fsdp"):
        if row.get(field) == UNKNOWN and "local_batch" not in row:
            return f"{field} is not published"
    if row["recompute"] == UNKNOWN and row["chip"].startswith("tpu"):
        return "recompute is not published"
    return ""


def _chip(row: Row) -> Chip:
    chip = find_chip("h100-96gb" if row.get("hbm_gb") == 96 else row["chip"])
    if row.get("slices", 1) > 1:
        return replace(chip, scale_up_domain=row["chips"] // row["slices"])
    return chip


def _stack(table: dict[str, Any], row: Row, shape: Row) -> Stack:
    source = table["source"]
    if "torchtitan" in source:
        words = table["title"] + row.get("software", "")
        return find_stack("fsdp-async" if "async TP" in words else "fsdp")
    if "llm-foundry" in source:
        return find_stack("fsdp-2023-a100" if row["chip"] == "a100" else "fsdp-2023")
    if "NeMo" in source:
        megatron = find_stack("megatron")
        release = table["id"].removeprefix("bridge-")
        if "experts" not in shape:
            return replace(megatron, expert_imbalance=1.0)
        return replace(megatron, **software(release, row["model"], row["chip"]))
    return find_stack("maxtext")


def _precision(row: Row) -> Any:
    word = row["precision"].split()[0]
    return {"fp8-cs": "fp8", "fp8-mx": "mxfp8", "fp8_full": "fp8"}.get(word, word)


def _layout(table: dict[str, Any], row: Row, stack: Stack) -> tuple[Layout, Stack]:
    if stack.name == "maxtext":
        layout = _maxtext(row)
    elif stack.name == "megatron":
        layout = _megatron(row)
    else:
        layout = _torch(row)
    if layout.chips != row["chips"]:
        raise ValueError(f"{table['id']}: {row} has {layout.chips} chips")
    policy = row["recompute"]
    if policy == "minimal":
        return replace(layout, recompute="selective"), replace(stack, selective_keeps=PRODUCTS)
    if policy.startswith("keep"):
        names = re.findall(r"\b[xqkvaod]\b", policy)
        keeps = tuple(name for letter in names for name in KEPT[letter])
        keeps = ("input", *keeps)
        return replace(layout, recompute="selective"), replace(stack, selective_keeps=keeps)
    policy = "none" if policy == UNKNOWN else policy
    return replace(layout, recompute=policy), stack


def _torch(row: Row) -> Layout:
    context, tensor, pipe = row.get("context", 1), row.get("tensor", 1), row.get("pipe", 1)
    virtual = row.get("virtual", 1)
    return Layout(
        fsdp=row["chips"] // (context * tensor * pipe),
        context=context,
        tensor=tensor,
        pipe=pipe,
        virtual=2 if virtual == UNKNOWN else virtual,
        micro_batch=row["local_batch"] / pipe if pipe > 1 else row["mbs"],
        zero=row.get("zero", 3),
    )


def _megatron(row: Row) -> Layout:
    tensor, pipe, context = row["tensor"], row["pipe"], row.get("context", 1)
    over_tensor = row.get("expert", 1) > 1 and tensor > 1
    expert = max(1, row.get("expert", 1) // (tensor if over_tensor else 1))
    return Layout(
        fsdp=row["chips"] // (tensor * pipe * context * expert),
        expert=expert,
        context=context,
        tensor=tensor,
        pipe=pipe,
        virtual=row.get("virtual", 1),
        micro_batch=row["mbs"],
        zero=3 if row.get("fsdp", 0) > 0 else 1,
        experts_over_tensor=over_tensor,
    )


def _maxtext(row: Row) -> Layout:
    data, fsdp = row.get("data", 1), row["fsdp"]
    if row["chip"] == "tpu-v7":
        fsdp //= 2
    return Layout(
        data=data,
        fsdp=fsdp,
        context=row.get("context", 1),
        tensor=row.get("tensor", 1),
        micro_batch=row["gbs"] / (data * fsdp),
    )
