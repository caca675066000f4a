"""From options to a run and a cluster, with every assumption in words.

Nothing is assumed silently: a value that is not given comes from the defaults of the options, from
the nearest published model or from the data files, and is listed in `PlanRequest.assumed`.
"""

from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, partial
from typing import TYPE_CHECKING

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions, PlanStops
from sabia.core.plan import memory
from sabia.core.plan.chips import Chip, find_chip
from sabia.core.plan.counting.counts import ModelCounts, count_model, given_counts
from sabia.core.plan.money.prices import Price, current, default_prices, prices_for, refused_words
from sabia.core.plan.planner import Cluster, Run
from sabia.core.units import format_bytes, format_count, parse_duration, parse_list, parse_money

if TYPE_CHECKING:
    from sabia.core.plan.counting.architecture import Architecture
    from sabia.core.plan.money.fitted import FittedLaw
    from sabia.core.plan.stops.failures import StopModel

SFT_BATCH = 512e3  # default tokens of a batch of fine-tuning
OFFERS = ("provider", "region", "spot", "commitment")  # parameters of prices_for
MOST_PRICES = 3  # columns of the table
LEAST_HBM = 1e9
MOST_USD = 100  # per chip-hour; several times the dearest on file


@dataclass(frozen=True)
class PlanRequest:
    """A run, a cluster and deadlines, and the assumptions in words.

    refused_price: why no price on file may be used; empty otherwise.
    """

    settings: PlanOptions
    run: Run
    cluster: Cluster
    deadlines_s: list[float]
    assumed: tuple[str, ...]
    today: date = field(default_factory=date.today)
    refused_price: str = ""

    @cached_property
    def own_law(self) -> "FittedLaw | None":
        """The law of --fit; None without it. Raises UsageError, BadData."""
        from sabia.core.plan.money.fitted import fitted_law

        return fitted_law(self.settings)

    @cached_property
    def architecture(self) -> "Architecture":
        """The model layer by layer; assumed from its counts where there is no config.json."""
        return architecture(self.settings)


def build(settings: PlanOptions, priced: bool = True, today: date | None = None) -> PlanRequest:
    """The request with all defaults. Raises UsageError on names and values that do not exist.

    priced: False accepts a chip without a price on file.
    """
    today = today or date.today()
    sequence, why = _sequence(settings)
    if settings.model is None:
        model = given_counts(settings.params, settings.active, settings.layers, settings.hidden)
    else:
        model = count_model(settings.model, sequence)
    chip, own_usd = _chip(settings)
    run = _run(settings, model, sequence)
    if settings.value("convention") != "6nd" or settings.lora_rank:
        run = _counted_exactly(run, settings, architecture(settings))
    prices, refused_price = prices_of(settings, chip, priced, today, own_usd)
    stops = _stops(settings, run)
    if stops and stops.preemption_s:
        prices = tuple(price.preemptible(stops.spot_share) for price in prices)
    cluster = replace(_cluster(settings, chip, prices), stops=stops)
    price_days = sorted({str(price.date) for price in prices if price.date})
    assumptions = {
        "tokens": f"{format_count(run.tokens)} tokens",
        "seq": f"sequences of {sequence}{why}",
        "batch_tokens": f"batches of {format_count(run.batch_tokens)} tokens",
        "chip": f"chip {chip.name}",
        "hbm": f"{format_bytes(cluster.hbm_bytes)} of HBM, every byte usable",
        "mfu": f"{cluster.mfu:.0%} MFU",
        "deadline": f"deadlines {settings.value('deadline').replace(',', ', ')}",
        "price": f"prices seen {', '.join(price_days)}",
    }
    days = partial(parse_duration, what="--deadline")
    instead = {"hbm": settings.utilisation, "chip": settings.machine, "tokens": settings.items}
    given = {*settings.set_values(), *(name for name, value in instead.items() if value)}
    if settings.search or settings.fixed_layout:
        given |= {"hbm", "mfu", "batch_tokens"}  # the view of layouts shows them
    given |= set() if prices else {"price"}
    return PlanRequest(
        settings=settings,
        run=run,
        cluster=cluster,
        deadlines_s=parse_list(settings.value("deadline"), days, "--deadline"),
        assumed=tuple(words for name, words in assumptions.items() if name not in given),
        today=today,
        refused_price=refused_price,
    )


def _chip(settings: PlanOptions) -> tuple[Chip, float | None]:
    """The chip of --machine with its price, or that of --chip. Raises UsageError."""
    if settings.machine is None:
        return find_chip(settings.value("chip")), None
    from sabia.core.plan.machine import load_machine

    machine = load_machine(settings.machine)
    return machine.chip, machine.usd_per_chip_hour


def _sequence(settings: PlanOptions) -> tuple[int, str]:
    """(tokens of a sequence, what else is to be said): without --seq no more than a config's."""
    sequence: int = settings.value("seq")
    if settings.model is None or settings.seq is not None:
        return sequence, ""
    from sabia.core.plan.counting.known import positions_of

    positions = positions_of(settings.model) or sequence
    return (sequence, "") if sequence <= positions else (positions, ", the positions of the config")


