"""`sabia classify` (`sabia classify score`): score documents, name their language, filter."""

from sabia.cli.command import command
from sabia.core.options.classify import ClassifyOptions
from sabia.core.shards.job import Job


@command(
    ClassifyOptions,
    examples="""
    sabia classify pages/ -o scored/ -j 2
    sabia classify pages/ --where "quality >= 0.5 and language == 'pt'" -o good.parquet
    sabia classify pages/ --where "gopher and c4 and fineweb" --removed out.parquet -o good.parquet
    sabia classify pages/ --pii mask --block-urls ut1/ --where "not blocked_url" -o clean/
    sabia classify train labelled.parquet --label kind -o spam.bin
    sabia classify pages/ --model spam.bin --where "spam < 0.3" --removed out.parquet | sabia dedup
    """,
)
def classify(job: Job, options: ClassifyOptions) -> None:
    """Score documents: quality, language, trained classifiers; filter.

    Adds entries to the column scores (word_count, gopher_top_2gram_share, … quality from 0 to 1;
    gopher, c4 and fineweb 1 where a text passes them) and sets language (und where unsure).
    Filtering is a choice made later, or by --where.
    """
    from sabia.core.recipes.classifier import score_documents as stage

    stage.run(job, options)
