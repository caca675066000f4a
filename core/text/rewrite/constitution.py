"""Recipe constitution: a model criticises and revises its answers; both are preference records.

The model answers a prompt record. In each round it is asked what in its answer is against one
principle, and then for a better answer, as in the supervised stage of Constitutional AI
(arXiv 2212.08073, section 3.1). The last revision is `chosen`, the first answer `rejected`. With
judges, each of both answers gets the share of all principles that it follows, and a pair whose
gain is below `min-gain` is rejected. A record is also rejected if an answer of the model cannot be
used, or if nothing was revised. New columns: `constitution_principles`, `constitution_critiques`,
`constitution_revisions` (of each round), `constitution_scores` (of the first answer and the last;
null without judges), `rewrite_recipe` and `rewrite_model`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.generate.calls import BYTES_PER_TOKEN, ChatRequest
from sabia.core.generate.opened import print_total
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.judge.llm import Question
from sabia.core.judge.rewards import RUBRIC, Case, Grader
from sabia.core.judge.rubric import Item, Rubric
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards import schemas
from sabia.core.shards.dry_run import unmeasured
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.text.rewrite.model_engine import Answers, Collect, one_process
from sabia.core.text.rewrite.prompt_records import (
    PROMPT,
    Row,
    answer_of,
    answered_shard,
    check_options,
    conversation,
    one_model,
    prompt_sources,
    usable,
)
from sabia.core.text.rewrite.rewrite_recipe import EQUAL, ByPrinciples

Pair = tuple[float | None, float | None]  # scores of the first answer and the last
_TEXTS = pa.list_(pa.string())
OWN = pa.schema([
    *schemas.KINDS["preference"], PROMPT.field("meta"),
    *(pa.field(f"constitution_{one}", _TEXTS) for one in ("principles", "critiques", "revisions")),
    pa.field("constitution_scores", pa.list_(pa.float64())),
    *(pa.field(f"rewrite_{name}", pa.string()) for name in ("recipe", "model")),
])  # fmt: skip


@dataclass
class Revision:
    """A prompt record, its number in its batch, a principle for each round, and what the model has
    said so far; `reason`: why the record is rejected."""

    number: int
    record: Mapping[str, Any]
    messages: list[dict[str, Any]]
    principles: tuple[str, ...]
    first: str = ""
    critiques: list[str] = field(default_factory=list)
    revisions: list[str] = field(default_factory=list)
    model: str = ""
    reason: str = ""

    @property
    def last(self) -> str:
        """The answer as it is now."""
        return self.revisions[-1] if self.revisions else self.first


def run(job: Job, options: RewriteOptions, recipe: ByPrinciples) -> None:
    """Write preference records of the job's prompt records; raise what shards and clients raise."""
    check_options(options, recipe.name)
    for name in ("models", "review", "reviewed"):
        if getattr(options, name):
            raise UsageError(
                f"--{name}: not for recipe {recipe.name}, whose one model writes pairs of answers"
            )
    job = one_process(job)
    with one_model(job, options, recipe, "answers") as (answers, panel, salt, live):
        grader = Grader({RUBRIC: 1.0}, panel, options.max_unknown) if panel else None
        reviser = Reviser(answers, recipe, grader, options.temperature, job.seed)
        sources, schema = prompt_sources(job, OWN)
        if job.dry_run:
            print_estimates(reviser, sources)
        run_map(
            job, partial(answered_shard, asker=reviser, schema=schema),
            "prompt", "preference", sources, salt, schema=schema, sampled=unmeasured,
            live=live,
        )  # fmt: skip


