"""`classify train`: on the labels of a column, or on labels that a language model gives first."""

from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.recipes.classifier import trainer
from sabia.core.shards.job import Job


def run(job: Job, options: ClassifyTrainOptions) -> None:
    """Train on the job's inputs; with `--ask` on a sample that a language model labels first."""
    if not options.ask:
        trainer.train(job, options)
        return
    from sabia.core.recipes.classifier import distill
    from sabia.core.recipes.classifier.lm_scorer import lm_scorer

    with lm_scorer(job, options) as teacher:
        distill.run(job, options, teacher)
