"""Options of `sabia rewrite`."""

from sabia.core.errors import UsageError
from sabia.core.options.chat_template import ChatTemplate, Reasoning
from sabia.core.options.model_calls import JUDGED, ApiCalls, EndpointOptions, RubricJudge
from sabia.core.options.option import changed, choice, needs, number, quantity, text
from sabia.core.options.shared import Appending, Backend, Drafting, Executor, RowOptions, TextColumn

ENDPOINT = needs(engine="endpoint")
LOCAL = needs(engine="local")
MODEL = needs(engine=("endpoint", "local"))
CALLS = needs("judge_url", "judge", engine="endpoint")


class RewriteOptions(
    RowOptions, Executor, TextColumn, Appending, EndpointOptions, RubricJudge, ChatTemplate,
    Drafting, Reasoning,
    group="Method", only={ApiCalls: CALLS, RubricJudge: MODEL, Drafting: LOCAL, Reasoning: MODEL},
):  # fmt: skip
    """Options of `sabia rewrite`."""

    recipe: str = text(
        "reason-first puts reasoning before conclusions, best-of keeps the best samples, ensemble "
        "what models agree on, constitution revises answers; or a file", "NAME|FILE.toml",
        default="reason-first",
    )  # fmt: skip
    """`reason-first` moves an answer or conclusion that precedes its reasoning to the end of the
    reasoning. `best-of` samples several answers to each prompt record, grades them, and writes the
    best as chat records. `ensemble` asks the models of `--models` for one answer each, and writes
    what a quorum of them states as chat records. `constitution` has the model revise its answers by
    principles, and writes first answers and revisions as preference records. The keys of a file,
    whose name ends in `.toml`, are listed in the description."""
    engine: str = choice("What rewrites: rules without a model, a model at --url, or a local model",
                         "rules", "endpoint", "local")  # fmt: skip
    """`rules` reorders sentences without a model. `endpoint` uses a model on a server (`--url`),
    `local` a model directory."""
    model: str = text("Model name at --url, or a model directory", "NAME", only=MODEL)
    """A model directory must contain a chat template."""
    models: str = text("Models of the recipe ensemble: a file with a table for each", "FILE.toml",
                       only=MODEL, excludes=("model", "url"), recorded=False)  # fmt: skip
    """With the engine `endpoint`, a table `[NAME]` has the keys `url` (or a list of URLs) and
    `model`, and optionally `prompt` and `completion` (US dollars per million tokens) and
    `api-key-env`; with the engine `local`, the key `model`, a model directory. `--concurrency` and
    `--timeout` are those of each model, the limits those of all together."""
    url: tuple[str, ...] = changed(EndpointOptions.url, only=ENDPOINT)
    cache: str = changed(EndpointOptions.cache, only=MODEL)
    backend: str = changed(Backend.backend, only=LOCAL, group="Method")
    max_usd: float | None = changed(ApiCalls.max_usd,
                                    only=(CALLS, needs("prices", "judge", "models")))  # fmt: skip
    chat: str = changed(ChatTemplate.chat, only=MODEL)
    """A value that is JSON, such as `false` or `3`, has its type; any other is text. `date` is the
    date that the template's `strftime_now` gives; a model directory whose template reads it needs
    one. A server gets the variables as `chat_template_kwargs`."""
    max_tokens: int | None = quantity("whole",
                                      "Stop before the requests use more tokens than this in total",
                                      only=CALLS, group="Endpoint", recorded=False)  # fmt: skip
    """Tokens of prompts and of replies are added."""
    timeout: float = quantity("duration", "Maximum time to wait for a reply", "10m", only=ENDPOINT,
                              group="Endpoint", recorded=False)  # fmt: skip
    """A request that takes longer is sent again."""
    temperature: float | None = number("Sampling temperature of the model", least=0, only=MODEL,
                                       unset="that of the recipe, else 0")  # fmt: skip
    max_unknown: float = changed(RubricJudge.max_unknown, only=(MODEL, JUDGED))
    on_unfaithful: str = choice(
        "If rewritten text fails a check: keep the original text, or reject the row", "keep",
        "reject", only=MODEL,
    )  # fmt: skip
    """`keep` keeps the original text and writes the reason to the column `rewrite_verdict`.
    `reject` writes the document to `--rejects` instead. The checks are listed in the
    description."""

    review: str = text("Write a file in which people review the new texts", "FILE.jsonl",
                       only=needs("out"), excludes=("reviewed",), recorded=False,
                       group="Input and output")  # fmt: skip
    """A line is one new text, of documents with the original one, of answers with the conversation
    before it. Whoever reviews it writes `accept`, `reject` or `edit` as `verdict`, for `edit` the
    better text as `edit`, and a name as `reviewer`. Lines that already have a verdict are kept if
    the file is written again."""
    reviewed: str = text("Apply the verdicts of a file that was written by --review", "FILE.jsonl",
                         recorded=False, group="Input and output")  # fmt: skip
    """Repeat the command with this option in place of `--review`; finished requests are in the
    cache. Rejected records are written to `--rejects`, edited ones have the text of the person. The
    new columns `review_verdict` and `reviewer` say what was decided and by whom. Records without a
    verdict are kept as they are, and both columns are null. A verdict on another text of a record
    than the one that the command makes now is an error."""

    def check(self) -> None:
        """An engine with a model needs the name of the model, an endpoint also a URL."""
        super().check()
        if self.models:
            return
        for name in {"rules": (), "endpoint": ("url", "model"), "local": ("model",)}[self.engine]:
            if not getattr(self, name):
                raise UsageError(f"--{name}: is missing (--engine {self.engine} needs it)")
