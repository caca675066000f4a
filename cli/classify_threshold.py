"""`sabia classify threshold`: where to cut a score, and what it is worth as a probability."""

from sabia.cli.command import command
from sabia.core.options.classify_threshold import ThresholdOptions
from sabia.core.shards.job import Job


@command(
    ThresholdOptions,
    examples="""
    sabia classify threshold scored.parquet --score spam --label kind --precision 95% -o spam.json
    sabia classify threshold scored/ --score edu --positive "stars >= 4" --recall 90% --sure
    sabia classify pages/ --model spam.bin --calibration spam.json --where "spam_ok == 0" -o ham/
    """,
)
def classify_threshold(job: Job, options: ThresholdOptions) -> None:
    """Choose thresholds of a score, overall and by language, and calibrate it.

    Without --precision or --recall the best F1 is taken. -o writes what classify --calibration
    applies: NAME_ok, by each document's language, and NAME_probability.
    """
    from sabia.core.text.classify import threshold_stage

    threshold_stage.run(job, options)
