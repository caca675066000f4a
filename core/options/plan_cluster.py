"""Options of `sabia plan-cluster`, on its command line and in the rows of a list of runs.

Their defaults are None or False, so that the planner can distinguish given values from assumed
ones. An assumed value is the option's `unset`, which help shows and `PlanOptions.value` reads.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, needs, quantity, switch
from sabia.core.options.planning import (
    GRPO,
    JUDGED,
    LAYOUT,
    TRAINED,
    TRAINING,
    PlanGeneration,
    PlanGrpo,
    PlanJudge,
    PlanSize,
    PlanTerms,
    choice_of,
    count,
    duration,
    share,
    text_of,
    whole,
)  # fmt: skip
from sabia.core.options.shared import Call, InputOptions, Output, Seeded
from sabia.core.options.table import Options
from sabia.core.plan.memory import RECIPES
from sabia.core.shards.job import check_ending

_RECIPES_TEXT = (
    "Bytes of weights + gradients + optimizer state: "
    + ", ".join(f"`{r.name}` {r.weights} + {r.gradients} + {r.optimizer}" for r in RECIPES.values())
    + ". With `--search` or `--fixed-layout` the default is the recipe of `--stack`."
)


# options that only some others may accompany
ALONE = {"budget": ("chip", "mfu", "price", "lora", "plot"), "measure": ()}


class PlanModel(Options, group="Model"):
    """The size and the shape of the model."""

    params: float | None = count(
        "Total parameters, of all experts", common=True, excludes=("model",)
    )
    """Such as `1.6T` or `8B`. Required, unless `--model` counts them."""
    active: float | None = count(
        "Active parameters: those that one token uses", common=True, excludes=("model",),
        unset="--params",
    )  # fmt: skip
    """In an MoE model they are fewer than `--params`."""
    model: str | None = text_of(
        "Count the parameters of this Hugging Face config.json", "PATH", common=True
    )
    """A `config.json`, or a directory that contains one, instead of `--params`, `--active`,
    `--layers` and `--hidden`. Input embeddings then count no FLOPs, since they are a table lookup,
    and a note tells how many FLOPs attention would add."""
    layers: int | None = whole(
        "Number of layers", most=10_000, excludes=("model", "api_price"),
        unset="nearest published model",
    )  # fmt: skip
    hidden: int | None = whole(
        "Hidden size", excludes=("model", "api_price"),
        unset="from a published model of similar size",
    )  # fmt: skip
    convention: str | None = choice_of(
        "FLOPs that --mfu counts: 6ND, with full or with causal attention", "6nd", "palm", "causal",
        unset="6nd", only=TRAINING,
    )  # fmt: skip
    """`6nd`: 6 for each active parameter and token, without attention; `palm`: also attention over
    the whole sequence; `causal`: also attention under a causal mask, which is half of that."""
    lora: bool = switch("Train LoRA adapters on frozen weights", only=TRAINED)
    """Training then costs 4 FLOPs per active parameter and token, and 2 bytes per parameter. The
    adapters themselves are not counted; use `--lora-rank` for that."""
    lora_rank: int | None = whole(
        "Train LoRA adapters of this rank on frozen weights", metavar="R", only=TRAINED
    )
    """Like `--lora`, but with the FLOPs and the training state of adapters on every matrix of the
    layers, and with checkpoints that contain only the adapters."""


class PlanRun(Options, group="Run"):
    """Tokens, batches and deadlines."""

    tokens: float | None = count(
        "Training tokens", unset="500B", only=TRAINING, excludes=("items",), common=True
    )
    """With `--stage sft`, `--tokens` or `--items` is required."""
    seq: int | None = quantity(
        "length", "Sequence length in tokens; 8k is 8192", unset="8k", only=TRAINING
    )
    """With `--model` the default is no more than the positions of its config."""
    batch_tokens: float | None = count(
        "Tokens per optimizer step (global batch)", unset="4M", only=TRAINING
    )
    """The table assumes that the activations of all of them are in memory at once; gradient
    accumulation needs fewer, at least one sequence. The default of `--stage sft` is 512K."""
    deadline: str | None = text_of(
        "Deadlines, such as 30d,2w", "DURATION,…", unset="30d,14d,7d", only=TRAINING, common=True
    )
    """Each deadline is a row of the table."""
    state_recipe: str | None = choice_of(
        "Training state per parameter: weights, gradients, optimizer", *RECIPES, unset="adamw16",
        only=TRAINED, excludes=("lora", "lora_rank"), details=_RECIPES_TEXT,
    )  # fmt: skip


class PlanHardware(Options, group="Hardware"):
    """The chips, their number and their speed."""

    chip: str | None = text_of(
        "Chip, such as b200, h100 or v5p", "NAME", unset="b200", values="chips.toml", common=True
    )
    """The error for an unknown name lists all. `cpu` is one core of a server, for plans without
    accelerators: set its memory with `--hbm`; the memory of a process excludes the Python
    interpreter, and times are rough."""
    chips: int | None = whole("Number of chips; otherwise it is computed", excludes=("api_price",))
    """If the batch's activations do not fit into their memory, gradients are accumulated."""
    nodes: int | None = whole(
        "Number of hosts, instead of --chips", excludes=("chips", "api_price")
    )
    """All chips of each host are used."""
    hbm: int | None = quantity(
        "size", "Usable memory (HBM) of a chip, such as 180GB", unset="its nominal memory",
        only=TRAINING,
    )  # fmt: skip
    utilisation: float | None = share(
        "Fraction of the usable memory to plan with", unset="100%", excludes=("api_price",)
    )
    """With `--search` or `--fixed-layout` the default is that of `--stack`: 90% for `sabia`. With
    `--stage grpo`, where generation and training share the chips, 60% for generation."""
    mfu: float | None = share(
        "Model FLOPs utilization (MFU) of training", unset="40%", only=TRAINED,
        excludes=("search", "fixed_layout"),
    )  # fmt: skip
    """The fraction of the chip's peak FLOP/s that training reaches: usually 50 to 60% for dense
    models and 20 to 40% for MoE models, counting active parameters only. `--search` and
    `--fixed-layout` predict it."""
    machine: str | None = text_of(
        "Plan for the machine in this file, instead of --chip", "FILE.toml",
        excludes=("chip", "compare", "provider", "region", "commitment", "offers"),
    )  # fmt: skip
    """`--measure` writes such a file. Its keys are `name`, `family` (`GPU`, `TPU`, `CPU` or
    `chip`), `node_chips` (chips of a host), `hbm_gb` or `memory_mib`, `bf16_tflops` (peak),
    `measured_tflops` (best measured matrix product; the peak, if that is not given), `hbm_tb_s`,
    `scale_up_gb_s` (a chip's links inside the host, one way), `scale_up_chips`, `nic_gb_s` (a
    chip's share of the network), `pcie_gb_s`, `fp8_tflops`, `fp4_tflops`, `int8_tops`, `power_w`,
    `torus_axes`, `usd_per_chip_hour`, `source` and `date`. A rate, a memory and `node_chips` are
    required; a layout needs the rates that it uses."""
    measure: bool = switch("Measure this machine and print a file for --machine")
    """It measures the matrix product, the memory and the links of the GPUs, or else of the CPU,
    and reads the network's rate from the system. It cannot be combined with other options than
    `--json`."""
    compare: str | None = text_of(
        "Compare these chips in one table", "CHIP,…", values="chips.toml", only=TRAINING,
        excludes=("chip",),
    )  # fmt: skip
    """A chip without a price on file has no cost; one that cannot do the run has the reason in its
    row."""


