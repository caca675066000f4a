"""The output of `--budget`: a row per item, totals of groups, kinds, providers and of all."""

from datetime import date
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.money.prices import format_rate, short_money
from sabia.core.plan.money.pyramid import Budget, read_pyramid
from sabia.core.plan.output.report import fields
from sabia.core.plan.output.table import columns
from sabia.core.plan.request import own_prices

SCHEMA_VERSION = 1


def budget_of(settings: PlanOptions, today: date) -> Budget:
    """The budget of `settings`. Raises UsageError, BadData."""
    own = own_prices(settings.price) if settings.price else ()
    if len(own) > 1:
        raise UsageError(f"--price: {settings.price} (expected one price with --budget)")
    return read_pyramid(settings, own[0] if own else None, today)


def text(budget: Budget) -> str:
    """The budget as a table, with kinds and providers if there are several."""
    rates = {price.usd_per_chip_hour for price in budget.prices}
    cost = f"COST {format_rate(rates.pop())}" if len(rates) == 1 else "COST"
    rows = []
    for item in budget.items:
        hours = ["-", "-"]
        if item.chip_hours_each:
            hours = [f"{item.chip_hours_each:,.0f}", f"{item.chip_hours:,.0f}"]
        cells = [item.name, item.runs_text, *hours, short_money(item.cost_usd)]
        rows.append([*cells, f"{budget.share(item.cost_usd):.1%}"])
    for name, total in [*budget.groups().items(), ("all", budget)]:
        cells = [f"= {name}", "", "", f"{total.chip_hours:,.0f}", short_money(total.cost_usd)]
        rows.append([*cells, f"{budget.share(total.cost_usd):.1%}"])
    if budget.contingency:
        contingency = ["+ contingency", "", "", "", short_money(budget.contingency_usd)]
        rows.append([*contingency, f"{budget.contingency:.1%}"])
        total_usd = budget.cost_usd + budget.contingency_usd
        rows.append(["= with contingency", "", "", "", short_money(total_usd), ""])
    lines = columns(["ITEM", "RUNS", "HOURS EACH", "CHIP-HOURS", cost, "SHARE"], rows)
    for name, sums in (("kinds", budget.parts("kind")), ("paid to", budget.parts("provider"))):
        if len(sums) > 1:
            parts = (
                f"{part} {short_money(total.cost_usd)} ({budget.share(total.cost_usd):.0%})"
                for part, total in sums.items()
            )
            lines.append(f"{name:<10}{', '.join(parts)}")
    return "\n".join(lines)


def report(budget: Budget) -> dict[str, object]:
    """The budget as a JSON object; the price is null where items have different prices."""
    rates = {price.usd_per_chip_hour for price in budget.prices}
    return {
        "schema_version": SCHEMA_VERSION,
        "price_usd_per_chip_hour": rates.pop() if len(rates) == 1 else None,
        **fields(budget, "chip_hours cost_usd contingency_share=contingency contingency_usd"),
        "rows": flat_rows(budget),
        "groups": _sums(budget, "group", budget.groups()),
        "kinds": _sums(budget, "kind", budget.parts("kind")),
        "providers": _sums(budget, "provider", budget.parts("provider")),
    }


def _sums(budget: Budget, key: str, sums: dict[str, Budget]) -> list[dict[str, Any]]:
    return [
        {key: name, **fields(part, "chip_hours cost_usd"), "share": budget.share(part.cost_usd)}
        for name, part in sums.items()
    ]


def flat_rows(budget: Budget) -> list[dict[str, Any]]:
    """One record per item."""
    return [
        {
            **fields(item, "name group kind runs chip provider"),
            "price_usd_per_chip_hour": item.price.usd_per_chip_hour if item.price else None,
            **fields(item, "chip_hours_each usd_each chip_hours cost_usd"),
            "share": budget.share(item.cost_usd),
        }
        for item in budget.items
    ]
