"""`sabia classify drift`: whether the scores of two runs have the same distribution."""

from typing import Annotated

from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job


@command(
    kind="compare",
    name="classify drift",
    examples="""
    sabia classify drift june/ july/
    sabia classify drift june/ july/ --score quality --score spam --json
    """,
)
def classify_drift(
    job: Job,
    score: Annotated[
        list[str] | None,
        option("Compare this score; may be repeated (default: all).", metavar="NAME"),
    ] = None,
) -> None:
    """Compare the scores of two runs, BEFORE and AFTER: PSI, KS, means."""
    from sabia.core.text import drift

    drift.run(job, score or ())
