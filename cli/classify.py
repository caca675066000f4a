"""`sabia classify`: score documents, name their language, filter; train classifiers."""

from typing import Annotated

from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job


@command(
    kind="map",
    examples="""
    sabia classify pages/ -o scored/ -j 2
    sabia classify pages/ --keep "quality >= 0.5 and language == 'pt'" -o good.parquet
    sabia classify labelled.parquet --train label -o spam.bin
    sabia classify pages/ --model spam.bin --keep "spam < 0.3" --removed out.parquet | sabia dedup
    """,
)
def classify(
    job: Job,
    keep: Annotated[
        str, option("Keep rows for which this holds (columns, scores).", metavar="EXPRESSION")
    ] = "",
    removed: Annotated[
        str, option("Where other rows go: FILE.parquet, or a directory.", metavar="PATH")
    ] = "",
    model: Annotated[
        str, option("A fastText model; adds the score of each label.", metavar="MODEL.bin")
    ] = "",
    quality: Annotated[
        bool, option("Count quality figures and name the language.", "--quality/--no-quality")
    ] = True,
    train: Annotated[
        str, option("Train a fastText model on this column; -o names it.", metavar="COLUMN")
    ] = "",
) -> None:
    """Score documents: quality, language, trained classifiers; filter.

    Adds entries to the column scores (word_count, stop_words, duplicate_lines, … and quality from
    0 to 1) and sets language (und where unsure). Filtering is a choice made later, or by --keep.
    """
    from sabia.core.errors import UsageError
    from sabia.core.text import classify as room

    if not train:
        room.run(job, room.ClassifyConfig(keep, model, quality, removed))
        return
    if keep or removed or model:
        raise UsageError("--train goes without --keep, --removed and --model")
    room.train(job, train)
