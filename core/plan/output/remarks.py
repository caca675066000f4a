"""What a reader should know beside the table: usable memory, usual MFU, old prices.

Pure functions to lines; the caller decides where they go (stderr).
"""

from datetime import date

from sabia.core.plan.compute import MFU_RANGES, model_kind
from sabia.core.plan.money.prices import STALE_DAYS, Price, format_rate, stale
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest, usable_needs
from sabia.core.units import format_bytes

FEW_TOKENS_PER_PARAM = 0.1
MANY_TOKENS_PER_PARAM = 1e5


def notes(request: PlanRequest, plan: Plan) -> list[str]:
    """Facts that change nothing in the table."""
    lines = (_usable(plan), _prices(plan), _mfu(plan), _attention(request, plan))
    return [line for line in lines if line]


def _attention(request: PlanRequest, plan: Plan) -> str:
    share = request.model.attention_share
    if share is None or plan.layouts or plan.run.convention != "6nd":
        return ""
    return (
        f"6ND leaves attention out: at {request.run.sequence} tokens it would add {share:.0%} "
        "(counted causally), so measure --mfu without it too"
    )


def warnings(request: PlanRequest, plan: Plan, today: date) -> list[str]:
    """What may make the table wrong."""
    lines = stale_lines(plan.cluster.prices, today)
    lines += _above_ceiling(plan) + _beyond_domain(plan)
    ratio = plan.run.tokens / plan.run.active_params
    few = 0 if request.settings.stage == "sft" or plan.run.lora else FEW_TOKENS_PER_PARAM
    if not few <= ratio <= MANY_TOKENS_PER_PARAM:
        lines.append(f"{ratio:.3g} tokens for each active parameter is far from any known run")
    return lines


def _above_ceiling(plan: Plan) -> list[str]:
    """MFU beyond what any matrix product was measured to reach on the chip."""
    chip, mfu = plan.cluster.chip, plan.cluster.mfu
    if chip.matmul_ceiling is None or mfu <= chip.matmul_ceiling:
        return []
    return [
        f"--mfu {mfu:.0%} is above the {chip.matmul_ceiling:.0%} of its peak that matrix products "
        f"were measured to reach on {chip.name}"
    ]


def _beyond_domain(plan: Plan) -> list[str]:
    """A fixed layout may spread what the search keeps together."""
    chip, laid = plan.cluster.chip, plan.best.layout
    if laid is None or laid.layout.tensor <= chip.scale_up_domain:
        return []
    return [
        f"tensor={laid.layout.tensor} goes beyond the {chip.scale_up_domain} {chip.name} of a fast "
        "domain; its collectives take the network"
    ]


def stale_lines(prices: tuple[Price, ...], today: date) -> list[str]:
    """One line for the old prices of each source: how old, and whose."""
    by_source: dict[tuple[str | None, int | None], list[str]] = {}
    for price in stale(prices, today):
        words = f"{price.label} {format_rate(price.usd_per_chip_hour)}"
        by_source.setdefault((price.source, price.age_days(today)), []).append(words)
    return [
        f"price of {', '.join(words)} last seen {days} days ago, more than {STALE_DAYS} "
        f"({source}); give today's with --price"
        for (source, days), words in by_source.items()
    ]


def _usable(plan: Plan) -> str:
    chip = plan.cluster.chip
    if plan.layouts or chip.usable_hbm_bytes >= plan.cluster.hbm_bytes:
        return ""
    state, total = usable_needs(plan.run, chip)
    return (
        f"memory counts all {format_bytes(plan.cluster.hbm_bytes)} of a {chip.name}; of its "
        f"{format_bytes(chip.usable_hbm_bytes)} usable the state would need {state} chips, "
        f"with activations {total} (--hbm {chip.usable_hbm_bytes / 1e9:g}GB plans so)"
    )


def _prices(plan: Plan) -> str:
    rates = [price.usd_per_chip_hour for price in plan.cluster.prices]
    sources = {f"{p.source}, {p.date}" for p in plan.cluster.prices if p.source}
    words = [f"prices: {'; '.join(sorted(sources))}"] if sources else []
    if len(rates) > 1 and max(rates) > min(rates):
        words.append(f"the dearest costs {max(rates) / min(rates):.2f} times the cheapest")
    return "; ".join(words)


def _mfu(plan: Plan) -> str:
    kind = model_kind(plan.run.params, plan.run.active_params)
    usual = MFU_RANGES[kind]
    counted = " (active parameters only)" if kind == "sparse" else ""
    if plan.layouts or usual.low <= plan.cluster.mfu <= usual.high:
        return ""
    return (
        f"{plan.cluster.mfu:.0%} MFU is outside the {usual.low:.0%} to {usual.high:.0%} that "
        f"{kind} models usually reach{counted}"
    )