def _run(settings: PlanOptions, model: ModelCounts, sequence: int) -> Run:
    lora, tokens = settings.lora or settings.lora_rank is not None, _tokens(settings)
    batch_tokens = settings.batch_tokens
    if batch_tokens is None:
        usual = SFT_BATCH if settings.stage == "sft" else settings.value("batch_tokens")
        batch_tokens = min(usual, max(tokens, sequence))
    return Run(
        **vars(model),
        tokens=tokens,
        sequence=sequence,
        batch_tokens=batch_tokens,
        recipe=memory.frozen_recipe(settings.value("base_format"))
        if lora
        else memory.RECIPES[settings.value("state_recipe")],
        lora=lora,
    )


def _tokens(settings: PlanOptions) -> float:
    """Tokens to train on; with `--stage sft` examples x tokens of each x epochs."""
    if settings.stage != "sft" or settings.tokens is not None:
        return settings.value("tokens")
    if settings.items is None:
        raise UsageError("--tokens: is missing (--stage sft needs --tokens or --items)")
    each = settings.value("prompt_tokens") + settings.value("output_tokens")
    return settings.items * each * settings.value("repeats")


def _counted_exactly(run: Run, settings: PlanOptions, model: "Architecture") -> Run:
    """The run with FLOPs by --convention, and with adapters of --lora-rank."""
    from sabia.core.plan.counting import operations

    convention, rank = settings.value("convention"), settings.lora_rank
    per_token = operations.training_flops_per_token(model, run.sequence, convention, rank)
    adapters = None if rank is None else operations.adapter_params(model, rank)
    counted = {"flops_per_token": per_token, "adapter_params": adapters}
    return replace(run, convention=convention, **counted)


def _stops(settings: PlanOptions, run: Run) -> "StopModel | None":
    """The interruptions of the options; None where none of them is given. Raises UsageError."""
    if not settings.set_values(*PlanStops.table):
        return None
    from sabia.core.plan.stops.failures import StopModel

    if run.lora and run.adapter_params is None:
        raise UsageError(
            "--lora: the size of the adapters is missing, so checkpoints cannot be planned; give "
            "--lora-rank, as --lora-rank 16"
        )
    return StopModel.of(settings)


def _cluster(settings: PlanOptions, chip: Chip, prices: tuple[Price, ...]) -> Cluster:
    if settings.utilisation == 0:
        raise UsageError("--utilisation: 0 (expected above 0 and at most 100%)")
    if settings.hbm is not None and settings.hbm < LEAST_HBM:
        raise UsageError(
            f"--hbm: {settings.hbm:,} bytes (expected a size such as 180GB; did you mean "
            f"{settings.hbm}GB?)"
        )
    return Cluster(
        chip=chip,
        hbm_bytes=(settings.hbm or chip.hbm_bytes) * (settings.utilisation or 1.0),
        mfu=settings.value("mfu"),
        prices=prices,
        chips=settings.nodes * chip.node_chips if settings.nodes else settings.chips,
    )


def prices_of(
    settings: PlanOptions, chip: Chip, priced: bool, today: date, own_usd: float | None = None
) -> tuple[tuple[Price, ...], str]:
    """The prices of --price, of a machine, or of `chip` on file that may be used, or why not.

    Raises UsageError where `priced` and no price is on file.
    """
    if settings.price:
        return own_prices(settings.price), ""
    if settings.machine:
        return (Price(own_usd),) if own_usd else (), ""
    try:
        if settings.set_values(*OFFERS):
            offers = prices_for(chip.name, *(getattr(settings, name) for name in OFFERS))
            usable = current(offers, today)[:MOST_PRICES]
        else:
            offers, usable = default_prices(chip.name), default_prices(chip.name, today)
    except UsageError:
        if priced:
            raise
        return (), ""
    return usable, "" if usable else refused_words(offers, today)


def architecture(settings: PlanOptions) -> "Architecture":
    """The model layer by layer. Raises UsageError."""
    if settings.model is not None:
        from sabia.core.plan.counting.known import architecture_of

        return architecture_of(settings.model)
    from sabia.core.plan.counting.assumed import assumed_architecture

    counts = given_counts(settings.params, settings.active)
    sizes = counts.params, counts.active_params
    return assumed_architecture(*sizes, settings.layers, settings.hidden)


def own_prices(text: str) -> tuple[Price, ...]:
    """'4.4,12' → the user's own prices, without source or date."""

    def price(text: str) -> Price:
        usd = parse_money(text, "--price")
        if usd > MOST_USD:
            raise UsageError(
                f"--price: ${usd:g} (expected US dollars per chip and hour, at most {MOST_USD}; a "
                "host or a month is not a chip-hour)"
            )
        return Price(usd)

    return tuple(parse_list(text, price, "--price"))
