"""The rewrite stage: documents in, documents in another order out, with where each came from.

The rules engine permutes sentences (`reason_first`) and runs in any number of workers; a model
engine asks an endpoint or a local model and passes every answer through `faithfulness`: what fails
keeps its original text or is rejected, with the reason. Columns added: `rewritten`,
`rewrite_verdict` (rewritten, unchanged, or why not), `rewrite_recipe`, `rewrite_engine`,
`rewrite_model`, `rewrite_prompt_hash`, `rewrite_source_hash` (of the text before) and
`rewrite_finish_reason`.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from sabia.core import notes, units
from sabia.core.generate.cache import CallCache
from sabia.core.generate.model_directory import load_engine, model_fingerprint
from sabia.core.generate.opened import default_cache, open_client
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards.dry_run import unmeasured
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.summary import Summary
from sabia.core.text.removed_rows import put_column
from sabia.core.text.rewrite import reason_first
from sabia.core.text.rewrite.faithfulness import cleaned, unfaithful
from sabia.core.text.rewrite.model_engine import (
    Answer,
    EndpointWriter,
    LocalWriter,
    Writer,
    pieces_of,
    prompt_hash,
)

BATCHES_AHEAD = 2
REWRITTEN, UNCHANGED = "rewritten", "unchanged"


@dataclass(frozen=True)
class Outcome:
    """What became of one text."""

    text: str
    verdict: str
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    finish_reason: str | None = None
    model: str | None = None


def run(job: Job, options: RewriteOptions) -> None:
    """Rewrites the job's documents; raises what the shards, the client and the engine raise."""
    sources = open_inputs(job, "document")
    if options.engine == "rules":
        transform = partial(by_rules, recipe=options.recipe)
        salt = f"rules {reason_first.VERSION}"
        summary = run_map(job, transform, sources=sources, salt=salt)
        _report(job, summary)
        return
    if job.jobs > 1:
        notes.note(f"-j {job.jobs}: a model engine works in one process; see --concurrency")
        job = replace(job, jobs=1)
    writer = make_writer(options, job.seed)
    try:
        if job.dry_run and isinstance(writer, EndpointWriter):
            _print_estimate(writer, sources)
        transform = partial(by_model, writer=writer, options=options)
        salt = f"{prompt_hash(options.recipe)} {getattr(writer, 'fingerprint', '')}"
        summary = run_map(job, transform, sources=sources, salt=salt, sampled=unmeasured)
    finally:
        writer.close()
    _report(job, summary)
    if isinstance(writer, EndpointWriter) and not job.dry_run:
        _report_calls(writer)


def by_rules(
    batches: Iterator[pa.RecordBatch], context: ShardContext, recipe: str
) -> Iterator[pa.RecordBatch]:
    """The transform of the rules engine."""
    marks = {"rewrite_recipe": recipe, "rewrite_engine": "rules"}
    for batch in batches:
        found = map(reason_first.rewrite, batch.column("text").to_pylist())
        outcomes = [
            Outcome(one.text, REWRITTEN if one.moved else UNCHANGED, one.before, one.after)
            for one in found
        ]
        _count(outcomes, context)
        yield with_outcomes(batch, outcomes, marks)


def by_model(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    writer: Writer,
    options: RewriteOptions,
) -> Iterator[pa.RecordBatch]:
    """The transform of the model engines; some batches are asked for ahead of the one written."""
    marks = {
        "rewrite_recipe": options.recipe,
        "rewrite_engine": options.engine,
        "rewrite_prompt_hash": prompt_hash(options.recipe),
        "rewrite_model": options.model,
    }
    waiting: deque[tuple[pa.RecordBatch, Callable[[], list[Outcome]]]] = deque()
    for batch in batches:
        waiting.append((batch, _ask(batch.column("text").to_pylist(), writer)))
        if len(waiting) > BATCHES_AHEAD:
            yield from _finish(*waiting.popleft(), context, options, marks)
    while waiting:
        yield from _finish(*waiting.popleft(), context, options, marks)


def _ask(texts: Sequence[str], writer: Writer) -> Callable[[], list[Outcome]]:
    """Starts all pieces of all texts; the result waits and gives an outcome a text."""
    parts = [pieces_of(text) for text in texts]
    asked = [(i, j) for i, part in enumerate(parts) for j in range(0, len(part), 2)
             if part[j].strip()]  # fmt: skip
    collect = writer.submit([parts[i][j] for i, j in asked])

    def outcomes() -> list[Outcome]:
        answers: dict[int, dict[int, Answer]] = {}
        for (i, j), answer in zip(asked, collect(), strict=True):
            answers.setdefault(i, {})[j] = answer
        return [judged(part, answers.get(i, {})) for i, part in enumerate(parts)]

    return outcomes


def judged(parts: Sequence[str], answers: dict[int, Answer]) -> Outcome:
    """Puts the pieces of one text together; a piece that fails keeps its original and decides
    the verdict."""
    source, made, failed = "".join(parts), list(parts), ""
    finish, model = None, None
    for place, answer in sorted(answers.items()):
        text = cleaned(answer.text or "")
        reason = answer.error or unfaithful(parts[place], text, answer.finish_reason)
        failed = failed or reason
        finish, model = answer.finish_reason, answer.model
        if not reason:
            made[place] = _in_the_margins_of(parts[place], text)
    text = "".join(made)
    verdict = failed or (REWRITTEN if text != source else UNCHANGED)
    before, after = reason_first.positions(source), reason_first.positions(text)
    return Outcome(text, verdict, before, after, finish, model)


