"""`classify train`: which trainer serves, on the labels of people or of a language model."""

from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.recipes.lm_scorer import asked
from sabia.core.shards.job import Job
from sabia.core.text.classify.scorers import Scorer, open_scorer


def run(job: Job, options: ClassifyTrainOptions) -> None:
    """Train on the job's inputs, with `--ask` on a sample that is labelled first."""
    teacher = asked(options)
    if teacher is None:
        train(job, options)
        return
    from sabia.core.recipes import distill

    with teacher:
        distill.run(job, options, teacher)


def train(job: Job, options: ClassifyTrainOptions) -> None:
    """Train a fastText model, or with `--model` an encoder or decoder of the core."""
    if options.model:
        from sabia.core.recipes import classifier

        classifier.run(job, options)
        return
    from sabia.core.text.classify import train_stage

    train_stage.run(job, options)


def opened(job: Job, options: ClassifyTrainOptions) -> Scorer:
    """What was trained."""
    if not options.model:
        return open_scorer(str(job.out))
    from sabia.core.recipes.classifier_model import ModelScorer

    return ModelScorer(f"{job.out}/final", options.backend)
