"""Compare corpora by small training runs: `sabia pretrain --compare A B …`.

Pairs of runs with one seed are trained in turn, A's and those of all candidates that are not yet
told from it, and the comparisons are tested after every pair (core.bench.seed_noise). The same call
again trains nothing that is finished and comes to the same verdicts; with a larger `--max-runs` it
goes on.

Candidates and the held-out set may be documents in place of token rows. Their text is tokenized
beside the runs, as `sabia tokenize --tokenizer DIR --length N` does it, and not again while
documents, tokenizer and length are the same.
"""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from sabia.core import notes
from sabia.core.bench.seed_noise import FIRST_LOOK, OPEN, Look, Rule
from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.parallel.world import World
from sabia.core.recipes import pretrain, training_run
from sabia.core.recipes.comparison import measures, verdicts
from sabia.core.recipes.comparison.candidates import Runs, names_of, open_runs, start_over
from sabia.core.recipes.comparison.verdicts import Comparison, Report, percent
from sabia.core.recipes.model_source import find_tokenizer
from sabia.core.recipes.row_outputs import warn_of_rejects
from sabia.core.recipes.run_call import open_run, show_plan
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.spec import load_spec, parse_shape
from sabia.core.text.tokenize import stage
from sabia.core.train.run_directory import RunDirectory


def run(job: Job, options: PretrainOptions) -> None:
    """Train and compare; the report into -o, its rows (or with --json the report) to stdout.

    Raises Infeasible if a comparison cannot tell, after all is written.
    """
    directory, world = open_run(job, options)
    if world.size > 1:
        raise UsageError("--compare trains small models in one process (expected one process)")
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="sabia-compare-")
        folder = Path(stack.enter_context(temporary)) if job.dry_run else directory.path
        _run(job, *with_rows(job, options, folder), directory, world)


def _run(
    given: Job, job: Job, options: PretrainOptions, directory: RunDirectory, world: World
) -> None:
    """Compare token rows; given: the job with its own inputs."""
    runs = open_runs(job, options, world)
    plans = runs.plans()
    task, plan = plans[0]
    context = task.spec.max_positions
    if options.validation:
        held = from_path(options.validation, "tokens", "--validation")
        rows = pretrain.read_rows(job, options, held, warn_of_rejects("validation row"))
        runs.measures.append(measures.held_out(rows, context, runs.tokenizer))
    if options.task:
        runs.measures += measures.of_tasks(
            options.task, options.data, runs.tokenizer, context, job.seed
        )
    if job.dry_run:
        most = options.max_runs * len(runs.candidates)
        figures = {
            "candidates": ", ".join(candidate.name for candidate in runs.candidates),
            "compared by": ", ".join(f"{m.name} ({len(m.sizes):,})" for m in runs.measures),
            "runs": f"{2 * len(runs.candidates)} to {most}",
        }
        figures |= training_run.describe_plan(task, plan, job.mesh, options)
        flops = most * plan.tokens * plan.flops_per_token
        show_plan(given, options, flops, training_run.state_of(task, options), 0, figures)
        return
    directory.path.mkdir(parents=True, exist_ok=True)
    if job.force:
        start_over(job)
    made = Report(job, options, runs, plan.tokens, compared(runs, options))
    verdicts.publish(made)
    if undecided := [one for one in made.comparisons if one.last.verdict == OPEN]:
        more = f" and {len(undecided) - 1} more" if len(undecided) > 1 else ""
        raise Infeasible(f"{made.sentence(undecided[0])}{more}; the report is written")


def compared(runs: Runs, options: PretrainOptions) -> list[Comparison]:
    """Train pairs of runs until every comparison has ended."""
    first, *others = runs.candidates
    comparisons = [
        Comparison(candidate.name, measure) for candidate in others for measure in runs.measures
    ]
    error = (1 - options.confidence) / len(comparisons)
    rule = Rule(error, options.delta, options.max_runs)
    losses: dict[str, list[list[np.ndarray]]] = {c.name: [] for c in runs.candidates}
    active, pairs = others, 0
    while active:
        pairs += 1
        for candidate in (first, *active):
            seed = runs.job.seed + pairs - 1
            losses[candidate.name].append(runs.losses(candidate, seed))
        if pairs < FIRST_LOOK:
            continue
        for number, one in enumerate(comparisons):
            of_measure = number % len(runs.measures)
            if len(losses[one.candidate]) < pairs or (one.looks and one.last.verdict != OPEN):
                continue
            a, b = (
                np.array([run[of_measure] for run in losses[name]])
                for name in (first.name, one.candidate)
            )
            one.scores = tuple(np.array([one.measure.score(x) for x in way]) for way in (a, b))
            one.looks.append(rule.look(a, b, one.measure.clusters))
            _note(one, first.name)
        open_ones = {one.candidate for one in comparisons if not rule.ends(one.last)}
        active = [candidate for candidate in active if candidate.name in open_ones]
    return comparisons


def _note(one: Comparison, first: str) -> None:
    look: Look = one.last
    if look.pairs == FIRST_LOOK:
        notes.note(
            f"{one.measure.name}, {one.candidate}: noise between seeds {percent(look.noise)} of a "
            f"run's loss, {percent(look.pair_noise)} of the difference of a pair"
        )
    notes.note(
        f"after {look.pairs} pairs, {one.measure.name}, {one.candidate} against {first}: "
        f"{one.interval()}: {look.verdict}"
    )


ROW_LENGTH = 2048  # tokens, where the model's context is not shorter


def with_rows(job: Job, options: PretrainOptions, folder: Path) -> tuple[Job, PretrainOptions]:
    """The job and the options with token rows, made in a folder, in place of documents.

    Raises UsageError where no tokenizer is known, and what `sabia tokenize` raises.
    """
    held = [options.validation] if options.validation else []
    given = {
        **{path: folder / "tokens" / name
           for path, name in zip(job.inputs, names_of(job.inputs), strict=True)},
        **dict.fromkeys(held, folder / "held-out"),
    }  # fmt: skip
    sources = {path: from_path(path, "tokens", "--validation" if path in held else "")
               for path in given if path != "-"}  # fmt: skip
    texts = [path for path, of_path in sources.items() if all(map(_has_text, of_path))]
    if not texts:
        return job, options
    rows = [one for path, of_path in sources.items() if path not in texts for one in of_path]
    tokenizer = find_tokenizer(options.tokenizer, options.model, rows)
    if not tokenizer:
        raise UsageError(f"--tokenizer: is missing (expected that of the text of {texts[0]})")
    tokenize = TokenizeOptions(tokenizer=tokenizer, length=_row_length(options))
    for path in texts:
        out = str(given[path])
        stage.run(Job("tokenize", (path,), out, jobs=job.jobs, force=job.force), tokenize)
    made = {path: str(given[path]) if path in texts else path for path in given}
    inputs = tuple(made[path] for path in job.inputs)
    return replace(job, inputs=inputs), options.replace(validation="".join(made[p] for p in held))


def _row_length(options: PretrainOptions) -> int:
    if options.shape:
        context = parse_shape(options.shape).get("context", ROW_LENGTH)
    else:
        known = load_spec(options.config_json or options.model).max_positions
        context = options.context or known
    return min(int(context), ROW_LENGTH)


def _has_text(source: Source) -> bool:
    """Whether its first rows are documents, not token rows."""
    with source.reading():
        if source.form != "jsonl":
            return "input_ids" not in source.stored_schema().names
        first = next(replace(source, kind="document").raw(), None)
    return first is not None and "input_ids" not in first.schema.names
