"""The policy behind a server that draws the samples (--sampler-url).

Before each step the weights are written to a folder that the server reads, and it is told to load
them (`sampler_servers`); they have a version, which every token of every sample must have. Token
ids go in; ids and the log-probabilities of the distribution that was drawn from come out. Of each
step some samples are scored by the trainer before any is used, so that a server that samples from
another distribution is refused by name. One that does not answer is waited for.
"""

import base64
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import Failed, Unavailable, UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import LENGTH, STOP, Completion, Request
from sabia.core.generate.thinking import BUDGET, FORCED, thinking_fields
from sabia.core.model.routing import ROUTED_EXPERTS, Routing
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.process_group import gather_objects
from sabia.core.parallel.world import World
from sabia.core.recipes.grpo.policy_config import max_gap
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import TrainingSamples, arrays_of, of_few_shapes, score
from sabia.core.recipes.grpo.sampler_servers import SamplerServer, server_at
from sabia.core.recipes.grpo.server_calls import Json, ServerCalls

CHECKED = 4  # samples of each step
# temperatures that are tried where the log-probabilities are not those of --temperature
TEMPERATURES = np.geomspace(0.25, 4.0, 49)


class ServedPolicy(Engine):
    """An `Engine` whose samples a server draws. `run`: a name of the run, for its files."""

    def __init__(self, *model: Any, options: GrpoOptions, run: str, **more: Any) -> None:
        super().__init__(*model, **more)
        self.options, self.run = options, run
        self.calls = ServerCalls("--sampler-url", options.sampler_url)
        self.url = self.calls.url
        self.folder = Path(options.sampler_folder)
        self._delivered: int | None = None  # the step before which the weights were sent
        self._version: int | str = 0
        self._checked = 0
        self.routing, self._noted = Routing.of(self.spec) if options.routing_replay else None, False

    def deliver(self, step: int, world: World) -> None:
        """Have the server draw from the present parameters, those before `step`; every process
        calls it. Raises UsageError, Failed or Unavailable."""
        if self._delivered == step:
            return
        version = self._send(step) if world.leads else 0
        self._version, self._checked = gather_objects(world, version)[0], 0
        self._delivered = step

    @cached_property
    def server(self) -> SamplerServer:
        """The server, which is asked for its kind once."""
        return server_at(self.calls)

    def _send(self, step: int) -> int | str:
        """Write the weights and have them loaded; their version."""
        for old in self.folder.glob(f"policy-{self.run}-*"):
            shutil.rmtree(old, ignore_errors=True)  # of a process that was killed
        written = self.folder / f"policy-{self.run}-{step}"
        hub.save_model(written, self.spec, self.ops.to_numpy(self.params))
        try:
            return self.server.load(written, f"{self.run}-{step}")
        finally:
            shutil.rmtree(written, ignore_errors=True)

    def _run(self, requests: Sequence[Request]) -> Iterator[Completion]:
        self.calls.on_wait = self.on_step
        calls = [self.server.call(request, self._more(request)) for request in requests]
        asked = {id(body): request for (_, body), request in zip(calls, requests, strict=True)}
        for reply in self.calls.answers(calls):
            request = asked[id(reply["asked"])]
            samples = [self._sample(request, choice) for choice in self.server.choices(reply)]
            if len(samples) != request.n:
                raise UsageError(f"--sampler-url: {self.url} gave {len(samples)} of {request.n}")
            self._check(request, samples)
            yield from (samples[number] for number in request.samples)

    def _more(self, request: Request) -> Json:
        """Fields of a request that not every server knows."""
        experts = {"return_routed_experts": True} if request.routed_experts else {}
        return {**thinking_fields(self.options), **experts}

    def _sample(self, request: Request, choice: Json) -> Completion:
        """A choice as a sample. Raises UsageError, or Unavailable for one of other weights."""
        tokens, raw = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not tokens or not raw or len(tokens) != len(raw):
            raise UsageError(
                f"--sampler-url: {self.url} gives no token ids with log-probabilities (expected "
                "sabia serve, vLLM or SGLang)"
            )
        if other := set(choice.get("weight_versions") or [None]) - {self._version}:
            raise Unavailable(
                f"--sampler-url: {self.url} drew samples from weights of version {other.pop()} "
                f"(expected {self._version}): it was started again, or has another trainer; run "
                "the same command again to send the weights"
            )
        if request.thinking and FORCED not in choice:
            raise UsageError(f"--sampler-url: {self.url} ignores {BUDGET} (expected sabia serve)")
        if (reason := choice["finish_reason"]) not in (STOP, LENGTH):
            raise Unavailable(
                f"--sampler-url: {self.url} ended a sample with {reason}; run the same command "
                "again"
            )
        text = self.tokenizer.decode(tokens[:-1] if reason == STOP else tokens)
        drawn = choice.get("drawn_logprobs") or raw
        return Completion(
            request.name, int(choice["index"]), tokens, text, drawn, raw, reason,
            choice[FORCED] if request.thinking else [],
            self._experts(choice, len(request.prompt) + len(tokens) - 1)
            if request.routed_experts else b"",
        )  # fmt: skip

    def _experts(self, choice: Json, tokens: int) -> bytes:
        """The experts of so many tokens, b"" from a server that gives none. Raises Failed for those
        of another model."""
        if not (given := choice.get(ROUTED_EXPERTS)):
            if not self._noted:
                self._noted = True
                notes.note(
                    f"--routing-replay: {self.url} gives no {ROUTED_EXPERTS}; each token goes to "
                    "the experts that the trainer's router chooses"
                )
            return b""
        try:
            packed = base64.b64decode(given, validate=True)
            if self.routing:
                self.routing.check(packed, tokens)
        except (ValueError, TypeError) as error:
            raise Failed(
                f"--sampler-url: {self.url} samples from other experts: its {ROUTED_EXPERTS} have "
                f"{error}; no sample of it was used"
            ) from None
        return packed

    def _check(self, request: Request, samples: Sequence[Completion]) -> None:
        """Raise Failed if the samples' log-probabilities are not those of the trainer."""
        if not request.temperature or self._checked >= CHECKED:
            return
        some = samples[: CHECKED - self._checked]
        self._checked += len(some)
        prompt = Prompt("", (), tuple(request.prompt), None, None)
        pairs: TrainingSamples = prompt, [(sample, 0.0) for sample in some]
        batch = arrays_of([pairs], self.options, 1, self.routing)
        if self.ops.name == "jax":
            batch = of_few_shapes(batch, self.options.max_new_tokens, 1, 1)
        rows, mask = len(batch["targets"]), batch["loss_mask"]

        def gap(temperature: float) -> float:
            """Mean difference in nats from the trainer at a temperature."""
            ours = score(self.spec, self.params, batch, self.ops, temperature, rows)
            return float((np.abs(ours - batch["sampler"]) * mask).sum() / mask.sum())

        cause = mismatch(gap, request.temperature, 2 * max_gap(self.options))  # of few tokens
        if cause:
            raise Failed(f"--sampler-url: {self.url} {cause}; no sample of it was used")


def mismatch(gap: Callable[[float], float], temperature: float, bound: float) -> str:
    """What is wrong with a sampler, by the gap of its log-probabilities from those of the trainer
    at any temperature, in nats; '' if it is within the bound at this one."""
    here = gap(temperature)
    if here <= bound:
        return ""
    gaps = [gap(float(t)) for t in TEMPERATURES]
    nearest = int(np.argmin(gaps))
    if gaps[nearest] <= max(bound, here / 4):
        return (
            f"samples at another temperature, about {TEMPERATURES[nearest]:.2g} (expected "
            f"--temperature {temperature:g}), or gives log-probabilities of it"
        )
    return (
        f"samples from other weights or experts: its log-probabilities differ by {here:.3g} nats "
        f"on average (expected at most {bound:g})"
    )
