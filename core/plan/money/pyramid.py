"""The budget of a list of runs, such as all experiments for one model: `--budget FILE`.

An item is a number of runs with chip-hours each, at its own price, and with costs each that are not
for chips (API tokens, storage). Shares are of the total cost; a contingency is added to the sum of
all items.

The resources of one run have one of several forms. A form has a leading key, further keys, a
default kind of work, and a function that returns (chip-hours, dollars) of one run:
- `chip_hours`: known hours;
- `params`, `active`, `tokens`: training, by 6ND (4ND with `lora`) at `mfu`, over `goodput`;
- `tokens_per_chip_s`, `tokens`: generation at a measured speed, over `goodput`;
- `usd_per_million` = [input, output], `input_tokens`, `output_tokens`: an API;
- `evaluation`: a table for core.plan.serving.asked: items, answers, a judge;
- `storage`, `keep`, `usd_per_gb_month`: bytes stored for a time, with months of 30 days.

A file is TOML: defaults at the top, then one [[item]] table per item. Both may have `chip`, `mfu`,
`lora`, `goodput` (share of billed time that is work, for computed hours), and the price of a
chip-hour: `price`, or an offer on file by `provider`, `region` and `spot`. The file may have
`contingency`, a share. An item has `name`, `group`, `kind`, `runs` (a number, or a range such as
[1, 2], whose mean counts), and the resources of a run. An item's own values override those of the
command line, which override the file's defaults. Prices that are too old are an error (prices.py).
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.files import read_toml
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import compute
from sabia.core.plan.chips import Chip, find_chip
from sabia.core.plan.money import prices
from sabia.core.plan.money.prices import DAY_S, HOUR_S, Price, cost_usd
from sabia.core.units import parse_bytes, parse_count, parse_duration, parse_fraction, parse_money

KINDS = ("training", "evaluation", "judge", "rollout", "storage", "other")


@dataclass(frozen=True)
class BudgetItem:
    """`runs` runs (the mean of a range) with chip-hours and dollars each.

    price: of a chip-hour, None without chips. provider: who is paid.
    """

    name: str
    group: str
    kind: str
    runs: float
    runs_text: str
    chip_hours_each: float
    usd_each: float
    chip: str
    price: Price | None
    provider: str

    @property
    def chip_hours(self) -> float:
        """Chip-hours of all runs of the item."""
        return self.runs * self.chip_hours_each

    @property
    def cost_usd(self) -> float:
        """Cost of all runs of the item: chips and other costs."""
        rate = self.price.usd_per_chip_hour if self.price else 0.0
        return cost_usd(self.chip_hours * HOUR_S, rate) + self.runs * self.usd_each


@dataclass(frozen=True)
class Budget:
    """All items, and a contingency as a share of their cost."""

    items: tuple[BudgetItem, ...]
    contingency: float = 0.0

    @property
    def chip_hours(self) -> float:
        """Chip-hours of all items."""
        return sum(item.chip_hours for item in self.items)

    @property
    def cost_usd(self) -> float:
        """Cost of all items, without the contingency."""
        return sum(item.cost_usd for item in self.items)

    @property
    def contingency_usd(self) -> float:
        """The contingency in dollars."""
        return self.contingency * self.cost_usd

    @property
    def prices(self) -> tuple[Price, ...]:
        """All different prices of a chip-hour."""
        return tuple(dict.fromkeys(item.price for item in self.items if item.price))

    def share(self, usd: float) -> float:
        """`usd` as a share of the cost of all items."""
        return usd / self.cost_usd if self.cost_usd else 0.0

    def groups(self) -> "dict[str, Budget]":
        """The items of each group with more than one."""
        parts = self.parts("group")
        return {name: part for name, part in parts.items() if name and len(part.items) > 1}

    def parts(self, field: str) -> "dict[str, Budget]":
        """The items by a field of theirs, such as kind or provider."""
        parts: dict[str, tuple[BudgetItem, ...]] = {}
        for item in self.items:
            name = getattr(item, field)
            parts[name] = (*parts.get(name, ()), item)
        return {name: Budget(items) for name, items in parts.items()}


MONTH_S = 30 * DAY_S
Resources = tuple[float, float]  # chip-hours and dollars of one run


@dataclass(frozen=True)
class Defaults:
    """Chip, MFU and goodput of an item; shares between 0 and 1."""

    chip: Chip
    mfu: float
    lora: bool
    goodput: float


def count(label: str, table: Mapping[str, Any], key: str) -> float:
    """The number of `key`. Raises BadData if it is missing."""
    if key not in table:
        raise BadData(f"{label} has no {key}")
    return parse_count(table[key], f"{label} {key}")


def positive_usd(label: str, table: Mapping[str, Any], key: str) -> float:
    """The dollars of `key`. Raises BadData if it is missing or not above 0."""
    usd = parse_money(table[key], f"{label} {key}") if key in table else 0.0
    if not usd > 0:
        raise BadData(f"{label} {key} {table.get(key)!r} (expected more than 0)")
    return usd


def _known_hours(label: str, table: Mapping[str, Any], _default: Defaults) -> Resources:
    return count(label, table, "chip_hours"), 0.0


def _training(label: str, table: Mapping[str, Any], default: Defaults) -> Resources:
    params, tokens = count(label, table, "params"), count(label, table, "tokens")
    active = parse_count(table.get("active", params), f"{label} active")
    rate = default.chip.bf16_flops_per_s * default.mfu * default.goodput
    return compute.train_flops(active, tokens, default.lora) / rate / HOUR_S, 0.0


def _generation(label: str, table: Mapping[str, Any], default: Defaults) -> Resources:
    speed = count(label, table, "tokens_per_chip_s") * default.goodput
    if not speed > 0:
        raise BadData(f"{label} tokens_per_chip_s {speed:g} (expected more than 0)")
    return count(label, table, "tokens") / speed / HOUR_S, 0.0


def _api(label: str, table: Mapping[str, Any], _default: Defaults) -> Resources:
    from sabia.core.plan.serving.asked import api_price

    read_usd, written_usd = api_price(table["usd_per_million"], f"{label} usd_per_million")
    read, written = (count(label, table, key) for key in ("input_tokens", "output_tokens"))
    return 0.0, (read * read_usd + written * written_usd) / 1e6


def _evaluation(label: str, table: Mapping[str, Any], default: Defaults) -> Resources:
    from sabia.core.plan.serving.asked import table_cost

    if not isinstance(table["evaluation"], dict):
        raise BadData(f"{label} evaluation {table['evaluation']!r} (expected a TOML table)")
    evaluation = table_cost(table["evaluation"], default.chip, label)
    return evaluation.chip_hours / default.goodput, evaluation.api_usd


def _storage(label: str, table: Mapping[str, Any], _default: Defaults) -> Resources:
    if "keep" not in table:
        raise BadData(f'{label} has no keep (expected a time, as keep = "90d")')
    size = parse_bytes(table["storage"], f"{label} storage")
    months = parse_duration(table["keep"], f"{label} keep") / MONTH_S
    return 0.0, size / 1e9 * months * positive_usd(label, table, "usd_per_gb_month")


# default kind of work, the function for the resources of a run, further keys
Form = tuple[str, Callable[[str, Mapping[str, Any], Defaults], Resources], set[str]]
FORMS: dict[str, Form] = {  # by the leading key
    "chip_hours": ("training", _known_hours, set()),
    "params": ("training", _training, {"active", "tokens"}),
    "tokens_per_chip_s": ("rollout", _generation, {"tokens"}),
    "usd_per_million": ("judge", _api, {"input_tokens", "output_tokens"}),
    "evaluation": ("evaluation", _evaluation, set()),
    "storage": ("storage", _storage, {"keep", "usd_per_gb_month"}),
}


OFFER = ("provider", "region", "spot")
COMMON = {"chip", "mfu", "lora", "goodput", "price", *OFFER}
FILE_KEYS = COMMON | {"contingency", "item"}
ITEM_KEYS = COMMON | {"name", "group", "kind", "runs"}


@dataclass(frozen=True)
class BudgetFile:
    """The file of the items: its path, defaults, the price of the command line, today's date."""

    path: str
    common: Mapping[str, Any]
    given: Price | None
    today: datetime.date


