"""From options to replicas at full load, an evaluation, or a GRPO step.

Every assumption is listed in words. An evaluation has a suite and perhaps a judge; a GRPO step has
samples, a reward, a training speed and memory limits.

Cost of an evaluation: answers to the items of a suite, and a judge's calls on them.

Answers and verdicts come from own chips (a replica at full load, traffic.py) or from an API with a
price per million tokens. A rubric judge makes one call for each criterion of an answer
(`judge_calls`), each with the answer and the rubric in its prompt, and generates a verdict.

`table_cost` computes the same from a table of a budget file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import BadData, Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.chips import Chip
from sabia.core.plan.compute import FLOPS_PER_PARAM_TOKEN, whole_chips, whole_nodes
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.serving import rollout
from sabia.core.plan.serving.decode import Replica
from sabia.core.plan.serving.traffic import MILLION, Load, cheapest, full_load, loads
from sabia.core.units import parse_count, parse_money

# keys of a table besides the fields of Suite: for the model, and with prefix for the judge
SOURCE_KEYS = ("params", "active", "weights", "usd_per_million")
NEEDED = ("items", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Suite:
    """Items that are answered `repeats` times, and a judge's calls on each answer (0: none)."""

    items: float
    prompt_tokens: float
    output_tokens: float
    repeats: float = 1
    judge_calls: float = 0
    judge_prompt_tokens: float = 0
    judge_output_tokens: float = 0

    @property
    def answers(self) -> float:
        """Number of answers."""
        return self.items * self.repeats


@dataclass(frozen=True)
class Bill:
    """Work of the model or of the judge: own chip-seconds, or dollars of an API."""

    name: str
    calls: float
    input_tokens: float
    output_tokens: float
    chip_s: float = 0.0
    api_usd: float = 0.0
    load: Load | None = None

    def cost_usd(self, usd_per_chip_hour: float) -> float:
        """Cost of chips and API."""
        return self.chip_s / 3600 * usd_per_chip_hour + self.api_usd


@dataclass(frozen=True)
class Evaluation:
    """One run of a suite: answers, and verdicts where there is a judge."""

    bills: tuple[Bill, ...]

    @property
    def chip_hours(self) -> float:
        """Chip-hours of answers and verdicts on own chips."""
        return sum(bill.chip_s for bill in self.bills) / 3600

    @property
    def api_usd(self) -> float:
        """Cost of APIs."""
        return sum(bill.api_usd for bill in self.bills)

    def cost_usd(self, usd_per_chip_hour: float) -> float:
        """Total cost."""
        return sum(bill.cost_usd(usd_per_chip_hour) for bill in self.bills)


ApiPrice = tuple[float, float]  # US dollars for a million tokens read, and written
Source = Replica | ApiPrice


def evaluate(suite: Suite, model: Source, judge: Source | None = None) -> Evaluation:
    """Cost of one run of `suite`; judge: None where it makes no calls."""
    bills = [_bill("answers", suite.answers, suite.prompt_tokens, suite.output_tokens, model)]
    calls = suite.answers * suite.judge_calls
    if calls and judge:
        sizes = suite.judge_prompt_tokens, suite.judge_output_tokens
        bills.append(_bill("verdicts", calls, *sizes, judge))
    return Evaluation(tuple(bills))


def _bill(name: str, calls: float, prompt: float, output: float, source: Source) -> Bill:
    tokens = calls * prompt, calls * output
    if isinstance(source, Replica):
        load = full_load(source, prompt, output)
        return Bill(name, calls, *tokens, chip_s=calls * load.request_chip_s, load=load)
    usd = sum(size * price for size, price in zip(tokens, source, strict=True)) / MILLION
    return Bill(name, calls, *tokens, api_usd=usd)


