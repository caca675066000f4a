"""`sabia classify train`: a classifier from labelled documents, with held-out figures."""

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
    """Train a classifier; measure it on documents held out by a hash of their id.

    A fastText model, or with --model an encoder or decoder of the core, whose -o is a run directory
    as in sft. With --ask a language model labels a sample first, and --label may name the column
    of people's labels to compare with. Labels become the names of scores:
    sabia classify pages/ --model kind.bin
    """
    from sabia.core.recipes.classifier import classify_train as stage

    stage.run(job, options)
