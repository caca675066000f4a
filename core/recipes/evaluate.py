"""Evaluate: tasks × models → score rows, a summary, a report.

Models are local directories or OpenAI-compatible endpoints. Answers may also be read from records,
and score rows of earlier runs are compared without a model. Scores at -o that were made from the
same tasks, models and options are read instead of computed.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes
from sabia.core.bench import gate_report, item_analysis, judged_checks, many_samples, verdict_table
from sabia.core.bench.answers import QUESTION_CHARACTERS, matched, read_answers, sampling_of
from sabia.core.bench.contamination import apart
from sabia.core.bench.contamination.memorization import memory_rows
from sabia.core.bench.gate import Check, Scores, failed, judge
from sabia.core.bench.gate_file import Gate, load_gate
from sabia.core.bench.harness.groups import Group, group_results, normalised_results
from sabia.core.bench.harness.results_json import harness_json
from sabia.core.bench.items import Item, part_of, units_of
from sabia.core.bench.metrics import NO_ANSWER, NO_VERDICT
from sabia.core.bench.pages import checkpoints, held_out
from sabia.core.bench.report import aligned, render, terminal_table
from sabia.core.bench.result_summary import Summary, summarise, tabulate, to_json
from sabia.core.bench.rubrics import judge_labels, pairwise
from sabia.core.bench.rubrics.judge_costs import answer_figure, judge_figures
from sabia.core.bench.score_rows import (
    Score,
    ScoreRow,
    from_batch,
    missing_shards,
    schema,
    to_batches,
)
from sabia.core.bench.task import Task
from sabia.core.bench.task_data.data_files import read_rows
from sabia.core.bench.task_files import items_of, load_groups, rows_of
from sabia.core.bench.verdict_rows import VerdictRow
from sabia.core.errors import BadData, Failed, GateClosed, UsageError
from sabia.core.files import unreadable
from sabia.core.generate.budget import Budget
from sabia.core.generate.opened import default_cache, open_budget
from sabia.core.judge.lookup import LookupTable
from sabia.core.judge.opened_judges import judge_servers, judges_identity
from sabia.core.options.eval import EvalOptions
from sabia.core.recipes import eval_ranks, eval_task_index
from sabia.core.recipes.eval_judging import Judging, check_grading
from sabia.core.recipes.evaluated_models import Endpoint, EvaluatedModel, open_models
from sabia.core.recipes.machine.peaks import measure_peak_flops
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.dry_run import planned
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import EXPECTED, Job
from sabia.core.shards.manifest import holds, provenance
from sabia.core.shards.outputs import open_output

Items = dict[str, list[Item]]  # by task
Models = Sequence[EvaluatedModel]


def run(job: Job, options: EvalOptions) -> None:
    """Evaluate by the options; rows to -o or stdout, the table to stderr.

    Raises UsageError where there is nothing to evaluate or an option does not fit.
    """
    started = time.monotonic()
    tasks, groups = load_groups(options.task, options.data, options.trust_task_code)
    gate = load_gate(options.gate) if options.gate else None
    _check(job, options, tasks)
    index_line = ""  # which tasks the corpus was cleaned of, for the report
    if options.index and not job.dry_run:
        index_line = eval_task_index.write_or_compare(options.index, tasks, job.force)
    if options.index and not (options.model or options.answers):
        return
    whole = {task.name: items_of(task, options.limit, job.seed) for task in tasks}
    index, count = job.shard or (0, 1)
    items = {name: part_of(of_task, index, count) for name, of_task in whole.items()}
    for task in tasks:
        check_grading(task, items[task.name])
    budget = open_budget(options, job)
    models = open_models(options, budget)
    if options.mesh:
        eval_ranks.check_mesh(options, tasks, models)
    if job.dry_run:
        _plan(job, options, tasks, items, models, budget)
        return
    provenance_record = _provenance(job, options, tasks, items, models)
    old = None if job.force or not job.to_file else _stored_scores(str(job.out), provenance_record)
    if old is not None and (missing := _missing(old, options.max_missing)):
        notes.note(f"{job.out}: {missing[0]}: what is missing is computed again")
        old = None
    if old is None and options.mesh and not eval_ranks.compute(job, options, tasks, items, models):
        return
    if old is None:
        made = _scores(options, tasks, items, models, budget)
        parts = {
            name: f"{index}/{count} of {units_of(of)}" for name, of in whole.items() if count > 1
        }
        fresh = with_places(made, items, parts)
    else:
        notes.note(f"{job.out} holds these scores already; --force computes them again")
        fresh = old
    earlier = [  # rows of earlier runs, given as INPUT
        score
        for source in (open_inputs(job, "score") if job.inputs else ())
        for batch in source.batches()
        for score in from_batch(batch, Path(source.name).stem)
    ]
    rows = [*earlier, *fresh]
    scores = [row for row in rows if isinstance(row, Score)]
    verdicts = [row for row in rows if isinstance(row, VerdictRow)]
    if not rows:
        raise BadData(f"{', '.join(job.inputs)}: no score rows (expected those of sabia eval)")
    capabilities = {task.name: task.capability for task in tasks if task.capability}
    headlines = {task.name: task.metric for task in tasks if task.metric}
    summary = summarise(scores, headlines, capabilities)
    means = [*group_results(groups, summary), *normalised_results(tasks, summary)]
    summary = replace(summary, groups=tuple(means))
    # rows are not printed on a terminal, and not where the JSON report goes
    printable = not job.to_stdout or not (job.json or sys.stdout.isatty())
    if old is None and (options.model or options.answers) and printable:
        with open_output(job, schema(), provenance_record) as writer:
            for batch in to_batches(fresh) or [pa.RecordBatch.from_pylist([], schema())]:
                writer.write(batch)
    facts = [(task.name, task.description) for task in tasks if task.description]
    facts += [("decontaminated", index_line)] if index_line else []
    spent = budget.spent
    facts += [("cost of calls", spent.text())] if spent.requests else []
    checks = gate_checks(gate, summary, scores, verdicts, capabilities)
    seen = held_out.count(
        Path(options.judge_cache or default_cache()), tasks, items,
        [model.name for model in models] + [*options.answers],
        old is None and bool(options.model or options.answers),
    )  # fmt: skip
    held = held_out.gaps(summary, tasks, seen)
    wall_s = time.monotonic() - started
    harness = _harness(job, options, tasks, groups, summary, scores) if job.json else {}
    _publish(
        job, options, summary, scores, verdicts, items, wall_s, facts, gate, checks, harness, held
    )
    if count == 1 and (lacking := missing_shards(scores)):
        raise Failed(f"INPUT: {'; '.join(lacking)}; the report is of the other rows only")
    if missing := _missing(fresh, options.max_missing):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise Failed(
            f"{missing[0]}{more}; their rows are written. Run again to ask for what is missing, or "
            "allow it by --max-missing"
        )
    if gate and (closing := failed(gate, checks)):
        names = ", ".join(f"{c.candidate}: {c.name} ({c.verdict})" for c in closing[:3])
        more = f" and {len(closing) - 3} more" if len(closing) > 3 else ""
        raise GateClosed(f"--gate {options.gate}: {names}{more}; the rows are written")


def _harness(
    job: Job,
    options: EvalOptions,
    tasks: Sequence[Task],
    groups: Sequence[Group],
    summary: Summary,
    scores: Sequence[Score],
) -> dict[str, object]:
    """The results of YAML tasks by model, as lm-evaluation-harness writes them."""
    given = [task for task in tasks if task.yaml is not None and task.name in summary.tasks]
    if not given:
        return {}
    table, originals = tabulate(scores)[0], {task.name: rows_of(task) for task in given}
    config = {"limit": options.limit or None, "random_seed": job.seed, "batch_size": "auto"}
    return {
        "lm_eval": {
            model: harness_json(
                model, given, groups, summary, table, originals, {"model": model, **config}
            )
            for model in summary.models
        }
    }


def gate_checks(
    gate: Gate | None,
    summary: Summary,
    scores: Sequence[Score],
    verdicts: Sequence[VerdictRow],
    capabilities: Mapping[str, str],
) -> list[Check]:
    """The checks of a gate, none without one. Raises UsageError."""
    if gate is None:
        return []
    table, groups = tabulate(scores)
    return judge(gate, Scores(table, groups, summary.headlines, capabilities, verdicts))


def with_places(rows: Iterable[ScoreRow], items: Items, parts: Mapping[str, str]) -> list[ScoreRow]:
    """The rows with the clusters of their items, and what part of its task a divided run scores."""
    clusters = {
        (task, item.id): item.cluster
        for task, of_task in items.items()
        for item in of_task
        if item.cluster
    }
    return [
        replace(
            row,
            cluster=clusters.get((row.task, row.item_id), ""),
            shard=parts.get(row.task, ""),
        )
        if isinstance(row, Score)
        else row
        for row in rows
    ]


def _missing(rows: Iterable[ScoreRow], limit: float) -> list[str]:
    """The tasks and models of which more than `limit` of the samples have no score, in words."""
    samples: dict[tuple[str, str], set[tuple[str, int]]] = {}
    without: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for score in (row for row in rows if isinstance(row, Score)):
        cell, sample = (score.task, score.model), (score.item_id, score.sample)
        samples.setdefault(cell, set()).add(sample)
        if score.metric in (NO_ANSWER, NO_VERDICT):
            reason = (score.detail or {}).get(NO_ANSWER, "no verdict")
            without.setdefault(cell, {})[sample] = str(reason)
    return [
        f"{task}, {model}: {len(reasons)} of {len(samples[task, model])} samples have no score, "
        f"the limit is {limit:.3g} of them (the first: {next(iter(reasons.values()))})"
        for (task, model), reasons in without.items()
        if len(reasons) > limit * len(samples[task, model])
    ]


def _check(job: Job, options: EvalOptions, tasks: Sequence[Task]) -> None:
    names = [task.name for task in tasks]
    if len(set(names)) != len(names):
        raise UsageError(f"--task: two have the same name: {', '.join(names)}")
    if options.answers and (kinds := [t.name for t in tasks if not t.generates]):
        raise UsageError(f"--answers: {kinds[0]} is scored by a model's probabilities, not by text")
    if job.to_directory:
        raise UsageError(f"--out: {job.out} (expected a file ending in {EXPECTED})")
    rubrics = [task for task in tasks if task.kind == "rubric"]
    by_items = [task for task in rubrics if task.scoring == "items"]
    graded = [task for task in tasks if task.kind == "exact_match" and task.yaml is None]
    several = [t for t in graded if options.answers or sampling_of(t, options)[0] > 1]
    if options.best_of and not several:
        raise UsageError(
            "--best-of: only with several samples of a TOML task with right answers "
            "(--samples 8 --temperature 1)"
        )
    for what, having, names in (
        ("a task that is answered in words", [t for t in tasks if t.generates],
         ["samples", "temperature"]),
        ("a rubric task, or --best-of", rubrics or options.best_of,
         ["judge_url", "judge", "judge_combine", "audit_judge"]),
        ("a rubric task scored by items", by_items,
         ["judge_votes", "judge_items_per_call", "judge_format", "max_unknown"]),
    ):  # fmt: skip
        if not having:
            options.refuse(names, f"only with {what}")


def _plan(
    job: Job, options: EvalOptions, tasks: Sequence[Task], items: Items, models: Models,
    budget: Budget,
) -> None:  # fmt: skip
    """Show the calls and answers that a run would make; changes nothing."""
    figures, flops, memory, size = dict[str, str](), 0.0, 0, 0
    answering = len(models) + len(options.answers)
    for task in tasks:
        task_items = items[task.name]
        figures[f"task {task.name}"] = f"{task.kind}, {len(task_items)} items"
        samples, _ = sampling_of(task, options) if task.generates else (1, 0.0)
        for model in models:
            if task.generates:
                what = f"{len(task_items) * samples} answers of {task.max_new_tokens} tokens"
            else:
                texts = sum(len(item.pairs or item.choices) or 1 for item in task_items)
                what = f"{texts} texts to score"
            if isinstance(model, Endpoint):
                what = answer_figure(task, task_items, samples, model.model, budget.prices)
            figures[f"{task.name} by {model.name}"] = what
            more, weights = model.cost(task, task_items, samples)
            flops, memory = flops + more, max(memory, weights)
        sets = len(models) * samples + len(options.answers)
        if task.kind == "exact_match" and options.best_of:
            figures |= judge_figures(task, task_items, options, sets, budget)
        if task.kind == "rubric":
            least = 2 if task.scoring == "pairs" else 1
            calls = Judging.calls(task, task_items, options)
            what = f"{calls} calls per answer set, {len(task_items) * max(1, answering)} answers"
            if task.scoring == "pairs":
                what = f"pairs of {max(2, answering)} models, both orders"
            figures[f"{task.name} by the judge"] = what
            figures |= judge_figures(task, task_items, options, max(least, sets), budget)
        shown = sum(min(len(item.question), QUESTION_CHARACTERS) for item in task_items)
        answer_bytes = 4 * task.max_new_tokens * task.generates * len(task_items)
        size += samples * (shown + answer_bytes) * answering
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
    options: EvalOptions, tasks: Sequence[Task], items: Items, models: Models, budget: Budget
) -> Iterator[ScoreRow]:
    with Judging(options, budget) as judging:
        for model in models:
            with model:
                for task in tasks:
                    notes.note(f"{model.name}: {task.name} ({len(items[task.name])} items)")
                    yield from model.scores(task, items[task.name], judging)
                    if options.min_k:
                        of_texts = partial(model.figures, share=options.min_k)
                        yield from memory_rows(model.name, task, items[task.name], of_texts)
        for given in options.answers:
            name, _, path = given.rpartition("=")
            for task in tasks:
                rows = read_rows(Path(path), "--answers")
                by_model = read_answers(task, rows, name or Path(path).stem)
                for answered_by, answers in by_model.items():
                    pairs = matched(task, items[task.name], answers, answered_by)
                    yield from judging.score(task, answered_by, pairs)
        yield from judging.compared()


def _provenance(
    job: Job, options: EvalOptions, tasks: Sequence[Task], items: Items, models: Models
) -> dict[str, object]:
    """What decides the scores: items as prompted, task settings, models, answers, sampling."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        settings = asdict(task) | {"path": ""}
        if task.lookup:
            settings["lookup"] = LookupTable(str(task.lookup_path)).fingerprint
        if task.yaml is None:
            del settings["yaml"]
        else:
            settings["yaml"]["path"] = ""
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for task_items in items.values():
        for item in task_items:
            asked: tuple[Any, ...] = (item.id, item.question, item.choices, item.answer)
            if item.pairs:
                asked = (*asked, item.pairs)
            digest.update(repr(asked).encode())
            digest.update(json.dumps(item.fields, sort_keys=True, default=str).encode())
    fingerprints = [model.fingerprint() for model in models]
    if options.judge:
        fingerprints += map(repr, judges_identity(options))
    for answers in options.answers:
        path = answers.rpartition("=")[2]
        try:
            fingerprints.append(hashlib.blake2b(Path(path).read_bytes()).hexdigest())
        except OSError as error:
            raise unreadable("--answers", path, error) from error
    salt = f"{digest.hexdigest()} {json.dumps(options.recorded(), sort_keys=True)}"
    return provenance(replace(job, options={}), "score", fingerprints, salt)


