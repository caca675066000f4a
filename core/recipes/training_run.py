"""Training on token rows: from rows and a model to a finished run directory.

`run` resolves the options into steps and trains in the run directory (core.recipes.run_call).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from sabia.core import units
from sabia.core.errors import BadData
from sabia.core.ops.precision import PrecisionSchedule, precision_named
from sabia.core.options.training import DistillationOptions, Training
from sabia.core.parallel.mesh import Mesh, check_fits, parse_mesh
from sabia.core.recipes import training_config
from sabia.core.recipes.run_call import (
    Made,
    RunCall,
    in_directory,
    make_meter,
    make_run,
    show_plan,
)
from sabia.core.shards.job import Job
from sabia.core.shards.order import DataOrder
from sabia.core.spec import ModelSpec, parameter_count, training_flops_per_token
from sabia.core.spec.model import check_predicts
from sabia.core.train.loop import TrainingRun
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.config import ScheduleConfig, decay_start
from sabia.core.train.stepper import StateBytes, Stepper, state_bytes
from sabia.core.train.stepper_factory import make_stepper
from sabia.core.train.token_objective import TokenObjective
from sabia.core.train.token_rows import NameRows, RowSource, TokenRows, check_ids

FLOP_CONVENTION: Literal["causal"] = "causal"


@dataclass(frozen=True)
class Task:
    """What a recipe has prepared: model, training and validation rows, tokenizer ('': none).

    mix, stages: of sources, see training_config.data_order. name_rows: see TrainingRun. model: the
    directory of the model ('': it is new).
    """

    spec: ModelSpec
    load_params: Callable[[], Mapping[str, np.ndarray]]
    rows: TokenRows
    validation: TokenRows | None
    tokenizer: str
    mix: str = ""
    stages: str = ""
    model: str = ""
    name_rows: NameRows | None = None
    loss: Callable[..., Any] | None = None  # a loss without its `remat`; None: next_token_loss
    arrange: Callable[[DataOrder, int, int], DataOrder] | None = None  # order, batch rows, steps
    # adds to the source what the loss needs, and gives the figures; None: TokenObjective
    prepare: Callable[[RowSource, TokenRows | None], TokenObjective] | None = None
    about: dict[str, str] = field(default_factory=dict)  # more lines for the plan


@dataclass(frozen=True)
class Plan:
    """A task with the options resolved to numbers."""

    steps: int
    batch_rows: int
    row_length: int
    order: DataOrder
    schedule: ScheduleConfig
    precision: PrecisionSchedule
    flops_per_token: float

    @property
    def tokens(self) -> int:
        """Tokens read in the whole run, including padding."""
        return self.steps * self.batch_rows * self.row_length


def make_plan(task: Task, options: Training, seed: int) -> Plan:
    """Resolve steps, batch, order and schedule; raises UsageError, BadData."""
    rows, spec = task.rows, task.spec
    check_ids(np.array([rows.largest_id]), spec.vocab_size)
    if rows.row_length > spec.max_positions:
        raise BadData(
            f"rows of {rows.row_length} tokens (expected at most the model's context of "
            f"{spec.max_positions}; sft and tokenize --length give shorter rows, pretrain "
            "--context extends it)"
        )
    if task.loss is None:
        check_predicts(spec)
    training_config.check_experts(options, spec)
    batch = training_config.batch_rows(options, rows.row_length)
    steps = training_config.step_count(options, len(rows), rows.row_length, batch)
    schedule = training_config.schedule_config(options, steps)
    decayed = steps - decay_start(schedule)
    precision = precision_named(options.precision)
    order = training_config.data_order(rows, task.mix, task.stages, seed, batch, schedule)
    return Plan(
        steps=steps,
        batch_rows=batch,
        row_length=rows.row_length,
        order=task.arrange(order, batch, steps) if task.arrange else order,
        schedule=schedule,
        precision=PrecisionSchedule(precision, steps, decayed, options.bf16_tail),
        flops_per_token=training_flops_per_token(spec, rows.row_length, FLOP_CONVENTION),
    )


def state_of(task: Task, options: Training) -> StateBytes:
    """What a run of the task holds."""
    optimizer = training_config.optimizer_config(options, task.spec)
    return state_bytes(task.spec, optimizer, training_config.lora_config(options))


def describe_plan(task: Task, plan: Plan, mesh: str, options: Training) -> dict[str, str]:
    """The plan of a run for `--dry-run`, line by line."""
    n, rows = parameter_count(task.spec), task.rows
    epochs = plan.order.epochs(plan.steps * plan.batch_rows)
    named = zip(rows.source_names, epochs, strict=True)
    narrow = 0 if plan.precision.precision.name == "fp32" else 2
    held = state_of(task, options)
    state = held.held + narrow * held.read
    flops = plan.tokens * plan.flops_per_token
    sizes = parse_mesh(mesh)
    split = math.prod(n for axis, n in sizes.items() if axis not in ("data", "context"))
    return {
        "parameters": f"{n:,}",
        "rows": f"{len(rows):,} of {plan.row_length:,} tokens ({rows.tokens:,} tokens)",
        "epochs": ", ".join(f"{name or 'all'} {times:.2f}" for name, times in named),
        "steps": f"{plan.steps:,} of {plan.batch_rows:,} rows "
        f"({plan.batch_rows * plan.row_length:,} tokens)",
        "tokens": f"{plan.tokens:,}",
        "FLOPs": f"{flops:.3g} ({plan.flops_per_token:.3g} a token, {FLOP_CONVENTION})",
        "state": f"{units.format_bytes(state // split)} on each device, and activations",
        "warm-up, decay": f"{plan.schedule.warmup:,}, {plan.schedule.decay:,} steps",
        **task.about,
    }


def run(call: RunCall, task: Task, options: Training) -> None:
    """Train (or resume); write final/, run.json, and the metrics to stdout."""
    train(call, task, options)
    if not call.job.dry_run:
        call.write_rows()


def train(call: RunCall, task: Task, options: Training) -> None:
    """Like `run`, but writes nothing to stdout except the plan of a dry run."""
    job = call.job
    plan = make_plan(task, options, job.seed)
    if isinstance(options, DistillationOptions):
        training_config.check_teacher(options, task.spec, plan.row_length, job.mesh)
    if job.dry_run:
        n = parameter_count(task.spec)
        state = state_of(task, options)
        show_plan(
            job, options, plan.tokens * plan.flops_per_token, state,
            n * (4 if options.export_dtype == "float32" else 2) + state.adapters,
            describe_plan(task, plan, job.mesh, options),
        )  # fmt: skip
        return
    in_directory(
        call,
        Made(task.spec, task.tokenizer, task.model, options),
        lambda mesh: check_fits(task.spec, mesh, plan.batch_rows, plan.row_length),
        lambda mesh: _training(call, task, options, plan, mesh),
        _token_figures,
    )


def _token_figures(figures: Mapping[str, Any]) -> list[str]:
    losses = [
        f"{name.replace('_', ' ')} {figures[name]:.4f}"
        for name in ("loss", "accuracy", "validation_loss", "validation_accuracy")
        if name in figures
    ]
    return [f"{figures['tokens']:,} tokens", *losses]


def loss_of(task: Task, options: Training) -> Callable[..., Any]:
    """The training loss of a task, with the options' coefficients."""
    remat: Any = options.remat
    if task.loss is not None:
        return partial(task.loss, remat=remat)
    terms: Any = {
        "z_loss": options.z_loss,
        "balance": options.balance,
        "router_z": options.router_z,
        "teacher": training_config.distillation(options),
    }
    return partial(next_token_loss, remat=remat, **terms)


