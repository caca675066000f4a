"""What pretraining and fine-tuning share: from token rows and a model to a finished run directory.

`run` resolves the options into steps, joins the processes of the launcher, trains or resumes, and
writes `final/`. A run's identity is everything that decides its weights; backend, mesh, micro-batch
and how often to save or report are not part of it, so that a run may go on elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes, units
from sabia.core.errors import BadData, UsageError
from sabia.core.model import hub
from sabia.core.parallel import launch
from sabia.core.parallel.launch import World
from sabia.core.parallel.mesh import parse_mesh
from sabia.core.recipes.metric_rows import write_metric_rows
from sabia.core.shards.job import Job
from sabia.core.shards.order import DataOrder, parse_weights
from sabia.core.spec import ModelSpec, parameter_count, training_flops_per_token
from sabia.core.text.tokenizer import load_tokenizer
from sabia.core.train.loop import LoopConfig, Training
from sabia.core.train.losses import next_token_loss
from sabia.core.train.optimizer import OptimizerConfig
from sabia.core.train.peak import devices_at_peak, measure_peak_flops
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.schedule import ScheduleConfig
from sabia.core.train.stepper import Stepper, make_stepper
from sabia.core.train.telemetry import Meter
from sabia.core.train.token_rows import TokenRows

FLOP_CONVENTION = "causal"
EXPORT_DTYPES = ("float32", "bfloat16")
REMATS = ("none", "matmuls", "full")
# options that may change while a run goes on: they do not decide what is learnt
FREE = frozenset(
    (
        "micro_batch",
        "compiled",
        "remat",
        "save_every",
        "keep_checkpoints",
        "eval_every",
        "log_every",
        "peak_flops",
    )
)
STATE_BYTES_PER_PARAMETER = 16  # fp32 parameter, gradient, two moments


@dataclass(frozen=True)
class TrainOptions:
    """The options of both trainers as given; 0 or '' means: by default or not at all."""

    lr: float = 6e-4
    schedule: str = "wsd"
    warmup: str = "2%"
    decay: str = "20%"
    decay_shape: str = "linear"
    final_lr: float = 0.0
    weight_decay: float = 0.1
    betas: str = "0.9,0.95"
    clip_norm: float = 1.0
    batch: int = 0
    batch_tokens: int = 0
    micro_batch: int = 0
    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    precision: str = "fp32"
    compiled: bool = False
    remat: str = "none"
    save_every: str = "10m"
    keep_checkpoints: int = 2
    eval_every: int = 0
    log_every: int = 1
    peak_flops: float = 0.0
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.export_dtype not in EXPORT_DTYPES:
            raise UsageError(f"--export-dtype: {self.export_dtype!r} (expected float32, bfloat16)")
        if self.remat not in REMATS:
            raise UsageError(f"--remat: {self.remat!r} (expected one of {', '.join(REMATS)})")
        if sum(bool(x) for x in (self.steps, self.tokens, self.epochs)) > 1:
            raise UsageError("how long? give one of --steps, --tokens and --epochs")
        if self.batch and self.batch_tokens:
            raise UsageError("how much a step? give either --batch or --batch-tokens")
        self.optimizer()
        self.save_interval()

    def optimizer(self) -> OptimizerConfig:
        """The optimizer's settings; raises UsageError."""
        try:
            beta1, beta2 = (float(part) for part in self.betas.split(","))
        except ValueError:
            raise UsageError(f"--betas: {self.betas!r} (expected two, such as 0.9,0.95)") from None
        return OptimizerConfig(
            beta1, beta2, weight_decay=self.weight_decay, clip_norm=self.clip_norm
        )

    def save_interval(self) -> tuple[int, float]:
        """(steps, seconds) between checkpoints, one of them 0; raises UsageError."""
        if self.save_every.isdigit():
            return int(self.save_every), 0.0
        return 0, units.parse_duration(self.save_every, "--save-every")

    def batch_rows(self, row_length: int) -> int:
        """Rows in a step."""
        if self.batch_tokens:
            return max(1, round(self.batch_tokens / row_length))
        return self.batch or 32

    def step_count(self, rows: int, row_length: int, batch: int) -> int:
        """Steps of the whole run; one epoch by default."""
        if self.steps:
            return self.steps
        if self.tokens:
            return max(1, math.ceil(self.tokens / (batch * row_length)))
        return max(1, math.ceil((self.epochs or 1.0) * rows / batch))

    def schedule_config(self, steps: int) -> ScheduleConfig:
        """The schedule of a run of `steps`."""
        return ScheduleConfig(
            peak=self.lr,
            steps=steps,
            warmup=_part("--warmup", self.warmup, steps),
            kind=self.schedule,
            decay=_part("--decay", self.decay, steps) if self.schedule == "wsd" else 0,
            tail=self.decay_shape,
            final=self.final_lr,
        )

    def identity(self) -> dict[str, Any]:
        """The options that decide the weights."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def _part(name: str, text: str, steps: int) -> int:
    """Steps of '20%' or '100'."""
    if text.isdigit():
        return int(text)
    if text.endswith("%"):
        return round(units.parse_fraction(text, name) * steps)
    raise UsageError(f"{name}: {text!r} (expected steps such as 100, or a share such as 2%)")


@dataclass(frozen=True)
class Task:
    """What a recipe has prepared: model, rows to learn and to validate on, tokenizer ('' none)."""

    spec: ModelSpec
    load_params: Callable[[], Mapping[str, np.ndarray]]
    rows: TokenRows
    validation: TokenRows | None
    tokenizer: str
    mix: str = ""
    about: dict[str, str] = field(default_factory=dict)  # more lines for the plan


@dataclass(frozen=True)
class Plan:
    """A task with the options resolved to numbers."""

    steps: int
    batch_rows: int
    row_length: int
    order: DataOrder
    schedule: ScheduleConfig
    flops_per_token: float

    @property
    def tokens(self) -> int:
        """Tokens read in the whole run, padding counted."""
        return self.steps * self.batch_rows * self.row_length


def open_run(job: Job) -> tuple[RunDirectory, World]:
    """The run directory of -o and this process's place; raises UsageError."""
    if job.to_stdout or job.to_file or "://" in str(job.out):
        raise UsageError(
            f"-o: {job.out or 'missing'} (expected a local directory for the run; its metrics go "
            "to stdout)"
        )
    world = launch.detect()
    if world.size > 1 and (not job.inputs or "-" in job.inputs):
        raise UsageError("several processes cannot share stdin; give the inputs as paths")
    if not world.leads:
        notes.configure(job.command, quiet=True)
    return RunDirectory(Path(str(job.out))), world


