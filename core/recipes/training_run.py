"""The training run of all trainers: from token rows and a model to a finished run directory.

`run` resolves the options into steps, joins the processes of the launcher, trains or resumes, and
writes `final/` from the last checkpoint, one tensor at a time.
"""

import contextlib
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sabia.core import notes, units
from sabia.core.errors import BadData, UsageError
from sabia.core.model import kernel_report
from sabia.core.model.lora import LoraConfig, lora_tensors, targeted
from sabia.core.model.precision import PrecisionSchedule, precision_named
from sabia.core.model.precision_backends import describe
from sabia.core.model.storage.peft_adapters import save_adapter
from sabia.core.options.training import Training
from sabia.core.parallel import process_group
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.mesh import Mesh, make_mesh, parse_mesh
from sabia.core.parallel.sharding_rules import check_fits
from sabia.core.parallel.world import World, detect
from sabia.core.recipes import training_config
from sabia.core.recipes.metric_rows import write_metric_rows
from sabia.core.recipes.peaks import find_peaks
from sabia.core.shards.dry_run import planned
from sabia.core.shards.job import Job
from sabia.core.shards.order import DataOrder
from sabia.core.spec import ModelSpec, parameter_count, training_flops_per_token
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.checkpoint import Checkpoint, Reader, latest, parse_interval
from sabia.core.train.convert import export_checkpoint
from sabia.core.train.loop import TrainingRun
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.schedule import ScheduleConfig, decay_start
from sabia.core.train.peak import measure_peak_flops, peak_multiplier
from sabia.core.train.row_source import NameRows, RowSource
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.stepper import Stepper
from sabia.core.train.stepper_factory import make_stepper
from sabia.core.train.telemetry import Meter
from sabia.core.train.token_rows import TokenRows, check_ids
from sabia.core.train.tracking import Tracker, open_sink, parse_services

FLOP_CONVENTION: Literal["causal"] = "causal"
STATE_BYTES_PER_PARAMETER = 16  # fp32 parameter, gradient, two moments
CHECKPOINT_BYTES_PER_PARAMETER = 12  # fp32 parameter, two moments


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
    about: dict[str, str] = field(default_factory=dict)  # more lines for the plan


