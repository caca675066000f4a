"""Notes and warnings about a plan: usual MFU, attention, old prices.

The functions return lines; the caller prints them to stderr.
"""

from datetime import date

from sabia.core.plan.device.step_time import outside
from sabia.core.plan.money.prices import STALE_DAYS, Price, format_rate, stale
from sabia.core.plan.output.table import words
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

FEW_TOKENS_PER_PARAM = 0.1
MANY_TOKENS_PER_PARAM = 1e5


def notes(request: PlanRequest, plan: Plan) -> list[str]:
    """Further facts about the plan: prices, usual MFU, attention."""
    mfu, lines, best = plan.cluster.mfu, list[str](), plan.best
    rates = [price.usd_per_chip_hour for price in plan.cluster.prices]
    sources = {f"{p.source}, {p.date}" for p in plan.cluster.prices if p.source}
    seen = [f"prices: {'; '.join(sorted(sources))}"] if sources else []
    if len(rates) > 1 and max(rates) > min(rates):
        seen.append(f"the highest is {max(rates) / min(rates):.2f} times the lowest")
    lines += ["; ".join(seen)] if seen else []
    usual = plan.run.usual_mfu
    if not (plan.problem or usual.low <= mfu <= usual.high):
        counted = " (active parameters only)" if plan.run.kind == "sparse" else ""
        lines.append(words("unusual", mfu=mfu, run=plan.run, counted=counted))
    if plan.problem:
        why = outside(plan.problem.workload, plan.cluster.chip, best.chips)
        lines += [f"predicted outside of what was compared: {why}"] if why else []
    share = request.run.attention_share
    if share is not None and not plan.problem and plan.run.convention == "6nd":
        lines.append(words("attention", run=request.run, share=share))
    return lines


def warnings(request: PlanRequest, plan: Plan, today: date) -> list[str]:
    """Reasons why the plan may be wrong."""
    lines = stale_lines(plan.cluster.prices, today)
    chip, mfu, best = plan.cluster.chip, plan.cluster.mfu, plan.best.layout
    if chip.matmul_ceiling is not None and mfu > chip.matmul_ceiling:
        lines.append(words("above_ceiling", mfu=mfu, chip=chip))
    if best is not None and best.layout.tensor > chip.scale_up_domain:  # only a fixed layout
        lines.append(words("beyond_domain", layout=best.layout, chip=chip))
    ratio = plan.run.tokens / plan.run.active_params
    few = 0 if request.settings.stage == "sft" or plan.run.lora else FEW_TOKENS_PER_PARAM
    if not few <= ratio <= MANY_TOKENS_PER_PARAM:
        lines.append(words("far_ratio", ratio=ratio))
    return lines


def stale_lines(prices: tuple[Price, ...], today: date) -> list[str]:
    """One line per source of old prices, with their age."""
    by_source: dict[tuple[str | None, int | None], list[str]] = {}
    for price in stale(prices, today):
        rate = f"{price.label} {format_rate(price.usd_per_chip_hour)}"
        by_source.setdefault((price.source, price.age_days(today)), []).append(rate)
    return [
        words("stale", prices=", ".join(rates), days=days, most=STALE_DAYS, source=source)
        for (source, days), rates in by_source.items()
    ]
