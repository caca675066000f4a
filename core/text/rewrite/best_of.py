"""Recipe best-of: several sampled answers to each prompt record; the best become chat records.

The answers are graded by verifiers, rubrics and judges, as in `sabia grpo`. An answer is accepted
if it is complete, calls no tool, and has the score that the recipe asks for. A record without an
accepted answer is rejected, with the reason. New columns: `best_of_id` (of the prompt record),
`best_of_score`, `best_of_scores` (of all samples; null where one has no score), `best_of_sample`
(the number of the answer among them), `best_of_reward`, `best_of_items` (verdicts), and
`rewrite_recipe`, `rewrite_model` and `rewrite_finish_reason`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.generate.calls import BYTES_PER_TOKEN, ChatRequest
from sabia.core.generate.opened import print_total
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.judge.llm import Question
from sabia.core.judge.rewards import RUBRIC, Case, Grader, parse_reward
from sabia.core.judge.rubric import Rubric
from sabia.core.judge.verdict import Grade
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards import schemas
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext
from sabia.core.text.rewrite.model_engine import Answers, Collect, one_process
from sabia.core.text.rewrite.prompt_records import (
    SCHEMA,
    Answer,
    Row,
    answer_of,
    answered,
    answered_shard,
    check_options,
    conversation,
    one_model,
    prompt_sources,
    usable,
)
from sabia.core.text.rewrite.review import run_reviewed
from sabia.core.text.rewrite.rewrite_recipe import EQUAL, BestOf

OWN = pa.schema([
    *SCHEMA,
    pa.field("best_of_id", pa.string()), pa.field("best_of_score", pa.float64()),
    pa.field("best_of_scores", pa.list_(pa.float64())), pa.field("best_of_sample", pa.int64()),
    pa.field("best_of_reward", pa.string()),
    schemas.KINDS["sample"].field("items").with_name("best_of_items"),
    *(pa.field(f"rewrite_{name}", pa.string()) for name in ("recipe", "model", "finish_reason")),
])  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A prompt record, its number in its batch, its rubric, and the requests for its answers."""

    number: int
    record: Mapping[str, Any]
    rubric: Rubric | None
    requests: Sequence[ChatRequest]


def run(job: Job, options: RewriteOptions, recipe: BestOf) -> None:
    """Write chat records of the job's prompt records; raise what the shards and clients raise."""
    check_options(options, recipe.name)
    if options.models:
        raise UsageError(f"--models: recipe {recipe.name} asks one model (expected ensemble)")
    weights = parse_reward(recipe.samples.reward)
    if RUBRIC not in weights and (options.judge or options.judge_url):
        raise UsageError(
            f"--judge: reward {recipe.samples.reward} of recipe {recipe.name} asks no judge "
            "(expected a recipe with reward rubric)"
        )
    job = one_process(job)
    with one_model(job, options, recipe, "samples") as (answers, panel, salt, live):
        grader = Grader(weights, panel, options.max_unknown)
        asked = options.temperature
        temperature = recipe.samples.temperature if asked is None else asked
        if temperature == 0 and recipe.samples.count > 1:
            raise UsageError(
                f"--temperature: 0 gives {recipe.samples.count} equal samples (expected above 0)"
            )
        sampler = Sampler(answers, recipe, grader, temperature, job.seed)
        sources, schema = prompt_sources(job, OWN)
        if job.dry_run:
            print_estimates(sampler, sources)
        transform = partial(answered_shard, asker=sampler, schema=schema)
        run_reviewed(job, options, transform, sources, salt, schema, live)


def print_estimates(sampler: "Sampler", sources: Sequence[Any]) -> None:
    """Print the most that the samples and their judges would cost (`--dry-run`)."""

    def prompts() -> Iterator[Prompt]:
        return usable(sources, ["messages", "tools", "rubric", "answer"], sampler.prompt)

    def questions() -> Iterator[Question]:
        for prompt in prompts():
            for number, request in enumerate(prompt.requests if prompt.rubric else ()):
                kept = sampler.answers.cached_text(request)
                unknown = f"{number} ".ljust(
                    int(sampler.recipe.samples.max_tokens * BYTES_PER_TOKEN), "x"
                )
                text = unknown if kept is None else split_reasoning(kept)[0]
                if text and prompt.rubric:
                    yield Question(prompt.record["messages"], text, prompt.rubric)

    made = [sampler.answers.print_estimate(r for p in prompts() for r in p.requests)]
    if sampler.grader.judge is not None:
        made += sampler.grader.judge.print_estimates(questions)
    print_total([one for one in made if one is not None])


@dataclass(frozen=True)
class Sampler:
    """Asks a model for the answers to prompt records."""

    base = "best-of"
    own = OWN

    answers: Answers
    recipe: BestOf
    grader: Grader
    temperature: float
    seed: int

    def prompt(self, number: int, record: Mapping[str, Any]) -> Prompt:
        """The requests for a record; raises BadData if they or the reward cannot use it."""
        rubric = self.grader.check(record["answer"], record["rubric"])
        messages, tools = conversation(record)
        requests = [
            ChatRequest(
                messages,
                max_tokens=self.recipe.samples.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                vote=vote,
                extra={**self.answers.extra, **tools},
            )
            for vote in range(self.recipe.samples.count)
        ]
        return Prompt(number, record, rubric, requests)

    def submit(self, prompts: Sequence[Prompt]) -> Collect:
        """Start the calls for the samples of all prompts."""
        return self.answers.submit([one for prompt in prompts for one in prompt.requests])

    def rows(self, prompts: Sequence[Prompt], collect: Collect, context: ShardContext) -> list[Row]:
        """Wait for the answers of a batch, grade them, and make rows of those that are accepted."""
        responses = iter(collect())
        answers = [
            [answer_of(one) for one in islice(responses, len(prompt.requests))]
            for prompt in prompts
        ]
        cases = [
            Case(p.record["messages"], one.text, p.record["answer"], p.rubric)
            for p, given in zip(prompts, answers, strict=True)
            for one in given
            if not one.reason
        ]
        grades = iter(self.grader.grade(cases))
        rows = list[Row]()
        for prompt, given in zip(prompts, answers, strict=True):
            graded = [(one, Grade(None) if one.reason else next(grades)) for one in given]
            made = list(_rows(prompt, graded, self.recipe, self.answers.name))
            context.count("samples", len(graded))
            context.count("accepted", sum(_accepted(grade, self.recipe) for _, grade in graded))
            if not made:
                context.reject(dict(prompt.record), f"best-of: {_why_none(graded, self.recipe)}")
            rows += [(prompt.number, row) for row in made]
        return rows


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
        yield {
            **answered(record, answer.text, answer.reasoning),
            "id": record["id"] if samples.keep == 1 else f"{record['id']}-{number}",
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
