"""Recipe ensemble: each of several models answers a prompt record; what they agree on is kept.

`segments` says what agreement is. The chat record has the answer of which most is supported by a
quorum, without its other segments and without reasoning. A record is rejected if a call of a model
failed, because another model's segments may have needed its support, and if too little is left. An
answer that is cut short, empty, or calls a tool supports nothing. New columns: `ensemble_model`
(the table of the model whose answer it is), `ensemble_share` (of its characters that are kept),
`ensemble_segments` (its segments, the models that support each, and whether it is kept),
`rewrite_recipe`, `rewrite_model` and `rewrite_finish_reason`.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.generate.budget import Budget
from sabia.core.generate.calls import ChatRequest
from sabia.core.generate.model_servers import ModelServer, load_servers
from sabia.core.generate.opened import cost_so_far, open_budget, open_client, print_total
from sabia.core.generate.thinking import thinking_fields
from sabia.core.judge.opened_judges import note_calls
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext
from sabia.core.text.rewrite import segments
from sabia.core.text.rewrite.model_engine import (
    Answers,
    Collect,
    EndpointAnswers,
    local_answers,
    one_process,
)
from sabia.core.text.rewrite.prompt_records import (
    SCHEMA,
    Answer,
    Row,
    answer_of,
    answered,
    answered_shard,
    check_options,
    conversation,
    prompt_sources,
    usable,
)
from sabia.core.text.rewrite.review import run_reviewed
from sabia.core.text.rewrite.rewrite_recipe import Ensemble
from sabia.core.text.rewrite.segments import Agreed, Limits

OWN = pa.schema([
    *SCHEMA,
    pa.field("ensemble_model", pa.string()), pa.field("ensemble_share", pa.float64()),
    pa.field("ensemble_segments", pa.list_(pa.struct([
        ("text", pa.string()), ("models", pa.list_(pa.string())), ("kept", pa.bool_()),
    ]))),
    *(pa.field(f"rewrite_{name}", pa.string()) for name in ("recipe", "model", "finish_reason")),
])  # fmt: skip
Models = Mapping[str, Answers]


@dataclass(frozen=True)
class Prompt:
    """A prompt record, its number in its batch, and the request for its answers to each model."""

    number: int
    record: Mapping[str, Any]
    requests: Mapping[str, ChatRequest]


def run(job: Job, options: RewriteOptions, recipe: Ensemble) -> None:
    """Write chat records of the job's prompt records; raise what the shards and clients raise."""
    check_options(options, recipe.name)
    if options.judge or options.judge_url:
        raise UsageError(
            f"--judge: recipe {recipe.name} has no judge (best-of and constitution do)"
        )
    if not options.models:
        raise UsageError(f"--models: is missing (recipe {recipe.name} asks several models)")
    servers = load_servers("--models", options.models, addressed=options.engine == "endpoint")
    limits = recipe.agreement.limits(len(servers))
    job = one_process(job)
    budget = open_budget(options, job, options.max_tokens)
    with ExitStack() as opened:
        models = {}
        for server in servers:
            models[server.name] = _open(server, options, budget)
            opened.callback(models[server.name].close)
        clients = {name: one.client for name, one in models.items() if one.client is not None}
        asked = options.temperature
        temperature = recipe.answers.temperature if asked is None else asked
        asker = Asker(models, recipe, limits, temperature, job.seed)
        sources, schema = prompt_sources(job, OWN)
        if job.dry_run:
            print_estimates(asker, sources)
        named = [(s.name, s.model, models[s.name].fingerprint) for s in servers]
        run_reviewed(
            job, options, partial(answered_shard, asker=asker, schema=schema), sources,
            f"{recipe.digest} {named}", schema,
            partial(cost_so_far, list(clients.values())),
        )  # fmt: skip
        if not job.dry_run:
            for name, client in clients.items():
                note_calls(name, client)


def _open(server: ModelServer, options: RewriteOptions, budget: Budget) -> Answers:
    if not server.urls:
        return local_answers(server.model, options)
    if server.price is not None:
        budget.prices = {server.model: server.price, **budget.prices}
    client = open_client(
        server.urls, server.model, options, options.cache, budget, options.timeout,
        server.api_key_env,
    )  # fmt: skip
    return EndpointAnswers(client, options.chat, thinking_fields(options))


@dataclass(frozen=True)
class Asker:
    """Asks several models for the answer to a record."""

    base = "ensemble"
    own = OWN

    models: Models
    recipe: Ensemble
    limits: Limits
    temperature: float
    seed: int

    def prompt(self, number: int, record: Mapping[str, Any]) -> Prompt:
        """The requests for a record; raises BadData for a damaged one."""
        messages, tools = conversation(record)
        return Prompt(number, record, {
            name: ChatRequest(
                messages,
                max_tokens=self.recipe.answers.max_tokens,
                temperature=self.temperature,
                seed=self.seed if self.temperature > 0 else None,
                extra={**model.extra, **tools},
            )
            for name, model in self.models.items()
        })  # fmt: skip

    def submit(self, prompts: Sequence[Prompt]) -> dict[str, Collect]:
        """Start the calls of each model for the prompts."""
        return {
            name: model.submit([prompt.requests[name] for prompt in prompts])
            for name, model in self.models.items()
        }

    def rows(
        self, prompts: Sequence[Prompt], collect: Mapping[str, Collect], context: ShardContext
    ) -> list[Row]:
        """Wait for the answers of a batch, and make rows of what is agreed on."""
        by_model = {name: [answer_of(one) for one in wait()] for name, wait in collect.items()}
        rows = list[Row]()
        for index, prompt in enumerate(prompts):
            answers = {name: given[index] for name, given in by_model.items()}
            reason, agreed = _agreed(answers, self.limits, self.recipe.agreement.kept)
            if agreed is None:
                context.reject(dict(prompt.record), f"ensemble: {reason}")
                continue
            context.count("segments", len(agreed.segments))
            context.count("kept", sum(one.kept for one in agreed.segments))
            response = answers[agreed.model].response
            rows.append((prompt.number, {
                **answered(prompt.record, agreed.text),
                "ensemble_model": agreed.model,
                "ensemble_share": agreed.share,
                "ensemble_segments": [asdict(one) for one in agreed.segments],
                "rewrite_recipe": self.recipe.name,
                "rewrite_model": response.model or self.models[agreed.model].name,
                "rewrite_finish_reason": response.finish_reason,
            }))  # fmt: skip
        return rows


def print_estimates(asker: Asker, sources: Sequence[Any]) -> None:
    """Print the most that the answers would cost (`--dry-run`)."""
    made = [
        model.print_estimate(
            prompt.requests[name] for prompt in usable(sources, ["messages", "tools"], asker.prompt)
        )
        for name, model in asker.models.items()
    ]
    print_total([one for one in made if one is not None])


def _agreed(
    answers: Mapping[str, Answer], limits: Limits, least: float
) -> tuple[str, Agreed | None]:
    """What the models agree on, or the reason why there is no such answer."""
    for name, answer in answers.items():
        if answer.response.error:
            return f"{name}: {answer.response.error}", None
    usable = {name: answer.text for name, answer in answers.items() if not answer.reason}
    if len(usable) < limits.quorum:
        reasons = "; ".join(f"{name}: {one.reason}" for name, one in answers.items() if one.reason)
        return f"{len(usable)} answers (expected {limits.quorum} or more): {reasons}", None
    agreed = segments.agree(usable, limits)
    if not agreed.text.strip() or agreed.share < least:
        return f"{agreed.share:.0%} of the answer has a quorum (expected {least:.0%} or more)", None
    return "", agreed
