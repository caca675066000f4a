"""The view of layouts: a table of alternatives with step time and memory.

With `--explain` also every term of memory and every part of a step, for the layout of the plan's
best row. GB are decimal, as marketed.

A layout as options of `sabia pretrain`.

--mesh has the axes above 1 (core.parallel.mesh), --batch the rows of a step over all devices,
--micro-batch those of one device at a time, --remat the recomputation (`matmuls`, which keeps the
matrix products, is selective recomputation). The length of a row is not an option there: it is that
of the token rows (`sabia tokenize --length`).
"""

import math
from collections.abc import Sequence
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan import planner
from sabia.core.plan.device.layout import AXES, Layout, Workload
from sabia.core.plan.device.survey import TimedLayout
from sabia.core.plan.money.prices import HOUR_S, short_money
from sabia.core.plan.output.report import View, fields
from sabia.core.plan.output.table import columns, words
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

REMAT = {"none": "none", "selective": "matmuls", "full": "full"}
PRECISIONS = ("fp32", "bf16", "fp8", "nvfp4")


def pretrain_flags(
    workload: Workload, layout: Layout, *, backend: str = "torch", lora_rank: int = 0
) -> str:
    """Such as '--mesh fsdp=8,tensor=4 --batch 512 --micro-batch 2 --remat full --precision bf16'.

    backend: torch on GPUs and CPUs, jax on TPUs. lora_rank: of the adapters, if only they are
    trained. The layout is one of `sabia` in stacks.toml. Raises UsageError on formats that the
    trainer does not have.
    """
    precision = workload.precision
    if precision not in PRECISIONS:
        raise UsageError(
            f"--precision: {precision} is not supported by sabia pretrain (expected one of "
            f"{', '.join(PRECISIONS)})"
        )
    options = {
        "backend": backend,
        "mesh": layout.axes_words,
        "batch": workload.batch_rows,
        "micro-batch": layout.micro_batch,
        "remat": REMAT[layout.recompute],
        "precision": precision,
        "lora-rank": lora_rank,
    }
    usual = {("backend", "torch"), ("lora-rank", 0)}
    return " ".join(f"--{n} {value}" for n, value in options.items() if (n, value) not in usual)


COLUMNS = {"dp": "data", "fsdp": "fsdp", "tp": "tensor", "pp": "pipe", "cp": "context",
           "ep": "expert", "v": "virtual", "mb": "micro_batch"}  # fmt: skip


def layout(request: PlanRequest, plan: Plan) -> View:
    """The layouts of a plan, with every term if `--explain` is given."""
    assert plan.problem is not None and plan.best.layout is not None
    best, problem, flags = plan.best.layout, plan.problem, flags_of(request, plan)
    workload, limit, binding = problem.workload, problem.memory_limit_bytes, best.time.binding
    chosen = tuple(row.layout for row in plan.rows if row.layout is not None)
    shown = plan.searched.shown(chosen) if plan.searched else chosen[:1]
    lines = [
        *_table(plan, shown, {one.layout.described for one in chosen}),
        words("software", stack=problem.stack, workload=workload),
    ]
    figures: dict[str, Any] = {
        "stack": problem.stack.name,
        **fields(workload, "precision batch_rows batch_tokens"),
        "steps": plan.run.optimizer_steps,
        "room_bytes_per_chip": limit,
        "binding": binding,
        "best": laid_report(plan, best),
        "layouts": [laid_report(plan, row) for row in shown],
        **({"pretrain_flags": flags} if flags else {}),
    }
    if plan.searched is not None:
        survey = plan.searched.survey
        lines.append(words("searched", survey=survey))
        figures |= {
            "pareto": [laid_report(plan, row) for row in plan.searched.front],
            "meshes": survey.meshes.total,
            "meshes_fallen": survey.rejected,
            "candidates": survey.candidates,
            "candidates_fitting": survey.fitting,
        }
    model = workload.architecture
    if flags or model.counted_only:
        lines.append(f"command   {flags or f'none: sabia pretrain cannot train {model.name}'}")
    share, full = best.time.parts[binding] / best.step_s, best.memory.total / limit
    given = {"binding": binding, "resource": words(f"resource_{binding}")}
    lines.append(words("bound", given, share=share, full=full))
    return View("\n".join(lines + (_explained(best) if request.settings.explain else [])), figures)


