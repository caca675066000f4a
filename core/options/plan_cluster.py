"""Options of `sabia plan-cluster`, on its command line and in the rows of a list of runs.

Their default is None or False, so that the planner can tell what was given from what it assumes.
What it assumes is an option's `unset`, which help shows and `PlanOptions.value` reads.
"""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, choice, needs, quantity, switch, text
from sabia.core.options.shared import Call, InputOptions, Output, Seeded
from sabia.core.options.table import Options

TRAINING = needs(stage=(None, "pretrain", "sft"))
TRAINED = needs(stage=(None, "pretrain", "sft", "grpo"))
GENERATED = needs(stage=("serve", "grpo", "eval"))
GRPO = needs(stage="grpo")
JUDGED = needs(stage=("grpo", "eval"))
LAYOUT = needs("search", "fixed_layout")
JUDGE = needs("judge_calls")
ASKED = needs("items", stage=("serve", "grpo", "eval"))

_choice, _text = partial(choice, default=None), partial(text, default=None)
_count, _share, _duration = (partial(quantity, kind) for kind in ("count", "share", "duration"))
_whole = partial(quantity, "whole", metavar="N", least=1, most=10**9)


class PlanModel(Options, group="Model"):
    """The size and the shape of the model."""

    params: float | None = _count(
        "Parameters of the model, all experts", common=True, excludes=("model",)
    )
    """Such as `1.6T` or `8B`. The least that a plan needs, unless `--model` counts them."""
    active: float | None = _count(
        "Active parameters", common=True, excludes=("model",), unset="--params"
    )
    """The parameters that one token uses; in a mixture of experts fewer than `--params`."""
    model: str | None = _text("Count the parameters of this config.json", "PATH", common=True)
    """A `config.json`, or a directory that holds one, instead of `--params`, `--active`, `--layers`
    and `--hidden`. Operations then leave out the lookup of input embeddings, and a note tells what
    attention would add."""
    layers: int | None = _whole(
        "Layers", most=10_000, excludes=("model", "api_price"), unset="nearest published model"
    )
    """Those of the published model whose size is nearest, unless they are given."""
    hidden: int | None = _whole(
        "Hidden size", excludes=("model", "api_price"), unset="nearest published model"
    )
    """That of the published model whose size is nearest, unless it is given."""
    convention: str | None = _choice(
        "FLOP convention that MFU refers to", "6nd", "palm", "causal", unset="6nd", only=TRAINING
    )
    """`6nd` leaves attention out, `palm` counts all of it, `causal` the half that a causal mask
    leaves."""
    lora: bool = switch("Train LoRA adapters on frozen weights", only=TRAINED)
    """Costs 4 operations for each active parameter and token, and 2 bytes for each parameter. The
    adapters themselves are not counted; `--lora-rank` counts them."""
    lora_rank: int | None = _whole("Train LoRA adapters of this rank", metavar="R", only=TRAINED)
    """As `--lora`, counting adapters of this rank on every matrix of the layers: their operations,
    their state, and a checkpoint that holds nothing else."""


class PlanRun(Options, group="Run"):
    """What is trained on, and by when."""

    tokens: float | None = _count(
        "Training tokens", unset="500B", only=TRAINING, excludes=("items",), common=True
    )
    """With `--stage sft`, `--items` may be given instead."""
    seq: int | None = quantity("length", "Sequence length; 8k is 8192", unset="8k", only=TRAINING)
    """Lengths are binary: `8k` is 8192."""
    batch_tokens: float | None = _count("Tokens of a global batch", unset="4M", only=TRAINING)
    """All of them are live at once in the table; with gradient accumulation fewer are, down to one
    sequence. Fine-tuning assumes a smaller batch."""
    deadline: str | None = _text(
        "Deadlines", "DURATION,…", unset="30d,14d,7d", only=TRAINING, common=True
    )
    """Each is a row of the table."""
    state_recipe: str | None = _choice(
        "Training state held per parameter", "adamw16", "megatron18", "fsdp-fp32", "jax10",
        "bf16-moments", "muon", "lion", "soap", "adam8bit", unset="adamw16",
        only=TRAINED, excludes=("lora", "lora_rank"),
    )  # fmt: skip
    """Bytes of weights, gradients and optimizer: `adamw16` 2 + 2 + 12, `megatron18` 2 + 4 + 12,
    `fsdp-fp32` 4 + 4 + 8, `jax10` 2 + 0 + 8, `bf16-moments` 2 + 2 + 8, `muon` 2 + 2 + 8, `lion`
    2 + 2 + 8, `soap` 2 + 2 + 28, `adam8bit` 2 + 2 + 6. A layout takes the recipe of its `--stack`
    unless one is given."""


