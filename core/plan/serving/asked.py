"""From options to engines at full load, an evaluation, or a step of GRPO.

Every gap that is filled is said in words. An evaluation has a suite and perhaps a judge; a step of
GRPO what it samples, who judges, how fast it trains, and what fits.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.compute import FLOPS_PER_PARAM_TOKEN
from sabia.core.plan.memory import activation_bytes
from sabia.core.plan.request import Request
from sabia.core.plan.serving import rollout
from sabia.core.plan.serving.decode import Replica, cache_bytes
from sabia.core.plan.serving.evaluation import (
    Evaluation,
    Source,
    Suite,
    api_price,
    evaluate,
    own_chips,
)
from sabia.core.plan.serving.rollout import Lengths
from sabia.core.plan.serving.traffic import Load, cheapest, loads, room


class Asked:
    """Options, and what is assumed where they are left out; `assumed` tells what of it was used."""

    def __init__(self, request: Request) -> None:
        """Read `request`; nothing is computed yet."""
        self.request, self.settings, self.assumed = request, request.settings, list[str]()

    def value(self, name: str) -> Any:
        """The value of an option, or what is assumed, which is then told."""
        default = self.settings.value(name)
        if getattr(self.settings, name) is not None:
            return default
        words = f"{default:,g}" if isinstance(default, int | float) else default
        line = f"{name.replace('_', ' ')} {words}"
        if line not in self.assumed:
            self.assumed.append(line)
        return default

    @property
    def usd_per_chip_hour(self) -> float:
        """The first price of the chip. Raises UsageError where there is none."""
        prices = self.request.cluster.prices
        if not prices:
            name = self.request.cluster.chip.name
            raise UsageError(f"--price: no price of {name} to reckon with; give one, as --price 2")
        return prices[0].usd_per_chip_hour


def asked_loads(asked: Asked, memory_share: float | None = None) -> list[Load]:
    """The replicas that can serve what was asked; those of --replica-chips where it is given.

    memory_share: of a chip for generation, unless --utilisation says so.
    """
    settings, chip = asked.settings, asked.request.cluster.chip
    prompt, output = asked.value("prompt_tokens"), asked.value("output_tokens")
    common = {"weights": asked.value("weights"), "cache": asked.value("cache")}
    most = settings.replica_chips or settings.generation_chips or asked.request.cluster.chips
    found = loads(
        asked.request.architecture, chip, prompt, output, **common, most_chips=most,
        batch=settings.batch, memory_share=settings.utilisation or memory_share,
    )  # fmt: skip
    wanted = settings.replica_chips
    chosen = [load for load in found if load.replica.chips == wanted] if wanted else found
    if not chosen:
        sizes = ", ".join(str(load.replica.chips) for load in found)
        raise UsageError(f"--replica-chips: {wanted} (expected a power of two; {sizes} hold it)")
    return chosen


def evaluation(asked: Asked) -> tuple[Suite, Evaluation]:
    """One evaluation as asked."""
    suite = suite_of(asked, asked.value("items"), asked.value("repeats"))
    if asked.settings.api_price is not None:
        source: Source = api_price(asked.settings.api_price.split(","), "--api-price")
    else:
        source = cheapest(asked_loads(asked)).replica
    return suite, evaluate(suite, source, judge(asked))


def suite_of(asked: Asked, items: float, repeats: float) -> Suite:
    """`items` answered `repeats` times, and the calls of a judge where one was asked for."""
    names = ["prompt_tokens", "output_tokens", "judge_calls"]
    if asked.settings.judge_calls:
        names += ["judge_prompt_tokens", "judge_output_tokens"]
    return Suite(items=items, repeats=repeats, **{name: asked.value(name) for name in names})


def judge(asked: Asked) -> Source | None:
    """An API by --judge-price, own chips by --judge-params; None without --judge-calls."""
    settings = asked.settings
    if not settings.judge_calls:
        return None
    if settings.judge_price is None and settings.judge_params is None:
        raise UsageError(
            "--judge-calls: no judge is given (expected --judge-price or --judge-params)"
        )
    if settings.judge_price is not None:
        return api_price(settings.judge_price.split(","), "--judge-price")
    assert settings.judge_params is not None
    sizes = settings.judge_params, settings.judge_active or settings.judge_params
    tokens = asked.value("judge_prompt_tokens"), asked.value("judge_output_tokens")
    return own_chips(sizes, asked.request.cluster.chip, tokens, asked.value("weights"))


REFERENCE_BYTES = 2  # of a parameter of the reference policy
COLOCATED_SHARE = 0.6  # of memory for generation while the trainer's state waits: NeMo RL's default


def sampling(asked: Asked) -> rollout.Sampling:
    """What a GRPO step samples."""
    lengths = Lengths(asked.value("output_tokens"), asked.settings.output_limit)
    sizes = asked.value("prompts"), asked.value("group"), asked.value("prompt_tokens")
    return rollout.Sampling(*sizes, lengths, asked.settings.batch)


def training_chips(asked: Asked, replica: Replica) -> int:
    """Chips that train: those of --chips that do not generate, else what holds the state."""
    cluster = asked.request.cluster
    apart = asked.settings.generation_chips or 0
    if cluster.chips:
        if apart >= cluster.chips:
            raise UsageError(
                f"--generation-chips: {apart} of --chips {cluster.chips} leave none to train"
            )
        return cluster.chips - apart
    held = math.ceil(_state_bytes(asked) / (0.9 * cluster.chip.usable_hbm_bytes))
    node = cluster.chip.node_chips
    chips = math.ceil(max(held, replica.chips) / node) * node
    asked.assumed.append(f"{chips} chips to train, whose memory holds the state")
    return chips


@dataclass(frozen=True)
class AskedStep:
    """A GRPO step with what it was made of."""

    step: rollout.Step
    sampling: rollout.Sampling
    replica: Replica
    verdicts: Evaluation | None
    training_mfu: float
    training_bytes: float


def grpo_step(asked: Asked) -> AskedStep:
    """One step as asked, with the replicas that make it shortest.

    On the same chips, or split where --generation-chips says so. Raises UsageError, Infeasible.
    """
    settings, drawn = asked.settings, sampling(asked)
    replicas = [load.replica for load in asked_loads(asked, _memory_share(asked))]
    chips = training_chips(asked, replicas[0])
    held = training_bytes(asked, drawn, chips)
    mfu, verdicts = training_mfu(asked, drawn, chips), judge_of_samples(asked, drawn)
    flops = FLOPS_PER_PARAM_TOKEN * asked.request.run.matmul_params * drawn.tokens
    train_s = flops / (chips * asked.request.cluster.chip.bf16_flops_per_s * mfu)
    passes = 1 if settings.no_reference else 2  # the policy's, and for a KL term the reference's
    parts = {
        "reward": _reward_s(asked, verdicts, settings.generation_chips or chips),
        "log-probs": train_s / 3 * passes,
        "training": train_s * (2 / 3 if settings.lora else 1),  # no gradients of frozen weights
    }
    steps = [(_step(asked, drawn, replica, chips, parts), replica) for replica in replicas]
    step, replica = min(steps, key=lambda pair: pair[0].seconds)
    return AskedStep(step, drawn, replica, verdicts, mfu, held)


def _memory_share(asked: Asked) -> float | None:
    """Of a chip, to generate; less than an engine takes alone where the trainer waits beside."""
    if asked.settings.generation_chips or asked.settings.utilisation:
        return asked.settings.utilisation
    asked.assumed.append(f"{COLOCATED_SHARE:.0%} of memory to generate beside the waiting trainer")
    return COLOCATED_SHARE


def _step(
    asked: Asked, drawn: rollout.Sampling, replica: Replica, chips: int, parts: dict[str, float]
) -> rollout.Step:
    apart, settings = asked.settings.generation_chips, asked.settings
    parts = parts | {"weights": rollout.hand_over_seconds(replica, bool(apart))}
    if not apart:
        share = settings.utilisation or COLOCATED_SHARE
        return rollout.colocated(replica, drawn, chips, parts, share)
    behind = settings.value("off_policy")
    return rollout.split(replica, drawn, apart, chips, parts, behind, settings.utilisation)


def training_mfu(asked: Asked, drawn: rollout.Sampling, chips: int) -> float:
    """--mfu, or its default, which is told; with --search or --fixed-layout the predicted one."""
    settings, request = asked.settings, asked.request
    if settings.search or settings.fixed_layout:
        from sabia.core.plan import placed

        length = round(drawn.tokens / drawn.samples)
        run = replace(request.run, sequence=length, batch_tokens=drawn.samples * length)
        cluster = replace(request.cluster, chips=chips)
        step = replace(request, run=run, cluster=cluster, deadlines_s=[math.inf])
        return placed.plan(step).best.mfu
    if settings.mfu is None:
        asked.assumed.append(f"{request.cluster.mfu:.0%} MFU to train")
    return request.cluster.mfu


def _reward_s(asked: Asked, verdicts: Evaluation | None, chips: int) -> float:
    """Own chips that generate also judge, afterwards; an API's calls run beside."""
    judging_s = verdicts.chip_hours * 3600 / chips if verdicts else 0.0
    return (asked.settings.reward_time or 0.0) + judging_s


