"""Options of calls to language models: the endpoint, limits on what calls cost, and the judge."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, choice, integer, needs, quantity, several, text
from sabia.core.options.table import Options

JUDGED = needs("judge_url", "judge")
SEVERAL_JUDGES = needs("judge")


class ApiCalls(Options, group="Endpoint", recorded=False):
    """How calls are sent and what they may cost. None of these options affects a result."""

    api_key_env: str = text(
        "Environment variable that holds the API key", "VARIABLE", default="SABIA_API_KEY"
    )
    """If the variable is not set, requests are sent without a key."""
    concurrency: int = integer("Maximum number of concurrent requests", 16, least=1)
    """The number is reduced automatically while the server is overloaded."""
    max_usd: float | None = quantity(
        "money", "Stop before the requests cost more than this in total", only=needs("prices")
    )
    max_requests: int | None = quantity("whole", "Stop before sending more requests than this")
    """Retries are counted. Limits hold for all processes, array tasks and starts with the same
    output together: what they have spent is recorded in `.NAME.spending` beside the output NAME
    (for a remote output, in the default cache; for stdout, nowhere). If a limit is reached, the
    command exits with code 3. Completed requests are kept in the cache."""
    prices: str = text("Price list: US dollars per million tokens, by model", "FILE.toml")
    """The file has a table for each model, with the keys `prompt` and `completion`."""


class EndpointOptions(ApiCalls, group="Endpoint", recorded=False):
    """An OpenAI-compatible server and the cache of its replies."""

    url: tuple[str, ...] = several("URL of an OpenAI-compatible server, up to /v1", "URL")
    """Servers that have the same model share the requests and `--concurrency`."""
    cache: str = text(
        "Directory that caches completed requests", "DIR", unset="~/.cache/sabia/calls"
    )
    """A request that is in the cache is not sent again. Several processes may share a cache."""


class RubricJudge(Options, group="Judge"):
    """A language model behind an endpoint that judges rubric items; see also `ApiCalls`."""

    judge_url: tuple[str, ...] = several(
        "URL of the judge's OpenAI-compatible server, up to /v1", "URL", recorded=False
    )
    """Servers that have the same model share the requests and `--concurrency`."""
    judge_model: str = text(
        "Name of the judge model on its server", "NAME", only=needs("judge_url")
    )
    judge: str = text("Several judges: a file with a table for each", "FILE.toml", recorded=False,
                      excludes=("judge_url", "judge_model"))  # fmt: skip
    """A table `[NAME]` has the keys `url` (or a list of URLs) and `model`, and optionally `weight`
    (default 1), `prompt` and `completion` (US dollars per million tokens) and `api-key-env`. The
    models must differ. All judges are asked about every item, `--concurrency` requests at a time
    each; the limits are those of all together. How far they agree, and Cohen's kappa, is written to
    stderr for each item at the end. `audit = true` makes one of them the auditor; see
    `--audit-judge`. `lookup` names a Parquet file, relative to this one, that the model may look
    things up in while it judges, with the columns `lookup-key` and `lookup-text` (default `id` and
    `text`); `lookup-about` tells the model what it holds. The server must support tool calls. A
    lookup gives the rows whose key is the query, else the three with the best BM25 score, of at
    most 2,000 characters each; a question may make four."""
    judge_combine: str = choice(
        "Verdict of several judges: weighted majority by item, or mean of their scores",
        "majority", "mean", only=SEVERAL_JUDGES, later=True,
    )  # fmt: skip
    """`majority`: judges without a verdict on an item are left out, and an item with equal weight
    on both sides has no verdict; points are the weighted median. `mean`: a sample has no score if
    one of the judges gives none; points are the weighted mean."""
    audit_judge: float = quantity(
        "share", "Share of the answers that the auditor of --judge judges too", "5%",
        only=SEVERAL_JUDGES, recorded=False,
    )  # fmt: skip
    """The auditor is the judge whose table has `audit = true`. It is asked about the answers whose
    hash selects them, which are the same in every run. How far it agrees with what was decided is
    reported; it never changes a score, and the run goes on without it if its server fails."""
    judge_votes: int = integer("Number of votes per rubric item", 1, least=1, only=JUDGED)
    """Each vote is a separate request. The majority decides; an item with a tied vote has no
    verdict."""
    judge_items_per_call: int = integer("Rubric items per request", 1, least=1, only=JUDGED)
    """With one item per request, the verdict on one item cannot influence the next."""
    judge_format: str = choice("Format that the server must enforce for replies", "text",
                               "json-object", "json-schema", only=JUDGED)  # fmt: skip
    """Sent to the server as `response_format`; `text` enforces nothing."""
    judge_tokens: int = integer("Maximum tokens in a reply of the judge", 1024, least=16,
                                only=JUDGED)  # fmt: skip
    judge_cache: str = text("Directory that caches completed judge requests", "DIR", recorded=False,
                            unset="~/.cache/sabia/calls", only=JUDGED)  # fmt: skip
    judge_timeout: float = quantity("duration", "Maximum time to wait for a reply of the judge",
                                    "10m", only=JUDGED, recorded=False)  # fmt: skip
    """A request that takes longer is sent again."""
    max_unknown: float = quantity(
        "share",
        "Fraction of a rubric's weight without a verdict, above which a sample has no score",
        0.0,
    )

    def check(self) -> None:
        """A judge needs the name of its model."""
        super().check()
        if self.judge_url and not self.judge_model:
            raise UsageError("--judge-model: is missing (expected the judge's model name)")


class JudgeOptions(RubricJudge, ApiCalls, only={ApiCalls: JUDGED}):
    """A judge whose requests are the only ones of a command."""

    max_usd: float | None = changed(ApiCalls.max_usd, only=(JUDGED, needs("prices", "judge")))
