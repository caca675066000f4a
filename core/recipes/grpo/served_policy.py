"""The policy behind a server that draws the samples (--sampler-url).

Before each step the weights are written to a folder that the server reads (`sabia serve --updates`)
and it is told to load them; the answer is their version, which every token of every sample must
have. Token ids go in; ids and the log-probabilities of the distribution that was drawn from come
out. Of each step some samples are scored by the trainer before any is used, so that a server that
samples from another distribution is refused by name. One that does not answer is waited for.
"""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from sabia.core import notes
from sabia.core.errors import Failed, Unavailable, UsageError
from sabia.core.generate.calls import Refused, Retryable, check_status
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import LENGTH, STOP, Completion, Request
from sabia.core.generate.thinking import BUDGET, FORCED, thinking_fields
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.process_group import gather_objects
from sabia.core.parallel.world import World
from sabia.core.recipes.grpo.policy_config import max_gap
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import arrays_of, of_few_shapes, score

KEY = "SABIA_API_KEY"  # variable of the server's token
CONCURRENT = 64  # requests
OUTAGE_S = 600.0  # without an answer
LONGEST_WAIT_S = 30.0
POLL_S = 0.1
CHECKED = 4  # samples of each step
# temperatures that are tried where the log-probabilities are not those of --temperature
TEMPERATURES = np.geomspace(0.25, 4.0, 49)
Json = dict[str, Any]


