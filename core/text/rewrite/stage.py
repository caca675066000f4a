"""The rewrite stage: put the reasoning of each document before its conclusions.

The rules engine permutes sentences (`reason_first`) and runs in any number of workers. A model
engine asks an endpoint or a local model, and `faithfulness` checks every answer: a document that
fails keeps its original text or is rejected, with the reason. New columns: `rewritten`,
`rewrite_verdict` (rewritten, unchanged, the filter that left the document out, or the reason of a
failure), `rewrite_recipe`,
`rewrite_engine`, `rewrite_model`, `rewrite_prompt_hash`, `rewrite_source_hash` (of the original
text) and `rewrite_finish_reason`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.generate.calls import ChatRequest, ChatResponse
from sabia.core.generate.opened import cost_so_far, open_budget
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.summary import Summary
from sabia.core.text.removed_rows import put_column
from sabia.core.text.rewrite import faithfulness, reason_first
from sabia.core.text.rewrite.faithfulness import strip_answer, unfaithful
from sabia.core.text.rewrite.model_engine import (
    Writer,
    in_advance,
    one_process,
    open_answers,
    pieces_of,
)
from sabia.core.text.rewrite.review import run_reviewed
from sabia.core.text.rewrite.rewrite_recipe import (
    BestOf,
    ByPrinciples,
    Checks,
    Ensemble,
    Filters,
    Recipe,
    load_recipe,
)

REWRITTEN, UNCHANGED = "rewritten", "unchanged"
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Outcome:
    """One text after rewriting; before and after: positions of its conclusions."""

    text: str
    verdict: str
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    finish_reason: str | None = None
    model: str | None = None

    @property
    def faithful(self) -> bool:
        """Whether no answer of a model failed a check."""
        return self.verdict in (REWRITTEN, UNCHANGED) or self.verdict.startswith(LEFT_OUT)


def run(job: Job, options: RewriteOptions) -> None:
    """Rewrite the job's documents; raise what the shards, the client and the engine raise."""
    recipe = load_recipe(options.recipe)
    if not isinstance(recipe, Recipe):
        from sabia.core.text.rewrite import best_of, constitution, ensemble

        of_prompts: dict[type, Callable[[Job, RewriteOptions, Any], None]] = {
            BestOf: best_of.run, ByPrinciples: constitution.run, Ensemble: ensemble.run,
        }  # fmt: skip
        of_prompts[type(recipe)](job, options, recipe)
        return
    if options.models:
        raise UsageError(f"--models: recipe {recipe.name} asks one model (expected ensemble)")
    if options.judge or options.judge_url:
        raise UsageError(
            f"--judge: recipe {recipe.name} has no judge (best-of and constitution do)"
        )
    sources = open_inputs(job, "document", once=True)
    if options.engine == "rules":
        if not recipe.rules:
            raise UsageError(f"--engine rules: recipe {recipe.name} has no rules (expected "
                             "--engine endpoint or local)")  # fmt: skip
        transform = partial(rewrite_by_rules, recipe=recipe)
        salt = f"rules {reason_first.VERSION} {recipe.filters}"
        summary = run_reviewed(job, options, transform, sources, salt)
        _report(job, summary)
        return
    job = one_process(job)
    answers = open_answers(options, open_budget(options, job, options.max_tokens))
    writer = Writer(answers, recipe, options.temperature or 0.0, job.seed)
    try:
        if job.dry_run:
            answers.print_estimate(_requests(writer, sources))
        transform = partial(rewrite_by_model, writer=writer, options=options)
        salt = f"{recipe.digest} {answers.fingerprint} checks {faithfulness.VERSION}"
        client = answers.client
        live = partial(cost_so_far, [client] if client else [])
        summary = run_reviewed(job, options, transform, sources, salt, live=live)
    finally:
        answers.close()
    _report(job, summary)
    if client is not None and not job.dry_run:
        notes.note(client.summary())


def rewrite_by_rules(
    batches: Iterator[pa.RecordBatch], context: ShardContext, recipe: Recipe
) -> Iterator[pa.RecordBatch]:
    """Rewrite a shard by rules: a transform for `run_map`."""
    constants = {"rewrite_recipe": recipe.name, "rewrite_engine": "rules"}
    for batch in batches:
        outcomes = [_by_rules(text, recipe.filters) for text in batch.column("text").to_pylist()]
        _count(outcomes, context)
        yield with_outcomes(batch, outcomes, constants)


def _by_rules(text: str, filters: Filters) -> Outcome:
    if filter_ := filters.excluded(text):
        return left_out(text, filter_)
    new = reason_first.rewrite(text)
    return Outcome(new.text, REWRITTEN if new.moved else UNCHANGED, new.before, new.after)


def left_out(text: str, filter_: str) -> Outcome:
    """The outcome of a text that does not pass a filter of the recipe."""
    position = reason_first.positions(text)
    return Outcome(text, f"{LEFT_OUT} by {filter_}", position, position)


def rewrite_by_model(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    writer: Writer,
    options: RewriteOptions,
) -> Iterator[pa.RecordBatch]:
    """Rewrite a shard with a model, with up to BATCHES_AHEAD batches requested in advance."""
    constants = {
        "rewrite_recipe": writer.recipe.name,
        "rewrite_engine": options.engine,
        "rewrite_prompt_hash": writer.recipe.prompt_hash,
        "rewrite_model": options.model,
    }

    def submit(batch: pa.RecordBatch) -> Callable[[], pa.RecordBatch]:
        collect = _submit(batch.column("text").to_pylist(), writer)
        return lambda: _finish(batch, collect(), context, options, constants)

    return in_advance(submit(batch) for batch in batches)


