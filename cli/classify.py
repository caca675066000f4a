"""`sabia classify` (`sabia classify score`): score documents, name their language, filter."""

import os
from typing import TYPE_CHECKING, Annotated

from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job

if TYPE_CHECKING:
    from sabia.core.text.scorers import Scorer


@command(
    kind="map",
    examples="""
    sabia classify pages/ -o scored/ -j 2
    sabia classify pages/ --where "quality >= 0.5 and language == 'pt'" -o good.parquet
    sabia classify train labelled.parquet --label kind -o spam.bin
    sabia classify pages/ --model spam.bin --where "spam < 0.3" --removed out.parquet | sabia dedup
    """,
)
def classify(
    job: Job,
    where: Annotated[
        str, option("Keep rows for which this holds (columns, scores).", metavar="EXPRESSION")
    ] = "",
    removed: Annotated[
        str, option("Where other rows go: FILE.parquet, or a directory.", metavar="PATH")
    ] = "",
    model: Annotated[
        list[str] | None,
        option("A classifier, which adds its scores; may be repeated.", metavar="[NAME=]PATH"),
    ] = None,
    quality: Annotated[
        bool, option("Count quality figures and name the language.", "--quality/--no-quality")
    ] = True,
) -> None:
    """Score documents: quality, language, trained classifiers; filter.

    Adds entries to the column scores (word_count, stop_words, duplicate_lines, … and quality from
    0 to 1) and sets language (und where unsure). Filtering is a choice made later, or by --where.
    """
    from sabia.core.text import classify as room

    scorers = [_open(given) for given in model or ()]
    room.run(job, room.ClassifyConfig(where, quality, removed), scorers)


def _open(given: str) -> "Scorer":
    """The scorer of `PATH` or `NAME=PATH`."""
    from sabia.core.errors import UsageError
    from sabia.core.text.scorers import named, open_scorer, split_name

    prefix, path = split_name(given)
    if os.path.isdir(path):
        raise UsageError(f"--model: {path} is a directory (expected a fastText model file)")
    return named(open_scorer(path), prefix)
