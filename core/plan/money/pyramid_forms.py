"""What one run of a pyramid's item takes, by the form in which the file says it.

Each form is a leading key, the keys that go with it, the kind of work that it usually is, and a
function to (chip-hours, dollars) of one run:
- `chip_hours`: known hours, as they are paid for;
- `params`, `active`, `tokens`: training, by 6ND (4ND with `lora`) at `mfu`, over `goodput`;
- `tokens_per_chip_s`, `tokens`: generation at a measured speed, over `goodput`;
- `usd_per_million` = [input, output], `input_tokens`, `output_tokens`: an API;
- `evaluation`: a table as core.plan.serving.evaluation reads it: items, answers, a judge;
- `storage`, `keep`, `usd_per_gb_month`: bytes kept for a time, a month being 30 days.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData
from sabia.core.plan import compute
from sabia.core.plan.chips import Chip
from sabia.core.plan.money.bills import DAY_S, HOUR_S
from sabia.core.units import parse_bytes, parse_count, parse_duration, parse_money

MONTH_S = 30 * DAY_S
Taken = tuple[float, float]  # chip-hours and dollars of one run


@dataclass(frozen=True)
class Defaults:
    """On what, how fast and how smoothly an item runs; shares between 0 and 1."""

    chip: Chip
    mfu: float
    lora: bool
    goodput: float


@dataclass(frozen=True)
class Form:
    """Keys of a form beside its leading one, the kind that it is, and what a run takes."""

    keys: frozenset[str]
    kind: str
    taken: Callable[[str, Mapping[str, Any], Defaults], Taken]


def form_of(label: str, table: Mapping[str, Any]) -> tuple[str, Form]:
    """The one form whose leading key the item has. Raises BadData on none or several."""
    found = [name for name in FORMS if name in table]
    if len(found) != 1:
        what = f"has {' and '.join(found)}" if found else "does not say what a run takes"
        raise BadData(f"{label} {what} (expected one of {', '.join(FORMS)})")
    return found[0], FORMS[found[0]]


def count(label: str, table: Mapping[str, Any], key: str) -> float:
    """The number under `key`. Raises BadData if there is none."""
    if key not in table:
        raise BadData(f"{label} has no {key}")
    return parse_count(table[key], f"{label} {key}")


def positive_usd(label: str, table: Mapping[str, Any], key: str) -> float:
    """The dollars under `key`. Raises BadData if there are none, or not more than 0."""
    usd = parse_money(table[key], f"{label} {key}") if key in table else 0.0
    if not usd > 0:
        raise BadData(f"{label} {key} {table.get(key)!r} (expected more than 0)")
    return usd


def _known_hours(label: str, table: Mapping[str, Any], _default: Defaults) -> Taken:
    return count(label, table, "chip_hours"), 0.0


def _training(label: str, table: Mapping[str, Any], default: Defaults) -> Taken:
    params, tokens = count(label, table, "params"), count(label, table, "tokens")
    active = parse_count(table.get("active", params), f"{label} active")
    rate = default.chip.bf16_flops_per_s * default.mfu * default.goodput
    flops = compute.train_flops(active, tokens, default.lora)
    return compute.chip_seconds(flops, rate) / HOUR_S, 0.0


def _generation(label: str, table: Mapping[str, Any], default: Defaults) -> Taken:
    speed = count(label, table, "tokens_per_chip_s") * default.goodput
    if not speed > 0:
        raise BadData(f"{label} tokens_per_chip_s {speed:g} (expected more than 0)")
    return count(label, table, "tokens") / speed / HOUR_S, 0.0


def _api(label: str, table: Mapping[str, Any], _default: Defaults) -> Taken:
    from sabia.core.plan.serving.evaluation import api_price

    price = api_price(table["usd_per_million"], f"{label} usd_per_million")
    read, written = (count(label, table, key) for key in ("input_tokens", "output_tokens"))
    usd = read * price.usd_per_million_input + written * price.usd_per_million_output
    return 0.0, usd / 1e6


def _evaluation(label: str, table: Mapping[str, Any], default: Defaults) -> Taken:
    from sabia.core.plan.serving.evaluation import table_cost

    if not isinstance(table["evaluation"], dict):
        raise BadData(f"{label} evaluation {table['evaluation']!r} (expected a table)")
    found = table_cost(table["evaluation"], default.chip, label)
    return found.chip_hours / default.goodput, found.api_usd


def _storage(label: str, table: Mapping[str, Any], _default: Defaults) -> Taken:
    if "keep" not in table:
        raise BadData(f'{label} has no keep (expected a time, as keep = "90d")')
    size = parse_bytes(table["storage"], f"{label} storage")
    months = parse_duration(table["keep"], f"{label} keep") / MONTH_S
    return 0.0, size / 1e9 * months * positive_usd(label, table, "usd_per_gb_month")


FORMS = {
    "chip_hours": Form(frozenset(), "training", _known_hours),
    "params": Form(frozenset({"active", "tokens"}), "training", _training),
    "tokens_per_chip_s": Form(frozenset({"tokens"}), "rollout", _generation),
    "usd_per_million": Form(frozenset({"input_tokens", "output_tokens"}), "judge", _api),
    "evaluation": Form(frozenset(), "evaluation", _evaluation),
    "storage": Form(frozenset({"keep", "usd_per_gb_month"}), "storage", _storage),
}
