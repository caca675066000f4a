"""What a GRPO run is, in frozen records, and which part of it is the run's identity.

Server addresses, caps, micro-batches and how often to save may change while a run goes on; all else
decides the weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.train.checkpoint import Interval
from sabia.core.train.losses_grpo import GrpoLossConfig
from sabia.core.train.optimizer import OptimizerConfig
from sabia.core.train.schedule import ScheduleConfig

OVERLONG = ("keep", "mask")
FREE = ("judge", "micro_tokens", "interval", "keep_checkpoints",
        "max_null", "export_dtype")  # fmt: skip
FREE_OF_JUDGE = (
    "url",
    "api_key_env",
    "cache",
    "concurrency",
    "max_requests",
    "max_tokens",
    "max_usd",
    "prices",
)


@dataclass(frozen=True)
class JudgeOptions:
    """The model that judges rubrics; caps are None where there is none."""

    url: str
    model: str
    votes: int = 1
    items_per_call: int = 1
    reply_format: str = "text"
    reply_tokens: int = 1024
    api_key_env: str = "SABIA_API_KEY"
    cache: str = ""
    concurrency: int = 16
    max_requests: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None
    prices: str = ""


@dataclass(frozen=True)
class GrpoConfig:
    """A step takes `prompts` prompts, `group` samples of each, and makes `updates` updates.

    `std` divides advantages by the group's deviation. `overlong` is what becomes of samples cut off
    at `max_new_tokens`: kept in the loss, or masked out of it. `max_null` is the share of samples
    without a reward that stops the run, `max_unknown` the share of a rubric's weight that may lack
    a verdict. `micro_tokens` bounds the tokens of one forward and backward pass.
    """

    model: str
    reward: str = "exact"
    steps: int = 100
    prompts: int = 32
    group: int = 16
    updates: int = 1
    lr: float = 1e-4
    schedule: str = "constant"
    warmup: int = 10
    decay: int = 0
    final_lr: float = 0.0
    max_new_tokens: int = 256
    std: bool = False
    overlong: str = "keep"
    precision: str = "fp32"
    loss: GrpoLossConfig = field(default_factory=GrpoLossConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(weight_decay=0.0))
    judge: JudgeOptions | None = None
    micro_tokens: int = 16_384
    interval: Interval = field(default_factory=lambda: Interval(seconds=600.0))
    keep_checkpoints: int = 2
    max_null: float = 0.2
    max_unknown: float = 0.0
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        if min(self.steps, self.prompts, self.updates, self.max_new_tokens) < 1 or self.group < 2:
            raise UsageError(
                f"grpo: {self.steps} steps, {self.prompts} prompts, groups of {self.group}, "
                f"{self.updates} updates, {self.max_new_tokens} new tokens (expected 1 or more of "
                "each, and groups of 2 or more: a sample is compared with its group)"
            )
        if self.overlong not in OVERLONG:
            raise UsageError(f"--overlong: {self.overlong!r} (expected keep or mask)")
        if self.export_dtype not in ("float32", "bfloat16"):
            raise UsageError(f"--export-dtype: {self.export_dtype!r} (expected float32, bfloat16)")
        if not self.loss.temperature > 0:
            raise UsageError(
                f"--temperature: {self.loss.temperature} (expected above 0: greedy samples are "
                "all alike)"
            )
        self.schedule_config()

    def schedule_config(self) -> ScheduleConfig:
        """The schedule of the learning rate."""
        warmup = min(self.warmup, self.steps)
        return ScheduleConfig(
            self.lr, self.steps, warmup, self.schedule, self.decay, final=self.final_lr
        )

    def identity(self) -> dict[str, Any]:
        """The options that decide the weights."""
        kept = {name: value for name, value in asdict(self).items() if name not in FREE}
        if self.judge:
            said = asdict(self.judge)
            kept["judge"] = {k: v for k, v in said.items() if k not in FREE_OF_JUDGE}
        del kept["model"]  # by its content, not by its path
        return kept
