"""`sabia rewrite`: documents in another order, such as reasoning before answers."""

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
    """Rewrite documents: conclusions that stand before their reasoning move behind it.

    The rules engine permutes sentences and drops none. A model's answers must keep the numbers,
    words, language and length of their source. Finished calls are kept and never paid twice.
    """
    from sabia.core.text.rewrite import stage

    stage.run(job, options)