class PlanHardware(Options, group="Hardware"):
    """The chips, how many they are, and how fast they train."""

    chip: str | None = _text(
        "Chip to plan for", "NAME", unset="b200", values="chips.toml", common=True
    )
    """Such as `b200`, `h100` or `v5p`; an unknown name lists all. `cpu` is one core of a server,
    for plans where there is no accelerator: give its memory with `--hbm`; the memory of a rank is
    that without the interpreter, and times are rough."""
    chips: int | None = _whole("Plan for this many chips", excludes=("api_price",))
    """Instead of finding their number. Activations beyond their memory are accumulated."""
    nodes: int | None = _whole("Plan for this many hosts", excludes=("chips", "api_price"))
    """As `--chips`, in whole hosts."""
    hbm: int | None = quantity(
        "size", "Memory of a chip, every byte usable", unset="as sold", only=TRAINING
    )
    """Such as `180GB`."""
    utilisation: float | None = _share(
        "Share of a chip's memory to plan with", unset="all", excludes=("api_price",)
    )
    """All of it by default, and 90% of what is usable with a layout."""
    mfu: float | None = _share(
        "Model FLOPs utilization of training", unset="40%", only=TRAINED,
        excludes=("search", "fixed_layout"),
    )  # fmt: skip
    """The share of the chip's peak that training reaches. Usual are 20 to 40% for sparse models,
    counting active parameters only, and 50 to 60% for dense ones. A layout predicts it."""
    compare: str | None = _text(
        "Plan on each of these chips, in one table", "CHIP,…", values="chips.toml", only=TRAINING,
        excludes=("chip",),
    )  # fmt: skip
    """A chip without a price on file has no bills; one that cannot do it says why."""


class PlanLayout(Options, group="Layout"):
    """How the run is spread over the chips; the speed is then predicted, with a band that holds
    four of five published runs."""

    search: bool = switch("Find the best layout and predict its speed", only=TRAINED, common=True)
    """Looks at every layout of `--chips`, or of all numbers of chips that can be rented, and takes
    the best that fits; for each deadline the cheapest that meets it."""
    fixed_layout: str | None = _text(
        "Predict this layout, such as tensor=8,fsdp=16", "AXIS=N,…", only=TRAINED
    )
    """Such as `fsdp=16,tensor=8,micro-batch=2,recompute=full`. The axes are those of
    `sabia pretrain`: `data`, `fsdp`, `expert`, `context`, `tensor`, `pipe`, or `dp`, `ep`, `cp`,
    `tp`, `pp`; also `virtual`, `zero` and `experts-over-tensor`. With `--search` these values are
    kept and the rest is searched."""
    objective: str | None = _choice(
        "What --search minimizes", "time", "cost", unset="time", only=(TRAINING, needs("search"))
    )
    """The time of a step, or its cost."""
    stack: str | None = _text(
        "Training software", "NAME", unset="sabia", values="stacks.toml", only=LAYOUT
    )
    """Decides which layouts there are, which communication is hidden behind computation, and what
    is kept in memory. An unknown name lists all."""
    precision: str | None = _choice(
        "Precision of the layers' matrix products", "fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8",
        unset="bf16", only=LAYOUT,
    )  # fmt: skip
    recompute: str | None = _choice(
        "Activation recomputation", "none", "selective", "full", unset="searched", only=LAYOUT
    )
    micro_batch: int | None = _whole(
        "Rows at a time on a device", metavar="ROWS", unset="searched", only=LAYOUT
    )
    explain: bool = switch(
        "Show every term of memory and every part of a step", only=(TRAINING, LAYOUT),
        excludes=("compare",),
    )  # fmt: skip


