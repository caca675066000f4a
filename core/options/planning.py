"""Options of `sabia plan-cluster` in groups: generation (serving, GRPO, evaluations, judges), and
questions before a run (what size, on which terms).

Also the kinds of options and the conditions that all groups use.
"""

from functools import partial

from sabia.core.options.option import choice, needs, quantity, switch, text
from sabia.core.options.table import Options

TRAINING = needs(stage=(None, "pretrain", "sft"))
TRAINED = needs(stage=(None, "pretrain", "sft", "grpo"))
GENERATED = needs(stage=("serve", "grpo", "eval"))
GRPO = needs(stage="grpo")
JUDGED = needs(stage=("grpo", "eval"))
LAYOUT = needs("search", "fixed_layout")
JUDGE = needs("judge_calls")
GENERATING = needs("items", stage=("serve", "grpo", "eval"))

choice_of, text_of = partial(choice, default=None), partial(text, default=None)
count, share, duration = (partial(quantity, kind) for kind in ("count", "share", "duration"))
whole = partial(quantity, "whole", metavar="N", least=1, most=10**9)


class PlanGeneration(Options, group="Generation"):
    """Generation: for users, for reinforcement learning, for evaluations."""

    weights: str | None = text_of(
        "Number format of the weights for generation", "NAME", unset="bf16", only=GENERATED,
        values="serving.toml format",
    )  # fmt: skip
    """The error for an unknown name lists all."""
    cache: str | None = choice_of(
        "Number format of the KV cache", "bf16", "fp8", "int8", unset="bf16",
        only=GENERATED, excludes=("api_price",),
    )  # fmt: skip
    prompt_tokens: float | None = count("Mean tokens of a prompt", unset="1000", only=GENERATING)
    output_tokens: float | None = count("Mean tokens of an answer", unset="1000", only=GENERATING)
    thinking_tokens: float | None = count(
        "Mean tokens of thinking before an answer", unset="0", only=GENERATING
    )
    """They are generated, paid for and cached like those of the answer, which follows them."""
    samples: int | None = whole(
        "Answers drawn per request, of which one is used", unset="1", most=100_000,
        only=needs(stage="serve"),
    )  # fmt: skip
    """As for a majority vote, or the best by a verifier, whose own cost is not counted. The prompt
    is computed once; each answer has a cache of its own. In an evaluation this is `--repeats`."""
    requests: float | None = count(
        "Requests per second to serve: how many chips that takes", metavar="N/S", least=1e-6,
        only=needs(stage="serve"), excludes=("chips", "nodes"),
    )  # fmt: skip
    output_limit: float | None = count(
        "Maximum tokens of an answer", unset="none", only=GRPO, group="GRPO"
    )
    replica_chips: int | None = whole(
        "Chips per model replica", unset="searched", only=GENERATED,
        excludes=("api_price",),
    )  # fmt: skip
    batch: int | None = whole(
        "Concurrent sequences per replica", unset="as many as fit in memory",
        only=needs(stage=("serve", "grpo")),
    )  # fmt: skip
    items: float | None = count(
        "Items to evaluate, or examples to fine-tune on", unset="10000", least=1,
        only=needs(stage=("eval", "sft")),
    )  # fmt: skip
    repeats: int | None = whole(
        "Answers per item, or epochs over the examples", unset="1",
        only=needs("items", stage="eval"),
    )  # fmt: skip
    api_price: str | None = text_of(
        "Use an API: USD per million input and output tokens", "USD,USD", only=needs(stage="eval")
    )
    """Such as `0.5,2`. Without it the answers are generated on `--chip`."""


