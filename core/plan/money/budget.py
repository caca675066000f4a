"""The budget of a generation of models: many small runs, some middle ones, one large.

The pyramid is a TOML file: `price` and a list of `item`s, each `runs` (a number, or a range
such as [1, 2], whose middle counts) of `chip_hours` each, or of a model given by `params`,
`active` and `tokens`, whose chip-hours are then computed. Items of one `group` are added up.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.plan.money.bills import cost_usd, short_money
from sabia.core.plan.money.prices import Price, format_rate
from sabia.core.plan.output.table import columns
from sabia.core.units import parse_count, parse_money

SCHEMA_VERSION = 1
ITEM_KEYS = {"name", "group", "runs", "chip_hours", "params", "active", "tokens"}
FILE_KEYS = {"price", "item"}
# chip-hours of a run from its (params, active_params, tokens)
HoursOf = Callable[[float, float, float], float]


@dataclass(frozen=True)
class Item:
    """`runs` runs of `chip_hours_each`, the mean where the file gave a range."""

    name: str
    group: str
    runs: float
    runs_text: str
    chip_hours_each: float

    @property
    def chip_hours(self) -> float:
        """All runs of the item."""
        return self.runs * self.chip_hours_each


@dataclass(frozen=True)
class Budget:
    """All items at one price."""

    items: tuple[Item, ...]
    price: Price

    @property
    def chip_hours(self) -> float:
        """All items."""
        return sum(item.chip_hours for item in self.items)

    def cost_usd(self, chip_hours: float) -> float:
        """The bill of some of the hours."""
        return cost_usd(chip_hours * 3600, self.price.usd_per_chip_hour)

    def share(self, chip_hours: float) -> float:
        """Part of the whole."""
        return chip_hours / self.chip_hours

    def groups(self) -> dict[str, float]:
        """Chip-hours of each group of more than one item."""
        names = [item.group for item in self.items if item.group]
        return {
            name: sum(item.chip_hours for item in self.items if item.group == name)
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        }


def load_budget(
    path: str, hours_of: HoursOf, price: Price | None, default: Callable[[], Price]
) -> Budget:
    """Read a pyramid at `price`, else at the file's, else at `default`'s.

    Raises BadData on a faulty file, UsageError on a missing one.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--budget: {path}: {error.strerror} (expected a TOML file)") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadData(f"{path}: {error} (expected TOML)") from error
    _refuse_unknown(path, "file", data, FILE_KEYS)
    items = data.get("item")
    if not isinstance(items, list) or not items:
        raise BadData(f"{path}: no items (expected [[item]] tables); man sabia-plan-cluster")
    if price is None:
        price = Price(_price(path, data["price"])) if "price" in data else default()
    return Budget(tuple(_item(path, item, hours_of) for item in items), price)


def _price(path: str, value: Any) -> float:
    usd = parse_money(value, f"{path}: price")
    if not usd > 0:
        raise BadData(f"{path}: price {value!r} (expected more than 0)")
    return usd


def _refuse_unknown(path: str, label: str, table: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        expected = ", ".join(sorted(known))
        raise BadData(f"{path}: {label} has unknown {', '.join(unknown)} (expected {expected})")


def _item(path: str, table: dict[str, Any], hours_of: HoursOf) -> Item:
    name = str(table.get("name", ""))
    label = f"{path}: item {name!r}"
    _refuse_unknown(path, f"item {name!r}", table, ITEM_KEYS)
    if not name or ("chip_hours" in table) == ("params" in table):
        raise BadData(f"{label} (expected name, runs, and either chip_hours or params and tokens)")
    runs, text = _runs(label, table.get("runs", 1))
    return Item(name, str(table.get("group", "")), runs, text, _hours(label, table, hours_of))


def _runs(label: str, value: Any) -> tuple[float, str]:
    if isinstance(value, list) and len(value) == 2:
        low, high = (parse_count(v, f"{label} runs") for v in value)
        if low <= high:
            return (low + high) / 2, f"{low:g}-{high:g}"
    elif not isinstance(value, list):
        runs = parse_count(value, f"{label} runs")
        return runs, f"{runs:,g}"
    raise BadData(f"{label} runs {value!r} (expected a number or a range such as [1, 2])")


def _hours(label: str, table: dict[str, Any], hours_of: HoursOf) -> float:
    if "chip_hours" in table:
        return parse_count(table["chip_hours"], f"{label} chip_hours")
    if "tokens" not in table:
        raise BadData(f"{label} has params but no tokens (expected both)")
    params = parse_count(table["params"], f"{label} params")
    active = parse_count(table.get("active", params), f"{label} active")
    return hours_of(params, active, parse_count(table["tokens"], f"{label} tokens"))


def render(budget: Budget) -> str:
    """The pyramid as a table, with a total and the sums of its groups."""
    head = ["ITEM", "RUNS", "HOURS EACH", "CHIP-HOURS",
            f"COST {format_rate(budget.price.usd_per_chip_hour)}", "SHARE"]  # fmt: skip
    rows = [
        [i.name, i.runs_text, f"{i.chip_hours_each:,.0f}", *_money_cells(budget, i.chip_hours)]
        for i in budget.items
    ]
    rows += [
        [f"= {name}", "", "", *_money_cells(budget, hours)]
        for name, hours in budget.groups().items()
    ]
    rows.append(["= all", "", "", *_money_cells(budget, budget.chip_hours)])
    return "\n".join(columns(head, rows))


def _money_cells(budget: Budget, hours: float) -> list[str]:
    return [f"{hours:,.0f}", short_money(budget.cost_usd(hours)), f"{budget.share(hours):.1%}"]


def report(budget: Budget) -> dict[str, Any]:
    """The pyramid as a JSON object."""
    return {
        "schema_version": SCHEMA_VERSION,
        "price_usd_per_chip_hour": budget.price.usd_per_chip_hour,
        "chip_hours": budget.chip_hours,
        "cost_usd": budget.cost_usd(budget.chip_hours),
        "rows": flat_rows(budget),
        "groups": [
            {
                "group": name,
                "chip_hours": hours,
                "cost_usd": budget.cost_usd(hours),
                "share": budget.share(hours),
            }
            for name, hours in budget.groups().items()
        ],
    }


def flat_rows(budget: Budget) -> list[dict[str, Any]]:
    """One record an item."""
    return [
        {
            "name": item.name,
            "group": item.group,
            "runs": item.runs,
            "chip_hours_each": item.chip_hours_each,
            "chip_hours": item.chip_hours,
            "cost_usd": budget.cost_usd(item.chip_hours),
            "share": budget.share(item.chip_hours),
        }
        for item in budget.items
    ]
