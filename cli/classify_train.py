"""`sabia classify train`: a classifier from labelled documents, with held-out figures."""

from typing import Annotated

from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job


@command(
    kind="fit",
    name="classify train",
    examples="""
    sabia classify train labelled.parquet --label kind -o kind.bin
    sabia classify train labelled/ --label kind -o kind.bin --json > figures.json
    """,
)
def classify_train(
    job: Job,
    label: Annotated[str, option("Column with the labels.", metavar="COLUMN")] = "",
) -> None:
    """Train a fastText classifier; measure it on documents held out by a hash of their id.

    Its labels become the names of scores: sabia classify pages/ --model kind.bin
    """
    from sabia.core.errors import UsageError
    from sabia.core.text import classifier_training as room

    if not label:
        raise UsageError("no --label COLUMN (expected the column with the labels)")
    room.run(job, room.TrainConfig(label))