class PlanGrpo(Options, group="GRPO"):
    """Steps of reinforcement learning (GRPO)."""

    prompts: int | None = whole("Prompts per step", unset="64")
    group: int | None = whole("Answers per prompt (group size)", unset="16", least=2)
    steps: int | None = whole("Number of steps", unset="1000")
    generation_chips: int | None = whole("Chips that only generate", unset="none")
    """By default all chips generate and train in turn."""
    off_policy: int | None = whole(
        "Maximum off-policy steps", least=0, unset="1", only=needs("generation_chips")
    )
    """The number of steps by which generation may be ahead of training; with 0 each side waits for
    the other."""
    no_reference: bool = switch("Train without a reference model and KL penalty")
    reward_time: float | None = duration("Time to compute the rewards of a step", unset="none")


class PlanJudge(Options, group="Judge model"):
    """A language model that judges answers, for rewards or in an evaluation."""

    judge_calls: float | None = count("Judge calls per answer", unset="0")
    judge_prompt_tokens: float | None = count(
        "Prompt tokens per judge call", unset="3000", only=JUDGE
    )
    judge_output_tokens: float | None = count(
        "Output tokens per judge call", unset="200", only=JUDGE
    )
    judge_params: float | None = count(
        "Total parameters of a judge that runs on --chip", only=JUDGE
    )
    judge_active: float | None = count(
        "Active parameters of the judge", unset="--judge-params", only=needs("judge_params")
    )
    judge_price: str | None = text_of(
        "Use a judge API: USD per million input and output tokens", "USD,USD", only=JUDGE,
        excludes=("judge_params",),
    )  # fmt: skip
    """Such as `0.5,2`."""


class PlanSize(Options, group="Model"):
    """What model to train, where neither `--params` nor `--model` is given, and its loss."""

    tokens_per_param: float | None = count(
        "Without --params: training tokens per parameter", least=0.1, most=1e5,
        unset="those of least loss", excludes=("params", "model", "tokens"),
        only=needs("chips", "nodes"),
    )  # fmt: skip
    """With `--chips` and `--deadline`, and without a size, the answer is the model to train. 20 is
    the rule of Hoffmann et al. (2022); more tokens make a smaller model that is cheaper to
    serve."""
    data: float | None = count(
        "Without --params: unique tokens at hand; repeated ones count less",
        excludes=("params", "model"), only=needs("chips", "nodes"),
    )  # fmt: skip
    fit: str | None = text_of("Fit a scaling law on these runs and use it", "PATH")
    """A file (Parquet or JSON lines) with the columns `params`, `tokens` and `loss` or
    `validation_loss` in nats per token, and perhaps `run`, of which the last row counts; or a
    directory of runs of `sabia pretrain`. Without it the law is that of Besiroglu et al. (2024)."""
    base_format: str | None = choice_of(
        "Number format of the frozen weights of LoRA (QLoRA: nf4)", "bf16", "fp8", "int8", "nf4",
        "int4",
        unset="bf16", only=(TRAINED, needs("lora", "lora_rank")),
    )  # fmt: skip
    """`nf4` with double quantization takes 0.516 bytes per parameter (Dettmers et al. 2023), `int4`
    0.531; both are those of `--lora-base` in `sabia sft` and `sabia grpo`. Only memory changes; the
    products are computed in BF16."""


class PlanTerms(Options, group="Money"):
    """On which terms the chips are used. Each of these options adds a section to the plan."""

    reserved: float | None = share("Discount of reserved chips, such as 40%")
    """A reservation is paid for all of `--term`, used or not."""
    term: float | None = duration("Term of the reservation", unset="52w", only=needs("reserved"))
    production: float | None = duration(
        "Time per working day that production needs the chips, such as 10h"
    )
    """The run has the nights and weekends. It stops in each morning of five working days, which
    costs `--restart` and the blocking part of a save."""
    first_mfu: float | None = share("MFU before the layout is tuned: compare it with tuning first")
    """Without `--search` the tuned MFU is `--mfu`, else the predicted one."""
    tuning: float | None = duration(
        "Time that tuning the layout takes on the chips", unset="3d", only=needs("first_mfu")
    )