def fresh_stepper(job: Job, task: Task, options: Training, plan: Plan, **more: Any) -> Stepper:
    """A task's model and optimizer at the first step; `more` goes to `make_stepper`."""
    return make_stepper(
        job.backend,
        task.spec,
        training_config.start_params(options, task.spec, task.load_params()),
        loss_of(task, options),
        training_config.optimizer_config(options, task.spec),
        precision=plan.precision,
        micro_batch=options.micro_batch,
        stage_micro_batches=options.stage_micro_batches,
        compiled=options.compile,
        bias_rate=options.bias_rate,
        seed=job.seed,
        **more,
    )


def _training(call: RunCall, task: Task, options: Training, plan: Plan, mesh: Mesh) -> TrainingRun:
    job, world = call.job, call.world
    lora = training_config.lora_config(options)
    stepper = fresh_stepper(job, task, options, plan, lora=lora, mesh=mesh, world=world)
    what = f"{plan.steps:,} steps of {plan.batch_rows} rows of {plan.row_length} tokens"
    packed = not task.rows.unpacked
    meter = make_meter(call, options, task.spec, mesh, plan.row_length, packed, what)
    source = RowSource(task.rows, plan.order, plan.batch_rows, stepper, read_ahead=True)
    if isinstance(options, DistillationOptions) and options.teacher:
        source.complete = training_config.load_teacher(options, job.backend).complete
    if task.name_rows is not None:
        source.names = task.name_rows
    position = {
        "seed": job.seed,
        "batch_rows": plan.batch_rows,
        "of_rows": len(task.rows),
        "sources": dict(zip(task.rows.source_names, task.rows.source_sizes, strict=True)),
        "weights": plan.order.weights,
        "stages": [asdict(stage) for stage in plan.order.stages],
    }
    optimizer = training_config.optimizer_config(options)
    objective = (task.prepare or TokenObjective)(source, task.validation)
    return make_run(
        call, options, mesh, stepper, source, objective, meter, optimizer, plan.schedule, position
    )