def _submit(texts: Sequence[str], writer: Writer) -> Callable[[], list[Outcome]]:
    """Submit all pieces of the texts that pass the filters; the function returned waits for the
    outcome of each text."""
    recipe = writer.recipe
    filters = [recipe.filters.excluded(text) for text in texts]
    parts = [pieces_of(text, recipe.pieces) for text in texts]
    submitted = [(i, j) for i, part in enumerate(parts) for j in range(0, len(part), 2)
                 if part[j].strip() and not filters[i]]  # fmt: skip
    collect = writer.submit([parts[i][j] for i, j in submitted])

    def outcomes() -> list[Outcome]:
        answers: dict[int, dict[int, ChatResponse]] = {}
        for (i, j), answer in zip(submitted, collect(), strict=True):
            answers.setdefault(i, {})[j] = answer
        return [
            left_out(text, filters[i]) if filters[i]
            else join_pieces(parts[i], answers.get(i, {}), recipe.checks)
            for i, text in enumerate(texts)
        ]  # fmt: skip

    return outcomes


def join_pieces(parts: Sequence[str], answers: dict[int, ChatResponse], checks: Checks) -> Outcome:
    """Join the pieces of one text. A piece that fails keeps its original text, and the verdict is
    the reason of the first failure."""
    source, pieces, failure = "".join(parts), list(parts), ""
    finish, model = None, None
    for index, answer in sorted(answers.items()):
        original, text = parts[index], strip_answer(answer.text or "")
        reason = answer.error or unfaithful(original, text, answer.finish_reason, checks)
        failure = failure or reason
        finish, model = answer.finish_reason, answer.model
        if not reason:  # keep the white space at both ends
            body = original.strip()
            start = original.index(body)
            pieces[index] = original[:start] + text + original[start + len(body) :]
    text = "".join(pieces)
    verdict = failure or (REWRITTEN if text != source else UNCHANGED)
    before, after = reason_first.positions(source), reason_first.positions(text)
    return Outcome(text, verdict, before, after, finish, model)


def _finish(
    batch: pa.RecordBatch,
    outcomes: list[Outcome],
    context: ShardContext,
    options: RewriteOptions,
    constants: dict[str, str],
) -> pa.RecordBatch:
    """The rows of a batch, with the policy for unfaithful answers."""
    faithful = [outcome.faithful for outcome in outcomes]
    failed = [row for row, good in enumerate(faithful) if not good]
    for row in failed:
        reason = outcomes[row].verdict.partition(" (")[0].partition(":")[0]
        context.count(f"unfaithful[{reason}]")
    context.count("unfaithful", len(failed))
    if options.on_unfaithful == "reject" and failed:
        for row in failed:
            context.reject(batch.slice(row, 1), f"rewrite: {outcomes[row].verdict}")
        batch = batch.filter(pa.array(faithful, pa.bool_()))
        outcomes = list(compress(outcomes, faithful))
    _count(outcomes, context)
    return with_outcomes(batch, outcomes, constants)


def with_outcomes(
    batch: pa.RecordBatch, outcomes: Sequence[Outcome], constants: dict[str, str]
) -> pa.RecordBatch:
    """The batch with the new texts and the columns that record how they were made.

    constants: the values of the columns that are the same in all rows.
    """
    old = batch.column("text").to_pylist()
    new = [outcome.text for outcome in outcomes]
    hashes = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in old]
    columns = {
        "rewritten": [a != b for a, b in zip(old, new, strict=True)],
        "rewrite_verdict": [outcome.verdict for outcome in outcomes],
        "rewrite_recipe": [constants["rewrite_recipe"]] * len(new),
        "rewrite_engine": [constants["rewrite_engine"]] * len(new),
        "rewrite_model": [outcome.model or constants.get("rewrite_model") for outcome in outcomes],
        "rewrite_prompt_hash": [constants.get("rewrite_prompt_hash")] * len(new),
        "rewrite_source_hash": hashes,
        "rewrite_finish_reason": [outcome.finish_reason for outcome in outcomes],
    }
    batch = put_column(batch, "text", pa.array(new, pa.string()))
    batch = batch.drop_columns([name for name in columns if name in batch.schema.names])
    for name, values in columns.items():
        kind = pa.bool_() if name == "rewritten" else pa.string()
        batch = batch.append_column(name, pa.array(values, kind))
    return batch


def _count(outcomes: Sequence[Outcome], context: ShardContext) -> None:
    context.count("rewritten", sum(outcome.verdict == REWRITTEN for outcome in outcomes))
    if skipped := sum(outcome.verdict.startswith(LEFT_OUT) for outcome in outcomes):
        context.count("left_out", skipped)
    before = [p for outcome in outcomes for p in outcome.before]
    after = [p for outcome in outcomes for p in outcome.after]
    for name, values in (("before", before), ("after", after)):
        context.count(f"conclusions[{name}]", len(values))
        context.count(f"position[{name}]", sum(values))


def _report(job: Job, summary: Summary) -> None:
    """Report the mean position of conclusions: the share of their reasoning before them."""
    counted = summary.counters
    if not counted.get("conclusions[before]"):
        return
    before, after = (
        counted[f"position[{when}]"] / max(1, counted[f"conclusions[{when}]"])
        for when in ("before", "after")
    )
    notes.note(
        f"answer position {before:.2f} → {after:.2f} (mean share of the reasoning before its "
        f"conclusion) over {int(counted['conclusions[before]']):,} conclusions"
    )


def _requests(writer: Writer, sources: Sequence[Any]) -> Iterator[ChatRequest]:
    return (
        writer.request(part)
        for source in sources
        for batch in source.batches(columns=["text"])
        for text in batch.column("text").to_pylist()
        if not writer.recipe.filters.excluded(text)
        for part in pieces_of(text, writer.recipe.pieces)[::2]
        if part.strip()
    )