def table_cost(table: Mapping[str, Any], chip: Chip, label: str) -> Evaluation:
    """One run of the suite that a TOML table describes, on `chip` or by API prices.

    items, prompt_tokens, output_tokens; repeats; the model's params and active (BF16 weights
    unless `weights` is given) or usd_per_million = [input, output]; judge_calls with
    judge_prompt_tokens, judge_output_tokens and judge_params, judge_active or
    judge_usd_per_million. Raises BadData, UsageError, Infeasible.
    """
    sizes = Suite.__dataclass_fields__.keys()
    keys = sizes | {f"{side}{key}" for side in ("", "judge_") for key in SOURCE_KEYS}
    unknown, missing = sorted(table.keys() - keys), [key for key in NEEDED if key not in table]
    if unknown or missing:
        words = f"has unknown {unknown[0]}" if unknown else f"lacks {missing[0]}"
        raise BadData(f"{label}: evaluation {words} (expected {', '.join(sorted(keys))})")
    given = {key: parse_count(table[key], f"{label} {key}") for key in sizes if key in table}
    suite = Suite(**given)
    judge = _source(table, "judge_", chip, suite, label) if suite.judge_calls else None
    return evaluate(suite, _source(table, "", chip, suite, label), judge)


def _source(table: Mapping[str, Any], side: str, chip: Chip, suite: Suite, label: str) -> Source:
    """The model, or the judge where `side` is 'judge_', by size or by price."""
    price, size = table.get(f"{side}usd_per_million"), table.get(f"{side}params")
    if (price is None) == (size is None):
        names = f"{side}params or {side}usd_per_million"
        raise BadData(f"{label}: evaluation needs {names} (expected one of them)")
    if size is None:
        return api_price(price, f"{label} {side}usd_per_million")
    params = parse_count(size, f"{label} {side}params")
    active = parse_count(table.get(f"{side}active", params), f"{label} {side}active")
    tokens = suite.prompt_tokens, suite.output_tokens
    if side:
        tokens = suite.judge_prompt_tokens, suite.judge_output_tokens
    weights = str(table.get(f"{side}weights", PlanOptions.assumed("weights")))
    return own_chips((params, active), chip, tokens, weights)


def own_chips(
    sizes: tuple[float, float], chip: Chip, tokens: tuple[float, float], weights: str
) -> Replica:
    """The cheapest replica of a model of (all, active) parameters for (prompt, output) tokens."""
    return cheapest(loads(assumed_architecture(*sizes), chip, *tokens, weights=weights)).replica


def api_price(prices: object, label: str) -> ApiPrice:
    """[input, output] in dollars for a million tokens. Raises UsageError."""
    if not isinstance(prices, list) or len(prices) != 2:
        raise UsageError(f"{label}: {prices!r} (expected two prices, input and output)")
    read, written = (parse_money(usd, label) for usd in prices)
    return read, written


class ServingRequest:
    """Options with their assumed values; `assumed` lists the assumed values that were used."""

    def __init__(self, request: PlanRequest) -> None:
        """A request with no assumptions yet."""
        self.request, self.settings, self.assumed = request, request.settings, list[str]()

    def value(self, name: str) -> Any:
        """The value of an option, or the assumed value, which is then listed."""
        default = self.settings.value(name)
        if getattr(self.settings, name) is not None:
            return default
        words = f"{default:,g}" if isinstance(default, int | float) else default
        line = f"{name.replace('_', ' ')} {words}"
        if line not in self.assumed:
            self.assumed.append(line)
        return default

    @property
    def generated_tokens(self) -> float:
        """Mean tokens of an answer, with those of thinking before it."""
        written: float = self.value("output_tokens") + (self.settings.thinking_tokens or 0)
        return written

    @property
    def usd_per_chip_hour(self) -> float:
        """The first price of the chip. Raises UsageError where there is none."""
        prices = self.request.cluster.prices
        if not prices:
            name = self.request.cluster.chip.name
            raise UsageError(f"--price: no price of {name} is on file; give one, as --price 2")
        return prices[0].usd_per_chip_hour


