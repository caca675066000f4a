"""Recipe best-of: several sampled answers to each prompt record; the best become chat records.

The answers are graded by verifiers, rubrics and judges, as in `sabia grpo`. An answer is accepted
if it is complete, calls no tool, and has the score that the recipe asks for. A record without an
accepted answer is rejected, with the reason. New columns: `best_of_id` (of the prompt record),
`best_of_score`, `best_of_scores` (of all samples; null where one has no score), `best_of_sample`
(the number of the answer among them), `best_of_reward`, `best_of_items` (verdicts), and
`rewrite_recipe`, `rewrite_model` and `rewrite_finish_reason`.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.generate.calls import ChatRequest, ChatResponse
from sabia.core.generate.chat_variables import server_variables
from sabia.core.generate.client import Client
from sabia.core.generate.message_forms import message_of
from sabia.core.generate.opened import cost_so_far, open_budget, open_client, print_estimate
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.generate.template_engine import from_json
from sabia.core.judge.opened_judges import judges_identity, note_calls, open_panel
from sabia.core.judge.rewards import RUBRIC, Case, Grader, parse_reward
from sabia.core.judge.rubric import Rubric
from sabia.core.judge.verdict import Grade
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards import schemas
from sabia.core.shards.dry_run import unmeasured
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.text.rewrite.model_engine import BATCHES_AHEAD, one_process
from sabia.core.text.rewrite.rewrite_recipe import BestOf

OF_DOCUMENTS = ("on_unfaithful", "text_column")
EQUAL = 1e-9  # a score that is lower by less is high enough
PROMPT = schemas.KINDS["prompt"]
SCHEMA = pa.schema([
    *schemas.KINDS["chat"], PROMPT.field("rubric"), PROMPT.field("answer"),
    pa.field("best_of_id", pa.string()), pa.field("best_of_score", pa.float64()),
    pa.field("best_of_scores", pa.list_(pa.float64())), pa.field("best_of_sample", pa.int64()),
    pa.field("best_of_reward", pa.string()),
    schemas.KINDS["sample"].field("items").with_name("best_of_items"),
    *(pa.field(f"rewrite_{name}", pa.string()) for name in ("recipe", "model", "finish_reason")),
])  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A prompt record, its rubric, and the calls for its answers."""

    record: Mapping[str, Any]
    rubric: Rubric | None
    calls: Sequence[Future[ChatResponse]]


@dataclass(frozen=True)
class Answer:
    """One sample: its text without reasoning, and why it cannot be graded ('' if it can)."""

    text: str
    reasoning: str
    response: ChatResponse
    reason: str


def run(job: Job, options: RewriteOptions, recipe: BestOf) -> None:
    """Write chat records of the job's prompt records; raise what the shards and clients raise."""
    if options.engine != "endpoint":
        raise UsageError(
            f"--engine {options.engine}: recipe {recipe.name} asks a server (expected --engine "
            "endpoint)"
        )
    if unused := [name for name in OF_DOCUMENTS if name in options.given]:
        flag = unused[0].replace("_", "-")
        raise UsageError(f"--{flag}: only for documents (recipe {recipe.name} reads prompts)")
    weights = parse_reward(recipe.samples.reward)
    if RUBRIC not in weights and (options.judge or options.judge_url):
        raise UsageError(
            f"--judge: reward {recipe.samples.reward} of recipe {recipe.name} asks no judge "
            "(expected a recipe with reward rubric)"
        )
    job = one_process(job)
    budget = open_budget(options, job, options.max_tokens)
    with (
        open_panel(options, budget) as panel,
        open_client(
            options.url, options.model, options, options.cache, budget, options.timeout
        ) as client,
    ):
        grader = Grader(weights, panel, options.max_unknown)
        sampler = Sampler(client, recipe, options.temperature, job.seed, options.chat)
        sources = open_inputs(job, "prompt", once=True)
        if job.dry_run:
            requests = (
                request
                for source in sources
                for batch in source.batches(columns=["messages", "tools"])
                for record in batch.to_pylist()
                for request in sampler.requests(record)
            )
            print_estimate(client, requests)
        run_map(
            job, partial(best_of_shard, sampler=sampler, grader=grader), "prompt", "chat", sources,
            f"{recipe.digest} {judges_identity(options)}", schema=SCHEMA, sampled=unmeasured,
            live=lambda: cost_so_far(client.stats + grader.stats if panel else client.stats),
        )  # fmt: skip
        if not job.dry_run:
            note_calls("samples", client)


class Sampler:
    """Asks a server for the answers to prompt records."""

    def __init__(
        self, client: Client, recipe: BestOf, temperature: float | None, seed: int, chat: str
    ) -> None:
        """temperature: None for that of the recipe. Raises UsageError for equal samples."""
        self.client, self.recipe, self.seed = client, recipe, seed
        self.temperature = recipe.samples.temperature if temperature is None else temperature
        self.extra = server_variables(chat)
        if self.temperature == 0 and recipe.samples.count > 1:
            raise UsageError(
                f"--temperature: 0 gives {recipe.samples.count} equal samples (expected above 0)"
            )

    def requests(self, record: Mapping[str, Any]) -> list[ChatRequest]:
        """The requests for the answers to a record; raises BadData for a damaged one."""
        messages = [message_of(message) for message in record["messages"] or ()]
        if not messages or messages[-1].get("role") == "assistant":
            raise BadData("the conversation does not end with a turn to answer")
        tools = {"tools": from_json(record["tools"], "tools")} if record["tools"] else {}
        return [
            ChatRequest(
                messages,
                max_tokens=self.recipe.samples.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                vote=number,
                extra={**self.extra, **tools},
            )
            for number in range(self.recipe.samples.count)
        ]

    def submit(self, record: Mapping[str, Any], grader: Grader) -> Prompt:
        """Start the calls for a record; raises BadData if they or the reward cannot use it."""
        rubric = grader.check(record["answer"], record["rubric"])
        return Prompt(record, rubric, [self.client.submit(r) for r in self.requests(record)])