def _stored_scores(path: str, provenance_record: dict[str, Any]) -> list[ScoreRow] | None:
    if not holds(path, provenance_record):
        return None
    batches = (batch for source in from_path(path, "score") for batch in source.batches())
    return [score for batch in batches for score in from_batch(batch, "")]


def _publish(
    job: Job,
    options: EvalOptions,
    summary: Summary,
    scores: Sequence[Score],
    verdicts: Sequence[VerdictRow],
    items: Items,
    wall_s: float,
    more: Sequence[tuple[str, str]],
    gate: Gate | None,
    checks: Sequence[Check],
    harness: dict[str, Any],
    held: Sequence[held_out.Gap],
) -> None:
    table = terminal_table(summary, verdicts)
    for line in filter(None, table.splitlines()):
        notes.note(line)
    if gate:
        _note_table(gate_report.COLUMNS, gate_report.rows(checks))
    sampled = many_samples.by_samples(scores)
    if sampled:
        _note_table(many_samples.COLUMNS, many_samples.rows(sampled))
    marked = apart.marked_items(options.contaminated)
    parted = apart.apart(scores, summary, marked) if marked else []
    figures = apart.figures(tabulate(scores)[0], marked)
    for columns, lines in (
        (apart.COLUMNS, apart.rows(parted)), (apart.FIGURE_COLUMNS, apart.figure_rows(figures)),
    ):  # fmt: skip
        if lines:
            _note_table(columns, lines)
    analyses = item_analysis.analyses(tabulate(scores)[0])
    for line in item_analysis.lines(analyses):
        notes.note(line)
    path = options.judge_labels
    labels = judge_labels.load_labels(path, verdicts) if path else {}
    people = judge_labels.compared(scores, verdicts, labels, summary.headlines)
    for _, head, cells in judge_labels.tables(people):
        _note_table(head, cells)
    positions = pairwise.positions(scores)
    if positions:
        _note_table(pairwise.COLUMNS, pairwise.lines(positions))
    if held:
        _note_table(held_out.COLUMNS, held_out.lines(held))
    traits = judged_checks.judged_traits(scores)
    for line in judged_checks.warnings(traits, *_judged_and_judges(options)):
        notes.warn(line)
    if options.report:
        facts = [
            ("tasks", ", ".join(f"{name} ({len(rows)} items)" for name, rows in items.items())),
            ("models", ", ".join(options.model + options.answers) or "score records"),
            ("seed", str(job.seed)),
            ("backend", job.backend),
            ("wall time", f"{wall_s:.1f} s"),
            *more,
        ]
        named = dict.fromkeys([*summary.tasks, *(row.task for row in verdicts)])
        title = "Evaluation: " + ", ".join(named)
        first = [gate_report.section(gate, checks)] if gate else []
        first += [many_samples.section(sampled)] if sampled else []
        first += [item_analysis.section(analyses, scores)] if analyses else []
        first += [apart.section(parted, figures)] if parted or figures else []
        first += judge_labels.section(people)
        first = [*checkpoints.section(summary), *held_out.section(held), *first]
        first += [pairwise.section(positions)] if positions else []
        write_atomic(
            options.report,
            render(summary, scores, title, facts, verdicts, judged_checks.rows(traits), first),
        )
        notes.note(f"report: {options.report}")
    if job.json:
        report = (
            to_json(summary)
            | verdict_table.to_json(verdicts)
            | {"reward_checks": judged_checks.rows(traits)}
            | judge_labels.to_json(people)
            | ({"held_out": held_out.to_json(held)} if held else {})
            | ({"positions": pairwise.to_json(positions)} if positions else {})
            | ({"items": item_analysis.to_json(analyses)} if analyses else {})
            | ({"samples": many_samples.to_json(sampled)} if sampled else {})
            | ({"gate": gate_report.to_json(checks)} if gate else {})
            | ({"contamination": apart.to_json(parted, figures)} if parted or figures else {})
            | harness
            | {"seed": job.seed, "wall_s": round(wall_s, 3)}
        )
        print(json.dumps(report, indent=1))


def _note_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in aligned([columns, *rows]):
        notes.note(line)


def _judged_and_judges(options: EvalOptions) -> tuple[list[str], list[str]]:
    """The names of the models of this call, and those of its judges."""
    models = [model.rpartition("#" if "#" in model else "=")[2] for model in options.model]
    models += [answers.partition("=")[0] for answers in options.answers if "=" in answers]
    return models, [server.model for server in judge_servers(options) if not server.audit]
