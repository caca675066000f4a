"""Train a classifier of either kind (fastText, or a model of the core), and open the result."""

from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.shards.job import Job
from sabia.core.text.classify.scorers import Scorer, open_scorer


def train(job: Job, options: ClassifyTrainOptions) -> None:
    """Train a fastText model, or with `--model` an encoder or decoder of the core."""
    if options.model:
        from sabia.core.recipes.classifier import fine_tuning

        fine_tuning.run(job, options)
        return
    from sabia.core.text.classify import train_stage

    train_stage.run(job, options)


def open_trained(job: Job, options: ClassifyTrainOptions) -> Scorer:
    """The scorer of the classifier that `train` wrote."""
    if not options.model:
        return open_scorer(str(job.out))
    from sabia.core.recipes.classifier.sequence_classifier import ModelScorer

    return ModelScorer(f"{job.out}/final", options.backend)