def possible_loads(serving: ServingRequest, memory_share: float | None = None) -> list[Load]:
    """The possible replicas for the requested load; those of --replica-chips if it is given.

    memory_share: of a chip for generation, unless --utilisation is given.
    """
    settings, chip = serving.settings, serving.request.cluster.chip
    prompt, output = serving.value("prompt_tokens"), serving.generated_tokens
    common = {"weights": serving.value("weights"), "cache": serving.value("cache")}
    most = settings.replica_chips or settings.generation_chips or serving.request.cluster.chips
    possible = loads(
        serving.request.architecture, chip, prompt, output, **common, most_chips=most,
        batch=settings.batch, memory_share=settings.utilisation or memory_share,
        samples=settings.samples or 1,
    )  # fmt: skip
    wanted = settings.replica_chips
    chosen = [load for load in possible if load.replica.chips == wanted] if wanted else possible
    if not chosen:
        sizes = ", ".join(str(load.replica.chips) for load in possible)
        raise UsageError(
            f"--replica-chips: {wanted} (expected a power of two that holds the model: {sizes})"
        )
    return chosen


def evaluation(serving: ServingRequest) -> tuple[Suite, Evaluation]:
    """The requested evaluation."""
    suite = suite_of(serving, serving.value("items"), serving.value("repeats"))
    if serving.settings.api_price is not None:
        source: Source = api_price(serving.settings.api_price.split(","), "--api-price")
    else:
        source = cheapest(possible_loads(serving)).replica
    return suite, evaluate(suite, source, judge(serving))


def suite_of(serving: ServingRequest, items: float, repeats: float) -> Suite:
    """`items` answered `repeats` times, and the calls of a judge where one is requested."""
    names = ["prompt_tokens", "judge_calls"]
    if serving.settings.judge_calls:
        names += ["judge_prompt_tokens", "judge_output_tokens"]
    counts = {name: serving.value(name) for name in names}
    return Suite(items=items, repeats=repeats, output_tokens=serving.generated_tokens, **counts)


def judge(serving: ServingRequest) -> Source | None:
    """An API by --judge-price, own chips by --judge-params; None without --judge-calls."""
    settings = serving.settings
    if not settings.judge_calls:
        return None
    if settings.judge_price is not None:
        return api_price(settings.judge_price.split(","), "--judge-price")
    if settings.judge_params is None:
        raise UsageError("--judge-calls: no judge is given; give --judge-price or --judge-params")
    sizes = settings.judge_params, settings.judge_active or settings.judge_params
    tokens = serving.value("judge_prompt_tokens"), serving.value("judge_output_tokens")
    return own_chips(sizes, serving.request.cluster.chip, tokens, serving.value("weights"))


REFERENCE_BYTES = 2  # of a parameter of the reference policy
COLOCATED_SHARE = 0.6  # of memory for generation while the trainer's state waits: NeMo RL's default


def training_chips(serving: ServingRequest, replica: Replica) -> int:
    """Chips that train: those of --chips that do not generate, else enough to hold the state."""
    cluster = serving.request.cluster
    generating = serving.settings.generation_chips or 0
    if cluster.chips:
        if generating >= cluster.chips:
            raise UsageError(
                f"--generation-chips: {generating} of --chips {cluster.chips} leave none to train "
                f"(expected at most {cluster.chips - 1})"
            )
        return cluster.chips - generating
    held = whole_chips(_state_bytes(serving) / (0.9 * cluster.chip.usable_hbm_bytes))
    chips = whole_nodes(max(held, replica.chips), cluster.chip.node_chips)
    serving.assumed.append(f"{chips} chips to train, which hold the state")
    return chips


@dataclass(frozen=True)
class GrpoStep:
    """A GRPO step with its samples, replica, judge and training."""

    step: rollout.Step
    sampling: rollout.Sampling
    replica: Replica
    verdicts: Evaluation | None
    training_mfu: float
    training_bytes: float


