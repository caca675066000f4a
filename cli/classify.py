"""`sabia classify` (`sabia classify score`): score documents, name their language, filter."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from sabia.cli.classifier_options import ASK, BACKEND, asked
from sabia.cli.grammar import command, length, money, option
from sabia.cli.screen_options import SCREENS
from sabia.cli.shared_options import sharing
from sabia.core import notes
from sabia.core.shards.job import Job

if TYPE_CHECKING:
    from sabia.core.text.scorers import Scorer

NO_MATTER = (
    *ASK,
    "backend",
    "price_per_hour",
)  # to the scores; what is asked is in a scorer's digest


@command(
    kind="map",
    examples="""
    sabia classify pages/ -o scored/ -j 2
    sabia classify pages/ --where "quality >= 0.5 and language == 'pt'" -o good.parquet
    sabia classify pages/ --where "gopher and c4 and fineweb" --removed out.parquet -o good.parquet
    sabia classify pages/ --pii mask --block-urls ut1/ --where "not blocked_url" -o clean/
    sabia classify train labelled.parquet --label kind -o spam.bin
    sabia classify pages/ --model spam.bin --where "spam < 0.3" --removed out.parquet | sabia dedup
    """,
)
@sharing("asking", ASK)
@sharing("screens", SCREENS)
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
    calibration: Annotated[
        list[str] | None,
        option("Of classify threshold: adds NAME_ok, NAME_probability.", metavar="FILE.json"),
    ] = None,
    quality: Annotated[
        bool, option("Count quality figures and name the language.", "--quality/--no-quality")
    ] = True,
    length: Annotated[
        int | None, length("Most tokens of a text or window (default: as trained).")
    ] = None,
    long: Annotated[
        str, option("Longer texts: truncate, or windows.", metavar="NAME")
    ] = "truncate",
    precision: Annotated[
        str, option("Of models of the core: fp32 or bf16.", metavar="NAME")
    ] = "fp32",
    price_per_hour: Annotated[
        float, money("Of one CPU core, for the cost of 10^9 documents.", show_default=False)
    ] = 0.0,
    backend: BACKEND = "torch",
    *,
    asking: dict[str, Any],
    screens: dict[str, Any],
) -> None:
    """Score documents: quality, language, trained classifiers; filter.

    Adds entries to the column scores (word_count, gopher_top_2gram_share, … quality from 0 to 1;
    gopher, c4 and fineweb 1 where a text passes them) and sets language (und where unsure).
    Filtering is a choice made later, or by --where.
    """
    from sabia.core.text import classify as room
    from sabia.core.text.screens import Screens

    settings = {"backend": backend, "length": length or 0, "long": long, "precision": precision}
    scorers = [_open(given, settings) for given in model or ()]
    decisions = tuple(room.read_decision(path) for path in calibration or ())
    lists = {name: tuple(screens[name] or ()) for name in ("bad_words", "block_urls")}
    look = Screens(**{**screens, **lists})
    config = room.ClassifyConfig(where, quality, removed, decisions, price_per_hour, look)
    asker = asked(asking, backend)
    told = {k: v for k, v in job.options.items() if k not in NO_MATTER}
    job = replace(job, options=told)
    if asker is None:
        room.run(job, config, scorers)
        return
    with asker:
        room.run(_alone(job), config, [*scorers, asker])
        notes.note(asker.said())


def _alone(job: Job) -> Job:
    """The job in one process, which has many calls in flight and keeps within its budget."""
    if job.jobs > 1:
        notes.note(f"-j {job.jobs}: a language model is asked by one process; see --concurrency")
    return replace(job, jobs=1)


def _open(given: str, settings: dict[str, Any]) -> "Scorer":
    """The scorer of `PATH` or `NAME=PATH`; a directory's model is the core's."""
    from sabia.core.text.scorers import named, open_scorer, split_name

    prefix, path = split_name(given)
    if os.path.isdir(path):
        from sabia.core.recipes.classifier_model import ModelScorer

        return named(ModelScorer(path, **settings), prefix)
    return named(open_scorer(path), prefix)