@dataclass(frozen=True)
class RunCall:
    """A call of a trainer: the run's identity and directory, and this process among the others.

    identity: everything that decides the weights.
    """

    job: Job
    identity: Mapping[str, Any]
    directory: RunDirectory
    world: World

    def already_done(self) -> bool:
        """True (and the metrics are written) if the same run has finished before."""
        path = self.directory.path
        if self.job.force or not self.directory.finished(self.identity):
            return False
        if self.job.dry_run:
            print(f"{path}: already finished, nothing to do")
        elif self.world.leads:
            notes.note(f"{path}: already finished; --force trains it again")
            self.write_rows()
        return True

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the directory, in the leading process."""
        return self.directory.locked() if self.world.leads else contextlib.nullcontext()

    def write_rows(self) -> None:
        """Write the metrics to stdout, in the leading process."""
        if self.world.leads:
            write_metric_rows(self.job, self.directory.path, self.world.launcher)


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
    flops_6nd: float

    @property
    def tokens(self) -> int:
        """Tokens read in the whole run, including padding."""
        return self.steps * self.batch_rows * self.row_length


def open_run(job: Job, options: Training | None = None) -> tuple[RunDirectory, World]:
    """The run directory of -o and the world of this process; raises UsageError."""
    if options is not None:
        training_config.check_texts(options)
    if job.to_stdout or job.to_file or "://" in str(job.out):
        raise UsageError(
            f"-o: {job.out or 'missing'} (expected a local directory for the run; its metrics go "
            "to stdout)"
        )
    world = detect()
    if world.size > 1 and (not job.inputs or "-" in job.inputs):
        raise UsageError("several processes cannot share stdin; give the inputs as paths")
    if not world.leads:
        notes.configure(job.command, quiet=True)
    return RunDirectory(Path(str(job.out))), world


def make_plan(task: Task, options: Training, seed: int) -> Plan:
    """Resolve steps, batch, order and schedule; raises UsageError, BadData."""
    rows, spec = task.rows, task.spec
    check_ids(np.array([rows.largest_id]), spec.vocab_size)
    if rows.row_length > spec.max_positions:
        raise BadData(
            f"rows of {rows.row_length} tokens (expected at most the model's context of "
            f"{spec.max_positions}; pretrain --context extends it)"
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
        flops_6nd=training_flops_per_token(spec, rows.row_length, "6nd"),
    )


def describe_plan(task: Task, plan: Plan, mesh: str) -> dict[str, str]:
    """The plan of a run for `--dry-run`, line by line."""
    n, rows = parameter_count(task.spec), task.rows
    epochs = plan.order.epochs(plan.steps * plan.batch_rows)
    named = zip(rows.source_names, epochs, strict=True)
    narrow = 0 if plan.precision.precision.name == "fp32" else 2
    state = n * (STATE_BYTES_PER_PARAMETER + narrow)
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
    job, identity, directory, world = call.job, call.identity, call.directory, call.world
    plan = make_plan(task, options, job.seed)
    if job.dry_run:
        n = parameter_count(task.spec)
        show_plan(
            job, options, plan.tokens * plan.flops_per_token, n,
            options.keep_checkpoints * n * CHECKPOINT_BYTES_PER_PARAMETER
            + n * (4 if options.export_dtype == "float32" else 2),
            describe_plan(task, plan, job.mesh),
        )  # fmt: skip
        return
    watchdog_config = WatchdogConfig(
        must_match={"run": _digest(identity)},
        hang_timeout_s=options.hang_timeout,
        directory=directory.path,
    )
    stdout = process_group.library_output_to_stderr(world)
    with stdout, joined(job, world, watchdog_config) as mesh, call.locked():
        check_fits(task.spec, mesh, plan.batch_rows, plan.row_length)
        if world.leads:
            directory.begin(identity, job.force, options.checkpoint_url)
        process_group.barrier(world, job.backend, "begin")
        figures = _training(call, task, options, plan, mesh).train()
        if world.leads:
            export(directory, task, options)
            directory.finish(identity, **figures)
            parts = [f"{figures['step']:,} steps", f"{figures['tokens']:,} tokens"]
            parts += [f"{name.replace('_', ' ')} {figures[name]:.4f}"
                      for name in ("loss", "validation_loss") if name in figures]  # fmt: skip
            took = units.format_duration(figures["seconds"])
            line = f"{', '.join(parts)} ({took}) → {directory.final}"
            notes.summarize(line, dict(figures) | {"final": str(directory.final)})
        process_group.barrier(world, job.backend, "end")


def show_plan(
    job: Job, options: Any, flops: float, parameters: int, written: int, figures: dict[str, Any]
) -> None:
    """Show the plan of a run of so many FLOPs; time is that of its products at the measured rate.

    options: with precision, keep_checkpoints and peak_flops, where the command has it.
    """
    given = getattr(options, "peak_flops", None)
    peak = given or measure_peak_flops(job.backend, options.precision)
    planned(
        job,
        cpu_seconds=flops / peak,
        memory_bytes=parameters * STATE_BYTES_PER_PARAMETER,
        bytes_written=written,
        figures=figures,
        basis=f"{flops:.3g} FLOPs at {peak:.3g} FLOP/s of one device (products alone), "
        f"{STATE_BYTES_PER_PARAMETER} bytes of state a parameter without activations"
        + (f", {options.keep_checkpoints} checkpoints and final/" if written else ""),
    ).show(job)


def _digest(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def joined(job: Job, world: World, config: WatchdogConfig | None = None) -> Iterator[Mesh]:
    """Join the processes; yield the mesh of all devices."""
    wanted = math.prod(parse_mesh(job.mesh).values())
    if job.backend == "torch":
        start = f"torchrun --nproc-per-node {wanted}, srun -n {wanted}"
        how = f"torch runs one process per device: {start}"
        mesh = make_mesh(job.mesh, world.size, how)
        with process_group.join_torch(world, config):
            yield mesh
        return
    with process_group.join_jax(world, wanted, config):
        import jax

        devices = jax.device_count()
        one_cpu = world.size == 1 and jax.devices()[0].platform == "cpu"
        # a CPU that has more virtual devices than the mesh leaves the rest unused
        yield make_mesh(job.mesh, min(wanted, devices) if one_cpu else devices)


def loss_of(task: Task, options: Training) -> Callable[..., Any]:
    """The training loss of a task, with the options' coefficients."""
    remat: Any = options.remat
    if task.loss is not None:
        return partial(task.loss, remat=remat)
    terms: Any = {
        "z_loss": options.z_loss,
        "balance": options.balance,
        "router_z": options.router_z,
    }
    return partial(next_token_loss, remat=remat, **terms)


