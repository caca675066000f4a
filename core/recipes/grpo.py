"""GRPO: groups of samples, rewards by verifiers or rubrics, one clipped policy update a step.

A step computes the numbers of its prompts, draws `group` samples of each with the current policy,
grades the samples, compares each with its group's mean and updates. Everything but the times is a
function of the options: samples are identified by (seed, step, prompt, number), the first update's
old policy is the trainer's own, and the journal stores finished samples. A run that was interrupted
anywhere therefore ends with the same weights. Source: arXiv 2402.03300, 2503.14476.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from sabia.core import notes, stop, units
from sabia.core.errors import BadData, Failed, Interrupted, SabiaError, UsageError
from sabia.core.generate.chat import chat_template
from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import weights_fingerprint
from sabia.core.judge.rewards import Grader, NullGuard
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel import process_group
from sabia.core.parallel.mesh import make_mesh
from sabia.core.parallel.world import World
from sabia.core.recipes import grpo_config, training_run
from sabia.core.recipes.grpo_batch import (
    Group,
    empty_batch,
    make_batch,
    micro_rows,
    score,
    split,
    with_slots,
)
from sabia.core.recipes.grpo_journal import Journal
from sabia.core.recipes.grpo_prompts import Prompt, PromptSchedule, read_prompts
from sabia.core.recipes.grpo_report import SUMS, StepTable, metrics_row, step_sums
from sabia.core.recipes.grpo_sampling import Sampler, open_grader
from sabia.core.recipes.model_source import load_fp32
from sabia.core.recipes.training_run import RunCall, last_checkpoint
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt_rejects
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.sources import Source
from sabia.core.spec import ModelSpec, load_spec, parameter_count
from sabia.core.spec.count import training_flops_per_token
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.train.checkpoint import Reader, Saver, latest, parse_interval
from sabia.core.train.convert import export_checkpoint
from sabia.core.train.losses.grpo import grpo_loss
from sabia.core.train.optimizer.schedule import learning_rate
from sabia.core.train.stepper import Stepper
from sabia.core.train.stepper_factory import make_stepper
from sabia.core.train.telemetry import RunLog


def run(job: Job, options: GrpoOptions) -> None:
    """Train by the job and the options; raises what its parts raise."""
    grpo_config.check_texts(options)
    directory, world = training_run.open_run(job)
    if make_mesh(job.mesh, world.size).data != world.size:
        raise UsageError(f"--mesh: {job.mesh} (expected data=N: every process generates samples)")
    if options.prompts % world.size:
        raise UsageError(
            f"--prompts: {options.prompts} (expected a multiple of {world.size} processes)"
        )
    sources = open_inputs(job, "prompt")
    model = weights_fingerprint(options.model)
    tokenizer = load_tokenizer(options.model, "--model")
    chat_template(tokenizer, f"--model: {options.model}")
    identity = {
        "command": job.command,
        "inputs": [source.fingerprint() for source in sources],
        "model": model,
        "tokenizer": tokenizer.fingerprint,
        "seed": job.seed,
        **grpo_config.identity(options),
    }
    call = RunCall(job, identity, directory, world)
    if call.already_done():
        return
    spec = load_spec(options.model)
    check_predicts(spec)
    with open_grader(options) as grader:
        prompts = _prompts(job, options, spec, sources, grader, world)
        if job.dry_run:
            _describe(job, spec, prompts, options)
            return
        with call.locked(), process_group.join_torch(world):
            _train(call, options, spec, tokenizer, prompts, grader)
    call.write_rows()


def _prompts(
    job: Job,
    options: GrpoOptions,
    spec: ModelSpec,
    sources: Sequence[Source],
    grader: Grader,
    world: World,
) -> list[Prompt]:
    """The usable prompts; the others are written to the rejects."""
    longest = spec.max_positions - options.max_new_tokens
    if longest < 1:
        raise UsageError(
            f"--max-new-tokens: {options.max_new_tokens} (expected less than the model's context "
            f"of {spec.max_positions})"
        )
    read = partial(read_prompts, sources, load_tokenizer(options.model), grader, longest)
    if job.dry_run or not world.leads:
        return read(lambda *_: None)
    adopt_rejects(job)
    with Rejects(reject_path(job)) as rejects:
        return read(rejects.add)


def _describe(job: Job, spec: ModelSpec, prompts: list[Prompt], options: GrpoOptions) -> None:
    n, samples = parameter_count(spec), options.prompts * options.group * options.steps
    longest = max(len(p.ids) for p in prompts)
    length = longest + options.max_new_tokens
    flops = samples * length * (training_flops_per_token(spec, length, "causal") * 4 / 3)
    training_run.show_plan(
        job, options, flops, n,
        n * (training_run.CHECKPOINT_BYTES_PER_PARAMETER * options.keep_checkpoints + 4),
        {
            "parameters": f"{n:,}",
            "prompts": f"{len(prompts):,}, the longest of {longest:,} tokens",
            "steps": f"{options.steps:,} of {options.prompts} prompts x {options.group} samples",
            "samples": f"{samples:,} of at most {options.max_new_tokens} tokens",
            "epochs": f"{options.steps * options.prompts / len(prompts):.2f}",
        },
    )  # fmt: skip


def _train(
    call: RunCall,
    options: GrpoOptions,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    grader: Grader,
) -> None:
    """Begin or resume the run in its directory, train to the end, export."""
    directory, world = call.directory, call.world
    journal = Journal(directory.path / "samples", world.rank)
    if world.leads:
        if call.job.force:
            journal.clear()
        directory.begin(call.identity, call.job.force)
    process_group.barrier(world, "torch", "begin")
    policy = Policy(call, options, spec, tokenizer, prompts, grader, journal)
    figures = policy.train()
    if world.leads:
        model, kind = options.model, options.export_dtype
        reader = Reader(last_checkpoint(directory))
        export_checkpoint(reader, spec, directory.final, kind, model, kept_from=model)
        directory.finish(call.identity, **figures)
        took = units.format_duration(figures["seconds"])
        line = (
            f"{figures['step']:,} steps, {figures['samples']:,} samples, reward "
            f"{figures['reward_first']:.3f} → {figures['reward']:.3f} ({took}) → {directory.final}"
        )
        notes.summarize(line, dict(figures) | {"final": str(directory.final)})
    process_group.barrier(world, "torch", "end")


@dataclass
class Policy:
    """One run in progress."""

    call: RunCall
    options: GrpoOptions
    spec: ModelSpec
    tokenizer: Tokenizer
    prompts: list[Prompt]
    grader: Grader
    journal: Journal
    step: int = 0
    samples: int = 0
    seconds_before: float = 0.0
    blocking_s: float | None = None  # of the last save
    reward_first: float = 0.0
    reward: float = 0.0
    table: StepTable = field(default_factory=StepTable)

    def __post_init__(self) -> None:
        options, self.world, self.seed = self.options, self.call.world, self.call.job.seed
        self.directory = self.call.directory
        self.schedule = grpo_config.schedule_config(options)
        self.optimizer = grpo_config.optimizer_config(options)
        self.interval = parse_interval(options.save_every)
        params = load_fp32(options.model)
        self.stepper: Stepper = make_stepper(
            "torch",
            self.spec,
            params,
            partial(grpo_loss, options=options),
            self.optimizer,
            precision=options.precision,
            world=self.world,
        )
        self.engine = Engine(self.spec, self.stepper.params, self.tokenizer, on_step=self._on_step)
        self.reference = self.engine.ops.to_device(params, "float32") if options.beta else None
        self.sampler = Sampler(
            options,
            self.engine,
            PromptSchedule(self.prompts, options.prompts, self.seed),
            self.grader,
            NullGuard(options.max_null),
            self.journal,
            self.world,
            self.seed,
        )

    def train(self) -> dict[str, Any]:
        """Run to the last step, from the newest checkpoint where there is one.

        Returns the last figures. Raises Interrupted after a stop signal (state saved), Failed when
        a loss is not finite or the judge fails too often.
        """
        self._resume()
        self.started = self.saved_at = time.monotonic()
        self.log = RunLog(self.directory.path, self.world.rank, self.step)
        try:
            with stop.polling("training"):
                while self.step < self.options.steps:
                    self._one_step()
        finally:
            self.log.close()
            self.journal.close()
        return {
            "step": self.step,
            "samples": self.samples,
            "reward_first": self.reward_first,
            "reward": self.reward,
            "seconds": self._seconds(),
        }

    def _resume(self) -> None:
        self.saved_step = 0
        newest = latest(self.directory.checkpoints)
        if newest is None:
            return
        manifest = newest.manifest
        if manifest["model"] != training_run.spec_hash(self.spec):
            raise BadData(f"checkpoint {newest.path.name} is of another model; --force starts over")
        self.stepper.load(Reader(newest).read)
        self.step = self.saved_step = newest.step
        self.samples = int(manifest["data"]["samples"])
        self.seconds_before = float(manifest["seconds"])
        self.reward_first, self.reward = manifest["reward_first"], manifest["reward"]
        self.table.rewards = list(manifest["rewards"])
        notes.note(f"resuming at step {self.step:,} of {self.options.steps:,} ({newest.path.name})")

    def _one_step(self) -> None:
        started = time.monotonic()
        try:
            self.engine.params = self._sampling_params()
            groups = self.sampler.groups(self.step)
        except SabiaError:
            self.journal.close()
            if self.step > self.saved_step and self.world.size == 1:
                self._save()
            raise
        # every process adds its control flags to the sums, so that all stop and save together
        flags = (stop.requested(), self._save_is_due())
        sums = step_sums(groups, self.sampler.made, time.monotonic() - started, *flags)
        lr = learning_rate(self.step, self.schedule)
        updates = self._update(groups, lr, sums)
        total = updates[0].pop("extra_sums")
        self.step += 1
        self._report(metrics_row(self.step, lr, total, updates))
        of_all = dict(zip(SUMS, total.tolist(), strict=True))
        done = self.step == self.options.steps
        if done or of_all["save"] or of_all["stop"]:
            self._save()
        if of_all["stop"] and not done:
            raise Interrupted(
                f"stopped at step {self.step:,} of {self.options.steps:,}; state is saved: run "
                "again to resume"
            )

    def _sampling_params(self) -> dict[str, Any]:
        """The policy in the precision of its training."""
        if self.options.precision == "fp32":
            return self.stepper.params
        narrow = {t.name for t in self.spec.tensors() if t.dtype_class == "weight"}
        params = self.stepper.params.items()
        return {k: p.detach().bfloat16() if k in narrow else p for k, p in params}

    def _on_step(self) -> None:
        """Between two tokens: end the sampling at a stop signal (several processes: after it)."""
        if self.world.size == 1:
            stop.check()

    def _update(self, groups: list[Group], lr: float, sums: np.ndarray) -> list[dict[str, Any]]:
        options, ops = self.options, self.engine.ops
        batch = make_batch(groups, options) or empty_batch(options)
        rows = self.stepper.micro_batch = micro_rows(batch, options)
        score_with = partial(
            score, self.spec, batch=batch, ops=ops, temperature=options.temperature, rows=rows
        )
        if self.reference is not None:
            batch["ref"] = score_with(self.reference)
        if options.updates > 1:
            batch["old"] = score_with(self._sampling_params())
        parts = split(batch, options.updates, (self.seed, self.step))
        # batches of weight 0 with the arrays of `batch`: all processes update equally often
        empty = empty_batch(options)
        empty |= {k: empty["sampler"] for k in ("old", "ref") if k in batch}
        parts += [empty] * (options.updates - len(parts))
        return [
            self._checked(self.stepper.step(with_slots(part, rows), lr, None if number else sums))
            for number, part in enumerate(parts)
        ]

    def _checked(self, figures: dict[str, Any]) -> dict[str, Any]:
        if not figures["updated"] and figures["weight"] > 0:
            raise Failed(
                f"step {self.step + 1}: loss {figures['loss']}, gradient norm "
                f"{figures['grad_norm']} (expected finite numbers). Nothing was updated; "
                "try a lower --lr"
            )
        return figures

    def _report(self, row: dict[str, Any]) -> None:
        self.samples += row["samples"]
        self.reward = row["reward"]
        if self.step == 1:
            self.reward_first = self.reward
        row["seconds"] = round(self._seconds(), 3)
        self.log.write(row)
        self.table.show(row)

    def _save_is_due(self) -> bool:
        if not self.world.leads:
            return False
        waited = time.monotonic() - self.saved_at
        return self.interval.due(self.step + 1, waited, self.blocking_s)

    def _save(self) -> None:
        self.log.sync()
        if self.world.leads:
            meta = {
                "model": training_run.spec_hash(self.spec),
                "config": dict(self.spec.config),
                "optimizer": asdict(self.optimizer),
                "schedule": asdict(self.schedule),
                "rng": {"seed": self.seed},
                "data": {
                    "prompts": self.step * self.options.prompts,
                    "samples": self.samples,
                    "of_prompts": len(self.prompts),
                },
                "backend": "torch",
                "precision": self.options.precision,
                "mesh": {"data": self.world.size},
                "version": version("sabia"),
                "seconds": self._seconds(),
                "reward_first": self.reward_first,
                "reward": self.reward,
                "rewards": self.table.rewards,
            }
            checkpoints = self.directory.checkpoints
            with Saver(checkpoints, keep=self.options.keep_checkpoints) as saver:
                saver.save(self.step, self.stepper.pieces(), meta)
                self.blocking_s = saver.blocking_s
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started
