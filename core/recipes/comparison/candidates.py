"""The corpora of a comparison, and the runs that are trained on them.

A run is one of `sabia pretrain` in a directory of its own, `runs/NAME-SEED`, with the same code,
checkpoints and record: one that has finished is not repeated, one that was interrupted continues.
Its scores are stored beside it, per item, and computed again if the items change.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from sabia.core import notes, stop
from sabia.core.bench.loglikelihood import Scorer
from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.parallel.world import World
from sabia.core.recipes import pretrain, training_run
from sabia.core.recipes.comparison.measures import Measure
from sabia.core.recipes.model_source import find_tokenizer
from sabia.core.recipes.row_outputs import opened_rejects
from sabia.core.recipes.run_call import RunCall
from sabia.core.recipes.training_run import Plan, Task
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.token_rows import TokenRows

RUNS = "runs"
SCORES = "scores.json"
COMPARED_ROWS = 64  # to find that two candidates are the same


@dataclass(frozen=True)
class Candidate:
    """A corpus: its name, the INPUT, and its rows."""

    name: str
    path: str
    sources: list[Source]
    rows: TokenRows


@dataclass
class Runs:
    """The runs of a comparison. measures: set once the model's context is known."""

    job: Job
    options: PretrainOptions
    world: World
    candidates: list[Candidate]
    tokenizer: str
    measures: list[Measure] = field(default_factory=list)

    def task(self, candidate: Candidate, seed: int) -> Task:
        """The model and the rows of a run."""
        job = replace(self.job, inputs=(candidate.path,), seed=seed)
        # validation is no part of training unless its figures during a run are asked for
        validation = self.options.validation if self.options.eval_every else ""
        options = self.options.replace(
            validation=validation, max_repeat=self.options.max_repeat or 1.0
        )
        return pretrain.make_task(job, options, candidate.sources, candidate.rows, self.tokenizer)

    def plans(self) -> list[tuple[Task, Plan]]:
        """The plan of a run on each candidate. UsageError where they are not alike."""
        made = []
        for candidate in self.candidates:
            try:
                task = self.task(candidate, self.job.seed)
                made.append((task, training_run.make_plan(task, self.options, self.job.seed)))
            except (UsageError, BadData) as error:
                raise type(error)(f"{error} (candidate {candidate.name})") from None
        tokens = [plan.tokens for _, plan in made]
        if len(set(tokens)) > 1:
            lengths = ", ".join(f"{c.name} {c.rows.row_length}" for c in self.candidates)
            raise UsageError(
                f"--compare: runs would read different numbers of tokens, because the rows have "
                f"different lengths ({lengths}; expected one length)"
            )
        return made

    def directory(self, candidate: Candidate, seed: int) -> RunDirectory:
        """Where a run is."""
        return RunDirectory(Path(str(self.job.out)) / RUNS / f"{candidate.name}-{seed}")

    def losses(self, candidate: Candidate, seed: int) -> list[np.ndarray]:
        """Nats of the items of each measure, after a run has been trained, if it has not been.

        Raises Failed for a run that fails, or whose loss is not finite; Interrupted.
        """
        directory = self.directory(candidate, seed)
        try:
            self._train(candidate, seed, directory)
            return self._scored(directory)
        except Failed as error:
            raise Failed(f"{candidate.name}, seed {seed}: {error}") from error

    def seconds(self, candidate: Candidate, seed: int) -> float:
        """How long a finished run was trained."""
        return float(read_json(self.directory(candidate, seed).record)["seconds"])

    def _train(self, candidate: Candidate, seed: int, directory: RunDirectory) -> None:
        path = str(directory.path)
        job = replace(self.job, inputs=(candidate.path,), out=path, seed=seed, force=False)
        options = self.options
        identity = pretrain.run_identity(job, options, candidate.sources, self.tokenizer, directory)
        if directory.finished(identity):
            return
        stop.check()
        notes.note(f"run of {candidate.name}, seed {seed}")
        (directory.path / SCORES).unlink(missing_ok=True)
        call = RunCall(job, identity, directory, self.world)
        training_run.train(call, self.task(candidate, seed), options)

    def _scored(self, directory: RunDirectory) -> list[np.ndarray]:
        path = directory.path / SCORES
        try:
            stored = read_json(path)
        except (OSError, ValueError):  # none, or cut short
            stored = {}
        known = [stored.get(measure.fingerprint) for measure in self.measures]
        if None in known:
            spec, params = load_stored(str(directory.final))
            scorer = Scorer(spec, params, self.job.backend)
            for number, measure in enumerate(self.measures):
                if known[number] is None:
                    known[number] = measure.losses(scorer).tolist()
            names = [measure.fingerprint for measure in self.measures]
            write_json(path, stored | dict(zip(names, known, strict=True)))
        losses = [np.array(nats, np.float64) for nats in known]
        for measure, nats in zip(self.measures, losses, strict=True):
            if not (np.isfinite(nats).all() and nats.sum() > 0):
                raise Failed(
                    f"{measure.name} is {measure.score(nats):.4g} (expected a number above 0; the "
                    "model has diverged: try a lower --lr)"
                )
        return losses


def open_runs(job: Job, options: PretrainOptions, world: World) -> Runs:
    """The candidates of the inputs. Raises UsageError for one candidate, equal ones, or several
    tokenizers."""
    if len(job.inputs) < 2 or "-" in job.inputs:
        given = " ".join(job.inputs) or "stdin"
        raise UsageError(f"--compare: {given} (expected two or more candidates as INPUT)")
    by_path = {path: open_inputs(replace(job, inputs=(path,)), "tokens") for path in job.inputs}
    held = from_path(options.validation, "tokens", "--validation") if options.validation else []
    every = [source for sources in by_path.values() for source in sources]
    tokenizer = find_tokenizer(options.tokenizer, options.model, [*every, *held])
    if len(by_path) < len(job.inputs):
        raise UsageError(f"--compare: an INPUT is given twice ({' '.join(job.inputs)})")
    with opened_rejects(job, world, "token rows") as rejects:
        candidates = [
            Candidate(name, path, sources, pretrain.read_rows(job, options, sources, rejects.add))
            for name, (path, sources) in zip(names_of(job.inputs), by_path.items(), strict=True)
        ]
    for one, other in combinations(candidates, 2):
        if _same_rows(one.rows, other.rows):
            raise UsageError(f"--compare: {one.path} and {other.path} have the same rows")
    return Runs(job, options, world, candidates, tokenizer)


def _same_rows(one: TokenRows, other: TokenRows) -> bool:
    """Whether as many rows have as many tokens, and those looked at are the same."""
    if (len(one), one.tokens) != (len(other), other.tokens):
        return False
    numbers = np.unique(np.linspace(0, len(one) - 1, COMPARED_ROWS).astype(int))
    a, b = (rows.batch(numbers)["input_ids"] for rows in (one, other))
    return np.array_equal(a, b)


def names_of(paths: Sequence[str]) -> list[str]:
    """Short names for paths: their last parts, numbered if two have the same."""
    last = [Path(path.rstrip("/")).name.partition(".")[0] or "corpus" for path in paths]
    return [
        name if last.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(last, 1)
    ]


def start_over(job: Job) -> None:
    """Delete the runs of an earlier call."""
    shutil.rmtree(Path(str(job.out)) / RUNS, ignore_errors=True)