def already_done(job: Job, run: RunDirectory, identity: Mapping[str, Any], world: World) -> bool:
    """True (and the metrics are written) when this very run has finished before."""
    if job.force or not run.finished(identity):
        return False
    if job.dry_run:
        print(f"{run.path}: already finished, nothing to do")
    elif world.leads:
        notes.note(f"{run.path}: already finished; --force trains it again")
        write_metric_rows(job, run.path, world.launcher)
    return True


def make_plan(task: Task, options: TrainOptions, seed: int, world: World) -> Plan:
    """Resolve steps, batch, order and schedule; raises UsageError, BadData."""
    rows, spec = task.rows, task.spec
    if rows.largest_id >= spec.vocab_size:
        raise BadData(
            f"token id {rows.largest_id} in the rows (expected below the model's vocabulary of "
            f"{spec.vocab_size}; is it another tokenizer's?)"
        )
    if rows.row_length > spec.max_positions:
        raise BadData(
            f"rows of {rows.row_length} tokens (expected at most the model's context of "
            f"{spec.max_positions})"
        )
    batch = options.batch_rows(rows.row_length)
    if batch % world.size:
        raise UsageError(f"--batch: {batch} rows (expected a multiple of {world.size} processes)")
    weights = parse_weights(task.mix, rows.source_names)
    steps = options.step_count(len(rows), rows.row_length, batch)
    return Plan(
        steps=steps,
        batch_rows=batch,
        row_length=rows.row_length,
        order=DataOrder(rows.source_sizes, seed, weights),
        schedule=options.schedule_config(steps),
        flops_per_token=training_flops_per_token(spec, rows.row_length, FLOP_CONVENTION),
    )


def describe(task: Task, plan: Plan, options: TrainOptions) -> dict[str, str]:
    """The plan of a run for `--dry-run`, line by line."""
    n, rows = parameter_count(task.spec), task.rows
    epochs = plan.order.epochs(plan.steps * plan.batch_rows)
    named = zip(rows.source_names, epochs, strict=True)
    state = n * (STATE_BYTES_PER_PARAMETER + (2 if options.precision == "bf16" else 0))
    flops = plan.tokens * plan.flops_per_token
    return {
        "parameters": f"{n:,}",
        "rows": f"{len(rows):,} of {plan.row_length:,} tokens ({rows.tokens:,} tokens)",
        "epochs": ", ".join(f"{name or 'all'} {times:.2f}" for name, times in named),
        "steps": f"{plan.steps:,} of {plan.batch_rows:,} rows "
        f"({plan.batch_rows * plan.row_length:,} tokens)",
        "tokens": f"{plan.tokens:,}",
        "FLOPs": f"{flops:.3g} ({plan.flops_per_token:.3g} a token, {FLOP_CONVENTION})",
        "memory": f"{units.format_bytes(state)} of state on each device, and activations",
        "warm-up, decay": f"{plan.schedule.warmup:,}, {plan.schedule.decay:,} steps",
        **task.about,
    }


def run(
    job: Job,
    task: Task,
    options: TrainOptions,
    identity: Mapping[str, Any],
    directory: RunDirectory,
    world: World,
) -> None:
    """Train (or resume) and write final/, run.json and the metrics on stdout."""
    plan = make_plan(task, options, job.seed, world)
    if job.dry_run:
        for name, value in describe(task, plan, options).items():
            print(f"{name}: {value}")
        return
    lock = directory.locked() if world.leads else contextlib.nullcontext()
    with lock, launch.stdout_kept_clean(world), _joined(job, world) as devices:
        if world.leads:
            directory.begin(identity, job.force)
        launch.barrier(world, job.backend, "begin")
        stepper = _make_stepper(job, task, options, world, devices)
        training = _training(job, task, options, plan, stepper, directory, world, devices)
        figures = training.train()
        if world.leads:
            export(directory.final, task, stepper, options.export_dtype)
            directory.finish(identity, **figures)
            _say_end(figures, directory)
        launch.barrier(world, job.backend, "end")
    if world.leads:
        write_metric_rows(job, directory.path, world.launcher)