def fresh_stepper(job: Job, task: Task, options: Training, plan: Plan, **more: Any) -> Stepper:
    """A task's model and optimizer at the first step; `more` goes to `make_stepper`."""
    return make_stepper(
        job.backend,
        task.spec,
        task.load_params(),
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
    peaks = find_peaks(job.backend, options.precision, options.peak_flops, warns=world.leads)
    notes.note(
        f"{parameter_count(task.spec):,} parameters, {plan.steps:,} steps of {plan.batch_rows} "
        f"rows of {plan.row_length} tokens on {mesh}; {peaks.description}"
    )
    if job.backend == "jax":
        import jax

        device: Any = jax.local_devices()[0]
    else:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    notes.note(describe(plan.precision.precision, device))
    computed, packed = plan.precision.precision.compute, not task.rows.unpacked
    notes.note(kernel_report.describe(task.spec, job.backend, computed, plan.row_length, packed))
    times = peak_multiplier(job.backend, mesh.size, world.size)
    meter = Meter(plan.flops_per_token, plan.flops_6nd, peaks.published * times,
                  peaks.measured * times, warned=not world.leads)  # fmt: skip
    # the leading process sends metrics to services
    services = parse_services(options.track) if world.leads else ()
    sinks = (call.directory.path, _digest(call.identity), call.identity)
    tracker = Tracker([partial(open_sink, name, *sinks) for name in services])
    more: dict[str, Any] = {} if task.name_rows is None else {"name_rows": task.name_rows}
    return TrainingRun(
        options=options,
        steps=plan.steps,
        schedule=plan.schedule,
        interval=parse_interval(options.save_every, options.mtbf or 0.0, mesh.size),
        guard_config=training_config.guard_config(options),
        backend=job.backend,
        stepper=stepper,
        source=RowSource(task.rows, plan.order, plan.batch_rows, stepper, read_ahead=True),
        run=call.directory,
        world=world,
        meter=meter,
        tracker=tracker,
        meta=_meta(job, task, options, plan, mesh) | {"identity": dict(call.identity)},
        validation=task.validation,
        **more,
    )


def _meta(job: Job, task: Task, options: Training, plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """The metadata of checkpoints."""
    stages = [asdict(stage) for stage in plan.order.stages]
    return {
        "model": spec_hash(task.spec),
        "config": dict(task.spec.config),
        "optimizer": training_config.optimizer_config(options).record(),
        "schedule": asdict(plan.schedule),
        "rng": {"seed": job.seed},
        "data": {
            "seed": job.seed,
            "batch_rows": plan.batch_rows,
            "of_rows": len(task.rows),
            "sources": dict(zip(task.rows.source_names, task.rows.source_sizes, strict=True)),
            "weights": plan.order.weights,
            "stages": stages,
        },
        "backend": job.backend,
        "precision": options.precision,
        "mesh": {axis: n for axis, n in asdict(mesh).items() if n > 1},
        "version": version("sabia"),
    }


def spec_hash(spec: ModelSpec) -> str:
    """A hash of the model's table of tensors: specs with equal hashes can share a checkpoint."""
    table = repr([(t.name, t.shape) for t in spec.tensors()])
    return hashlib.blake2b(table.encode(), digest_size=16).hexdigest()


def last_checkpoint(directory: RunDirectory) -> Checkpoint:
    """The last checkpoint of a finished run."""
    checkpoint = latest(directory.checkpoints)
    assert checkpoint is not None, "a finished run has a checkpoint"
    return checkpoint


def export(directory: RunDirectory, task: Task, options: Training) -> None:
    """Write the last checkpoint's parameters as a Hugging Face directory, adapters merged.

    Adapters are also written separately, to `adapter/`.
    """
    checkpoint = last_checkpoint(directory)
    lora = training_config.lora_config(options)
    if lora is not None:
        _export_adapter(directory, task, Reader(checkpoint), lora)
    with _tokenizer_directory(task.tokenizer) as tokenizer:
        export_checkpoint(
            Reader(checkpoint),
            task.spec,
            directory.final,
            options.export_dtype,
            tokenizer_from=tokenizer,
            lora=lora,
            kept_from=task.model or None,
        )


def _export_adapter(directory: RunDirectory, task: Task, reader: Reader, lora: LoraConfig) -> None:
    if task.spec.classifier is not None:
        notes.note(
            "no adapter/: the adapters of a classifier are useless without its head (use final/)"
        )
        return
    if any(not isinstance(tensor.hf, str) for tensor in targeted(task.spec, lora)):
        notes.note("no adapter/: an adapted matrix is part of a fused one in the model's files")
        return
    params = {t.name: np.asarray(reader[f"param/{t.name}"]) for t in lora_tensors(task.spec, lora)}
    save_adapter(directory.path / "adapter", task.spec, params, lora, task.model)


@contextlib.contextmanager
def _tokenizer_directory(path: str) -> Iterator[Path | None]:
    if not path or Path(path).is_dir():
        yield Path(path) if path else None
        return
    with tempfile.TemporaryDirectory() as scratch:
        load_tokenizer(path).save(scratch)
        yield Path(scratch)