class PlanOutput(Options, group="Output"):
    """What is written beside the table, or in its place."""

    plot: str | None = _text("Write charts, as .svg or .html", "FILE")
    """Chips and cost against the deadline, memory by term, and the layouts that no other beats, as
    `.svg` or as a self-contained `.html`."""
    emit: str | None = _choice(
        "Print the script that starts the run", "slurm", "xpk", "skypilot",
        only=LAYOUT, excludes=(
            "compare", "out", "to", "plot", "explain", "simulate", "spot_share", "offers", "carbon",
            "pue", "carbon_intensity", "serve_tokens",
        ),
    )  # fmt: skip
    """Prints, instead of the table, the script that starts `sabia pretrain` with the layout of
    `--search` or `--fixed-layout`. Its time limit, checkpoint interval and requeueing follow the
    plan's failures and checkpoints."""
    pretrain_args: str | None = _text(
        "Arguments of sabia pretrain in the script", "WORDS", unset="tokens/ and the model",
        only=needs("emit"), excludes=("compare",),
    )  # fmt: skip
    """Inputs, model and schedule, beside the layout. By default `tokens/` and the model's
    `config.json`."""


class PlanPrice(Options, group="Money"):
    """The price of a chip."""

    price: str | None = _text("US dollars per chip-hour", "USD,…", unset="prices on file")
    """Such as `4.4,12`. The prices on file are dated; a warning tells when they are older than 90
    days, and older than a year they are not used."""


class PlanStops(Options, group="Failures and checkpoints"):
    """What interrupts a run, and how it is saved. Any of these options adds a view.

    Checkpoints are uploaded in the background, one at a time, so their interval is the longer of
    the upload and Young's optimum. A stop costs the restart, the work since the last checkpoint,
    and the time that its upload took."""

    failure_rate: float | None = _share("Failures per chip and day", unset="0.1%")
    preempt: float | None = _duration("Mean time between preemptions of the cluster", unset="never")
    restart: float | None = _duration("Time to start again after a stop", unset="15m")
    bucket_gbps: float | None = _count(
        "Gigabytes per second that storage takes", metavar="GB/S", least=1e-6, unset="8"
    )
    """Gigabytes (not gigabits) from the whole cluster."""
    spot_share: float | None = _share(
        "Preemptible price as a share of the on-demand one", unset="50%", excludes=("spot",)
    )
    """Stands in for prices on file of preemptible chips, which `--spot` takes."""
    simulate: int | None = _whole("Monte Carlo: simulate N runs", most=100_000)
    """Prints the mean, the median and the 95th percentile of the time."""
    capacity_wait: float | None = _duration(
        "Mean wait for machines after a preemption", unset="none", only=needs("preempt")
    )
    """It is not paid for."""
    repair: float | None = _duration("Mean time until a failed node is back", unset="at once")
    spare_nodes: int | None = _whole(
        "Spare nodes for failed ones, paid for", least=0, most=1000, unset="0", only=needs("repair")
    )
    job_limit: float | None = _duration("Longest job; another follows it", unset="none")
    """The longest job that the cluster's queue takes."""
    queue: float | None = _duration(
        "Mean wait for the next job", unset="none", only=needs("job_limit")
    )
    synchronous: bool = switch("Blocking checkpoint saves")
    """The run stands still until a checkpoint is in storage."""
    checkpoint_copies: int | None = _whole("Checkpoint uploads in flight at once", unset="1")
    peer_copies: bool = switch(
        "Mirror checkpoints in the memory of other nodes",
        excludes=("job_limit", "synchronous", "checkpoint_copies"),
    )
    """Each node's share of a checkpoint is in another node's memory too: a failure of one node goes
    back to the newest checkpoint taken, whether it is stored or not."""
    seed: int = changed(Seeded.seed,
        help="Random seed of --simulate", group="Failures and checkpoints", recorded=True,
        only=needs("simulate"),
    )  # fmt: skip


class PlanMoney(Options, group="Money"):
    """Which prices on file are taken."""

    spot: bool = switch("Prices on file of preemptible chips")
    """With `--preempt`, shows their bill against that of on-demand ones, and from when on they are
    cheaper."""
    provider: str | None = _text(
        "Prices on file of this provider", "NAME", values="prices.toml offer provider",
        excludes=("price",),
    )  # fmt: skip
    """The beginning of its name will do."""
    region: str | None = _text("Prices on file for this region", "NAME", excludes=("price",))
    """The beginning of its name will do."""
    commitment: str | None = _text(
        "Prices on file for a commitment, such as '1 year'", "TERM", excludes=("price",)
    )


