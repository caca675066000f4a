"""Evaluate: tasks × models → score rows, a summary, a report.

Models are local directories or OpenAI-compatible endpoints; answers may also come from records,
and score rows of earlier runs join the comparison without a model. Scores already at -o, made from
the same tasks, models and options, are read instead of computed.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.bench import report as reports
from sabia.core.bench.answers import QUESTION_CHARACTERS, Answer, matched, read_answers, sampling_of
from sabia.core.bench.items import Item, load_items, read_rows
from sabia.core.bench.result_summary import Summary, summarise, to_json
from sabia.core.bench.score_rows import Score, from_batch, schema, to_batches
from sabia.core.bench.task import Task, load_task
from sabia.core.errors import UsageError
from sabia.core.files import unreadable
from sabia.core.options.eval import EvalOptions
from sabia.core.recipes import eval_task_index
from sabia.core.recipes.evaluated_models import Judging, Subject, open_subjects
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.dry_run import planned
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import holds, provenance
from sabia.core.shards.outputs import open_output
from sabia.core.train.peak import measure_peak_flops


def run(job: Job, options: EvalOptions) -> None:
    """Evaluate as the options say; rows to -o or stdout, the table to stderr.

    Raises UsageError where there is nothing to evaluate or an option does not fit.
    """
    started = time.monotonic()
    tasks = [load_task(path) for path in options.task]
    _check(job, options, tasks)
    indexed = _indexed(job, options, tasks)
    if options.index and not (options.model or options.answers):
        return
    items = {task.name: load_items(task, options.limit, job.seed) for task in tasks}
    subjects = open_subjects(options)
    if job.dry_run:
        _plan(job, options, tasks, items, subjects)
        return
    made = _provenance(job, options, items, subjects)
    old = None if job.force or not job.to_file else _kept(str(job.out), made)
    if old is None:
        fresh = list(_scores(options, tasks, items, subjects))
    else:
        notes.note(f"{job.out} holds these scores already; --force computes them again")
        fresh = old
    scores = [*_earlier(job), *fresh]
    summary = summarise(scores, {task.name: task.metric for task in tasks if task.metric})
    if old is None and (options.model or options.answers):
        _write_rows(job, fresh, made)
    _publish(job, options, summary, scores, items, time.monotonic() - started, indexed)


def _check(job: Job, options: EvalOptions, tasks: Sequence[Task]) -> None:
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise UsageError(f"--task: two are named alike: {', '.join(names)}")
    if options.answers and (kinds := [t.name for t in tasks if not t.generates]):
        raise UsageError(f"--answers: {kinds[0]} is scored by a model's probabilities, not by text")
    if job.to_directory:
        raise UsageError(f"--out: {job.out} (expected a file ending in .parquet)")
    rubrics = [task for task in tasks if task.kind == "rubric"]
    by_items = [task for task in rubrics if task.scoring == "items"]
    for what, having, names in (
        ("a task that is answered in words", [t for t in tasks if t.generates],
         ["samples", "temperature"]),
        ("a rubric task", rubrics, ["judge_url"]),
        ("a rubric task scored by items", by_items,
         ["judge_votes", "judge_items_per_call", "judge_format", "max_unknown"]),
    ):  # fmt: skip
        for name in options.given & set(names):
            if not having:
                raise UsageError(f"{options.table[name].flag}: only with {what}")


def _indexed(job: Job, options: EvalOptions, tasks: Sequence[Task]) -> str:
    """What the index of `dedup --decontaminate` says of these tasks, for the report."""
    if not options.index or job.dry_run:
        return ""
    return eval_task_index.write_or_compare(options.index, tasks, job.force)


def _plan(
    job: Job,
    options: EvalOptions,
    tasks: Sequence[Task],
    items: dict[str, list[Item]],
    subjects: Sequence[Subject],
) -> None:
    """Show what would be done, in calls and answers; touches nothing."""
    figures, flops, memory, size = dict[str, str](), 0.0, 0, 0
    for task in tasks:
        asked = items[task.name]
        figures[f"task {task.name}"] = f"{task.kind}, {len(asked)} items"
        samples, _ = sampling_of(task, options) if task.generates else (1, 0.0)
        for subject in subjects:
            if task.generates:
                what = f"{len(asked) * samples} answers of {task.max_new_tokens} tokens"
            else:
                what = f"{sum(len(item.choices) or 1 for item in asked)} texts to score"
            figures[f"{task.name} by {subject.name}"] = what
            more, weights = subject.cost(task, asked, samples)
            flops, memory = flops + more, max(memory, weights)
        if task.kind == "rubric":
            answers = len(asked) * max(1, len(subjects) + len(options.answers))
            calls = Judging.calls(task, asked, options)
            figures[f"{task.name} by the judge"] = f"{calls} calls an answer set, {answers} answers"
        shown = sum(min(len(item.question), QUESTION_CHARACTERS) for item in asked)
        of_each = samples * (shown + 4 * task.max_new_tokens * task.generates * len(asked))
        size += of_each * (len(subjects) + len(options.answers))
    peak, basis = None, "questions and answers uncompressed; what endpoints do is not counted"
    if flops:
        precision = "fp32" if options.dtype == "float32" else "bf16"
        peak = measure_peak_flops(options.backend, precision)
        basis = (
            f"{flops:.3g} FLOPs at most at {peak:.3g} FLOP/s of one device (products alone), the "
            f"weights of the largest model, {basis}"
        )
    planned(
        job,
        [*options.task, *options.model, *options.answers, *job.inputs],
        cpu_seconds=flops / peak if peak else None,
        memory_bytes=memory or None,
        bytes_written=size,
        figures=figures,
        basis=basis,
    ).show(job)


def _scores(
    options: EvalOptions,
    tasks: Sequence[Task],
    items: dict[str, list[Item]],
    subjects: Sequence[Subject],
) -> Iterator[Score]:
    with Judging(options) as judging:
        for subject in subjects:
            with subject:
                for task in tasks:
                    notes.note(f"{subject.name}: {task.name} ({len(items[task.name])} items)")
                    yield from subject.scores(task, items[task.name], judging)
        for given in options.answers:
            for task in tasks:
                yield from _scored_answers(given, task, items[task.name], judging)


def _scored_answers(
    given: str, task: Task, items: Sequence[Item], judging: Judging
) -> Iterator[Score]:
    name, _, path = given.rpartition("=")
    by_model = read_answers(task, read_rows(Path(path), "--answers"), name or Path(path).stem)
    for model, answers in by_model.items():
        pairs: list[tuple[Item, Answer]] = matched(task, items, answers, model)
        yield from judging.score(task, model, pairs)


def _earlier(job: Job) -> Iterator[Score]:
    """Score rows of earlier runs, named as INPUT."""
    for source in open_inputs(job, "score") if job.inputs else ():
        for batch in source.batches():
            yield from from_batch(batch, Path(source.name).stem)


def _provenance(
    job: Job, options: EvalOptions, items: dict[str, list[Item]], subjects: Sequence[Subject]
) -> dict[str, Any]:
    """What makes the scores: items as prompted, task settings, models, answers, sampling."""
    digest = hashlib.blake2b(digest_size=16)
    for path in options.task:
        digest.update(json.dumps(asdict(load_task(path)) | {"path": ""}, sort_keys=True).encode())
    for found in items.values():
        for item in found:
            digest.update(repr((item.id, item.question, item.choices, item.answer)).encode())
            digest.update(json.dumps(item.fields, sort_keys=True, default=str).encode())
    prints = [subject.fingerprint() for subject in subjects]
    prints += [_print(answers.rpartition("=")[2]) for answers in options.answers]
    salt = f"{digest.hexdigest()} {json.dumps(options.recorded(), sort_keys=True)}"
    return provenance(replace(job, options={}), "score", prints, salt)


def _print(answers: str) -> str:
    try:
        return hashlib.blake2b(Path(answers).read_bytes()).hexdigest()
    except OSError as error:
        raise unreadable("--answers", answers, error) from error


def _kept(path: str, made: dict[str, Any]) -> list[Score] | None:
    import pyarrow.parquet as pq

    if not holds(path, made):
        return None
    batches = pq.read_table(path).to_batches()
    return [score for batch in batches for score in from_batch(batch, "")]


def _write_rows(job: Job, scores: Sequence[Score], made: dict[str, Any]) -> None:
    """Rows to -o, or to stdout unless a report goes there or nobody could read them."""
    if job.to_stdout and (job.json or sys.stdout.isatty()):
        return
    with open_output(job, schema(), made) as writer:
        for batch in to_batches(scores) or [pa.RecordBatch.from_pylist([], schema())]:
            writer.write(batch)


def _publish(
    job: Job,
    options: EvalOptions,
    summary: Summary,
    scores: Sequence[Score],
    items: dict[str, list[Item]],
    wall_s: float,
    indexed: str,
) -> None:
    table = reports.terminal_table(summary)
    for line in filter(None, table.splitlines()):
        notes.note(line)
    if options.report:
        facts = [
            ("tasks", ", ".join(f"{name} ({len(found)} items)" for name, found in items.items())),
            ("models", ", ".join(options.model + options.answers) or "score records"),
            ("seed", str(job.seed)),
            ("backend", job.backend),
            ("wall time", f"{wall_s:.1f} s"),
            *([("decontaminated", indexed)] if indexed else []),
        ]
        title = "Evaluation: " + ", ".join(summary.tasks)
        write_atomic(options.report, reports.render(summary, scores, title, facts))
        notes.note(f"report: {options.report}")
    if job.json:
        print(
            json.dumps(to_json(summary) | {"seed": job.seed, "wall_s": round(wall_s, 3)}, indent=1)
        )
