"""Options of `sabia rewrite`."""

from sabia.core.errors import UsageError
from sabia.core.options.chat_template import ChatTemplate
from sabia.core.options.model_calls import JUDGED, EndpointOptions, RubricJudge
from sabia.core.options.option import changed, choice, needs, number, quantity, text
from sabia.core.options.shared import Appending, RowOptions, TextColumn

ENDPOINT = needs(engine="endpoint")
MODEL = needs(engine=("endpoint", "local"))


class RewriteOptions(
    RowOptions, TextColumn, Appending, EndpointOptions, RubricJudge, ChatTemplate, group="Method",
    only={EndpointOptions: ENDPOINT, RubricJudge: ENDPOINT},
):  # fmt: skip
    """Options of `sabia rewrite`."""

    recipe: str = text(
        "reason-first puts reasoning before conclusions, best-of keeps the best samples; or a file",
        "NAME|FILE.toml", default="reason-first",
    )  # fmt: skip
    """`reason-first` moves an answer or conclusion that precedes its reasoning to the end of the
    reasoning. `best-of` samples several answers to each prompt record, grades them, and writes the
    best as chat records. The keys of a file, whose name ends in `.toml`, are listed in the
    description."""
    engine: str = choice("What rewrites: rules without a model, a model at --url, or a local model",
                         "rules", "endpoint", "local")  # fmt: skip
    """`rules` reorders sentences without a model. `endpoint` uses a model on a server (`--url`),
    `local` a model directory."""
    model: str = text("Model name at --url, or a model directory", "NAME", only=MODEL)
    """A model directory must contain a chat template."""
    chat: str = changed(ChatTemplate.chat, only=MODEL)
    """A value that is JSON, such as `false` or `3`, has its type; any other is text. `date` is the
    date that the template's `strftime_now` gives; a model directory whose template reads it needs
    one. A server gets the variables as `chat_template_kwargs`."""
    max_tokens: int | None = quantity("whole",
                                      "Stop before the requests use more tokens than this in total",
                                      only=ENDPOINT, group="Endpoint", recorded=False)  # fmt: skip
    """Tokens of prompts and of replies are added."""
    timeout: float = quantity("duration", "Maximum time to wait for a reply", "10m", only=ENDPOINT,
                              group="Endpoint", recorded=False)  # fmt: skip
    """A request that takes longer is sent again."""
    temperature: float | None = number("Sampling temperature of the model", least=0, only=MODEL,
                                       unset="0, with best-of that of the recipe")  # fmt: skip
    max_unknown: float = changed(RubricJudge.max_unknown, only=(ENDPOINT, JUDGED))
    on_unfaithful: str = choice(
        "If rewritten text fails a check: keep the original text, or reject the row", "keep",
        "reject", only=MODEL,
    )  # fmt: skip
    """`keep` keeps the original text and writes the reason to the column `rewrite_verdict`.
    `reject` writes the document to `--rejects` instead. The checks are listed in the
    description."""

    def check(self) -> None:
        """An engine with a model needs the name of the model, an endpoint also a URL."""
        super().check()
        for name in {"rules": (), "endpoint": ("url", "model"), "local": ("model",)}[self.engine]:
            if not getattr(self, name):
                raise UsageError(f"--{name}: is missing (--engine {self.engine} needs it)")