def best_of_shard(
    batches: Iterator[pa.RecordBatch], context: ShardContext, sampler: Sampler, grader: Grader
) -> Iterator[pa.RecordBatch]:
    """The accepted answers to a shard of prompt records, with up to BATCHES_AHEAD batches requested
    in advance: a transform for `run_map`."""
    pending: deque[list[Prompt]] = deque()
    for batch in batches:
        prompts = []
        for record in batch.to_pylist():
            try:
                prompts.append(sampler.submit(record, grader))
            except BadData as error:
                context.reject(record, f"best-of: {error}")
        pending.append(prompts)
        if len(pending) > BATCHES_AHEAD:
            yield _finish(pending.popleft(), context, sampler, grader)
    while pending:
        yield _finish(pending.popleft(), context, sampler, grader)


def _finish(
    prompts: Sequence[Prompt], context: ShardContext, sampler: Sampler, grader: Grader
) -> pa.RecordBatch:
    """Wait for the answers of a batch, grade them, and make rows of those that are accepted."""
    responses = iter(sampler.client.wait([call for prompt in prompts for call in prompt.calls]))
    answers = [[_answer(next(responses)) for _ in prompt.calls] for prompt in prompts]
    cases = [
        Case(p.record["messages"], one.text, p.record["answer"], p.rubric)
        for p, given in zip(prompts, answers, strict=True)
        for one in given
        if not one.reason
    ]
    grades = iter(grader.grade(cases))
    rows = []
    for prompt, given in zip(prompts, answers, strict=True):
        graded = [(one, Grade(None) if one.reason else next(grades)) for one in given]
        made = list(_rows(prompt, graded, sampler.recipe, sampler.client.model))
        context.count("samples", len(graded))
        context.count("accepted", sum(_accepted(grade, sampler.recipe) for _, grade in graded))
        if not made:
            context.reject(dict(prompt.record), f"best-of: {_why_none(graded, sampler.recipe)}")
        rows += made
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _answer(response: ChatResponse) -> Answer:
    text, reasoning = split_reasoning(response.text or "")
    given = response.message.get("reasoning_content")
    reasoning = given if isinstance(given, str) else reasoning
    try:
        f"{text or ''}{reasoning}".encode()
    except UnicodeEncodeError:
        return Answer("", "", response, "not valid Unicode")
    reason = response.error or ""
    if not reason and response.message.get("tool_calls"):
        reason = "calls a tool"
    if not reason and response.finish_reason not in ("stop", None):
        reason = f"cut short (finish reason {response.finish_reason})"
    if not reason and not (text or "").strip():
        reason = "empty"
    return Answer(text or "", reasoning, response, reason)


def _accepted(grade: Grade, recipe: BestOf) -> bool:
    return grade.score is not None and grade.score > recipe.samples.min_score - EQUAL


def _rows(
    prompt: Prompt, graded: Sequence[tuple[Answer, Grade]], recipe: BestOf, model: str
) -> Iterator[dict[str, Any]]:
    """A chat record for each of the best accepted answers; of equal scores, the first ones."""
    record, samples = prompt.record, recipe.samples
    order = sorted(
        (number for number, (_, grade) in enumerate(graded) if _accepted(grade, recipe)),
        key=lambda number: -(graded[number][1].score or 0.0),
    )
    texts: dict[str, int] = {}
    for number in order:
        texts.setdefault(graded[number][0].text, number)
    for number in list(texts.values())[: samples.keep]:
        answer, grade = graded[number]
        turn = {
            "role": "assistant",
            "content": answer.text,
            "reasoning_content": answer.reasoning or None,
        }
        yield {
            **{name: record[name] for name in ("tools", "meta", "rubric", "answer")},
            "id": record["id"] if samples.keep == 1 else f"{record['id']}-{number}",
            "messages": [*record["messages"], turn],
            "best_of_id": record["id"],
            "best_of_score": grade.score,
            "best_of_scores": [one.score for _, one in graded],
            "best_of_sample": number,
            "best_of_reward": samples.reward,
            "best_of_items": grade.items(),
            "rewrite_recipe": recipe.name,
            "rewrite_model": answer.response.model or model,
            "rewrite_finish_reason": answer.response.finish_reason,
        }


def _why_none(graded: Sequence[tuple[Answer, Grade]], recipe: BestOf) -> str:
    """Why no answer to a record is accepted."""
    scores = [grade.score for _, grade in graded if grade.score is not None]
    if scores:
        return (
            f"no sample of {len(graded)} has a score of {recipe.samples.min_score:g} or more (the "
            f"best has {max(scores):g})"
        )
    reason = next((answer.reason for answer, _ in graded if answer.reason), "the judge failed")
    return f"no sample of {len(graded)} has a score: {reason}"
