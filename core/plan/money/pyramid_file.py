"""Read a pyramid of runs from TOML: defaults at the top, then one [[item]] table an item.

Of the file, and of an item, which goes before: `chip`, `mfu`, `lora`, `goodput` (share of paid time
that is work, for hours that are computed), and what a chip-hour costs: `price`, or an offer on file
by `provider`, `region` and `spot`. Of the file only: `contingency`, a share on top. An item has
`name`, `group`, `kind`, `runs` (a number, or a range such as [1, 2], whose middle counts), and what
a run takes, in one of the forms of pyramid_forms.py. What the command line says goes before the
file's defaults and after an item's own words. Prices too old to be used are refused (prices.py).
"""

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.chips import Chip, find_chip
from sabia.core.plan.money.prices import (
    Price,
    default_prices,
    prices_for,
    refused_words,
    usable,
)
from sabia.core.plan.money.pyramid import KINDS, Item, Pyramid
from sabia.core.plan.money.pyramid_forms import Defaults, form_of, positive_usd
from sabia.core.units import parse_count, parse_fraction

OFFER = ("provider", "region", "spot")
COMMON = {"chip", "mfu", "lora", "goodput", "price", *OFFER}
FILE_KEYS = COMMON | {"contingency", "item"}
ITEM_KEYS = COMMON | {"name", "group", "kind", "runs"}


@dataclass(frozen=True)
class Given:
    """What the command line says of all items; None was not said."""

    chip: str | None = None
    mfu: float | None = None
    lora: bool = False
    price: Price | None = None

    def over(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The file's defaults with these in their place."""
        said = {"chip": self.chip, "mfu": self.mfu, "lora": self.lora or None}
        return defaults | {key: value for key, value in said.items() if value is not None}


@dataclass(frozen=True)
class Source:
    """Where items are read from: the path for messages, defaults, the command line, the day."""

    path: str
    common: Mapping[str, Any]
    given: Given
    today: datetime.date


def read_pyramid(path: str, given: Given, today: datetime.date, default_chip: str) -> Pyramid:
    """Read and work out a pyramid. Raises BadData on a faulty file, UsageError on a missing one."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--budget: {path}: {error.strerror} (expected a TOML file)") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadData(f"{path}: {error} (expected TOML)") from error
    _refuse_unknown(path, "file", data, FILE_KEYS)
    tables = data.get("item")
    if not isinstance(tables, list) or not tables:
        raise BadData(f"{path}: no items (expected [[item]] tables); man sabia-plan-cluster")
    defaults = {key: data[key] for key in COMMON if key in data}
    source = Source(path, {"chip": default_chip} | given.over(defaults), given, today)
    contingency = parse_fraction(data.get("contingency", 0.0), f"{path}: contingency")
    return Pyramid(tuple(_item(source, table) for table in tables), contingency)


def _refuse_unknown(path: str, label: str, table: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        expected = ", ".join(sorted(known))
        raise BadData(f"{path}: {label} has unknown {', '.join(unknown)} (expected {expected})")


def _item(source: Source, table: Any) -> Item:
    name = str(table.get("name", "")) if isinstance(table, dict) else ""
    label = f"{source.path}: item {name!r}"
    if not name:
        raise BadData(f"{label} (expected a table with a name, runs and what a run takes)")
    lead, form = form_of(label, table)
    _refuse_unknown(source.path, f"item {name!r}", table, ITEM_KEYS | form.keys | {lead})
    kind = str(table.get("kind", form.kind))
    if kind not in KINDS:
        raise BadData(f"{label} kind {kind!r} (expected one of {', '.join(KINDS)})")
    default = _defaults(label, {**source.common, **table})
    hours, usd = form.taken(label, table, default)
    runs, runs_text = _runs(label, table.get("runs", 1))
    price = _price(source, label, table, default.chip) if hours else None
    return Item(
        name=name,
        group=str(table.get("group", "")),
        kind=kind,
        runs=runs,
        runs_text=runs_text,
        chip_hours_each=hours,
        usd_each=usd,
        chip=default.chip.name if hours else "",
        price=price,
        provider=_provider(price, table),
    )


def _defaults(label: str, table: Mapping[str, Any]) -> Defaults:
    mfu = parse_fraction(table.get("mfu", PlanOptions.assumed("mfu")), f"{label} mfu")
    goodput = parse_fraction(table.get("goodput", 1.0), f"{label} goodput")
    for name, share in (("mfu", mfu), ("goodput", goodput)):
        if not share > 0:
            raise BadData(f"{label} {name} {share:g} (expected more than 0)")
    return Defaults(find_chip(str(table["chip"])), mfu, bool(table.get("lora")), goodput)


def _price(source: Source, label: str, own: Mapping[str, Any], chip: Chip) -> Price:
    """The item's own price or offer, the command line's, the file's, or the first on file."""
    for table in (own, source.common):
        if table is source.common and source.given.price:
            return source.given.price
        if "price" in table:
            return Price(positive_usd(label, table, "price"), provider=table.get("provider"))
        if any(key in table for key in OFFER):
            provider, region, spot = (table.get(key) for key in OFFER)
            found = prices_for(chip.name, provider, region, bool(spot))
            return usable(found, source.today, label)[0]
    found = default_prices(chip.name, source.today)
    if not found:
        words = refused_words(default_prices(chip.name), source.today)
        raise UsageError(f"--budget: {words}")
    return found[0]


def _provider(price: Price | None, table: Mapping[str, Any]) -> str:
    named = table.get("provider") or (price.provider if price else None)
    return str(named or ("own price" if price else "by use"))


def _runs(label: str, value: Any) -> tuple[float, str]:
    if isinstance(value, list) and len(value) == 2:
        low, high = (parse_count(v, f"{label} runs") for v in value)
        if low <= high:
            return (low + high) / 2, f"{low:g}-{high:g}"
    elif not isinstance(value, list):
        runs = parse_count(value, f"{label} runs")
        return runs, f"{runs:,g}"
    raise BadData(f"{label} runs {value!r} (expected a number or a range such as [1, 2])")
