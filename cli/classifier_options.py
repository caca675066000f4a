"""Options of classifiers that the model core computes, and of language models that are asked.

Shared by `classify` and `classify train`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from sabia.cli.grammar import count, length, money, option
from sabia.cli.training_options import kind

if TYPE_CHECKING:
    from sabia.core.recipes.lm_scorer import LmScorer

ASK: Mapping[str, tuple[Any, Any]] = {
    "ask": (
        Annotated[str, option("Ask a language model about each document.", metavar="FILE.toml")],
        "",
    ),
    "lm": (
        Annotated[str, option("The model to ask: a directory, or its name at --url.",
                              metavar="MODEL")],
        "",
    ),
    "url": (Annotated[str, option("OpenAI-compatible server, up to /v1.", metavar="URL")], ""),
    "api_key_env": (
        Annotated[str, option("Variable that holds the key.", metavar="VARIABLE")],
        "SABIA_API_KEY",
    ),
    "cache": (
        Annotated[str, option("Finished calls (default: ~/.cache/sabia/calls).", metavar="DIR")],
        "",
    ),
    "concurrency": (Annotated[int, option("Calls in flight.", metavar="N", min=1)], 16),
    "max_usd": (
        Annotated[float | None, money("Stop before spending more; needs --prices.")],
        None,
    ),
    "max_requests": (Annotated[float | None, count("Stop before sending more.")], None),
    "prices": (
        Annotated[str, option("Dollars per million tokens by model.", metavar="FILE.toml")],
        "",
    ),
}  # fmt: skip
BACKEND = Annotated[
    str, option("torch or jax, for models of the core.", envvar=["SABIA_BACKEND"], metavar="NAME")
]
_LENGTH = Annotated[int, length("Most tokens of a document.")]
ENCODER: Mapping[str, tuple[Any, Any]] = {
    "regression": (Annotated[bool, option("Labels are numbers to be met.", "--regression")], False),
    "class_weights": (
        Annotated[str, option("none, or balanced by how rare a label is.", metavar="NAME")],
        "none",
    ),
    "length": (_LENGTH, "512"),
    "backend": (BACKEND, "torch"),
    "mesh": (Annotated[str, option("Devices by axis, such as data=4.", metavar="AXIS=N,…")], ""),
}
TRAINING: Mapping[str, Any] = {
    "lr": 5e-5, "steps": 0, "batch": 0, "micro_batch": 0, "schedule": "wsd", "warmup": "6%",
    "weight_decay": 0.01, "optimizer": "adamw", "freeze": "", "lora_rank": 0, "lora_alpha": 0.0,
    "lora_targets": "", "precision": "fp32", "compiled": False, "remat": "none",
    "save_every": "10m", "eval_every": 0,
}  # fmt: skip
ENCODER = {**ENCODER, **{name: (kind(name), value) for name, value in TRAINING.items()}}


def asked(given: Mapping[str, Any], backend: str) -> "LmScorer | None":
    """The scorer that --ask names, None without it."""
    from sabia.core.errors import UsageError
    from sabia.core.recipes.lm_prompt import load_prompt
    from sabia.core.recipes.lm_scorer import AskOptions, LmScorer

    settings = dict(given)
    path = settings.pop("ask")
    if not path:
        if settings["lm"] or settings["url"]:
            raise UsageError("--lm, --url: without --ask FILE.toml (what is to be asked?)")
        return None
    if settings["max_requests"] is not None:
        settings["max_requests"] = int(settings["max_requests"])
    return LmScorer(load_prompt(path), AskOptions(**settings, backend=backend))
