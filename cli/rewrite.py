"""`sabia rewrite`: documents in another order, such as reasoning before answers."""

from typing import Annotated

from sabia.cli.grammar import command, count, duration, money, option
from sabia.core.shards.job import Job


@command(
    kind="map",
    examples="""
    sabia rewrite pages/ -o rewritten/ -j 2
    sabia dedup pages.parquet | sabia rewrite | sabia tokenize --tokenizer model/ -o tokens/
    sabia rewrite pages/ --engine endpoint --url http://localhost:8000/v1 --model NAME \\
        --prices prices.toml --max-usd 20 -o rewritten/
    """,
)
def rewrite(
    job: Job,
    recipe: Annotated[str, option("What to do: reason-first.", metavar="NAME")] = "reason-first",
    engine: Annotated[
        str, option("rules (no model), endpoint or local.", metavar="NAME")
    ] = "rules",
    url: Annotated[str, option("OpenAI-compatible server, up to /v1.", metavar="URL")] = "",
    model: Annotated[
        str, option("The endpoint's model name, or a local directory.", metavar="NAME")
    ] = "",
    api_key_env: Annotated[
        str, option("Variable that holds the key.", metavar="VARIABLE")
    ] = "SABIA_API_KEY",
    cache: Annotated[
        str, option("Finished calls (default: ~/.cache/sabia/calls).", metavar="DIR")
    ] = "",
    concurrency: Annotated[int, option("Calls in flight.", metavar="N", min=1)] = 16,
    max_usd: Annotated[float | None, money("Stop before spending more; needs --prices.")] = None,
    max_requests: Annotated[float | None, count("Stop before sending more.")] = None,
    max_tokens: Annotated[float | None, count("Stop before using more tokens.")] = None,
    prices: Annotated[
        str, option("Dollars per million tokens by model.", metavar="FILE.toml")
    ] = "",
    timeout: Annotated[float, duration("Wait so long for an answer.")] = "10m",  # type: ignore[assignment]
    temperature: Annotated[float, option("Of a model's sampling.", metavar="T", min=0)] = 0.0,
    on_unfaithful: Annotated[
        str, option("keep the original or reject the document.", metavar="POLICY")
    ] = "keep",
) -> None:
    """Rewrite documents: conclusions that stand before their reasoning move behind it.

    The rules engine permutes sentences and drops none. A model's answers must keep the numbers,
    words, language and length of their source. Finished calls are kept and never paid twice.
    """
    from sabia.core.text import rewrite as room

    config = room.RewriteConfig(
        recipe=recipe,
        engine=engine,
        url=url,
        model=model,
        api_key_env=api_key_env,
        cache=cache,
        concurrency=concurrency,
        max_usd=max_usd,
        max_requests=None if max_requests is None else int(max_requests),
        max_tokens=None if max_tokens is None else int(max_tokens),
        prices=prices,
        timeout_s=timeout,
        temperature=temperature,
        on_unfaithful=on_unfaithful,
    )
    room.run(job, config)
