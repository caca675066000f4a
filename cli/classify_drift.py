"""`sabia classify drift`: whether the scores of two runs have the same distribution."""

from sabia.cli.command import command
from sabia.core.options.classify_drift import DriftOptions
from sabia.core.shards.job import Job


@command(
    DriftOptions,
    examples="""
    sabia classify drift june/ july/
    sabia classify drift june/ july/ --score quality --score spam --json
    """,
)
def classify_drift(job: Job, options: DriftOptions) -> None:
    """Compare the scores of two runs, BEFORE and AFTER: PSI, KS, means."""
    from sabia.core.text.classify import drift_stage

    drift_stage.run(job, options.score)
