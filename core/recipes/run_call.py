"""A training run in its directory: the call, the processes, the files at its end.

`in_directory` joins the processes of the launcher, trains or resumes, and writes `final/` from the
last checkpoint, one tensor at a time. Speed is told as shares of the device's peaks: of its data
sheet (MFU) and of a measured product (gemm_share). What is trained on is the caller's: token rows
(core.recipes.training_run) or samples (core.recipes.grpo).
"""

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes, units
from sabia.core.errors import BadData, UsageError
from sabia.core.model.lora import LoraConfig, lora_tensors, targeted
from sabia.core.ops.precision import precision_named
from sabia.core.options.training import Training
from sabia.core.parallel import build_ops, process_group
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.mesh import Mesh, make_mesh, parse_mesh
from sabia.core.parallel.world import World, detect
from sabia.core.recipes import training_config
from sabia.core.recipes.machine.peaks import (
    device_name,
    find_peaks,
    measure_peak_flops,
    peak_multiplier,
)
from sabia.core.recipes.row_outputs import write_metric_rows
from sabia.core.shards.job import Job
from sabia.core.shards.lineage import run_record
from sabia.core.spec import ModelSpec, parameter_count, training_flops_per_token
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.checkpoint.local import name_of, open_checkpoint
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import parse_interval
from sabia.core.train.convert import export_checkpoint
from sabia.core.train.loop import Objective, Source, TrainingRun
from sabia.core.train.optimizer.config import OptimizerConfig, ScheduleConfig
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.stepper import StateBytes, Stepper
from sabia.core.train.telemetry import Meter


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


def open_run(job: Job, options: Training | None = None) -> tuple[RunDirectory, World]:
    """The run directory of -o and the world of this process; raises UsageError."""
    if options is not None:
        training_config.check_texts(options)
    if job.to_stdout or job.to_file or "://" in str(job.out):
        raise UsageError(
            f"-o: {job.out or 'missing'} (expected a local directory for the run, or a URL for one "
            "of a single process; its metrics go to stdout)"
        )
    world = detect()
    if world.size > 1 and (not job.inputs or "-" in job.inputs):
        raise UsageError("several processes cannot share stdin; give the inputs as paths")
    if not world.leads:
        notes.configure(job.command, quiet=True)
    return RunDirectory(Path(str(job.out))), world


@dataclass(frozen=True)
class Made:
    """What `final/` is made of besides the checkpoint: the model, its tokenizer ('': none), the
    directory of the model that the run began with ('': none), the options of the run."""

    spec: ModelSpec
    tokenizer: str
    model: str
    options: Any

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters."""
        return training_config.lora_config(self.options)

    @property
    def trained_for(self) -> str:
        """The precision of quantization-aware training that the weights were trained for; '' if
        there is none: merged adapters, and steps in BF16, are not what was simulated."""
        name, tail = str(self.options.precision), getattr(self.options, "bf16_tail", False)
        return name if precision_named(name).qat and self.lora is None and not tail else ""


def in_directory(
    call: RunCall,
    made: Made,
    check: Callable[[Mesh], None],
    make_run: Callable[[Mesh], TrainingRun],
    describe: Callable[[Mapping[str, Any]], list[str]],
) -> None:
    """Join the processes, train or resume in the run directory, export, record the end.

    check: raises UsageError for a mesh that does not fit. describe: last figures → parts of the
    summary.
    """
    job, identity, directory, world = call.job, call.identity, call.directory, call.world
    must_match, timeout = {"run": _digest(identity)}, made.options.hang_timeout
    watchdog_config = WatchdogConfig(must_match, timeout, directory=directory.path)
    stdout = process_group.library_output_to_stderr(world)
    with stdout, joined(job, world, watchdog_config) as mesh, call.locked():
        check(mesh)
        if world.leads:
            record = _run_record(job)
            directory.begin(identity, job.force, made.options.checkpoint_url, record)
            if record:
                run_record.keep_beside(str(directory.path), record)
        process_group.barrier(world, job.backend, "begin")
        figures = make_run(mesh).train()
        if world.leads:
            export(directory, made)
            export_best(directory, made, figures)
            directory.finish(identity, **figures, **{run_record.RUN: _run_record(job)})
            parts = [f"{figures['step']:,} steps", *describe(figures)]
            took = units.format_duration(figures["seconds"])
            line = f"{', '.join(parts)} ({took}) → {directory.final}"
            notes.summarize(line, dict(figures) | {"final": str(directory.final)})
        process_group.barrier(world, job.backend, "end")


def _run_record(job: Job) -> dict[str, Any] | None:
    """What is known of this call until now; None if outputs do not tell of their runs."""
    made = {"command": job.command, "options": job.options, "seed": job.seed}
    return run_record.of_process(made, job) if run_record.enabled() else None


def show_plan(
    job: Job, options: Any, flops: float, state: StateBytes, exported: int, figures: dict[str, Any]
) -> None:
    """Show the plan of a run of so many FLOPs; time is that of its products at the measured rate.

    exported: bytes of `final/` (0: the run writes neither it nor checkpoints). options: with
    precision, keep_checkpoints and peak_flops, where the command has it.
    """
    from sabia.core.shards.dry_run import planned

    given = getattr(options, "peak_flops", None)
    peak = given or measure_peak_flops(job.backend, options.precision)
    planned(
        job,
        cpu_seconds=flops / peak,
        memory_bytes=state.held,
        bytes_written=exported and options.keep_checkpoints * state.checkpoint + exported,
        figures=figures,
        basis=f"{flops:.3g} FLOPs at {peak:.3g} FLOP/s of one device (products alone), "
        "the state without activations"
        + (f", {options.keep_checkpoints} checkpoints and final/" if exported else ""),
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


def make_meter(
    call: RunCall, options: Any, spec: ModelSpec, mesh: Mesh, length: int, packed: bool, what: str
) -> Meter:
    """The speed of a run on a mesh, with rows of `length` tokens; notes `what` the run is, what its
    peaks are, and what computes the products and the kernels on this process's device."""
    job, world, precision = call.job, call.world, precision_named(options.precision)
    peaks = find_peaks(job.backend, options.precision, options.peak_flops, warns=world.leads)
    notes.note(f"{parameter_count(spec):,} parameters, {what} on {mesh}; {peaks.description}")
    if job.backend == "jax":
        import jax

        device: Any = jax.local_devices()[0]
    else:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    notes.note(build_ops.describe_products(precision, device))
    notes.note(build_ops.describe(spec, job.backend, precision.compute, length, packed))
    times = peak_multiplier(job.backend, mesh.size, world.size)
    return Meter(
        training_flops_per_token(spec, length, "causal"),
        training_flops_per_token(spec, length, "6nd"),
        peaks.published * times,
        peaks.measured * times,
        warned=not world.leads,
    )


