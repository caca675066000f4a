"""`sabia eval`: models on tasks, compared item by item."""

from typing import Annotated

from sabia.cli.grammar import command, count, money, option
from sabia.core.shards.job import Job


@command(
    kind="report",
    examples="""
    sabia eval --task sums.toml --model base/ --model tuned/ -o scores.parquet --report report.html
    sabia eval --task sums.toml --model tuned/ --samples 20 --temperature 1 --json
    sabia eval --task enem.toml --task gsm8k.toml --index benchmarks.parquet
    sabia eval before.parquet after.parquet --report compared.html
    sabia eval --task oab.toml --answers tuned=answers.jsonl --judge-url http://localhost:8000/v1 \\
        --judge-model NAME
    """,
)
def eval(
    job: Job,
    task: Annotated[
        list[str] | None, option("A task; give it often for several.", metavar="FILE.toml")
    ] = None,
    model: Annotated[
        list[str] | None,
        option("Model directory or URL#NAME; give it often.", metavar="[NAME=]DIR|URL"),
    ] = None,
    answers: Annotated[
        list[str] | None, option("Answers written before, to score.", metavar="[NAME=]FILE")
    ] = None,
    report: Annotated[
        str | None, option("Where the HTML report goes.", metavar="FILE.html")
    ] = None,
    index: Annotated[
        str,
        option("The index of dedup --decontaminate: written, or compared.", metavar="FILE.parquet"),
    ] = "",
    limit: Annotated[int, option("Items of each task (0: all).", metavar="N", min=0)] = 0,
    samples: Annotated[
        int | None, option("Answers to each item (default: the task's).", metavar="N", min=1)
    ] = None,
    temperature: Annotated[
        float | None, option("Of sampling (default: the task's).", metavar="T", min=0)
    ] = None,
    dtype: Annotated[
        str, option("float32 or bfloat16, of local models.", metavar="NAME")
    ] = "float32",
    api_key_env: Annotated[
        str, option("Variable that holds the endpoints' key.", metavar="VARIABLE")
    ] = "SABIA_API_KEY",
    concurrency: Annotated[int, option("Calls in flight.", metavar="N", min=1)] = 16,
    judge_url: Annotated[str, option("OpenAI-compatible judge, up to /v1.", metavar="URL")] = "",
    judge_model: Annotated[str, option("The judge's model name.", metavar="NAME")] = "",
    judge_votes: Annotated[int, option("Calls that vote on an item.", metavar="N", min=1)] = 1,
    judge_items_per_call: Annotated[int, option("Rubric items in a call.", metavar="N", min=1)] = 1,
    judge_format: Annotated[
        str, option("text, json-object or json-schema.", metavar="NAME")
    ] = "text",
    judge_tokens: Annotated[int, option("Longest reply of the judge.", metavar="N", min=16)] = 1024,
    judge_cache: Annotated[
        str, option("Finished calls (default: ~/.cache/sabia/calls).", metavar="DIR")
    ] = "",
    max_usd: Annotated[float | None, money("Stop before spending more; needs --prices.")] = None,
    max_requests: Annotated[float | None, count("Stop before sending more calls.")] = None,
    prices: Annotated[
        str, option("Dollars per million tokens by model.", metavar="FILE.toml")
    ] = "",
    max_unknown: Annotated[
        float, option("Share of a rubric that may lack a verdict.", metavar="SHARE", min=0, max=1)
    ] = 0.0,
) -> None:
    """Measure models on tasks and compare them item by item.

    INPUT are score rows of earlier runs, compared with the new ones. Scores go to -o or stdout
    as rows, a table with intervals and paired tests to stderr, the same as a page to --report.
    """
    from sabia.core.recipes import evaluate as room
    from sabia.core.recipes.subjects import JudgeOptions

    judge = JudgeOptions(
        url=judge_url,
        model=judge_model,
        votes=judge_votes,
        items_per_call=judge_items_per_call,
        reply_format=judge_format,
        max_tokens=judge_tokens,
        cache=judge_cache,
        max_usd=max_usd,
        max_requests=None if max_requests is None else int(max_requests),
        prices=prices,
        max_unknown=max_unknown,
        concurrency=concurrency,
        api_key_env=api_key_env,
    )
    config = room.EvalConfig(
        tasks=tuple(task or ()),
        models=tuple(model or ()),
        answers=tuple(answers or ()),
        report=report,
        index=index,
        limit=limit,
        samples=samples,
        temperature=temperature,
        dtype=dtype,
        api_key_env=api_key_env,
        concurrency=concurrency,
        judge=judge,
    )
    room.run(job, config)