class PlanLayout(Options, group="Layout"):
    """How the run is parallelized; its speed is then predicted, with an interval that contains four
    of five published runs."""

    search: bool = switch(
        "Search for the best parallel layout and predict its speed", only=TRAINED, common=True
    )
    """It evaluates every layout of `--chips`, or of all numbers of chips that can be rented, and
    selects the best one that fits into memory; for each deadline the cheapest that meets it."""
    fixed_layout: str | None = text_of(
        "Predict the speed of this layout, such as tensor=8,fsdp=16", "AXIS=N,…", only=TRAINED
    )
    """A longer example is `fsdp=16,tensor=8,micro-batch=2,recompute=full`. The axes are those of
    `sabia pretrain`: `data`, `fsdp`, `expert`, `context`, `tensor`, `pipe`, or `dp`, `ep`, `cp`,
    `tp`, `pp`; also `virtual`, `zero` and `experts-over-tensor`. With `--search` these values are
    fixed and the others are searched."""
    objective: str | None = choice_of(
        "What --search minimizes", "time", "cost", unset="time", only=(TRAINING, needs("search"))
    )
    """`time` is the duration of a step, `cost` its price."""
    stack: str | None = text_of(
        "Training software whose layouts are modelled", "NAME", unset="sabia", values="stacks.toml",
        only=LAYOUT,
    )  # fmt: skip
    """It determines which layouts are possible, which communication overlaps with computation, and
    what is kept in memory. The error for an unknown name lists all."""
    precision: str | None = choice_of(
        "Number format of the layers' matrix products", "fp32", "bf16", "fp8", "mxfp8", "nvfp4",
        "int8", unset="bf16", only=LAYOUT,
    )  # fmt: skip
    recompute: str | None = choice_of(
        "Activation recomputation", "none", "selective", "full", unset="searched", only=LAYOUT
    )
    """`full` keeps only the inputs of the layers. `selective` keeps what the software of `--stack`
    keeps: `sabia` (`--remat matmuls`) the matrix products, `megatron` all but the attention
    matrix."""
    micro_batch: int | None = whole(
        "Rows per micro-batch on a device", metavar="ROWS", unset="searched", only=LAYOUT
    )
    explain: bool = switch(
        "Also show every memory term and every part of a step", only=(TRAINING, LAYOUT),
        excludes=("compare",),
    )  # fmt: skip


