"""`sabia classify threshold`: where to cut a score, and what it is worth as a probability."""

from typing import Annotated

from sabia.cli.grammar import command, fraction, option
from sabia.core.shards.job import Job


@command(
    kind="choose",
    name="classify threshold",
    examples="""
    sabia classify threshold scored.parquet --score spam --label kind --precision 95% -o spam.json
    sabia classify threshold scored/ --score edu --positive "stars >= 4" --recall 90% --sure
    sabia classify pages/ --model spam.bin --calibration spam.json --where "spam_ok == 0" -o ham/
    """,
)
def classify_threshold(
    job: Job,
    score: Annotated[str, option("The score, or a column of numbers.", metavar="NAME")] = "",
    label: Annotated[
        str, option("Column of true and false, or of labels (NAME is one).", metavar="COLUMN")
    ] = "",
    positive: Annotated[
        str, option("What holds for positive rows, instead of a label.", metavar="EXPRESSION")
    ] = "",
    precision: Annotated[
        float, fraction("Reach this precision, with the most recall.", show_default=False)
    ] = 0.0,
    recall: Annotated[
        float, fraction("Reach this recall, with the most precision.", show_default=False)
    ] = 0.0,
    sure: Annotated[bool, option("The interval's lower end must reach it.", "--sure")] = False,
    least: Annotated[
        int, option("Rows for a language's own threshold; 0: none has one.", min=0)
    ] = 200,
) -> None:
    """Choose thresholds of a score, overall and by language, and calibrate it.

    Without --precision or --recall the best F1 is taken. -o writes what classify --calibration
    applies: NAME_ok, by each document's language, and NAME_probability.
    """
    from sabia.core.text import thresholding as room
    from sabia.core.text.threshold import Target

    target = Target(precision, recall, sure)
    room.run(job, room.ThresholdConfig(score, label, positive, target, least))
