"""`sabia classify drift`: compare the score distributions of two runs."""

from sabia.cli.command import command
from sabia.core.options.classify_threshold import DriftOptions
from sabia.core.shards.job import Job


@command(
    DriftOptions,
    examples="""
    sabia classify drift june/ july/
    sabia classify drift june/ july/ --score quality --score spam --json
    """,
)
def classify_drift(job: Job, options: DriftOptions) -> None:
    """Compare the score distributions of two runs: PSI, KS statistic and means."""
    from sabia.core.text.classify.drift_stage import run

    run(job, options.score)
