"""From settings to engines, samplings and suites; every gap that is filled is said in words."""

import math
from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.request import Request
from sabia.core.plan.serving import rollout
from sabia.core.plan.serving.capacity import room
from sabia.core.plan.serving.decode import Replica, cache_bytes
from sabia.core.plan.serving.evaluation import (
    ApiPrice,
    Evaluation,
    Source,
    Suite,
    api_price,
    evaluate,
)
from sabia.core.plan.serving.lengths import Lengths
from sabia.core.plan.serving.traffic import Load, cheapest, loads

DEFAULTS: dict[str, Any] = {
    "weights": "bf16", "cache": "bf16", "prompt_tokens": 1000.0, "output_tokens": 1000.0,
    "prompts": 64, "group": 16, "steps": 1000, "items": 10_000.0, "repeats": 1,
    "judge_calls": 0.0, "judge_prompt_tokens": 3000.0, "judge_output_tokens": 200.0,
}  # fmt: skip
COLOCATED_SHARE = 0.6  # of memory for generation while the trainer's state waits: NeMo RL's default


class Asked:
    """Settings with their defaults; `assumed` collects those that were used."""

    def __init__(self, request: Request) -> None:
        """Read `request`; nothing is computed yet."""
        self.request, self.settings, self.assumed = request, request.settings, list[str]()

    def value(self, name: str) -> Any:
        """A setting, or its default, which is then told."""
        said = getattr(self.settings, name)
        if said is not None:
            return said
        default = DEFAULTS[name]
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


def asked_loads(asked: Asked) -> list[Load]:
    """The replicas that can serve what was asked; one where --replica-chips says which."""
    settings, chip = asked.settings, asked.request.cluster.chip
    prompt, output = asked.value("prompt_tokens"), asked.value("output_tokens")
    common = {"weights": asked.value("weights"), "cache": asked.value("cache")}
    most = settings.replica_chips or asked.request.cluster.chips
    found = loads(
        asked.request.architecture, chip, prompt, output, **common, most_chips=most,
        batch=settings.batch, memory_share=settings.utilisation,
    )  # fmt: skip
    wanted = settings.replica_chips
    if wanted and found[-1].replica.chips != wanted:
        raise UsageError(f"--replica-chips: {wanted} (expected a power of two)")
    return found[-1:] if wanted else found


def sampling(asked: Asked) -> rollout.Sampling:
    """What a GRPO step samples."""
    lengths = Lengths(asked.value("output_tokens"), asked.settings.output_limit)
    sizes = asked.value("prompts"), asked.value("group"), asked.value("prompt_tokens")
    return rollout.Sampling(*sizes, lengths, asked.settings.batch)


def training_chips(asked: Asked, replica: Replica) -> int:
    """Chips that train: those of --chips that do not generate, else what holds the state."""
    cluster, run = asked.request.cluster, asked.request.run
    apart = asked.settings.generation_chips or 0
    if cluster.chips:
        if apart >= cluster.chips:
            raise UsageError(
                f"--generation-chips: {apart} of --chips {cluster.chips} leave none to train"
            )
        return cluster.chips - apart
    held = math.ceil(run.state_bytes / cluster.chip.usable_hbm_bytes)
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


def grpo_step(asked: Asked) -> AskedStep:
    """One step as asked: on the same chips, or split where --generation-chips says so."""
    settings, request = asked.settings, asked.request
    replica = cheapest(asked_loads(asked)).replica
    drawn, chips = sampling(asked), training_chips(asked, replica)
    mfu = training_mfu(asked, drawn, chips)
    forward_s, train_s = rollout.passes_at_mfu(
        6 * request.run.matmul_params, drawn.tokens, chips,
        request.cluster.chip.bf16_flops_per_s, mfu,
    )  # fmt: skip
    if request.run.lora:
        train_s *= 2 / 3  # no gradients of the frozen weights
    apart = settings.generation_chips
    refuse_too_few(request, chips)
    judged = judge_of_samples(asked, drawn)
    parts = rollout.step_parts(
        forward_s,
        train_s,
        reference=not settings.no_reference,
        reward_s=(settings.reward_time or 0.0) + _judging_s(judged, apart or chips),
        weights_s=rollout.hand_over_seconds(replica, bool(apart)),
    )
    if not apart:
        share = settings.utilisation or COLOCATED_SHARE
        if settings.utilisation is None:
            asked.assumed.append(f"{share:.0%} of memory to generate beside the waiting trainer")
        step = rollout.colocated(replica, drawn, chips, parts, share)
        return AskedStep(step, drawn, replica, judged, mfu)
    behind = 1 if settings.off_policy is None else settings.off_policy
    step = rollout.split(replica, drawn, apart, chips, parts, behind, settings.utilisation)
    return AskedStep(step, drawn, replica, judged, mfu)