def grpo_step(serving: ServingRequest) -> GrpoStep:
    """The requested step, with the replicas that make it shortest.

    Generation is on the chips of training, or on its own --generation-chips. Raises UsageError,
    Infeasible.
    """
    settings, cluster = serving.settings, serving.request.cluster
    lengths = rollout.Lengths(serving.generated_tokens, settings.output_limit)
    sizes = serving.value("prompts"), serving.value("group"), serving.value("prompt_tokens")
    drawn = rollout.Sampling(*sizes, lengths, settings.batch)
    apart, share = settings.generation_chips, settings.utilisation
    if not apart and not share:  # the trainer is on the same chips
        share = COLOCATED_SHARE
        serving.assumed.append(f"{share:.0%} of memory to generate beside the waiting trainer")
    replicas = [load.replica for load in possible_loads(serving, share)]
    chips = training_chips(serving, replicas[0])
    held = training_bytes(serving, drawn, chips)
    mfu, verdicts = training_mfu(serving, drawn, chips), judge_of_samples(serving, drawn)
    flops = FLOPS_PER_PARAM_TOKEN * serving.request.run.matmul_params * drawn.tokens
    train_s = flops / (chips * cluster.chip.bf16_flops_per_s * mfu)
    passes = 1 if settings.no_reference else 2  # of the policy, and for KL of the reference
    # own chips that generate also judge, afterwards; calls of an API run at the same time
    judging_s = verdicts.chip_hours * 3600 / (apart or chips) if verdicts else 0.0
    others = {
        "reward": (settings.reward_time or 0.0) + judging_s,
        "log-probs": train_s / 3 * passes,
        "training": train_s * (2 / 3 if settings.lora else 1),  # no gradients of frozen weights
    }
    steps = []
    for replica in replicas:
        parts = others | {"weights": rollout.hand_over_seconds(replica, bool(apart))}
        if apart:
            step = rollout.split(replica, drawn, apart, chips, parts, settings.value("off_policy"))
        else:
            step = rollout.colocated(replica, drawn, chips, parts)
        steps.append((step, replica))
    step, replica = min(steps, key=lambda pair: pair[0].seconds)
    return GrpoStep(step, drawn, replica, verdicts, mfu, held)


def training_mfu(serving: ServingRequest, drawn: rollout.Sampling, chips: int) -> float:
    """--mfu, or its default, which is listed; with --search or --fixed-layout the predicted one."""
    settings, request = serving.settings, serving.request
    if settings.search or settings.fixed_layout:
        from sabia.core.plan import placed

        length = round(drawn.tokens / drawn.samples)
        run = replace(request.run, sequence=length, batch_tokens=drawn.samples * length)
        cluster = replace(request.cluster, chips=chips)
        step = replace(request, run=run, cluster=cluster, deadlines_s=[math.inf])
        return placed.plan(step).best.mfu
    if settings.mfu is None:
        serving.assumed.append(f"{request.cluster.mfu:.0%} MFU to train")
    return request.cluster.mfu


def judge_of_samples(serving: ServingRequest, drawn: rollout.Sampling) -> Evaluation | None:
    """The judge's work on a step's answers; None where programs verify rewards."""
    if not serving.settings.judge_calls:
        return None
    free = 0.0, 0.0  # the answers themselves count as generation
    return Evaluation(evaluate(suite_of(serving, drawn.samples, 1), free, judge(serving)).bills[1:])


def training_bytes(serving: ServingRequest, drawn: rollout.Sampling, chips: int) -> float:
    """A chip's share of the state, and activations of the longest sequence. Raises Infeasible."""
    run, chip = serving.request.run, serving.request.cluster.chip
    live = run.live_bytes(drawn.prompt_tokens + drawn.lengths.longest_of(drawn.samples))
    held, usable_bytes = _state_bytes(serving) / chips + live, chip.usable_hbm_bytes
    if held > usable_bytes:
        fix = "use a shorter --output-limit"
        if live < usable_bytes:
            fix = f"train on {math.ceil(_state_bytes(serving) / (usable_bytes - live))} or more"
        raise Infeasible(
            f"--chips: training on {chips} {chip.name} needs {held / 1e9:,.0f} GB each (expected "
            f"at most {usable_bytes / 1e9:,.0f}); {fix}"
        )
    return held


def _state_bytes(serving: ServingRequest) -> float:
    """The trainer's state, and weights of the reference (with adapters it is the frozen model)."""
    run, settings = serving.request.run, serving.settings
    reference = 0 if run.lora or settings.no_reference else REFERENCE_BYTES * run.params
    return run.state_bytes + reference