class PlanCosts(Options, group="Costs and carbon"):
    """Limits, energy and emissions. Each of these options adds a view."""

    offers: bool = switch("Show the bill at every price on file", excludes=("compare",))
    """Of the provider and region given, the smallest first; with `--preempt` preemptible offers are
    billed with their stops."""
    max_cost: float | None = quantity("money", "Refuse a run that costs more")
    """The error names the tokens, the price or the MFU that would do."""
    carbon: bool = switch("Show energy and emissions")
    """With their range over grids."""
    pue: float | None = _count(
        "Power usage effectiveness (PUE)", metavar="RATIO", least=1, most=5, unset="1.1"
    )
    """Energy of the building over that of the chips; good buildings have 1.1."""
    carbon_intensity: float | None = _count(
        "Carbon intensity of electricity", metavar="KG/KWH", least=0, most=2, unset="0.385"
    )
    """Kilograms of CO2 equivalents per kilowatt-hour; grids have 0.03 to 0.7."""
    serve_tokens: float | None = _count("Check the model's size for serving so many tokens")
    """What a scaling law says of the size, if the model then serves so many tokens: a smaller one
    that is trained for longer may be cheaper."""


class PlanSubject(Options, group="Plan"):
    """What is planned: one run, or a list of runs."""

    budget: str | None = _text("Sum up the costs of the runs of this file", "FILE.toml")
    """Only `--chip`, `--mfu`, `--price`, `--lora` and `--plot` go with it."""
    stage: str | None = _choice(
        "What to plan", "pretrain", "sft", "grpo", "serve", "eval", unset="pretrain", common=True
    )
    """`pretrain` and `sft` are training runs, `sft` also of `--items` examples; `grpo` is steps of
    reinforcement learning; `serve` and `eval` only generate."""


class PlanGeneration(Options, group="Generation"):
    """Generating: for users, for steps of reinforcement learning, for evaluations."""

    weights: str | None = _text(
        "Number format of the weights", "NAME", unset="bf16", values="serving.toml format",
        only=GENERATED,
    )  # fmt: skip
    """An unknown name lists all."""
    cache: str | None = _choice(
        "Number format of the key-value cache", "bf16", "fp8", "int8", unset="bf16",
        only=GENERATED, excludes=("api_price",),
    )  # fmt: skip
    prompt_tokens: float | None = _count(
        "Tokens of a prompt, or of an example's prompt", unset="1000", only=ASKED
    )
    output_tokens: float | None = _count("Mean tokens of an answer", unset="1000", only=ASKED)
    output_limit: float | None = _count(
        "Longest answer, in tokens", unset="none", only=GRPO, group="GRPO"
    )
    replica_chips: int | None = _whole(
        "Chips that share a copy of the model", unset="searched", only=GENERATED,
        excludes=("api_price",),
    )  # fmt: skip
    batch: int | None = _whole(
        "Sequences at once in a replica", unset="all that fit", only=needs(stage=("serve", "grpo"))
    )
    items: float | None = _count(
        "Items to answer, or examples to train on", unset="10000", only=needs(stage=("eval", "sft"))
    )
    """The items of an evaluation, or the examples of `--stage sft`."""
    repeats: int | None = _whole(
        "Answers to each item, or passes over the examples", unset="1",
        only=needs("items", stage="eval"),
    )  # fmt: skip
    api_price: str | None = _text(
        "Price of the API that answers", "USD,USD", only=needs(stage="eval")
    )
    """US dollars per million tokens read, and written. Without it own chips answer."""


class PlanGrpo(Options, group="GRPO"):
    """Steps of reinforcement learning."""

    prompts: int | None = _whole("Prompts of a step", unset="64")
    group: int | None = _whole("Answers to each prompt", unset="16")
    steps: int | None = _whole("Steps", unset="1000")
    generation_chips: int | None = _whole("Dedicated generation chips", unset="none")
    """By default the same chips generate and train in turn."""
    off_policy: int | None = _whole(
        "Maximum off-policy steps", least=0, unset="1", only=needs("generation_chips")
    )
    """Steps that generation on `--generation-chips` may be ahead of training."""
    no_reference: bool = switch("No reference model, so no KL term")
    reward_time: float | None = _duration("Time that the rewards of a step take", unset="none")