def training_mfu(asked: Asked, drawn: rollout.Sampling, chips: int) -> float:
    """--mfu, or its default, which is told; with --search or --fixed-layout the predicted one."""
    settings, request = asked.settings, asked.request
    if settings.given("search", "fixed_layout"):
        from sabia.core.plan import placed

        length = round(drawn.tokens / drawn.samples)
        run = replace(request.run, sequence=length, batch_tokens=drawn.samples * length)
        cluster = replace(request.cluster, chips=chips)
        step = replace(request, run=run, cluster=cluster, deadlines_s=[math.inf])
        return placed.plan(step).best.mfu
    if settings.mfu is None:
        asked.assumed.append(f"{request.cluster.mfu:.0%} MFU to train")
    return request.cluster.mfu


def _judging_s(judged: Evaluation | None, chips: int) -> float:
    """Own chips that generate also judge, afterwards; an API's calls run beside."""
    return judged.chip_hours * 3600 / chips if judged else 0.0


def judge_of_samples(asked: Asked, drawn: rollout.Sampling) -> Evaluation | None:
    """The judge's work on a step's answers; None where rewards are verified by programs."""
    if not asked.settings.judge_calls:
        return None
    free = ApiPrice(0.0, 0.0)  # the answers themselves are generation's
    both = evaluate(_suite(asked, drawn.samples, 1), free, judge(asked))
    return Evaluation(both.bills[1:])


def _suite(asked: Asked, items: float, repeats: float) -> Suite:
    return Suite(
        items,
        asked.value("prompt_tokens"),
        asked.value("output_tokens"),
        repeats,
        asked.value("judge_calls"),
        asked.value("judge_prompt_tokens") if asked.settings.judge_calls else 0,
        asked.value("judge_output_tokens") if asked.settings.judge_calls else 0,
    )


def judge(asked: Asked) -> Source | None:
    """An API by --judge-price, own chips by --judge-params; None without --judge-calls."""
    settings = asked.settings
    if not settings.judge_calls:
        return None
    if (settings.judge_price is None) == (settings.judge_params is None):
        raise UsageError(
            "--judge-calls: who judges? (expected --judge-price IN,OUT or --judge-params)"
        )
    if settings.judge_price is not None:
        return api_price(settings.judge_price.split(","), "--judge-price")
    assert settings.judge_params is not None
    model = assumed_architecture(
        settings.judge_params, settings.judge_active or settings.judge_params
    )
    prompt, output = asked.value("judge_prompt_tokens"), asked.value("judge_output_tokens")
    chip, weights = asked.request.cluster.chip, asked.value("weights")
    return cheapest(loads(model, chip, prompt, output, weights=weights)).replica


def evaluation(asked: Asked) -> tuple[Suite, Evaluation]:
    """One evaluation as asked."""
    suite = _suite(asked, asked.value("items"), asked.value("repeats"))
    if asked.settings.api_price is not None:
        source: Source = api_price(asked.settings.api_price.split(","), "--api-price")
    else:
        source = cheapest(asked_loads(asked)).replica
    return suite, evaluate(suite, source, judge(asked))


def generating_bytes(replica: Replica, slots: int, context: float) -> float:
    """Bytes on a chip while it generates."""
    found = room(replica)
    return found.weights + found.workspace + slots * cache_bytes(replica, context, on_chip=True)


def training_bytes(request: Request, chips: int) -> float:
    """State on a chip while it trains, split over all of them; one sequence's activations."""
    run = request.run
    live = run.layers * run.hidden * run.sequence * 2
    return run.state_bytes / chips + live


def refuse_too_few(request: Request, chips: int) -> None:
    """Raise Infeasible where `chips` cannot hold the trainer's state and a sequence on each."""
    chip, need = request.cluster.chip, training_bytes(request, chips)
    if need > chip.usable_hbm_bytes:
        live = need - request.run.state_bytes / chips
        enough = math.ceil(request.run.state_bytes / max(1.0, chip.usable_hbm_bytes - live))
        raise Infeasible(
            f"--chips: {chips} {chip.name} train with {need / 1e9:,.0f} GB each (expected at most "
            f"{chip.usable_hbm_bytes / 1e9:,.0f}); train on {enough} or more"
        )
