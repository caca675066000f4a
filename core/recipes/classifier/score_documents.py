"""`classify`: open the classifiers and the language model that score documents, and score them."""

import os
from dataclasses import replace

from sabia.core import notes
from sabia.core.options.classify import ClassifyOptions
from sabia.core.shards.job import Job
from sabia.core.text.classify import stage
from sabia.core.text.classify.scorers import Scorer, open_scorer, split_name, with_prefix


def run(job: Job, options: ClassifyOptions) -> None:
    """Score the job's inputs; raises what the scorers and the shards raise."""
    scorers = _opened(options)
    if not options.ask:
        stage.run(job, options, scorers)
        return
    from sabia.core.recipes.classifier.lm_scorer import lm_scorer

    asker = lm_scorer(job, options)
    if job.jobs > 1:
        notes.note(f"-j {job.jobs}: only one process asks a language model; see --concurrency")
    with asker:
        stage.run(replace(job, jobs=1), options, [*scorers, asker])
        notes.note(asker.summary())


def _opened(options: ClassifyOptions) -> list[Scorer]:
    """The scorers of `PATH` or `NAME=PATH`; a directory is a model of the core."""
    given = [split_name(value) for value in options.model]
    directories = any(os.path.isdir(path) for _, path in given)
    local = options.ask and not options.url
    if not directories:
        of_models = ("length", "long", "precision", *(() if local else ("backend",)))
        options.refuse(of_models, "only with a directory as --model")
    return [with_prefix(_open(path, options), prefix) for prefix, path in given]


def _open(path: str, options: ClassifyOptions) -> Scorer:
    if not os.path.isdir(path):
        return open_scorer(path)
    from sabia.core.recipes.classifier.sequence_classifier import ModelScorer

    return ModelScorer(path, options.backend, options.length or 0, options.long, options.precision)