def judge_of_samples(asked: Asked, drawn: rollout.Sampling) -> Evaluation | None:
    """The judge's work on a step's answers; None where rewards are verified by programs."""
    if not asked.settings.judge_calls:
        return None
    free = 0.0, 0.0  # the answers themselves are generation's
    both = evaluate(suite_of(asked, drawn.samples, 1), free, judge(asked))
    return Evaluation(both.bills[1:])


def generating_bytes(replica: Replica, slots: int, context: float) -> float:
    """Bytes on a chip while it generates."""
    found = room(replica)
    return found.weights + found.workspace + slots * cache_bytes(replica, context, on_chip=True)


def training_bytes(asked: Asked, drawn: rollout.Sampling, chips: int) -> float:
    """A chip's share of the state, and the activations of the longest sequence. Infeasible
    where that is more than it has."""
    run, chip = asked.request.run, asked.request.cluster.chip
    longest = drawn.prompt_tokens + drawn.lengths.longest_of(drawn.samples)
    live = activation_bytes(run.layers, run.hidden, longest)
    held, room_bytes = _state_bytes(asked) / chips + live, chip.usable_hbm_bytes
    if held > room_bytes:
        fix = "expect shorter answers, --output-limit"
        if live < room_bytes:
            fix = f"train on {math.ceil(_state_bytes(asked) / (room_bytes - live))} or more"
        raise Infeasible(
            f"--chips: {chips} {chip.name} train with {held / 1e9:,.0f} GB each (expected at most "
            f"{room_bytes / 1e9:,.0f}); {fix}"
        )
    return held


def _state_bytes(asked: Asked) -> float:
    """The trainer's state, and the reference's weights; with adapters that is the frozen model."""
    run, settings = asked.request.run, asked.settings
    reference = 0 if run.lora or settings.no_reference else REFERENCE_BYTES * run.params
    return run.state_bytes + reference
