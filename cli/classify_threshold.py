"""`sabia classify threshold`: choose thresholds of a score, and calibrate it."""

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
    """Choose thresholds of a score, overall and for each language, and calibrate it.

    INPUT is documents with a score and the true labels. Without --precision or --recall the
    threshold with the highest F1 is chosen. -o writes a file for classify --calibration, which adds
    the scores NAME_ok (1 if the score reaches the threshold of the document's language) and
    NAME_probability (the calibrated score).
    """
    from sabia.core.text.classify.threshold_stage import run

    run(job, options)