class PlanJudge(Options, group="Judge model"):
    """A model that judges answers, for rewards or in an evaluation."""

    judge_calls: float | None = _count("Calls of a judge for each answer", unset="0")
    judge_prompt_tokens: float | None = _count(
        "Prompt tokens of a judge's call", unset="3000", only=JUDGE
    )
    judge_output_tokens: float | None = _count("Tokens of a verdict", unset="200", only=JUDGE)
    judge_params: float | None = _count("Parameters of the judge, on own chips", only=JUDGE)
    judge_active: float | None = _count(
        "Active parameters of the judge", unset="--judge-params", only=needs("judge_params")
    )
    judge_price: str | None = _text(
        "Price of the judge's API", "USD,USD", only=JUDGE, excludes=("judge_params",)
    )
    """US dollars per million tokens read, and written."""


class PlanOptions(
    InputOptions, Output, PlanModel, PlanRun, PlanHardware, PlanLayout, PlanOutput, PlanPrice,
    PlanStops, PlanMoney, PlanCosts, PlanSubject, PlanGeneration, PlanGrpo, PlanJudge, Call,
    only={PlanOutput: TRAINING, PlanStops: TRAINING, PlanCosts: TRAINING, PlanGrpo: GRPO,
          PlanJudge: JUDGED},
):  # fmt: skip
    """Options of `sabia plan-cluster`: one question to the planner."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs,
        help="A config.json, or runs as JSON lines (- for stdin) or Parquet",
    )

    def check(self) -> None:
        """Refuse what has no meaning; runs of a list are checked one by one, with these options."""
        if self.json and (self.out == "-" or "to" in self.given):
            flag = "--out -" if self.out == "-" else "--to"
            raise UsageError(f"{flag}: not together with --json")
        if self.runs:
            return
        super().check()
        if self.budget:
            allowed = ("budget", "chip", "mfu", "price", "lora", "plot")
            for name in self.set_values():
                if name not in allowed:
                    raise UsageError(f"{self.table[name].flag}: not together with --budget")
        if self.spot and self.price and not (self.preempt or self.emit):
            raise UsageError("--spot: with --price only together with --preempt or --emit")
        if self.weights and self.api_price and not self.judge_params:
            raise UsageError("--weights: with --api-price only together with --judge-params")

    @property
    def runs(self) -> tuple[str, ...]:
        """The inputs that are lists of runs; the others are a config.json or its directory."""
        return tuple(
            path for path in self.inputs if not (path.endswith(".json") or os.path.isdir(path))
        )

    @property
    def trains(self) -> bool:
        """Whether a training run is planned, and not serving, GRPO or an evaluation."""
        return TRAINING.holds({"stage": self.stage})

    def set_values(self, *names: str) -> dict[str, Any]:
        """Those of `names` (all of the question, if none) that were not left out, by name."""
        asked = names or [name for name, option in self.table.items() if option.recorded]
        default = {name: self.table[name].default_value() for name in asked}
        return {name: value for name in asked if (value := getattr(self, name)) != default[name]}

    @classmethod
    def assumed(cls, name: str) -> Any:
        """What is assumed where an option is left out: the default that its help shows."""
        return cls.table[name].read(cls.table[name].unset)

    def value(self, name: str) -> Any:
        """The value of an option, or what is assumed where it is left out."""
        value = getattr(self, name)
        return self.assumed(name) if value is None else value

    def changed(self, **changes: Any) -> Self:
        """The same question with some values changed, checked again; None leaves an option out."""
        kept = {name: getattr(self, name) for name in self.given - changes.keys()}
        return type(self)(**kept, **{k: v for k, v in changes.items() if v is not None})

    @classmethod
    def read_row(cls, row: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
        """The values of a row of a list of runs; false is as good as left out. UsageError."""
        values = cls.read_values({k: v for k, v in row.items() if k != "name" and v is not False})
        for name in values:
            if not cls.table[name].recorded or name in ("plot", *without):
                raise UsageError(f"{cls.table[name].flag}: is no option of a run in a list")
        return values
