"""From what a user said to a run and a cluster, with every assumption that filled the gaps.

Nothing is assumed silently: what was not given takes its value from DEFAULTS, the nearest
published shape or the data files, and is listed in `Request.assumed`.
"""

from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.plan import memory
from sabia.core.plan.chips import Chip, find_chip
from sabia.core.plan.compute import DEFAULT_MFU
from sabia.core.plan.counting.nearest import nearest_shape
from sabia.core.plan.money.prices import Price, default_prices
from sabia.core.plan.planner import Cluster, Run
from sabia.core.units import (
    format_bytes,
    format_count,
    parse_duration,
    parse_list,
    parse_money,
)

DEFAULT_TOKENS = 500e9
DEFAULT_SEQUENCE = 8192
DEFAULT_BATCH_TOKENS = 4e6
DEFAULT_CHIP = "b200"
DEFAULT_DEADLINES = "30d,14d,7d"
DEFAULT_RECIPE = "adamw16"


@dataclass(frozen=True)
class Counts:
    """What is known of the model: from flags, or counted from a config.json.

    `matmul_params` are those that cost operations (without the input lookup; all active ones
    where only flags are known); `attention_share` is what attention would add to them at the
    run's sequence length, causally counted (None: not known).
    """

    params: float
    active_params: float
    matmul_params: float
    layers: int
    hidden: int
    origin: str
    attention_share: float | None = None


@dataclass(frozen=True)
class Request:
    """A run, a cluster and deadlines, and in words what of them was assumed."""

    run: Run
    cluster: Cluster
    deadlines_s: list[float]
    model: Counts
    assumed: tuple[str, ...]


def given_counts(
    params: float | None, active: float | None, layers: int | None, hidden: int | None
) -> Counts:
    """Counts from flags; a dense model unless `active` is given, a published shape unless known."""
    if params is None:
        raise UsageError(
            "--params: how large is the model? (expected --params 1.6T or --model DIR)"
        )
    active = params if active is None else active
    if not 0 < active <= params:
        raise UsageError(
            f"--active: {active:g} (expected more than 0 and at most --params {params:g})"
        )
    if layers and hidden:
        return Counts(params, active, active, layers, hidden, "given")
    shape = nearest_shape(params, active)
    return Counts(
        params=params,
        active_params=active,
        matmul_params=active,
        layers=layers or shape.layers,
        hidden=hidden or shape.hidden,
        origin=f"assumed as {shape.name}",
    )


def build(
    model: Counts,
    *,
    tokens: float | None = None,
    sequence: int | None = None,
    batch_tokens: float | None = None,
    chip: str | None = None,
    hbm_bytes: float | None = None,
    chips: int | None = None,
    mfu: float | None = None,
    deadlines: str | None = None,
    prices: str | None = None,
    recipe: str | None = None,
    lora: bool = False,
) -> Request:
    """Fill the gaps. Raises UsageError on names and values that do not exist."""
    if lora and recipe:
        raise UsageError("--state-recipe: not with --lora, whose weights are frozen in BF16")
    found = find_chip(chip or DEFAULT_CHIP)
    run = Run(
        params=model.params,
        active_params=model.active_params,
        matmul_params=model.matmul_params,
        tokens=DEFAULT_TOKENS if tokens is None else tokens,
        sequence=DEFAULT_SEQUENCE if sequence is None else sequence,
        batch_tokens=DEFAULT_BATCH_TOKENS if batch_tokens is None else batch_tokens,
        layers=model.layers,
        hidden=model.hidden,
        recipe=memory.LORA if lora else memory.find_recipe(recipe or DEFAULT_RECIPE),
        lora=lora,
    )
    cluster = Cluster(
        chip=found,
        hbm_bytes=found.hbm_bytes if hbm_bytes is None else hbm_bytes,
        mfu=DEFAULT_MFU if mfu is None else mfu,
        prices=own_prices(prices) if prices else default_prices(found.name),
        chips=chips,
    )
    gaps = {
        f"{format_count(run.tokens)} tokens": tokens,
        f"sequences of {run.sequence}": sequence,
        f"batches of {format_count(run.batch_tokens)} tokens": batch_tokens,
        f"chip {found.name}": chip,
        f"{format_bytes(cluster.hbm_bytes)} of HBM, every byte usable": hbm_bytes,
        f"{cluster.mfu:.0%} MFU": mfu,
        f"deadlines {DEFAULT_DEADLINES.replace(',', ', ')}": deadlines,
        _seen(cluster.prices): prices,
    }
    return Request(
        run=run,
        cluster=cluster,
        deadlines_s=parse_list(deadlines or DEFAULT_DEADLINES, _deadline),
        model=model,
        assumed=tuple(words for words, value in gaps.items() if value is None),
    )


def _deadline(text: str) -> float:
    return parse_duration(text, "--deadline")


def _price(text: str) -> float:
    return parse_money(text, "--price")


def own_prices(text: str) -> tuple[Price, ...]:
    """'4.4,12' → the user's own prices, without source or date."""
    return tuple(Price(usd) for usd in parse_list(text, _price))


def _seen(prices: tuple[Price, ...]) -> str:
    days = sorted({str(price.date) for price in prices if price.date})
    return f"prices seen {', '.join(days)}"


def usable_needs(run: Run, chip: Chip) -> tuple[int, int]:
    """Chips for state and for state + activations where only usable memory counts."""
    total = run.state_bytes + run.activation_bytes
    return (
        memory.chips_to_hold(run.state_bytes, chip.usable_hbm_bytes),
        memory.chips_to_hold(total, chip.usable_hbm_bytes),
    )
