"""What both trainers are told: the options as given, checked, and resolved into parts of a run.

A run's identity is everything that decides its weights; backend, mesh, micro-batch and how often to
save or report are not part of it, so that a run may go on elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sabia.core import units
from sabia.core.errors import UsageError
from sabia.core.model.lora import LoraConfig
from sabia.core.shards.order import DataOrder, Stage, parse_weights
from sabia.core.spec import ModelSpec
from sabia.core.train.checkpoint import Interval, parse_interval
from sabia.core.train.guards import GuardConfig
from sabia.core.train.optimizer import BETAS, OptimizerConfig
from sabia.core.train.optimizer_mup import mup
from sabia.core.train.profiling import parse_steps
from sabia.core.train.schedule import ScheduleConfig, decay_start
from sabia.core.train.token_rows import TokenRows
from sabia.core.train.tracking import parse_services

EXPORT_DTYPES = ("float32", "bfloat16")
REMATS = ("none", "matmuls", "full")
# options that may change while a run goes on: they do not decide what is learnt
FREE = frozenset(
    (
        *("micro_batch", "compiled", "remat", "eval_every", "log_every", "peak_flops"),
        *("save_every", "mtbf", "keep_checkpoints", "keep_every", "checkpoint_url", "grace"),
        *("hang_timeout", "profile", "track", "export_dtype"),
    )
)


@dataclass(frozen=True)
class TrainOptions:
    """The options of both trainers as given; 0 or '' means: by default or not at all."""

    lr: float = 6e-4
    schedule: str = "wsd"
    warmup: str = "2%"
    decay: str = "20%"
    decay_shape: str = "linear"
    final_lr: float = 0.0
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    betas: str = ""
    clip_norm: float = 1.0
    mup_base: int = 0
    freeze: str = ""
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: str = ""
    batch: int = 0
    batch_tokens: int = 0
    micro_batch: int = 0
    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    precision: str = "fp32"
    bf16_tail: bool = False
    compiled: bool = False
    remat: str = "none"
    z_loss: float = 0.0
    balance: float = 0.0
    router_z: float = 0.0
    bias_rate: float = 0.001
    on_spike: str = "rewind"
    spike_sigmas: float = 8.0
    save_every: str = "10m"
    mtbf: str = ""
    keep_checkpoints: int = 2
    keep_every: int = 0
    checkpoint_url: str = ""
    grace: str = ""
    hang_timeout: str = "30m"
    eval_every: int = 0
    log_every: int = 1
    profile: str = ""
    track: str = ""
    peak_flops: float = 0.0
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.export_dtype not in EXPORT_DTYPES:
            raise UsageError(f"--export-dtype: {self.export_dtype!r} (expected float32, bfloat16)")
        if self.remat not in REMATS:
            raise UsageError(f"--remat: {self.remat!r} (expected one of {', '.join(REMATS)})")
        if sum(bool(x) for x in (self.steps, self.tokens, self.epochs)) > 1:
            raise UsageError("how long? give one of --steps, --tokens and --epochs")
        if self.batch and self.batch_tokens:
            raise UsageError("how much a step? give either --batch or --batch-tokens")
        if not self.lora_rank and (self.lora_alpha or self.lora_targets):
            raise UsageError("--lora-alpha, --lora-targets: without --lora-rank (expected a rank)")
        for check in (
            self.plain_optimizer,
            self.lora,
            self.guard,
            partial(self.interval, 1),
            partial(parse_steps, self.profile),
            partial(parse_services, self.track),
        ):
            check()  # fmt: skip

    def plain_optimizer(self) -> OptimizerConfig:
        """The optimizer's settings without what depends on the model; raises UsageError."""
        if self.optimizer not in BETAS:
            known = ", ".join(BETAS)
            raise UsageError(f"--optimizer: {self.optimizer!r} (expected one of {known})")
        beta1, beta2 = BETAS[self.optimizer]
        if self.betas:
            try:
                beta1, beta2 = (float(part) for part in self.betas.split(","))
            except ValueError:
                raise UsageError(f"--betas: {self.betas!r} (expected such as 0.9,0.95)") from None
        return OptimizerConfig(
            beta1,
            beta2,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            name=self.optimizer,
            freeze=self.freeze,
        )

    def optimizer_for(self, spec: ModelSpec) -> OptimizerConfig:
        """The optimizer's settings for a model."""
        config = self.plain_optimizer()
        if not self.mup_base:
            return config
        return replace(config, lr_scales=mup(spec, self.mup_base, config).lr_scales)

    def initial_stds(self, spec: ModelSpec) -> dict[str, float] | None:
        """Standard deviations of a new model's initial values, where μP sets them."""
        return mup(spec, self.mup_base, self.plain_optimizer()).stds if self.mup_base else None

    def lora(self) -> LoraConfig | None:
        """The adapters, None where the model itself is trained."""
        if not self.lora_rank:
            return None
        alpha = self.lora_alpha or 2.0 * self.lora_rank
        return LoraConfig(self.lora_rank, alpha, self.lora_targets)

    @property
    def spares_memory(self) -> bool:
        """Whether anything is asked for by which a step takes less memory."""
        narrow = self.precision != "fp32" or self.remat != "none"
        return narrow or self.micro_batch > 0 or self.lora_rank > 0

    def guard(self) -> GuardConfig:
        """What to do about spikes."""
        return GuardConfig(self.on_spike, self.spike_sigmas)

    def interval(self, devices: int) -> Interval:
        """When to save."""
        return parse_interval(self.save_every, self.mtbf, devices)

    def seconds(self, name: str) -> float:
        """A duration among the options; '' is 0."""
        text = getattr(self, name)
        return units.parse_duration(text, "--" + name.replace("_", "-")) if text else 0.0

    def batch_rows(self, row_length: int) -> int:
        """Rows in a step."""
        if self.batch_tokens:
            return max(1, round(self.batch_tokens / row_length))
        return self.batch or 32

    def step_count(self, rows: int, row_length: int, batch: int) -> int:
        """Steps of the whole run; one epoch by default."""
        if self.steps:
            return self.steps
        if self.tokens:
            return max(1, math.ceil(self.tokens / (batch * row_length)))
        return max(1, math.ceil((self.epochs or 1.0) * rows / batch))

    def schedule_config(self, steps: int) -> ScheduleConfig:
        """The schedule of a run of `steps`."""
        return ScheduleConfig(
            peak=self.lr,
            steps=steps,
            warmup=_part("--warmup", self.warmup, steps),
            kind=self.schedule,
            decay=_part("--decay", self.decay, steps) if self.schedule == "wsd" else 0,
            tail=self.decay_shape,
            final=self.final_lr,
        )

    def identity(self) -> dict[str, Any]:
        """The options that decide the weights."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def _part(name: str, text: str, steps: int) -> int:
    """Steps of '20%' or '100'."""
    if text.isdigit():
        return int(text)
    if text.endswith("%"):
        return round(units.parse_fraction(text, name) * steps)
    raise UsageError(f"{name}: {text!r} (expected steps such as 100, or a share such as 2%)")


def data_order(
    rows: TokenRows, mix: str, stages: str, seed: int, batch: int, schedule: ScheduleConfig
) -> DataOrder:
    """The order of a run: `mix` from the start, `stages` from steps on.

    stages: 'WHEN:SOURCE=WEIGHT,…' joined by ';', WHEN being steps, a share of them, or `decay`.
    """
    weights = parse_weights(mix, rows.source_names)
    found = []
    for text in filter(None, (piece.strip() for piece in stages.split(";"))):
        when, colon, then = text.partition(":")
        if not colon or not then:
            raise UsageError(f"--then: {text!r} (expected WHEN:SOURCE=WEIGHT,…)")
        step = decay_start(schedule) if when == "decay" else _part("--then", when, schedule.steps)
        found.append(Stage(step * batch, parse_weights(then, rows.source_names) or ()))
    return DataOrder(rows.source_sizes, seed, weights, tuple(found))