def _in_the_margins_of(source: str, text: str) -> str:
    """White space at both ends as in the source."""
    body = source.strip()
    start = source.index(body)
    return source[:start] + text + source[start + len(body) :]


def _finish(
    batch: pa.RecordBatch,
    outcomes: Callable[[], list[Outcome]],
    context: ShardContext,
    options: RewriteOptions,
    marks: dict[str, str],
) -> Iterator[pa.RecordBatch]:
    """Applies the policy for unfaithful answers and yields the batch with its new columns."""
    found = outcomes()
    failed = [o.verdict not in (REWRITTEN, UNCHANGED) for o in found]
    for outcome, bad in zip(found, failed, strict=True):
        if bad:
            context.count(f"unfaithful[{outcome.verdict.partition(' (')[0].partition(':')[0]}]")
    context.count("unfaithful", sum(failed))
    if options.on_unfaithful == "reject" and any(failed):
        for row, (outcome, bad) in enumerate(zip(found, failed, strict=True)):
            if bad:
                context.reject(batch.slice(row, 1), f"rewrite: {outcome.verdict}")
        batch = batch.filter(pa.array([not bad for bad in failed], pa.bool_()))
        found = [outcome for outcome, bad in zip(found, failed, strict=True) if not bad]
    _count(found, context)
    yield with_outcomes(batch, found, marks)


def with_outcomes(
    batch: pa.RecordBatch, outcomes: Sequence[Outcome], marks: dict[str, str]
) -> pa.RecordBatch:
    """The batch with the new texts and the columns that say where they came from."""
    old = batch.column("text").to_pylist()
    new = [outcome.text for outcome in outcomes]
    hashes = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in old]
    columns = {
        "rewritten": [a != b for a, b in zip(old, new, strict=True)],
        "rewrite_verdict": [outcome.verdict for outcome in outcomes],
        "rewrite_recipe": [marks["rewrite_recipe"]] * len(new),
        "rewrite_engine": [marks["rewrite_engine"]] * len(new),
        "rewrite_model": [outcome.model or marks.get("rewrite_model") for outcome in outcomes],
        "rewrite_prompt_hash": [marks.get("rewrite_prompt_hash")] * len(new),
        "rewrite_source_hash": hashes,
        "rewrite_finish_reason": [outcome.finish_reason for outcome in outcomes],
    }
    batch = put_column(batch, "text", pa.array(new, pa.string()))
    batch = batch.drop_columns([name for name in columns if name in batch.schema.names])
    for name, values in columns.items():
        kind = pa.bool_() if name == "rewritten" else pa.string()
        batch = batch.append_column(name, pa.array(values, kind))
    return batch


def make_writer(options: RewriteOptions, seed: int) -> Writer:
    """The door to the model that the configuration names."""
    if options.engine == "local":
        cache = CallCache(options.cache or default_cache())
        fingerprint = model_fingerprint(options.model)
        door = (load_engine(options.model), options.model, fingerprint, cache)
        return LocalWriter(*door, options.recipe, options.temperature, seed)
    client = open_client(
        options.url, options.model, options, options.cache, options.max_tokens, options.timeout
    )
    return EndpointWriter(client, options.recipe, options.temperature, seed)


def _count(outcomes: Sequence[Outcome], context: ShardContext) -> None:
    context.count("rewritten", sum(outcome.verdict == REWRITTEN for outcome in outcomes))
    before = [p for outcome in outcomes for p in outcome.before]
    after = [p for outcome in outcomes for p in outcome.after]
    for name, values in (("before", before), ("after", after)):
        context.count(f"conclusions[{name}]", len(values))
        context.count(f"position[{name}]", sum(values))


def _report(job: Job, summary: Summary) -> None:
    """The answer position: share of its reasoning that stands before a conclusion, on average."""
    counted = summary.counters
    if not counted.get("conclusions[before]"):
        return
    before, after = (
        counted[f"position[{when}]"] / max(1, counted[f"conclusions[{when}]"])
        for when in ("before", "after")
    )
    notes.note(
        f"answer position {before:.2f} → {after:.2f} (share of the reasoning that stands before "
        f"its conclusion) over {int(counted['conclusions[before]']):,} conclusions"
    )


def _report_calls(writer: EndpointWriter) -> None:
    stats = writer.client.stats
    cost = "" if stats.usd is None else f", {units.format_money(stats.usd)}"
    notes.note(
        f"{stats.calls:,} calls, {stats.cached:,} from the cache, {stats.failed:,} failed; "
        f"{stats.usage.prompt_tokens:,} prompt and {stats.usage.completion_tokens:,} completion "
        f"tokens{cost}"
    )


def _print_estimate(writer: EndpointWriter, sources: Sequence[Any]) -> None:
    """`--dry-run`: what the calls would cost at most."""
    requests = (
        writer.request(part)
        for source in sources
        for batch in source.batches(columns=["text"])
        for text in batch.column("text").to_pylist()
        for part in pieces_of(text)[::2]
        if part.strip()
    )
    found = writer.client.estimate(requests)
    cost = "" if found.usd is None else f", at most {units.format_money(found.usd)}"
    print(
        f"call {writer.client.url}: {found.requests:,} requests ({found.cached:,} more are paid), "
        f"about {found.usage.prompt_tokens:,} prompt and at most "
        f"{found.usage.completion_tokens:,} completion tokens{cost}"
    )
