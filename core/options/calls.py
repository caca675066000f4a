"""Options of calls to language models: the endpoint, what calls may cost, and the judge."""

from sabia.core.errors import UsageError
from sabia.core.options.option import choice, integer, needs, quantity, text
from sabia.core.options.table import Options

JUDGED = needs("judge_url")


class ApiCalls(Options, group="Endpoint"):
    """How calls are made and what they may cost. None of it decides a result."""

    api_key_env: str = text(
        "Environment variable that holds the API key", "VARIABLE", default="SABIA_API_KEY",
        recorded=False,
    )  # fmt: skip
    """No key is sent where the variable is not set."""
    concurrency: int = integer("Calls in flight", 16, least=1, recorded=False)
    """An overloaded server gets fewer."""
    max_usd: float | None = quantity(
        "money", "Stop before spending more", only=needs("prices"), recorded=False
    )
    max_requests: int | None = quantity(
        "whole", "Stop before sending more requests", recorded=False
    )
    """Retries count."""
    prices: str = text("US dollars per million tokens, by model", "FILE.toml", recorded=False)
    """A table for each model, with `prompt` and `completion`."""


class EndpointOptions(ApiCalls, group="Endpoint"):
    """An OpenAI-compatible server and the cache of its replies."""

    url: str = text("OpenAI-compatible server, up to /v1", "URL", recorded=False)
    cache: str = text(
        "Cache of finished calls", "DIR", recorded=False, unset="~/.cache/sabia/calls"
    )
    """Several processes may share it. A call that is in it is never sent again."""


class RubricJudge(Options, group="Judge"):
    """A language model behind an endpoint that judges the items of rubrics; how calls are made is
    told by `ApiCalls`."""

    judge_url: str = text("OpenAI-compatible judge, up to /v1", "URL", recorded=False)
    judge_model: str = text("Model name of the judge", "NAME", only=JUDGED)
    judge_votes: int = integer("Calls that vote on an item", 1, least=1, only=JUDGED)
    """The majority decides; an item whose votes are tied has no verdict."""
    judge_items_per_call: int = integer("Rubric items in a call", 1, least=1, only=JUDGED)
    """One item in a call keeps its verdict from influencing the next."""
    judge_format: str = choice(
        "Format that replies are constrained to", "text", "json-object", "json-schema",
        only=JUDGED,
    )  # fmt: skip
    """What the server is told to hold replies to, where it can."""
    judge_tokens: int = integer("Maximum tokens of a reply", 1024, least=16, only=JUDGED)
    judge_cache: str = text(
        "Cache of finished calls", "DIR", recorded=False, unset="~/.cache/sabia/calls",
        only=JUDGED,
    )  # fmt: skip
    max_unknown: float = quantity(
        "share", "Maximum share of a rubric's weight without a verdict", 0.0
    )

    def check(self) -> None:
        """A judge needs its model's name."""
        super().check()
        if self.judge_url and not self.judge_model:
            raise UsageError("--judge-model: is missing (expected the judge's model name)")


class JudgeOptions(RubricJudge, ApiCalls, only={ApiCalls: JUDGED}):
    """A judge whose calls are the only ones of a command."""