def _explained(best: TimedLayout) -> list[str]:
    """Every term of memory and every part of a step."""
    from sabia.core.plan.device.memory import explain

    parts = sorted(best.time.parts.items(), key=lambda part: -part[1])
    rows = [[name, f"{s:.4f} s", f"{s / best.step_s:.1%}"] for name, s in parts if s]
    band = f"{best.time.low_s:.3f} to {best.time.high_s:.3f} s"
    rows.append(["total", f"{best.step_s:.4f} s", band])
    title = f"MEMORY of the fullest chip, {best.layout.described}"
    return ["", title, explain(best.memory), "", *columns(["STEP", "", ""], rows)]


def _table(plan: Plan, shown: Sequence[TimedLayout], picked: set[str]) -> list[str]:
    """A column is left out where it says nothing: an axis of 1, the same chips, no price."""
    price = min(plan.cluster.prices, key=lambda p: p.usd_per_chip_hour, default=None)

    def mfu(row: TimedLayout) -> str:
        step_times = row.time.high_s, row.time.total_s, row.time.low_s
        low, middle, high = (100 * mfu_of(plan, row, s) for s in step_times)
        return f"{middle:.0f}% ({low:.0f}-{high:.0f})"

    def cost(row: TimedLayout) -> str:
        hours = billed_hours(plan, row)
        return short_money(hours * price.usd_per_chip_hour) if hours and price else "-"

    marks = [" *" if row.layout.described in picked else "" for row in shown]
    sizes = {name: [getattr(row.layout, axis) for row in shown] for name, axis in COLUMNS.items()}
    sizes = {name: ns for name, ns in sizes.items() if name in ("dp", "mb") or {*ns} != {1}}
    several = len({row.chips for row in shown}) > 1
    table = {
        "#": [f"{number}{mark}" for number, mark in enumerate(marks, 1)],
        "CHIPS": [f"{row.chips:,}" for row in shown if several],
        **{name: [f"{n:g}" for n in ns] for name, ns in sizes.items()},
        "REMAT": [row.layout.recompute for row in shown],
        "STEP": [seconds(row.step_s) for row in shown],
        "MFU": [mfu(row) for row in shown],
        "GB/CHIP": [f"{row.memory.total / 1e9:.1f}" for row in shown],
        "COST": [cost(row) for row in shown if price],
    }
    table = {head: texts for head, texts in table.items() if texts}
    return columns(list(table), list(zip(*table.values(), strict=True)))


def billed_hours(plan: Plan, row: TimedLayout) -> float | None:
    """Billed chip-hours of the run in a layout; None where it makes no progress."""
    billed_s = planner.end_in(plan.run, plan.cluster, row)[1]
    return None if math.isinf(billed_s) else billed_s / HOUR_S


def seconds(value: float) -> str:
    """12.3s, 0.82s: three figures."""
    return f"{value:.3g}s" if value < 1000 else f"{value:,.0f}s"


def mfu_of(plan: Plan, row: TimedLayout, step_s: float) -> float:
    """Model FLOPs utilization of a step of `step_s`, in the plan's convention."""
    flops = plan.run.train_flops / plan.run.optimizer_steps
    return flops / (step_s * row.chips * plan.cluster.chip.bf16_flops_per_s)


def flags_of(request: PlanRequest, plan: Plan) -> str:
    """The `sabia pretrain` command of the layout; empty for other software or models."""
    assert plan.problem is not None and plan.best.layout is not None
    problem, layout = plan.problem, plan.best.layout.layout
    trained_here = problem.stack.name in ("sabia", "sabia-cpu")
    if problem.workload.architecture.counted_only or not trained_here:
        return ""
    backend, rank = "jax" if problem.chip.family == "TPU" else "torch", request.settings.lora_rank
    flags = pretrain_flags(problem.workload, layout, backend=backend, lora_rank=rank or 0)
    return f"sabia pretrain {flags}"


def laid_report(plan: Plan, row: TimedLayout) -> dict[str, object]:
    """One layout: axes, memory by term and step by part."""
    return {
        "chips": row.chips,
        **{axis: int(getattr(row.layout, axis)) for axis in (*AXES, "micro_batch", "virtual")},
        **fields(row.layout, "recompute zero experts_over_tensor"),
        **fields(row, "step_s step_low_s=time.low_s step_high_s=time.high_s"),
        "mfu": mfu_of(plan, row, row.step_s),
        "binding": row.time.binding,
        "parts_s": {name: float(value) for name, value in row.time.parts.items()},
        "memory_bytes": float(row.memory.total),
        "memory_terms_bytes": {term.name: float(term.bytes) for term in row.memory.terms},
        "chip_hours": billed_hours(plan, row),
    }