class PlanOutput(Options, group="Output"):
    """What is written in addition to the table, or instead of it."""

    plot: str | None = text_of("Write charts to this .svg or .html file", "FILE")
    """They show chips and cost by deadline, memory by term, and the Pareto-optimal layouts."""
    emit: str | None = choice_of(
        "Print a script that starts the run, instead of the table", "slurm", "xpk", "skypilot",
        only=LAYOUT, excludes=(
            "compare", "out", "to", "plot", "explain", "simulate", "spot_share", "offers", "carbon",
            "pue", "carbon_intensity", "serve_tokens", "fit", "reserved", "production", "first_mfu",
        ),
    )  # fmt: skip
    """The script starts `sabia pretrain` with the layout of `--search` or `--fixed-layout`. Its
    time limit, checkpoint interval and requeueing are those of the plan."""
    pretrain_args: str | None = text_of(
        "Further arguments of sabia pretrain in the script", "WORDS",
        unset="tokens/ and the model's config.json",
        only=needs("emit"), excludes=("compare",),
    )  # fmt: skip
    """Inputs, model and schedule, as one quoted text; the script adds the layout."""


class PlanPrice(Options, group="Money"):
    """The price of a chip."""

    price: str | None = text_of("US dollars per chip-hour", "USD,…", unset="prices on file")
    """Several prices, such as `4.4,12`, give several columns. The prices on file have a date: there
    is a warning after 90 days, and prices older than a year are not used."""


