"""`sabia classify` (`sabia classify score`): score documents, detect their language, filter."""

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
    """Score documents and optionally filter them.

    Adds entries to the column scores: text statistics (word_count, gopher_top_2gram_share, ...),
    quality from 0 to 1, gopher, c4 and fineweb (1 if the text passes the filter rules of that
    paper, else 0), and those of --model classifiers. Sets the column language (und if uncertain).
    All rows are kept unless --where is given.
    """
    from sabia.core.recipes.classifier.score_documents import run

    run(job, options)