@contextlib.contextmanager
def _joined(job: Job, world: World) -> Iterator[int]:
    """Join the processes; yield how many devices there are in all."""
    sizes = parse_mesh(job.mesh)
    wanted = sizes.pop("data", 0)
    if max(sizes.values(), default=1) > 1:
        raise UsageError(f"--mesh: {job.mesh} (expected data=N)")
    if job.backend == "torch":
        if wanted and wanted != world.size:
            raise UsageError(
                f"--mesh: data={wanted} with {world.size} processes (torch runs one process per "
                f"device: torchrun --nproc-per-node {wanted}, or srun -n {wanted})"
            )
        with launch.join_torch(world):
            yield world.size
        return
    with launch.join_jax(world, wanted):
        import jax

        found = jax.device_count()
        if wanted > found or (world.size > 1 and wanted and wanted != found):
            raise UsageError(f"--mesh: data={wanted} with {found} devices in all")
        yield wanted or found


def _make_stepper(
    job: Job, task: Task, options: TrainOptions, world: World, devices: int
) -> Stepper:
    return make_stepper(
        job.backend,
        task.spec,
        task.load_params(),
        partial(next_token_loss, remat=options.remat),
        options.optimizer(),
        precision=options.precision,
        micro_batch=options.micro_batch,
        compiled=options.compiled,
        world=world,
        devices=devices if world.size == 1 else 0,
    )


def _training(
    job: Job,
    task: Task,
    options: TrainOptions,
    plan: Plan,
    stepper: Stepper,
    directory: RunDirectory,
    world: World,
    devices: int,
) -> Training:
    every_steps, every_s = options.save_interval()
    peak = options.peak_flops or measure_peak_flops(job.backend, options.precision)
    notes.note(
        f"{parameter_count(task.spec):,} parameters, {plan.steps:,} steps of {plan.batch_rows} "
        f"rows of {plan.row_length} tokens; MFU is of {units.format_count(peak)}FLOP/s a device "
        f"({'given' if options.peak_flops else 'measured by a matrix product here'})"
    )
    loop = LoopConfig(
        steps=plan.steps,
        batch_rows=plan.batch_rows,
        schedule=plan.schedule,
        save_every_steps=every_steps,
        save_every_s=every_s,
        keep_checkpoints=options.keep_checkpoints,
        eval_every=options.eval_every,
        log_every=options.log_every,
    )
    times = devices_at_peak(job.backend, devices, world.size)
    meter = Meter(plan.flops_per_token, peak * times)
    meta = {
        "model": spec_hash(task.spec),
        "config": dict(task.spec.config),
        "optimizer": {"name": "adamw", **asdict(options.optimizer())},
        "schedule": asdict(plan.schedule),
        "rng": {"seed": job.seed},
        "data": {"seed": job.seed, "batch_rows": plan.batch_rows, "of_rows": len(task.rows)},
        "backend": job.backend,
        "precision": options.precision,
        "mesh": {"data": devices},
        "version": version("sabia"),
    }
    return Training(
        loop, stepper, task.rows, plan.order, directory, world, meter, meta, task.validation
    )


def spec_hash(spec: ModelSpec) -> str:
    """A hash of the model's table of tensors: two specs with the same can share a checkpoint."""
    table = repr([(t.name, t.shape) for t in spec.tensors()])
    return hashlib.blake2b(table.encode(), digest_size=16).hexdigest()


def export(place: Path, task: Task, stepper: Stepper, dtype: str) -> None:
    """Write the parameters as a Hugging Face directory with the tokenizer's files."""
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    state = stepper.state()
    params = {t.name: state[f"param/{t.name}"].astype(kind) for t in task.spec.tensors()}
    with _tokenizer_directory(task.tokenizer) as tokenizer:
        hub.save_model(place, task.spec, params, tokenizer_from=tokenizer)


@contextlib.contextmanager
def _tokenizer_directory(path: str) -> Iterator[Path | None]:
    if not path or Path(path).is_dir():
        yield Path(path) if path else None
        return
    with tempfile.TemporaryDirectory() as scratch:
        load_tokenizer(path).save(scratch)
        yield Path(scratch)


def _say_end(figures: Mapping[str, Any], directory: RunDirectory) -> None:
    said = [f"{figures['step']:,} steps", f"{figures['tokens']:,} tokens"]
    said += [f"{name.replace('_', ' ')} {figures[name]:.4f}"
             for name in ("loss", "validation_loss") if name in figures]  # fmt: skip
    took = units.format_duration(figures["seconds"])
    notes.note(f"{', '.join(said)} ({took}) → {directory.final}")
