"""`sabia eval`: models on tasks, compared item by item."""

from sabia.cli.command import command
from sabia.core.options.eval import EvalOptions
from sabia.core.shards.job import Job


@command(
    EvalOptions,
    examples="""
    sabia eval --task sums.toml --model base/ --model tuned/ -o scores.parquet --report report.html
    sabia eval --task sums.toml --model tuned/ --samples 20 --temperature 1 --json
    sabia eval --task enem.toml --task gsm8k.toml --index benchmarks.parquet
    sabia eval before.parquet after.parquet --report compared.html
    sabia eval --task oab.toml --answers tuned=answers.jsonl --judge-url http://localhost:8000/v1 --judge-model NAME
    """,  # noqa: E501 - a help page wraps it
)
def eval(job: Job, options: EvalOptions) -> None:
    """Measure models on tasks and compare them item by item.

    INPUT are score rows of earlier runs, compared with the new ones. Scores go to -o or stdout
    as rows, a table with intervals and paired tests to stderr, the same as a page to --report.
    """
    from sabia.core.recipes import evaluate as stage

    stage.run(job, options)
