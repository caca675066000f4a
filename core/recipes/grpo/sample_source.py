"""The samples of a GRPO run as the source of its training: one rollout a step, its updates.

Every process samples its share of the prompts with the whole policy. On a mesh along `data` alone a
process trains on its own samples. On other meshes all processes exchange the samples and take equal
parts of the same batch, because those that share weights or tokens must make the same passes.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sabia.core import stop
from sabia.core.generate.session import Counts
from sabia.core.judge.reward_checks import RewardChecks
from sabia.core.model.lora import LoraConfig, base_names, merged
from sabia.core.model.routing import Routing
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.process_group import gather_objects
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import (
    Batch,
    Group,
    TrainingSamples,
    arrays_of,
    divided,
    empty_batch,
    is_dull,
    micro_batches,
    micro_rows,
    of_few_shapes,
    own_rows,
    row_tokens,
    score,
    training_samples,
    with_slots,
)
from sabia.core.recipes.grpo.sampler import Sampler
from sabia.core.recipes.grpo.served_policy import ServedPolicy
from sabia.core.recipes.grpo.step_table import StepTable, step_sums
from sabia.core.recipes.grpo.teacher_scores import OnPolicyTeacher
from sabia.core.recipes.grpo.value_estimates import Estimates, estimated, normalise
from sabia.core.train.losses import grpo
from sabia.core.train.losses.value import without_head
from sabia.core.train.stepper import Stepper


@dataclass
class SampleSource:
    """See core.train.loop.Source; `reference`: the initial parameters, where --beta needs them."""

    options: GrpoOptions
    stepper: Stepper
    sampler: Sampler
    table: StepTable
    reference: dict[str, Any] | None
    lora: LoraConfig | None
    teacher: OnPolicyTeacher | None = None
    _distance: tuple[float, float] = (0.0, 0.0)  # of the samples from the teacher; see step_sums
    _estimates: Estimates = field(default_factory=Estimates)  # of the values of a step
    _sums: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        mesh, self.world = self.stepper.mesh, self.sampler.world
        self.engine, self.step = self.sampler.engine, 0
        self.head: dict[str, Any] = {}  # the value head, if there is one
        self.routing = Routing.of(self.stepper.spec) if self.options.routing_replay else None
        self.engine.on_step = self._on_step
        if self.teacher is not None:
            self.teacher.on_wait = self._on_step
        # processes must make the same passes
        self.shared = self.world.size > 1 and mesh.size > mesh.data
        prompts = self.sampler.schedule.prompts
        self._numbers = {id(prompt): number for number, prompt in enumerate(prompts)}
        self._outcomes: dict[int, bool] = {}  # of the last step: whether a prompt was dull
        jax = self.engine.ops.name == "jax"
        self.compiled = jax or self.options.compile
        self.devices = mesh.rows if jax else 1  # of this process

    def open(self, run: object, leads: bool) -> None:
        """See Source."""

    def batches(self, step: int) -> Iterator[Batch]:
        """See Source: --updates batches, all of the samples of one rollout."""
        started, before, self.step = time.monotonic(), self.sampler.grader.stats, step
        try:
            self.use_policy(step)
            self._settle()
            groups = self.sampler.groups(step)
        except BaseException:
            self.sampler.journal.close()
            raise
        self._note(groups)
        seconds = time.monotonic() - started
        updates = self._updates(groups)
        computed = 1.0 * sum(len(part["targets"]) * row_tokens(part) for part, _ in updates)
        if self.shared:  # equal on the processes that share rows
            computed *= self.stepper.mesh.rows / self.world.size
        after = self.sampler.grader.stats
        figures = (self.sampler.made, seconds, computed, before, after)
        self._sums = step_sums(
            groups, *figures, self.table.sources, self._distance, self.engine.counts,
            self._estimates,
        )  # fmt: skip
        self.engine.counts = Counts()
        for batch, rows in updates:
            self.stepper.micro_batch = rows
            yield batch

    def sums(self) -> np.ndarray:
        """See Source: in the order of step_table.SUMS."""
        return self._sums

    def _updates(self, groups: list[Group]) -> list[tuple[Batch, int]]:
        """The batch of each update, and the rows of a pass over it."""
        options = self.options
        if self.shared:
            every = gather_objects(self.world, groups)  # prompt n is of process n mod size
            groups = sorted((g for part in every for g in part), key=lambda group: group.position)
        training = training_samples(groups, options)
        counts = {position: len(samples) for position, (_, samples) in training.items()}
        if not self.shared:
            counts = {k: n for part in gather_objects(self.world, counts) for k, n in part.items()}
        divisions = divided(training, counts, options.updates)
        self._distance = (0.0, 0.0)
        parts = [self._prepared(samples) for samples in divisions]
        if options.advantage == "gae":
            share = self.stepper.mesh.rows / self.world.size if self.shared else 1.0
            batches = [batch for batch, _ in parts]
            self._estimates = normalise(batches, share, partial(gather_objects, self.world))
        parts = [(self._advised(batch, rows), rows) for batch, rows in parts]
        wide = self.devices if self.compiled else 1
        most = max(micro_batches(part, rows * wide) for part, rows in parts)
        width = max(gather_objects(self.world, most))  # sums over processes have one shape
        return [(with_slots(part, rows * wide, width), rows) for part, rows in parts]

    def _prepared(self, samples: list[TrainingSamples]) -> tuple[Batch, int]:
        """This process's batch of an update, scored, and the rows of a pass.

        Without samples it has a row of weight 0: all processes update equally often.
        """
        options, mesh = self.options, self.stepper.mesh
        # samples of a prompt share a row only where one process computes it in one pass
        one = self.shared or self.compiled or options.remat != "none"
        fan = 1 if one else options.group
        if samples:
            batch = arrays_of(samples, options, fan, self.routing)
        else:
            batch = empty_batch(options, self.routing)
        if self.shared:
            batch = own_rows(batch, *self.stepper.row_part, mesh.context)
        if self.compiled:
            batch = of_few_shapes(batch, options.max_new_tokens, self.devices, mesh.context)
        rows = micro_rows(batch, options, self.devices)
        score_with = partial(
            score, self.stepper.spec, batch=batch, ops=self.engine.ops,
            temperature=options.temperature, rows=rows,
        )  # fmt: skip
        if self.reference is not None:
            batch["ref"] = score_with(self.reference, routes=True)
        if options.updates > 1:
            batch["old"] = score_with(self.engine.params)
        if options.advantage == "gae":
            values = score_with({**self.engine.params, **self.head}, of=grpo.sample_values)
            batch |= estimated(batch, values, options)
        return batch, rows

    def _advised(self, batch: Batch, rows: int) -> Batch:
        """The batch with the advice of the teacher, if there is one."""
        options, mesh = self.options, self.stepper.mesh
        if self.teacher is not None:
            batch = self.teacher.advised(batch, options, rows)
            share = mesh.rows / self.world.size if self.shared else 1.0
            apart, tokens = self.teacher.distance(batch, share)
            self._distance = self._distance[0] + apart, self._distance[1] + tokens
            del batch["teacher"]
        return batch

    def _note(self, groups: Sequence[Group]) -> None:
        """Remember which prompts of a step were solved always or never."""
        if self.sampler.schedule.keep < 1:
            own = {self._numbers[id(group.prompt)]: is_dull(group) for group in groups}
            self._outcomes = {
                n: d for part in gather_objects(self.world, own) for n, d in part.items()
            }

    def _settle(self) -> None:
        """Let the outcomes of the last step decide about the prompts of the next ones."""
        dull = self.sampler.schedule.dull
        for number, is_one in self._outcomes.items():
            (dull.add if is_one else dull.discard)(number)
        self._outcomes = {}

    def use_policy(self, step: int) -> None:
        """Sample from the policy before `step` from now on; every process calls it."""
        self.engine.params = self.sampling_params()
        if isinstance(self.engine, ServedPolicy):
            self.engine.deliver(step, self.world)

    def sampling_params(self) -> dict[str, object]:
        """The policy, whole, in the precision of its training; adapters are merged, except where
        the matrices are codes or merging would round (--exact)."""
        whole, spec = self.stepper.whole_params(), self.stepper.spec
        params = without_head(whole)
        self.head = {name: p for name, p in whole.items() if name not in params}
        codes = base_names(spec, self.lora)
        if self.lora is not None and not codes and not self.options.exact:
            params = merged(params, self.lora)
        if self.options.precision == "fp32":
            return params
        narrow = {t.name for t in spec.tensors() if t.dtype_class == "weight"} - codes
        cast = self.engine.ops.cast
        return {k: cast(p, "bfloat16") if k in narrow else p for k, p in params.items()}

    def held_out_rewards(
        self, prompts: Sequence[Prompt], temperature: float
    ) -> tuple[float, float]:
        """(sum of rewards, samples with a reward) of one sample of each prompt."""
        own = [*enumerate(prompts)][self.world.rank :: self.world.size]
        rewards = self.sampler.held_out_rewards(own, temperature)
        every = gather_objects(self.world, rewards)
        valid = [reward for part in every for reward in part if reward is not None]
        return sum(valid), float(len(valid))

    def _on_step(self) -> None:
        """Between two tokens: end the sampling at a stop signal (several processes: after it)."""
        watchdog.enter_phase(self.step + 1, "sampling")
        if self.world.size == 1:
            stop.check()

    def new_stage(self, step: int) -> bool:
        """See Source: no."""
        return False

    def describe(self, step: int) -> str:
        """See Source: the prompts of the step."""
        names = [prompt.id for prompt in self.sampler.schedule.of_step(step)]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def state(self, step: int) -> dict[str, object]:
        """See Source."""
        data = {"prompts": step * self.options.prompts, "samples": self.table.samples}
        checks = {"window": self.table.checks.window, "warned": sorted(self.table.checks.warned)}
        self._settle()
        dull = sorted(self.sampler.schedule.dull)
        more = {"dull_prompts": dull} if dull else {}
        return {"data": data, "rewards": self.table.rewards, "checks": checks, **more}

    def load(self, name: str, manifest: Mapping[str, Any], step: int) -> None:
        """See Source."""
        self.table.samples = int(manifest["data"]["samples"])
        self.table.rewards = list(manifest["rewards"])
        self._outcomes = {}
        self.sampler.schedule.dull.clear()
        self.sampler.schedule.dull.update(manifest.get("dull_prompts", ()))
        if checks := manifest.get("checks"):  # absent in earlier versions
            self.table.checks = RewardChecks(checks["window"], set(checks["warned"]))

    def close(self) -> None:
        """See Source."""
        with contextlib.suppress(OSError):
            self.sampler.journal.close()