class ServedPolicy(Engine):
    """An `Engine` whose samples a server draws. `run`: a name of the run, for its files."""

    def __init__(self, *model: Any, options: GrpoOptions, run: str, **more: Any) -> None:
        super().__init__(*model, **more)
        self.options, self.run = options, run
        self.url = options.sampler_url.rstrip("/")
        self.folder = Path(options.sampler_folder)
        self._delivered: int | None = None  # the step before which the weights were sent
        self._version, self._checked, self._name = 0, 0, ""
        self._answered = self._warned = False

    def deliver(self, step: int, world: World) -> None:
        """Have the server draw from the present parameters, those before `step`; every process
        calls it. Raises UsageError, Failed or Unavailable."""
        if self._delivered == step:
            return
        version = self._send(step) if world.leads else 0
        self._version, self._checked = gather_objects(world, version)[0], 0
        self._delivered = step

    def _send(self, step: int) -> int:
        """Write the weights and have them loaded; their version."""
        for old in self.folder.glob(f"policy-{self.run}-*"):
            shutil.rmtree(old, ignore_errors=True)  # of a process that was killed
        written = self.folder / f"policy-{self.run}-{step}"
        hub.save_model(written, self.spec, self.ops.to_numpy(self.params))
        root = self.url.removesuffix("/v1")
        try:
            (reply,) = self._answers([(f"{root}/update_weights", {"path": written.name})])
        finally:
            shutil.rmtree(written, ignore_errors=True)
        if not isinstance(version := reply.get("version"), int):
            raise UsageError(f"--sampler-url: {self.url} gives its weights no version")
        return version

    def _run(self, requests: Sequence[Request]) -> Iterator[Completion]:
        if not self._name:
            (models,) = self._answers([(f"{self.url}/models", None)])
            self._name = models["data"][0]["id"]
        by_name = {request.name: request for request in requests}
        calls = [(f"{self.url}/completions", self._body(request)) for request in requests]
        for reply in self._answers(calls):
            request = by_name[reply["asked"]["request_id"]]
            samples = [self._sample(request, choice) for choice in reply["choices"]]
            if len(samples) != request.n:
                raise UsageError(f"--sampler-url: {self.url} gave {len(samples)} of {request.n}")
            self._check(request, samples)
            yield from (samples[number] for number in request.samples)

    def _body(self, request: Request) -> Json:
        return {
            "model": self._name, "prompt": list(request.prompt), "n": request.n,
            "max_tokens": request.max_new_tokens, "temperature": request.temperature,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "seed": request.seed, "request_id": request.name, "logprobs": 0,
            "return_token_ids": True, **thinking_fields(self.options),
        }  # fmt: skip

    def _sample(self, request: Request, choice: Json) -> Completion:
        """A choice as a sample. Raises UsageError, or Unavailable for one of other weights."""
        tokens, raw = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not tokens or not raw or len(tokens) != len(raw):
            raise UsageError(
                f"--sampler-url: {self.url} gives no token ids with log-probabilities (expected a "
                "server such as sabia serve)"
            )
        if other := set(choice.get("weight_versions") or [None]) - {self._version}:
            raise Unavailable(
                f"--sampler-url: {self.url} drew samples from weights of version {other.pop()} "
                f"(expected {self._version}): it was started again, or has another trainer; run "
                "the same command again to send the weights"
            )
        if request.thinking and FORCED not in choice:
            raise UsageError(f"--sampler-url: {self.url} ignores {BUDGET} (expected sabia serve)")
        reason = STOP if choice["finish_reason"] == STOP else LENGTH
        text = self.tokenizer.decode(tokens[:-1] if reason == STOP else tokens)
        drawn = choice.get("drawn_logprobs") or raw
        return Completion(
            request.name, int(choice["index"]), tokens, text, drawn, raw, reason,
            choice[FORCED] if request.thinking else [],
        )  # fmt: skip

    def _check(self, request: Request, samples: Sequence[Completion]) -> None:
        """Raise Failed if the samples' log-probabilities are not those of the trainer."""
        if not request.temperature or self._checked >= CHECKED:
            return
        some = samples[: CHECKED - self._checked]
        self._checked += len(some)
        prompt = Prompt("", (), tuple(request.prompt), None, None)
        batch = arrays_of([(prompt, [(sample, 0.0) for sample in some])], self.options, 1)
        if self.ops.name == "jax":
            batch = of_few_shapes(batch, 1, 1)
        rows, mask = len(batch["targets"]), batch["loss_mask"]

        def gap(temperature: float) -> float:
            """Mean difference in nats from the trainer at a temperature."""
            ours = score(self.spec, self.params, batch, self.ops, temperature, rows)
            return float((np.abs(ours - batch["sampler"]) * mask).sum() / mask.sum())

        cause = mismatch(gap, request.temperature, 2 * max_gap(self.options))  # of few tokens
        if cause:
            raise Failed(f"--sampler-url: {self.url} {cause}; no sample of it was used")

    def _answers(self, calls: Sequence[tuple[str, Json | None]]) -> Iterator[Json]:
        """The replies to requests (None: GET), with their bodies as `asked`, as they arrive."""
        loop, tasks = asyncio.new_event_loop(), set[asyncio.Task[Json]]()
        http = loop.run_until_complete(_session())
        try:
            limit = asyncio.Semaphore(CONCURRENT)
            tasks = {loop.create_task(self._answer(http, limit, *call)) for call in calls}
            while tasks:
                if self.on_step is not None:
                    self.on_step()
                waits: Any = {"timeout": POLL_S, "return_when": asyncio.FIRST_COMPLETED}
                done, tasks = loop.run_until_complete(asyncio.wait(tasks, **waits))
                yield from [task.result() for task in done]
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.run_until_complete(http.close())
            loop.close()

    async def _answer(
        self, http: aiohttp.ClientSession, limit: asyncio.Semaphore, url: str, body: Json | None
    ) -> Json:
        """One reply, after as many attempts as it takes. Raises Failed, or Unavailable after a
        long outage."""
        since, wait = time.monotonic(), POLL_S
        while True:
            try:
                async with limit:
                    reply = await _once(http, url, body)
                self._answered, self._warned = True, False
                return reply | {"asked": body}
            except Refused as error:
                raise UsageError(f"--sampler-url: {error}") from error
            except (Retryable, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                line = f"{url}: {' '.join(str(error).split()) or type(error).__name__}"
            if time.monotonic() - since > OUTAGE_S:
                if self._answered:
                    raise Unavailable(f"--sampler-url: {line}; run again when the server is back")
                raise Failed(f"--sampler-url: {line}; it has never answered")
            if not self._warned:
                self._warned = True
                notes.warn(f"--sampler-url: {line}; waiting for the server")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)


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


async def _session() -> aiohttp.ClientSession:
    key = os.environ.get(KEY, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=OUTAGE_S)
    return aiohttp.ClientSession(headers=headers, timeout=timeout)


async def _once(http: aiohttp.ClientSession, url: str, body: Json | None) -> Json:
    call = http.get(url) if body is None else http.post(url, json=body)
    async with call as answer:
        raw = await answer.read()
        check_status(answer.status, answer.headers, raw, url)
    reply = json.loads(raw)
    if not isinstance(reply, dict):
        raise ValueError("the reply is no JSON object")
    return reply
