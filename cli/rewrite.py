"""`sabia rewrite`: rewrite documents so that reasoning precedes the answer."""

from sabia.cli.command import command
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards.job import Job


@command(
    RewriteOptions,
    examples="""
    sabia rewrite pages/ -o rewritten/ -j 2
    sabia dedup pages.parquet | sabia rewrite | sabia tokenize --tokenizer model/ -o tokens/
    sabia rewrite pages/ --engine endpoint --url http://localhost:8000/v1 --model NAME --prices prices.toml --max-usd 20 -o rewritten/
    """,  # noqa: E501 - a help page wraps it
)
def rewrite(job: Job, options: RewriteOptions) -> None:
    """Rewrite documents so that reasoning precedes its conclusion.

    The rules engine reorders sentences and changes none. The other engines use a language model and
    check that its text keeps the numbers, words, language and length of the original and states no
    other date or name. Completed requests are cached, so that none is paid for twice.
    """
    from sabia.core.text.rewrite.stage import run

    run(job, options)
