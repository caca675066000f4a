"""`sabia eval`: evaluate models on tasks and compare them."""

from sabia.cli.command import command
from sabia.core.options.eval import EvalOptions
from sabia.core.shards.job import Job


@command(
    EvalOptions,
    examples="""
    sabia eval --task sums.toml --model base/ --model tuned/ -o scores.parquet --report report.html
    sabia eval --task sums.toml --model tuned/ --samples 20 --temperature 1 --json
    sabia eval --task enem.toml --task gsm8k.toml --index benchmarks.parquet
    sabia eval --task gsm8k --data gsm8k=test.jsonl --model tuned/
    sabia eval --task enem.yaml --model large/ --shard 0/4 -o part-0.parquet
    sabia eval part-*.parquet --report report.html
    sabia eval before.parquet after.parquet --report compared.html
    sabia eval --task oab.toml --answers tuned=answers.jsonl --judge-url http://localhost:8000/v1 --judge-model NAME
    """,  # noqa: E501 - a help page wraps it
)
def eval(job: Job, options: EvalOptions) -> None:
    """Evaluate models on benchmark tasks and compare them item by item.

    INPUT is score rows of earlier evaluations, to compare with the new ones. Scores are written to
    -o or stdout as rows. A table with confidence intervals and paired tests is printed to stderr,
    and written to --report as an HTML page.
    """
    from sabia.core.recipes.evaluate import run

    run(job, options)