class PlanStops(Options, group="Failures and checkpoints"):
    """What interrupts a run, and how it is saved. Any of these options adds a section to the plan.

    Checkpoints are uploaded in the background, one at a time, so the checkpoint interval is the
    longer of the upload time and Young's optimum. An interruption costs the restart, the work since
    the last checkpoint, and the work done during the upload of that checkpoint."""

    failure_rate: float | None = share("Failure rate: failures per chip and day", unset="0.1%")
    preempt: float | None = duration("Mean time between preemptions of the cluster", unset="never")
    """Give it for preemptible (spot) chips."""
    restart: float | None = duration("Time to restart after an interruption", unset="15m")
    bucket_gbps: float | None = count(
        "Write rate of the checkpoint storage, in gigabytes per second", metavar="GB/S", least=1e-6,
        unset="8",
    )  # fmt: skip
    """The rate for the whole cluster, in gigabytes (not gigabits)."""
    spot_share: float | None = share(
        "Preemptible price, as a fraction of the on-demand price", unset="50%", excludes=("spot",)
    )
    """`--spot` uses preemptible prices on file instead."""
    simulate: int | None = whole("Monte Carlo: simulate N runs with random failures", most=100_000)
    """It prints the mean, the median and the 95th percentile of the run time."""
    capacity_wait: float | None = duration(
        "Mean time until the cluster is back after a preemption", unset="none",
        only=needs("preempt"),
    )  # fmt: skip
    """This time is not billed."""
    repair: float | None = duration("Mean time to repair or replace a failed node", unset="at once")
    spare_nodes: int | None = whole(
        "Spare nodes that replace failed ones; they are billed", least=0, most=1000, unset="0",
        only=needs("repair"),
    )  # fmt: skip
    job_limit: float | None = duration("Time limit of a job of the cluster", unset="none")
    """A longer run is a chain of jobs, each of which resumes from the last checkpoint."""
    queue: float | None = duration(
        "Mean queue wait before each further job", unset="none", only=needs("job_limit")
    )
    save_stall: float | None = duration("Time that a save blocks training", unset="computed")
    """By default that of a copy to host memory and into files, at about 1 GB/s per device. The
    asynchronous saves of published runs block for seconds to a minute."""
    synchronous: bool = switch("Blocking checkpoint saves")
    """Training waits until a checkpoint is in storage."""
    checkpoint_copies: int | None = whole("Number of concurrent checkpoint uploads", unset="1")
    peer_copies: bool = switch(
        "Also copy checkpoints to the memory of other nodes",
        excludes=("job_limit", "synchronous", "checkpoint_copies"),
    )
    """If one node fails, the run resumes from the newest checkpoint, even if it is not yet in
    storage."""
    seed: int = changed(Seeded.seed,
        help="Random seed of --simulate", group="Failures and checkpoints", recorded=True,
        only=needs("simulate"),
    )  # fmt: skip


class PlanMoney(Options, group="Money"):
    """Which prices on file are used."""

    spot: bool = switch("Use prices on file of preemptible (spot) chips")
    """With `--preempt` the plan compares their cost with that of on-demand chips, and tells the
    preemption interval from which they are cheaper."""
    provider: str | None = text_of(
        "Use prices on file of this provider", "NAME", values="prices.toml offer provider",
        excludes=("price",),
    )  # fmt: skip
    """The first letters of its name are enough."""
    region: str | None = text_of("Use prices on file for this region", "NAME", excludes=("price",))
    """The first letters of its name are enough."""
    commitment: str | None = text_of(
        "Use prices on file for a commitment, such as '1 year'", "TERM", excludes=("price",)
    )


class PlanCosts(Options, group="Costs and carbon"):
    """Limits, energy and emissions. Each of these options adds a section to the plan."""

    offers: bool = switch("Also show the cost at every price on file", excludes=("compare",))
    """The offers of `--provider` and `--region`, cheapest first; with `--preempt` the cost of
    preemptible offers includes interruptions."""
    max_cost: float | None = quantity(
        "money", "Maximum cost of the run; a dearer plan exits with 3"
    )
    """The error lists the number of tokens, the price or the MFU at which the run is affordable."""
    carbon: bool = switch("Also show energy and CO2 emissions")
    """The range over different electricity grids is shown too."""
    pue: float | None = count(
        "Energy of the data centre over that of its chips (PUE)", metavar="RATIO", least=1, most=5,
        unset="1.1",
    )  # fmt: skip
    """Power usage effectiveness; efficient data centres have 1.1."""
    carbon_intensity: float | None = count(
        "Carbon intensity of the electricity, in kg CO2e per kWh", metavar="KG/KWH", least=0,
        most=2, unset="0.385",
    )  # fmt: skip
    """Electricity grids have 0.03 to 0.7."""
    serve_tokens: float | None = count("Tokens to serve later; check the model's size for this")
    """A scaling law gives the model size with the lowest cost of training and serving together: a
    smaller model that is trained for longer may be cheaper."""


