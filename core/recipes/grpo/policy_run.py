"""GRPO: groups of samples, rewards by verifiers or rubrics, one clipped policy update a step.

A step computes the numbers of its prompts, draws `group` samples of each with the current policy,
grades the samples, compares each with its group's mean and updates. Everything but the times is a
function of the options: samples are identified by (seed, step, prompt, number), the first update's
old policy is the trainer's own, and the journal stores finished samples. A run that was interrupted
anywhere therefore ends with the same weights. Source: arXiv 2402.03300, 2503.14476.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.generate.chat_variables import template_variables
from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import load_draft, weights_fingerprint
from sabia.core.generate.template_engine import chat_template
from sabia.core.judge.opened_judges import judge_servers
from sabia.core.judge.rewards import RUBRIC, Grader, NullGuard
from sabia.core.model.lora import A, B, merged
from sabia.core.model.routing import Routing
from sabia.core.ops.base import Params, Remat
from sabia.core.ops.precision import PrecisionSchedule, precision_named
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.build_ops import build_ops
from sabia.core.parallel.mesh import Mesh, check_fits
from sabia.core.parallel.world import World
from sabia.core.recipes import training_config
from sabia.core.recipes.grpo import policy_config
from sabia.core.recipes.grpo.prompt_schedule import Prompt, PromptSchedule, read_prompts
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.recipes.grpo.sample_source import SampleSource
from sabia.core.recipes.grpo.sampler import Sampler, open_grader
from sabia.core.recipes.grpo.served_policy import ServedPolicy
from sabia.core.recipes.grpo.step_table import SUMS, StepTable, metrics_row
from sabia.core.recipes.grpo.teacher_scores import OnPolicyTeacher, open_teacher
from sabia.core.recipes.model_source import load_arrays, load_fp32
from sabia.core.recipes.row_outputs import warn_of_rejects
from sabia.core.recipes.run_call import (
    Made,
    RunCall,
    in_directory,
    make_meter,
    make_run,
    open_run,
    show_plan,
)
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt_rejects
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.sources import Source
from sabia.core.spec import ModelSpec, load_spec, parameter_count
from sabia.core.spec.layers import Attention
from sabia.core.spec.model import check_predicts, training_flops_per_token
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.train.loop import Results, TrainingRun
from sabia.core.train.losses.grpo import grpo_loss
from sabia.core.train.losses.value import value_head, without_head
from sabia.core.train.stepper import state_bytes
from sabia.core.train.stepper_factory import make_stepper

GREEDY, SAMPLED = "validation_reward", "validation_sampled_reward"
MOST_SOURCES = 32  # whose rewards are reported


def run(job: Job, options: GrpoOptions) -> None:
    """Train by the job and the options; raises what its parts raise."""
    policy_config.check_texts(options)
    directory, world = open_run(job)
    if job.backend == "jax" and world.size > 1:
        raise UsageError(
            f"--backend: jax with {world.size} processes (expected one, which uses all its "
            "devices, or torch)"
        )
    if options.prompts % world.size:
        raise UsageError(
            f"--prompts: {options.prompts} (expected a multiple of {world.size} processes)"
        )
    options = training_config.with_adapter(options)
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
        **policy_config.identity(options),
        **training_config.adapter_identity(options),
    }
    recorded = {} if job.force else directory.recorded_identity()
    if variables := template_variables(options.chat, tokenizer, recorded.get("chat")):
        identity["chat"] = variables
    call = RunCall(job, identity, directory, world)
    if call.already_done():
        return
    spec = load_spec(options.model)
    check_predicts(spec)
    if options.routing_replay and Routing.of(spec) is None:
        raise UsageError(f"--routing-replay: {options.model} has no experts (expected a MoE model)")
    teacher = open_teacher(options, tokenizer) if options.teacher else None
    with open_grader(job, options) as grader:
        reader = partial(
            read_prompts, tokenizer=tokenizer, grader=grader, longest=_longest(options, spec),
            variables=variables,
        )  # fmt: skip
        prompts = _prompts(job, sources, reader, world)
        held_out = _held_out(options, reader)
        if job.dry_run:
            _describe(job, spec, prompts, options)
            return
        judged, priced = grader.judge is not None, grader.stats.usd is not None
        models = tuple(server.model for server in judge_servers(options) if not server.audit)
        named = tuple(dict.fromkeys(prompt.source for prompt in prompts))
        table = StepTable(
            policy_config.max_gap(options), judged, priced, options.model, models,
            sources=named if 1 < len(named) <= MOST_SOURCES else (),
            entropy_floor=options.entropy_floor, exact=options.exact,
            max_mismatch=policy_config.max_mismatch(options), expert_layers=spec.expert_layers,
        )  # fmt: skip

        def check(mesh: Mesh) -> None:
            check_fits(spec, mesh)
            if options.exact:
                check_exact(spec, mesh)
            if job.force and world.leads:
                _journal(call, options).clear()

        def make(mesh: Mesh) -> TrainingRun:
            given = (tokenizer, prompts, held_out, grader, table)
            return _training(call, options, spec, mesh, *given, teacher and teacher(job.backend))

        made = Made(spec, options.model, options.model, options)
        in_directory(call, made, check, make, lambda _: table.describe())
    call.write_rows()


def _prompts(
    job: Job, sources: Sequence[Source], reader: Callable[..., list[Prompt]], world: World
) -> list[Prompt]:
    """The usable prompts; the others are written to the rejects."""
    if job.dry_run or not world.leads:
        return reader(sources, reject=lambda *_: None)
    adopt_rejects(job)
    with Rejects(reject_path(job)) as rejects:
        return reader(sources, reject=rejects.add)


def _journal(call: RunCall, options: GrpoOptions) -> Journal:
    """The samples of this process; with a rubric, its verdicts as well."""
    path = call.directory.path
    graded = policy_config.reward_weights(options)
    verdicts = path / "verdicts" if RUBRIC in graded else None
    return Journal(path / "samples", call.world.rank, verdicts)


def _held_out(options: GrpoOptions, reader: Callable[..., list[Prompt]]) -> list[Prompt]:
    """The prompts of --validation."""
    if not options.validation:
        return []
    sources = from_path(options.validation, "prompt", "--validation")
    return reader(sources, reject=warn_of_rejects("validation prompt"))


def _longest(options: GrpoOptions, spec: ModelSpec) -> int:
    """Tokens that a prompt may have."""
    longest = spec.max_positions - options.max_new_tokens
    if longest < 1:
        raise UsageError(
            f"--max-new-tokens: {options.max_new_tokens} (expected less than the model's context "
            f"of {spec.max_positions})"
        )
    return longest


def _describe(job: Job, spec: ModelSpec, prompts: list[Prompt], options: GrpoOptions) -> None:
    n, samples = parameter_count(spec), options.prompts * options.group * options.steps
    longest = max(len(p.ids) for p in prompts)
    length = longest + options.max_new_tokens
    flops = samples * length * (training_flops_per_token(spec, length, "causal") * 4 / 3)
    heads = value_head(spec) if options.advantage == "gae" else ()
    optimizer, lora = policy_config.optimizer_config(options), training_config.lora_config(options)
    state = state_bytes(spec, optimizer, lora, heads)
    show_plan(
        job, options, flops, state, 4 * n + state.adapters,
        {
            "parameters": f"{n:,}",
            "prompts": f"{len(prompts):,}, the longest of {longest:,} tokens",
            "steps": f"{options.steps:,} of {options.prompts} prompts x {options.group} samples",
            "samples": f"{samples:,} of at most {options.max_new_tokens} tokens",
            "epochs": f"{options.steps * options.prompts / len(prompts):.2f}",
        },
    )  # fmt: skip


def _engine(
    call: RunCall, options: GrpoOptions, spec: ModelSpec, params: Params, tokenizer: Tokenizer
) -> Engine:
    """What samples: the engine of this process, or a server."""
    lora, exact = training_config.lora_config(options), options.exact
    # adapters of codes cannot be merged, and merging rounds
    adapters = lora if lora and (lora.base or exact) else None
    ops = build_ops(call.job.backend, spec if exact else None, adapters=adapters, exact=exact)
    if not options.sampler_url:
        return Engine(spec, params, tokenizer, ops=ops)
    if not Path(options.sampler_folder).is_dir():
        raise UsageError(f"--sampler-folder: {options.sampler_folder} is not a directory")
    path = str(call.directory.path.resolve()).encode()
    run = hashlib.blake2b(path, digest_size=6).hexdigest()
    return ServedPolicy(spec, params, tokenizer, ops=ops, options=options, run=run)


def _training(
    call: RunCall, options: GrpoOptions, spec: ModelSpec, mesh: Mesh, tokenizer: Tokenizer,
    prompts: list[Prompt], held_out: list[Prompt], grader: Grader, table: StepTable,
    teacher: OnPolicyTeacher | None,
) -> TrainingRun:  # fmt: skip
    job, world = call.job, call.world
    lora = training_config.lora_config(options)
    params = load_arrays(options.model, lora) if lora and lora.base else load_fp32(options.model)
    optimizer, schedule = (
        policy_config.optimizer_config(options, spec.hidden_size),
        policy_config.schedule_config(options),
    )
    estimated = options.advantage == "gae"
    loss = partial(
        grpo_loss, options=options, remat=cast(Remat, options.remat),
        value=options if estimated else None,
    )  # fmt: skip
    start = training_config.start_params(options, spec, params)
    stepper = make_stepper(
        job.backend, spec, start, loss, optimizer, mesh=mesh, lora=lora, seed=job.seed,
        precision=PrecisionSchedule(precision_named(options.precision), options.steps), world=world,
        compiled=options.compile, heads=value_head(spec) if estimated else (), exact=options.exact,
    )  # fmt: skip
    engine = _engine(call, options, spec, without_head(stepper.whole_params()), tokenizer)
    dtype = "float32" if options.precision == "fp32" else "bfloat16"
    engine.draft = load_draft(options, engine, dtype, job.backend)
    schedule_of_prompts = PromptSchedule(prompts, options.prompts, job.seed, options.curriculum)
    sampler = Sampler(
        options, engine, schedule_of_prompts, grader,
        NullGuard(options.max_null), _journal(call, options), world, job.seed,
    )  # fmt: skip
    reference = None
    if options.beta and lora and lora.base:
        reference = {k: p.clone() if A in k or B in k else p for k, p in engine.params.items()}
    elif options.beta:
        reference = engine.ops.to_device(merged(start, lora) if lora else start, "float32")
    source = SampleSource(options, stepper, sampler, table, reference, lora, teacher)
    length = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
    what = f"{options.steps:,} steps of {options.prompts} prompts x {options.group} samples"
    meter = make_meter(call, options, spec, mesh, length, packed=False, what=what)
    objective = PolicyObjective(source, table, held_out)
    return make_run(
        call, options, mesh, stepper, source, objective, meter, optimizer, schedule,
        data={"of_prompts": len(prompts)}, best_by=GREEDY if held_out else "",
    )  # fmt: skip


def check_exact(spec: ModelSpec, mesh: Mesh) -> None:
    """See that a run can be exactly on policy (--exact). Raises UsageError where the
    log-probabilities of sampler and trainer can differ in bits."""
    if cause := _inexact(spec, mesh):
        raise UsageError(f"--exact: not with {cause}; train without --exact")


def _inexact(spec: ModelSpec, mesh: Mesh) -> str:
    """What is in the way, '' for nothing."""
    from sabia.core.ops.device_torch import default_device
    from sabia.kernels.runtime.torch_fp32 import HAS_ONEDNN

    if default_device().type != "cpu":
        return "a GPU (expected a CPU)"
    if not HAS_ONEDNN:
        return "this processor (expected x86-64 and a torch that has oneDNN)"
    if mesh.size > mesh.data * mesh.fsdp:
        return f"--mesh {mesh} (expected data and fsdp alone)"
    for layer in spec.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            return f"{type(mixer).__name__} layers (expected plain attention)"
        if mixer.softcap is not None or mixer.sinks:
            return "capped attention or sinks (expected plain attention)"
    return ""


@dataclass(frozen=True)
class PolicyObjective:
    """The figures of a run (see core.train.loop.Objective): rewards and samples of each step, and
    rewards of held-out prompts."""

    source: SampleSource
    table: StepTable
    held_out: Sequence[Prompt]

    def display(self, total: int, done: int) -> AbstractContextManager[StepTable]:
        """See Objective: a row per step."""
        return contextlib.nullcontext(self.table)

    def tokens(self, results: Results, sums: np.ndarray) -> tuple[int, int]:
        """See Objective."""
        trained = sum(result.extras.get("tokens", 0.0) for result in results)
        return int(trained), int(sums[SUMS.index("computed")])

    def figures(self, results: Results, sums: np.ndarray, lr: float) -> dict[str, object]:
        """See Objective."""
        return self.table.figures(results, sums, lr)

    def details(self, results: Results, sums: np.ndarray) -> dict[str, object]:
        """See Objective: the rate of sampling."""
        return {"tokens_per_s": metrics_row(0.0, sums, results)["tokens_per_s"]}

    def summary(self, row: dict[str, Any]) -> dict[str, object]:
        """See Objective."""
        if GREEDY in row:
            return {name: row[name] for name in (GREEDY, SAMPLED)}
        rewards = self.table.rewards
        return {"samples": self.table.samples, "reward_first": rewards[0], "reward": rewards[-1]}

    def validate(self, step: int) -> dict[str, object]:
        """See Objective: the mean rewards of a greedy and of a sampled answer to each prompt."""
        if not self.held_out:
            return {}
        self.source.use_policy(step)
        means, count = {}, 0
        for name, temperature in ((GREEDY, 0.0), (SAMPLED, self.source.options.temperature)):
            total, graded = self.source.held_out_rewards(self.held_out, temperature)
            means[name] = total / max(graded, 1.0)
            count = count or int(graded)
        notes.note(
            f"step {step:,}: validation reward {means[GREEDY]:.4f}, sampled {means[SAMPLED]:.4f}"
        )
        return {**means, "validation_prompts": count}
