"""What a user may say about a run, by the names of the options; None (or False) was not said.

The command line, a list of runs (one JSON object a line) and a library call all come through here,
so that a value means the same everywhere: `Settings(tokens=5e11)` and the row {"tokens": "500B"}.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sabia.core import units
from sabia.core.errors import UsageError

CHOICES: dict[str, tuple[str, ...]] = {
    "convention": ("6nd", "palm", "causal"),
    "stage": ("pretrain", "sft", "grpo", "serve", "eval"),
    "objective": ("time", "cost"),
    "precision": ("fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8"),
    "recompute": ("none", "selective", "full"),
    "emit": ("slurm", "xpk", "skypilot"),
}
MOST = 10**9  # of what is counted in whole numbers
FEWER = {"layers": 10_000, "spare_nodes": 1000, "simulate": 100_000}  # each takes its time


def _whole(text: str | float, what: str) -> int:
    value = units.parse_count(text, what)
    if value != int(value) or value < 1:
        raise UsageError(f"{what}: {text!r} (expected a whole number, 1 or more)")
    return int(value)


def _natural(text: str | float, what: str) -> int:
    return 0 if str(text).strip() == "0" else _whole(text, what)


def _number(text: str | float, what: str) -> float:
    return units.parse_count(text, what)


# how the value of an option in a row is read; what is not here is text
UNITS: Mapping[str, Callable[[Any, str], Any]] = (
    dict.fromkeys(("params", "active", "tokens", "batch_tokens", "serve_tokens"), units.parse_count)
    | dict.fromkeys(("layers", "hidden", "lora_rank", "chips", "nodes", "micro_batch"), _whole)
    | dict.fromkeys(("utilisation", "mfu", "failure_rate", "spot_share"), units.parse_fraction)
    | dict.fromkeys(("preempt", "restart", "capacity_wait"), units.parse_duration)
    | dict.fromkeys(("repair", "job_limit", "queue"), units.parse_duration)
    | dict.fromkeys(("simulate", "checkpoint_copies"), _whole)
    | dict.fromkeys(("spare_nodes", "off_policy", "seed"), _natural)
    | {"max_cost": units.parse_money, "pue": _number, "carbon_intensity": _number}
    | dict.fromkeys(("replica_chips", "batch", "prompts", "group", "steps"), _whole)
    | dict.fromkeys(("generation_chips", "repeats"), _whole)
    | dict.fromkeys(("prompt_tokens", "output_tokens", "output_limit", "items"), _number)
    | dict.fromkeys(("judge_calls", "judge_prompt_tokens", "judge_output_tokens"), _number)
    | dict.fromkeys(("judge_params", "judge_active"), units.parse_count)
    | {"seq": units.parse_length, "hbm": units.parse_bytes, "bucket_gbps": _number}
    | {"reward_time": units.parse_duration}
)


@dataclass(frozen=True, eq=False)  # comparing is not needed, and its code takes time to make
class Settings:
    """One question to the planner. Quantities are in the units of their parsers (UNITS)."""

    params: float | None = None
    active: float | None = None
    model: str | None = None
    layers: int | None = None
    hidden: int | None = None
    convention: Literal["6nd", "palm", "causal"] | None = None
    lora: bool = False
    lora_rank: int | None = None
    tokens: float | None = None
    seq: int | None = None
    batch_tokens: float | None = None
    deadline: str | None = None
    state_recipe: str | None = None
    chip: str | None = None
    chips: int | None = None
    nodes: int | None = None
    hbm: int | None = None
    utilisation: float | None = None
    mfu: float | None = None
    compare: str | None = None
    search: bool = False
    fixed_layout: str | None = None
    objective: Literal["time", "cost"] | None = None
    stack: str | None = None
    precision: Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4", "int8"] | None = None
    recompute: str | None = None
    micro_batch: int | None = None
    explain: bool = False
    plot: str | None = None
    emit: str | None = None
    pretrain_args: str | None = None
    price: str | None = None
    failure_rate: float | None = None
    preempt: float | None = None
    restart: float | None = None
    bucket_gbps: float | None = None
    spot_share: float | None = None
    simulate: int | None = None
    capacity_wait: float | None = None
    repair: float | None = None
    spare_nodes: int | None = None
    job_limit: float | None = None
    queue: float | None = None
    synchronous: bool = False
    checkpoint_copies: int | None = None
    spot: bool = False
    provider: str | None = None
    region: str | None = None
    commitment: str | None = None
    peer_copies: bool = False
    offers: bool = False
    max_cost: float | None = None
    carbon: bool = False
    pue: float | None = None
    carbon_intensity: float | None = None
    serve_tokens: float | None = None
    seed: int | None = None
    budget: str | None = None
    # --stage serve, grpo, eval: generation
    stage: str | None = None
    weights: str | None = None
    cache: str | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    output_limit: float | None = None
    replica_chips: int | None = None
    batch: int | None = None
    # --stage grpo
    prompts: int | None = None
    group: int | None = None
    steps: int | None = None
    generation_chips: int | None = None
    off_policy: int | None = None
    no_reference: bool = False
    reward_time: float | None = None
    # --stage eval, and the judge of grpo
    items: float | None = None
    repeats: int | None = None
    api_price: str | None = None
    judge_calls: float | None = None
    judge_prompt_tokens: float | None = None
    judge_output_tokens: float | None = None
    judge_params: float | None = None
    judge_active: float | None = None
    judge_price: str | None = None

    def __post_init__(self) -> None:
        """Refuse names that do not exist, and whole numbers beyond reason."""
        for name, value in vars(self).items():
            if value == "":
                raise UsageError(f"{flag(name)}: is empty (expected a value, or leave it out)")
        for name, known in CHOICES.items():
            value = getattr(self, name, None)
            if value is not None and value not in known:
                raise UsageError(f"{flag(name)}: {value!r} (expected {' or '.join(known)})")
        for name, parse in UNITS.items():
            value = getattr(self, name) if parse in (_whole, _natural) else None
            most = FEWER.get(name, MOST)
            if value is not None and value > most:
                raise UsageError(f"{flag(name)}: {value} (expected at most {most:,})")

    def given(self, *names: str) -> list[str]:
        """Those of `names` (all, if none) that were said, in that order."""
        asked = names or [field.name for field in fields(self)]
        return [
            name
            for name in asked
            if getattr(self, name) is not None and getattr(self, name) is not False
        ]

    def said(self) -> dict[str, Any]:
        """Everything that was said, for reports."""
        return {name: getattr(self, name) for name in self.given()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Settings":
        """The settings of one row of a list of runs; names may have hyphens, values units.

        Raises UsageError on a name that is no option, or a value that its parser refuses.
        """
        known = {field.name for field in fields(cls)}
        said = {key.replace("-", "_"): value for key, value in row.items()}
        for name in said:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"{name!r} is no option of a plan (expected such as params){hint}")
        return cls(**{name: _parsed(name, value) for name, value in said.items()})


def _parsed(name: str, value: Any) -> Any:
    switch = getattr(Settings, name) is False
    if value is None or (switch and isinstance(value, bool)):
        return value
    if switch or isinstance(value, bool):
        wanted = "true or false" if switch else "a value"
        raise UsageError(f"{name}: {value!r} (expected {wanted})")
    return UNITS[name](value, name) if name in UNITS else str(value)


def flag(name: str) -> str:
    """batch_tokens → --batch-tokens."""
    return f"--{name.replace('_', '-')}"
