"""Compare corpora by small training runs: `sabia pretrain --compare A B …`.

Pairs of runs with one seed are trained in turn, A's and those of all candidates that are not yet
told from it, and the comparisons are tested after every pair (core.bench.seed_noise). The same call
again trains nothing that is finished and comes to the same verdicts; with a larger `--max-runs` it
goes on.
"""

import contextlib
import tempfile
from pathlib import Path

import numpy as np

from sabia.core import notes
from sabia.core.bench.seed_noise import FIRST_LOOK, OPEN, Look, Rule
from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.parallel.world import World
from sabia.core.recipes import pretrain, training_run
from sabia.core.recipes.comparison import measures, verdicts
from sabia.core.recipes.comparison.candidates import Runs, open_runs, start_over
from sabia.core.recipes.comparison.text_rows import with_rows
from sabia.core.recipes.comparison.verdicts import Comparison, Report, percent
from sabia.core.recipes.row_outputs import warn_of_rejects
from sabia.core.recipes.run_call import open_run, show_plan
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
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
