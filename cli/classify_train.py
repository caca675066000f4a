"""`sabia classify train`: train a classifier on labelled documents and measure it."""

from sabia.cli.command import command
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.shards.job import Job


@command(
    ClassifyTrainOptions,
    examples="""
    sabia classify train labelled.parquet --label kind -o kind.bin
    sabia classify train rated/ --label stars --positive "stars >= 4" -o good.bin --json
    sabia classify train rated/ --label stars --model encoder/ --regression -o run/
    sabia classify train pages/ --ask quality.toml --lm chat-model/ --sample 20k -o quality.bin
    """,
)
def classify_train(job: Job, options: ClassifyTrainOptions) -> None:
    """Train a document classifier and measure it on held-out documents.

    The classifier is a fastText model, or with --model a fine-tuned encoder or decoder, whose
    output is a run directory as in sabia sft. With --ask, a language model labels a sample of the
    documents first. A tenth of the documents, chosen by a hash of their id, is held out. The labels
    become the names of scores in sabia classify pages/ --model kind.bin
    """
    from sabia.core.recipes.classifier.classify_train import run

    run(job, options)
