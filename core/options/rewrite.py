"""Options of `sabia rewrite`."""

from sabia.core.errors import UsageError
from sabia.core.options.calls import EndpointOptions
from sabia.core.options.option import choice, needs, number, quantity, text
from sabia.core.options.shared import RowOptions

ENDPOINT = needs(engine="endpoint")
MODEL = needs(engine=("endpoint", "local"))


class RewriteOptions(RowOptions, EndpointOptions, group="Method", only={EndpointOptions: ENDPOINT}):
    """Options of `sabia rewrite`."""

    recipe: str = choice("What to do", "reason-first")
    """`reason-first` moves an answer or conclusion that stands before its reasoning behind it."""
    engine: str = choice("What rewrites", "rules", "endpoint", "local")
    """`rules` needs no model; `endpoint` asks a server, `local` a model directory."""
    model: str = text("Model name at --url, or a local directory", "NAME", only=MODEL)
    """A local model needs a chat template."""
    max_tokens: int | None = quantity(
        "whole", "Stop before using more tokens", only=ENDPOINT, group="Endpoint", recorded=False
    )
    """Tokens of prompts and replies together."""
    timeout: float = quantity(
        "duration", "Time to wait for a reply", "10m", only=ENDPOINT, group="Endpoint",
        recorded=False,
    )  # fmt: skip
    """A call that takes longer is tried again."""
    temperature: float = number("Sampling temperature of the model", 0.0, least=0, only=MODEL)
    on_unfaithful: str = choice(
        "Documents whose rewriting fails a check", "keep", "reject", only=MODEL
    )
    """`keep` leaves the text as it was and gives the reason in `rewrite_verdict`; `reject` moves
    the document to the rejects."""

    def check(self) -> None:
        """An engine with a model needs its name, an endpoint also its address."""
        super().check()
        for name in {"rules": (), "endpoint": ("url", "model"), "local": ("model",)}[self.engine]:
            if not getattr(self, name):
                raise UsageError(f"--{name}: is missing (--engine {self.engine} needs it)")