class Reviser:
    """Asks a model for answers, critiques and revisions."""

    base = "constitution"
    own = OWN

    def __init__(
        self, answers: Answers, recipe: ByPrinciples, grader: Grader | None,
        temperature: float | None, seed: int,
    ) -> None:  # fmt: skip
        """grader: None without judges. temperature: None for that of the recipe."""
        self.answers, self.recipe, self.grader, self.seed = answers, recipe, grader, seed
        self.settings = settings = recipe.constitution
        self.temperature = settings.temperature if temperature is None else temperature
        items = (Item(f"principle-{n}", text) for n, text in enumerate(settings.principles, 1))
        self.rubric = Rubric(recipe.digest, tuple(items))

    def prompt(self, number: int, record: Mapping[str, Any]) -> Revision:
        """A record before its first answer; raises BadData if it cannot be used."""
        messages, tools = conversation(record)
        if tools:
            raise BadData("has tools, which preference records have not")

        def key(principle: str) -> bytes:
            text = f"{self.seed} {record['id']} {principle}"
            return hashlib.blake2b(text.encode(), digest_size=16).digest()

        order = sorted(self.settings.principles, key=key)
        rounds = range(self.settings.rounds)
        return Revision(number, record, messages, tuple(order[i % len(order)] for i in rounds))

    def submit(self, prompts: Sequence[Revision]) -> Collect:
        """Start the next request of each record: of its answer, a critique or a revision."""
        return self.answers.submit([self.request(one) for one in prompts])

    def request(self, revision: Revision) -> ChatRequest:
        """The next request of a record."""
        turns = list(revision.messages)
        if revision.first:
            index = len(revision.revisions)
            replies = [revision.last, *revision.critiques[index:]]
            asked = (self.settings.critique, self.settings.revise)
            for reply, question in zip(replies, asked, strict=False):
                turn = question.replace("{principle}", revision.principles[index])
                turns.append({"role": "assistant", "content": reply})
                turns.append({"role": "user", "content": turn})
        return ChatRequest(
            turns,
            max_tokens=self.settings.max_tokens,
            temperature=self.temperature,
            seed=self.seed if self.temperature > 0 else None,
            extra=self.answers.extra,
        )

    def add_reply(self, revision: Revision, text: str) -> None:
        """Record the answer to a record's last request."""
        if not revision.first:
            revision.first = text
        elif len(revision.critiques) == len(revision.revisions):
            revision.critiques.append(text)
        else:
            revision.revisions.append(text)

    def cases(self, revision: Revision) -> list[Case]:
        """The first answer and the last, to be graded."""
        texts = (revision.first, revision.last)
        return [Case(revision.messages, text, rubric=self.rubric) for text in texts]

    def rows(
        self, prompts: Sequence[Revision], collect: Collect, context: ShardContext
    ) -> list[Row]:
        """Wait for the first answers of a batch, have them revised, and make rows of the pairs."""
        used = _with_replies(self, prompts, collect, "the answer")
        for number in range(1, self.settings.rounds + 1):
            for what in ("critique", "revision"):
                used = _with_replies(self, used, self.submit(used), f"{what} {number}")
        for one in used:
            if one.last.strip() == one.first.strip():
                one.reason = "the last revision is the first answer"
        used = [one for one in used if not one.reason]
        scores: list[Pair | None] = [None] * len(used)
        if self.grader is not None:
            graded = iter(self.grader.grade([case for one in used for case in self.cases(one)]))
            scores = [(next(graded).score, next(graded).score) for _ in used]
        rows = list[Row]()
        for one, pair in zip(used, scores, strict=True):
            one.reason = "" if pair is None else _too_little(*pair, self.settings.min_gain)
            if not one.reason:
                rows.append((one.number, _row(one, pair, self)))
        for one in prompts:
            if one.reason:
                context.reject(dict(one.record), f"constitution: {one.reason}")
        return rows


def print_estimates(reviser: Reviser, sources: Sequence[Any]) -> None:
    """Print the most that the model and its judges would cost (`--dry-run`)."""
    longest = "x" * int(reviser.settings.max_tokens * BYTES_PER_TOKEN)

    def steps() -> Iterator[tuple[Revision, ChatRequest]]:
        for one in usable(sources, ["id", "messages", "tools"], reviser.prompt):
            for _ in range(1 + 2 * reviser.settings.rounds):
                request = reviser.request(one)
                yield one, request
                kept = reviser.answers.cached_text(request)
                text = None if kept is None else split_reasoning(kept)[0]
                reviser.add_reply(one, text or f"{one.number} {longest}")

    def questions() -> Iterator[Question]:
        for one, _ in steps():
            if len(one.revisions) == reviser.settings.rounds - 1 < len(one.critiques):
                one.revisions.append(longest)
                for case in reviser.cases(one):
                    yield Question(case.messages, case.text, reviser.rubric)
                one.revisions.pop()

    made = [reviser.answers.print_estimate(request for _, request in steps())]
    if reviser.grader is not None and reviser.grader.judge is not None:
        made += reviser.grader.judge.print_estimates(questions)
    print_total([one for one in made if one is not None])


def _with_replies(
    reviser: Reviser, asked: Sequence[Revision], collect: Collect, what: str
) -> list[Revision]:
    """The records whose answers can be used, with these."""
    for one, response in zip(asked, collect(), strict=True):
        answer = answer_of(response)
        one.model = response.model or reviser.answers.name
        one.reason = f"{what}: {answer.reason}" if answer.reason else ""
        reviser.add_reply(one, answer.text)
    return [one for one in asked if not one.reason]


def _too_little(first: float | None, last: float | None, least: float) -> str:
    """Why a pair with these scores is rejected."""
    if first is None or last is None:
        return "the judge failed"
    if last - first > least - EQUAL:
        return ""
    return f"the score went from {first:.3g} to {last:.3g} (expected a gain of {least:g} or more)"


def _row(one: Revision, scores: Pair | None, reviser: Reviser) -> dict[str, object]:
    return {
        "id": one.record["id"],
        "prompt": one.record["messages"],
        "chosen": one.last,
        "rejected": one.first,
        "meta": one.record["meta"],
        "constitution_principles": list(one.principles),
        "constitution_critiques": one.critiques,
        "constitution_revisions": one.revisions,
        "constitution_scores": scores,
        "rewrite_recipe": reviser.recipe.name,
        "rewrite_model": one.model,
    }