def make_run(
    call: RunCall, options: Any, mesh: Mesh, stepper: Stepper, source: Source,
    objective: Objective, meter: Meter, optimizer: OptimizerConfig, schedule: ScheduleConfig,
    data: dict[str, Any], best_by: str = "",
) -> TrainingRun:  # fmt: skip
    """A run of `schedule.steps` steps with the options' checkpoints, guards and services; `data`:
    what the position in checkpoints is a position in."""
    world, identity = call.world, dict(call.identity)
    job, spec = call.job, stepper.spec
    tracker = None
    if options.track and world.leads:
        from sabia.core.train.tracking import Tracker, open_sink, parse_services

        sinks = (call.directory.path, _digest(identity), identity)
        tracker = Tracker([partial(open_sink, x, *sinks) for x in parse_services(options.track)])
    return TrainingRun(
        options=options,
        steps=schedule.steps,
        schedule=schedule,
        interval=parse_interval(options.save_every, options.mtbf or 0.0, mesh.size),
        guard_config=training_config.guard_config(options),
        backend=job.backend,
        stepper=stepper,
        source=source,
        objective=objective,
        run=call.directory,
        world=world,
        meter=meter,
        tracker=tracker,
        meta={  # of checkpoints
            "model": spec_hash(spec),
            "config": dict(spec.config),
            "optimizer": optimizer.record(),
            "schedule": asdict(schedule),
            "rng": {"seed": job.seed},
            "data": data,
            "backend": job.backend,
            "precision": options.precision,
            "mesh": {axis: n for axis, n in asdict(mesh).items() if n > 1},
            "device": {"name": device_name(job.backend), "count": mesh.size},
            "version": version("sabia"),
            "identity": identity,
        },
        best_by=best_by,
    )


def spec_hash(spec: ModelSpec) -> str:
    """A hash of the model's table of tensors: specs with equal hashes can share a checkpoint."""
    table = repr([(t.name, t.shape) for t in spec.tensors()])
    return hashlib.blake2b(table.encode(), digest_size=16).hexdigest()


def export(directory: RunDirectory, made: Made) -> None:
    """Write the last checkpoint's parameters as a Hugging Face directory, adapters merged.

    Adapters are also written separately, to `adapter/`.
    """
    checkpoint = latest(directory.checkpoints)
    assert checkpoint is not None, "a finished run has one"
    reader = Reader(checkpoint)
    if made.lora is not None:
        _export_adapter(directory, made, reader, made.lora)
    _export_model(reader, directory.final, made)


def export_best(directory: RunDirectory, made: Made, figures: Mapping[str, Any]) -> None:
    """Write the model of the best validation to `best/`, where it is not the last one."""
    step, best = figures.get("best_step"), directory.path / "best"
    shutil.rmtree(best, ignore_errors=True)
    if step is None or step == figures["step"]:
        return
    notes.note(f"the best validation is that of step {step:,}")
    if not step:  # the model that the run began with
        return
    try:
        saved = open_checkpoint(directory.checkpoints / name_of(step))
    except BadData as error:
        notes.warn(f"no best/: {error}")
        return
    _export_model(Reader(saved), best, made)


def _export_model(reader: Reader, out: Path, made: Made) -> None:
    tokenizer = Path(made.tokenizer) if made.tokenizer else None
    with contextlib.ExitStack() as stack:
        if tokenizer is not None and not tokenizer.is_dir():
            tokenizer = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            load_tokenizer(made.tokenizer).save(tokenizer)
        export_checkpoint(
            reader,
            made.spec,
            out,
            made.options.export_dtype,
            tokenizer_from=tokenizer,
            lora=made.lora,
            kept_from=made.model or None,
            trained_for=made.trained_for,
        )


def _export_adapter(directory: RunDirectory, made: Made, reader: Reader, lora: LoraConfig) -> None:
    from sabia.core.generate.model_directory import weights_fingerprint
    from sabia.core.model.storage.peft_adapters import save_adapter

    spec = made.spec
    if spec.classifier is not None:
        notes.note(
            "no adapter/: the adapters of a classifier are useless without its head (use final/)"
        )
        return
    if any(not isinstance(tensor.hf, str) for tensor in targeted(spec, lora)):
        notes.note("no adapter/: an adapted matrix is part of a fused one in the model's files")
        return
    params = {t.name: np.asarray(reader[f"param/{t.name}"]) for t in lora_tensors(spec, lora)}
    base = weights_fingerprint(made.model) if made.model else ""
    save_adapter(directory.path / "adapter", spec, params, lora, made.model, base)
