"""`sabia classify train`: a classifier from labelled documents, with held-out figures."""

from typing import Annotated

from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job


@command(
    kind="fit",
    name="classify train",
    examples="""
    sabia classify train labelled.parquet --label kind -o kind.bin
    sabia classify train rated/ --label stars --positive "stars >= 4" -o good.bin --json
    """,
)
def classify_train(
    job: Job,
    label: Annotated[
        str, option("Column with the labels; rows without one are left out.", metavar="COLUMN")
    ] = "",
    positive: Annotated[
        str, option("Two labels: where this holds (named as -o), and not.", metavar="EXPRESSION")
    ] = "",
    quantize_model: Annotated[
        bool, option("Write the model in its small form.", "--quantize-model")
    ] = False,
    dim: Annotated[
        int, option("Numbers for each word; 0 leaves it to the labels.", min=0, max=4096)
    ] = 0,
    ngrams: Annotated[int, option("Words in a row that count as a feature.", min=1, max=9)] = 2,
    subwords: Annotated[
        str, option("Also parts of words of so many letters, such as 2-4.", metavar="MIN-MAX")
    ] = "",
    epochs: Annotated[
        int, option("Passes over the data; 0 leaves it to its size.", min=0, max=10_000)
    ] = 0,
) -> None:
    """Train a fastText classifier; measure it on documents held out by a hash of their id.

    Its labels become the names of scores: sabia classify pages/ --model kind.bin
    """
    from sabia.core.errors import UsageError
    from sabia.core.text import classifier_training as room

    if not (label or positive):
        raise UsageError("no --label COLUMN and no --positive EXPRESSION (expected one or both)")
    wishes = room.Wishes(dim, ngrams, _letters(subwords), epochs)
    room.run(job, room.TrainConfig(label, positive, quantize_model, wishes))


def _letters(text: str) -> tuple[int, int]:
    """(least, most) of `MIN-MAX`; (0, 0) for none."""
    from sabia.core.errors import UsageError

    if not text:
        return 0, 0
    least, _, most = text.partition("-")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= 12):
        raise UsageError(f"--subwords: {text!r} (expected MIN-MAX, such as 2-4)")
    return int(least), int(most)