def read_pyramid(settings: PlanOptions, price: Price | None, today: datetime.date) -> Budget:
    """Read and compute `--budget`. Raises BadData on a faulty file, UsageError on a missing one.

    price: of a chip-hour, from the command line.
    """
    path = settings.budget or ""
    data = read_toml("--budget", path)
    _refuse_unknown(path, "file", data, FILE_KEYS)
    tables = data.get("item")
    if not isinstance(tables, list) or not tables:
        raise BadData(f"{path}: no items (expected [[item]] tables); man sabia-plan-cluster")
    common = {"chip": PlanOptions.assumed("chip")}
    common |= {key: data[key] for key in COMMON if key in data}
    common |= settings.set_values("chip", "mfu", "lora")
    source = BudgetFile(path, common, price, today)
    contingency = parse_fraction(data.get("contingency", 0.0), f"{path}: contingency")
    return Budget(tuple(_item(source, table) for table in tables), contingency)


def _refuse_unknown(path: str, label: str, table: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        expected = ", ".join(sorted(known))
        raise BadData(f"{path}: {label} has unknown {', '.join(unknown)} (expected {expected})")


def _item(source: BudgetFile, table: Any) -> BudgetItem:
    name = str(table.get("name", "")) if isinstance(table, dict) else ""
    label = f"{source.path}: item {name!r}"
    if not name:
        raise BadData(
            f"{label} (expected a TOML table with a name, runs and the resources of a run)"
        )
    names = [name for name in FORMS if name in table]
    if len(names) != 1:
        what = f"has {' and '.join(names)}" if names else "has no resources of a run"
        raise BadData(f"{label} {what} (expected one of {', '.join(FORMS)})")
    usual, resources, keys = FORMS[names[0]]
    _refuse_unknown(source.path, f"item {name!r}", table, ITEM_KEYS | keys | set(names))
    kind = str(table.get("kind", usual))
    if kind not in KINDS:
        raise BadData(f"{label} kind {kind!r} (expected one of {', '.join(KINDS)})")
    default = _defaults(label, {**source.common, **table})
    hours, usd = resources(label, table, default)
    runs, runs_text = _runs(label, table.get("runs", 1))
    price = _price(source, label, table, default.chip) if hours else None
    provider = table.get("provider") or (price.provider if price else None)
    return BudgetItem(
        name=name,
        group=str(table.get("group", "")),
        kind=kind,
        runs=runs,
        runs_text=runs_text,
        chip_hours_each=hours,
        usd_each=usd,
        chip=default.chip.name if hours else "",
        price=price,
        provider=str(provider or ("own price" if price else "by use")),
    )


def _defaults(label: str, table: Mapping[str, Any]) -> Defaults:
    mfu = parse_fraction(table.get("mfu", PlanOptions.assumed("mfu")), f"{label} mfu")
    goodput = parse_fraction(table.get("goodput", 1.0), f"{label} goodput")
    for name, share in (("mfu", mfu), ("goodput", goodput)):
        if not share > 0:
            raise BadData(f"{label} {name} {share:g} (expected more than 0)")
    return Defaults(find_chip(str(table["chip"])), mfu, bool(table.get("lora")), goodput)


def _price(source: BudgetFile, label: str, own: Mapping[str, Any], chip: Chip) -> Price:
    """The price of the item, the command line, or the file; else the first price on file."""
    for table in (own, source.common):
        if table is source.common and source.given:
            return source.given
        if "price" in table:
            return Price(positive_usd(label, table, "price"), provider=table.get("provider"))
        if any(key in table for key in OFFER):
            provider, region, spot = (table.get(key) for key in OFFER)
            offers = prices.prices_for(chip.name, provider, region, bool(spot))
            return prices.usable(offers, source.today, label)[0]
    first = prices.default_prices(chip.name, source.today)
    if not first:
        words = prices.refused_words(prices.default_prices(chip.name), source.today)
        raise UsageError(f"--budget: {words}")
    return first[0]


def _runs(label: str, value: Any) -> tuple[float, str]:
    if isinstance(value, list) and len(value) == 2:
        low, high = (parse_count(v, f"{label} runs") for v in value)
        if low <= high:
            return (low + high) / 2, f"{low:g}-{high:g}"
    elif not isinstance(value, list):
        runs = parse_count(value, f"{label} runs")
        return runs, f"{runs:,g}"
    raise BadData(f"{label} runs {value!r} (expected a number or a range such as [1, 2])")
