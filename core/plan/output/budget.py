"""The view of a pyramid of runs: a line an item, sums of groups, kinds and providers, a total."""

from datetime import date
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.money.bills import short_money
from sabia.core.plan.money.prices import format_rate
from sabia.core.plan.money.pyramid import Item, Pyramid, Total, read_pyramid
from sabia.core.plan.output.report import fields
from sabia.core.plan.output.table import columns
from sabia.core.plan.request import own_prices

SCHEMA_VERSION = 1


def pyramid_of(settings: PlanOptions, today: date) -> Pyramid:
    """The pyramid that `settings` ask about. Raises UsageError, BadData."""
    own = own_prices(settings.price) if settings.price else ()
    if len(own) > 1:
        raise UsageError(f"--price: {settings.price} (expected one price with --budget)")
    return read_pyramid(settings, own[0] if own else None, today)


def text(pyramid: Pyramid) -> str:
    """The pyramid as a table; kinds and providers where there are several."""
    rates = {price.usd_per_chip_hour for price in pyramid.prices}
    cost = f"COST {format_rate(rates.pop())}" if len(rates) == 1 else "COST"
    head = ["ITEM", "RUNS", "HOURS EACH", "CHIP-HOURS", cost, "SHARE"]
    rows = [_item_cells(pyramid, item) for item in pyramid.items]
    rows += [_sum_cells(pyramid, name, total) for name, total in pyramid.groups().items()]
    rows.append(_sum_cells(pyramid, "all", Total(pyramid.chip_hours, pyramid.cost_usd)))
    if pyramid.contingency:
        put_by = ["+ contingency", "", "", "", short_money(pyramid.contingency_usd)]
        rows.append([*put_by, f"{pyramid.contingency:.1%}"])
        with_it = pyramid.cost_usd + pyramid.contingency_usd
        rows.append(["= with contingency", "", "", "", short_money(with_it), ""])
    lines = columns(head, rows)
    for name, sums in (("kinds", pyramid.kinds()), ("paid to", pyramid.providers())):
        if len(sums) > 1:
            lines.append(f"{name:<10}{_parts(pyramid, sums)}")
    return "\n".join(lines)


def _item_cells(pyramid: Pyramid, item: Item) -> list[str]:
    usd = item.cost_usd
    hours = ["-", "-"]
    if item.chip_hours_each:
        hours = [f"{item.chip_hours_each:,.0f}", f"{item.chip_hours:,.0f}"]
    return [item.name, item.runs_text, *hours, short_money(usd), f"{pyramid.share(usd):.1%}"]


def _sum_cells(pyramid: Pyramid, name: str, total: Total) -> list[str]:
    share = f"{pyramid.share(total.cost_usd):.1%}"
    money = short_money(total.cost_usd)
    return [f"= {name}", "", "", f"{total.chip_hours:,.0f}", money, share]


def _parts(pyramid: Pyramid, sums: dict[str, Total]) -> str:
    return ", ".join(
        f"{name} {short_money(total.cost_usd)} ({pyramid.share(total.cost_usd):.0%})"
        for name, total in sums.items()
    )


def report(pyramid: Pyramid) -> dict[str, Any]:
    """The pyramid as a JSON object; one price of all items, or null where they differ."""
    rates = {price.usd_per_chip_hour for price in pyramid.prices}
    return {
        "schema_version": SCHEMA_VERSION,
        "price_usd_per_chip_hour": rates.pop() if len(rates) == 1 else None,
        **fields(pyramid, "chip_hours", "cost_usd"),
        "contingency_share": pyramid.contingency,
        "contingency_usd": pyramid.contingency_usd,
        "rows": flat_rows(pyramid),
        "groups": _sums(pyramid, "group", pyramid.groups()),
        "kinds": _sums(pyramid, "kind", pyramid.kinds()),
        "providers": _sums(pyramid, "provider", pyramid.providers()),
    }


def _sums(pyramid: Pyramid, key: str, sums: dict[str, Total]) -> list[dict[str, Any]]:
    return [
        {
            key: name,
            **fields(total, "chip_hours", "cost_usd"),
            "share": pyramid.share(total.cost_usd),
        }
        for name, total in sums.items()
    ]


def flat_rows(pyramid: Pyramid) -> list[dict[str, Any]]:
    """One record an item."""
    return [
        {
            **fields(item, "name", "group", "kind", "runs", "chip", "provider"),
            "price_usd_per_chip_hour": item.price.usd_per_chip_hour if item.price else None,
            **fields(item, "chip_hours_each", "usd_each", "chip_hours", "cost_usd"),
            "share": pyramid.share(item.cost_usd),
        }
        for item in pyramid.items
    ]