class PlanSubject(Options, group="Plan"):
    """What is planned: one run, or a list of runs."""

    budget: str | None = text_of("Sum up the costs of the runs in this file", "FILE.toml")
    """It may be combined with `--chip`, `--mfu`, `--price`, `--lora` and `--plot` only."""
    stage: str | None = choice_of(
        "Kind of work to plan", "pretrain", "sft", "grpo", "serve", "eval", unset="pretrain",
        common=True,
    )  # fmt: skip
    """`pretrain` and `sft` are training runs (of `sft` the size may be given by `--items`); `grpo`
    is reinforcement learning; `serve` is an inference service at full load; `eval` is an evaluation
    of `--items` items."""


class PlanOptions(
    InputOptions, Output, PlanModel, PlanSize, PlanRun, PlanHardware, PlanLayout, PlanOutput,
    PlanPrice, PlanStops, PlanMoney, PlanTerms, PlanCosts, PlanSubject, PlanGeneration, PlanGrpo,
    PlanJudge, Call,
    only={PlanOutput: TRAINING, PlanTerms: TRAINING, PlanStops: TRAINING, PlanCosts: TRAINING,
          PlanGrpo: GRPO, PlanJudge: JUDGED},
):  # fmt: skip
    """Options of `sabia plan-cluster`: one plan."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs,
        help="A config.json, or a list of runs: JSON lines (- for stdin) or Parquet",
    )
    out: str | None = changed(
        Output.out, help="Rows of the plan: FILE.parquet, a directory, or - (stdout)"
    )
    """The ending of the path is the format of the file, as in `sabia classify`. Without the option
    the plan is a table on standard output, and rows only with `--to jsonl` or, into a
    pipe, `--to arrow`."""

    def check(self) -> None:
        """Refuse contradictory options; runs of a list are checked one by one. UsageError."""
        if self.json and (self.out == "-" or "to" in self.given):
            flag = "--out -" if self.out == "-" else "--to"
            raise UsageError(f"{flag}: not together with --json")
        check_ending(self.out, "--out")
        self.check_format()
        if self.runs:
            return
        super().check()
        for alone, allowed in ALONE.items():
            others = self.set_values().keys() - {alone, *allowed} if getattr(self, alone) else ()
            for name in sorted(others):
                flag = self.table[alone].flag
                raise UsageError(f"{self.table[name].flag}: not together with {flag}")
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
        """Whether the stage is pretrain or sft, and not serving, GRPO or an evaluation."""
        return TRAINING.holds({"stage": self.stage})

    @property
    def asks_size(self) -> bool:
        """Whether the question is which model to train: chips are given, and no model."""
        given = self.params or self.model or self.inputs or self.compare
        return not given and bool(self.chips or self.nodes) and self.stage != "sft"

    def set_values(self, *names: str) -> dict[str, object]:
        """The given values among `names` (default: all recorded options), by name."""
        names = names or tuple(name for name, option in self.table.items() if option.recorded)
        default = {name: self.table[name].default_value() for name in names}
        return {name: value for name in names if (value := getattr(self, name)) != default[name]}

    @classmethod
    def assumed(cls, name: str) -> Any:
        """The value assumed for an option that is not given: the default in its help."""
        return cls.table[name].read(cls.table[name].unset)

    def value(self, name: str) -> Any:
        """The value of an option, or the assumed value if it is not given."""
        value = getattr(self, name)
        return self.assumed(name) if value is None else value

    def changed(self, **changes: Any) -> Self:
        """A copy with some values changed, checked again; None removes an option."""
        unchanged = {name: getattr(self, name) for name in self.given - changes.keys()}
        return type(self)(**unchanged, **{k: v for k, v in changes.items() if v is not None})

    @classmethod
    def read_row(cls, row: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, object]:
        """The values of a row of a list of runs; false means not given. UsageError."""
        values = cls.read_values({k: v for k, v in row.items() if k != "name" and v is not False})
        for name in values:
            if not cls.table[name].recorded or name in ("plot", *without):
                raise UsageError(f"{cls.table[name].flag}: cannot be set in a list of runs")
        return values
