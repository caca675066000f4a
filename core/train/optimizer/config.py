"""The optimizer's settings, the learning rate's schedule, and the update of each tensor.

`OptimizerConfig` names an optimizer and its settings, `rules` turns it and a model's table into one
`Rule` per tensor, and `core.numerics.optimizers` has a record of each kind of rule; `update`
applies one over the array functions of either backend. In all of them t counts updates from 1,
weight decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101), and
  p = p - lr (lr_scale u + weight_decay p)
with u the rule's direction; the decay has no `lr_scale`, so that a scaled tensor keeps its time
constant (as in the mup package, scaled_wd). Only tensors that the table marks have weight decay:
matrices, not norms and biases. The state is fp32: param/NAME, PART/NAME for every part of a rule's
state (m/NAME, v/NAME …), and `count`, the number of updates.

`learning_rate` has the schedules WSD, cosine and constant. `step` is the number of updates already
made, 0 … steps - 1. The warm-up counts the update itself, (step + 1) / warmup, and the decay the
remaining steps, (steps - step) / decay, so neither the first nor the last update has rate 0. With
1000 steps, a warm-up of 100 and a linear decay of 200: lr(50) = 0.51, lr(99 … 800) = 1,
lr(900) = 0.5, lr(999) = 0.005, lr(1000) = 0. With x the elapsed share of the decay, 0 … 1, its
shapes are 1 - x (linear), 2 · 2^-x - 1 (exponential), (1 + cos πx) / 2 (cosine) and 1 - sqrt x
(1-sqrt); Megatron-LM's four shapes. Sources: WSD, Hu et al. 2024 (arXiv 2404.06395); its 1 - sqrt
tail, Hägele et al. 2024 (arXiv 2405.18392); cosine, Loshchilov and Hutter 2017 (arXiv 1608.03983).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.numerics.optimizers import (
    LIMITS,
    OPTIMIZERS,
    ArrayFunctions,
    Parts,
    Settings,
    Shape,
    State,
    Step,
    with_setting,
)
from sabia.core.options.option import listed, unknown
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec

Array = Any
TensorFunction = Callable[[Array], Array]
COUNT = "count"

# the optimizer record of checkpoints and GRPO runs of earlier versions, with the settings of all
# optimizers; the run in question is the same run only if these entries are the same
EARLIER_RECORD: Mapping[str, Any] = {
    "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0, "name": "",
    "muon_momentum": 0.95, "muon_nesterov": True, "soap_every": 10, "soap_max_dim": 10_000,
}  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its settings; `clip_norm` bounds the gradient's global norm (0: unbounded).

    settings: those that are not the defaults in the optimizer's record; all of them afterwards.
    lr_scales: tensor name → factor of the learning rate. freeze: regular expression; tensors whose
    names match are not trained. Raises UsageError.
    """

    name: str = "adamw"
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    settings: Settings = field(default_factory=dict, hash=False)
    lr_scales: Mapping[str, float] = field(default_factory=dict, hash=False)
    freeze: str = ""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise unknown("--optimizer", self.name, OPTIMIZERS)
        record = OPTIMIZERS[self.name]
        for name, value in self.settings.items():
            flag = "--betas" if name in ("beta1", "beta2") else f"--{name.replace('_', '-')}"
            if name not in record.settings:
                others = listed(with_setting(name)) or "none"
                raise UsageError(f"{flag}: not a setting of {self.name} (expected {others})")
            is_valid, text = LIMITS[name]
            if not is_valid(value):
                raise UsageError(f"{flag}: {value} (expected {text})")
        object.__setattr__(self, "settings", {**record.settings, **self.settings})
        for name, value in (("weight-decay", self.weight_decay), ("clip-norm", self.clip_norm)):
            if value < 0:
                raise UsageError(f"--{name}: {value} (expected 0 or more)")
        for name, scale in self.lr_scales.items():
            if not (math.isfinite(scale) and scale > 0):
                raise UsageError(f"learning-rate scale of {name}: {scale} (expected above 0)")

    def record(self) -> dict[str, object]:
        """The configuration as checkpoints and GRPO runs record it."""
        values = {
            long if (long := f"{self.name}_{name}") in EARLIER_RECORD else name: value
            for name, value in self.settings.items()
        }
        others = {"weight_decay": self.weight_decay, "clip_norm": self.clip_norm, "name": self.name}
        scales = {"lr_scales": dict(self.lr_scales), "freeze": self.freeze}
        return {**EARLIER_RECORD, **values, **others, **scales}


@dataclass(frozen=True)
class Rule:
    """How one tensor is updated; `decay`: its weight decay, 0 for none."""

    kind: str
    decay: float
    config: OptimizerConfig
    lr_scale: float = 1.0
    trained: bool = True


def rules(
    spec: ModelSpec, config: OptimizerConfig, adapters: Sequence[TensorSpec] = (),
    heads: Sequence[TensorSpec] = (),
) -> dict[str, Rule]:  # fmt: skip
    """Tensor name → rule, in the order of the table, adapters and then other heads last.

    With `adapters` (LoRA) only they and heads, such as that of a classifier, are trained. Raises
    UsageError if `freeze` or a name in `lr_scales` matches no tensor, and if nothing is left to
    train.
    """
    own = spec.tensors()
    if adapters:
        own = tuple(t for t in own if spec.classifier and t.name.startswith("classifier"))
    table = (*spec.tensors(), *adapters, *heads)
    frozen = {t.name for t in table} - {t.name for t in (*own, *adapters, *heads)}
    frozen |= {t.name for t in table if not t.trained}
    freeze = config.freeze
    if freeze:
        matches = {t.name for t in table if re.search(freeze, t.name)}
        if not matches:
            names = f"{table[0].name} … {table[-1].name}"
            raise UsageError(f"--freeze: {freeze!r} matches no tensor (expected some of {names})")
        frozen |= matches
    unknown = set(config.lr_scales) - {t.name for t in table}
    if unknown:
        raise UsageError(f"learning-rate scale: no tensor is called {min(unknown)!r}")
    if len(frozen) == len(table):
        raise UsageError(f"--freeze: {freeze!r} matches all tensors (expected some left to train)")
    by_name: dict[str, Rule] = {}
    for t in table:
        decay, lr_scale = config.weight_decay if t.decay else 0.0, config.lr_scales.get(t.name, 1.0)
        by_name[t.name] = Rule(_kind(t, config.name), decay, config, lr_scale, t.name not in frozen)
    return by_name


def _kind(tensor: TensorSpec, name: str) -> str:
    """The optimizer of a tensor: the one of this name within its scope, otherwise AdamW."""
    is_matrix = tensor.dtype_class == "weight" and len(tensor.shape) > 1
    in_scope = {"all": True, "matrices": is_matrix, "hidden matrices": tensor.muon}
    return name if in_scope[OPTIMIZERS[name].scope] else "adamw"


def state_parts(rule: Rule, shape: Shape) -> Parts:
    """Part → (shape, whole) of the state of `rule` for a tensor of `shape`; see `Optimizer`."""
    return OPTIMIZERS[rule.kind].parts(shape, rule.config.settings) if rule.trained else {}


def init_state(
    shapes: Mapping[str, Shape], rules: Mapping[str, Rule], zeros: Callable[[str, Shape, bool], Any]
) -> dict[str, dict[str, Any]]:
    """Name → part → `zeros(name, shape, whole)`: the state before the first update."""
    state: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        parts = state_parts(rules[name], tuple(shape)).items()
        state[name] = {part: zeros(name, size, whole) for part, (size, whole) in parts}
    return state


def state_shapes(shapes: Mapping[str, Shape], rules: Mapping[str, Rule]) -> dict[str, Shape]:
    """PART/NAME → shape of a whole state without `count`, in the order of checkpoints.

    Parameters come first, then part by part.
    """
    by_part: dict[str, dict[str, Shape]] = {"param": dict(shapes), "m": {}, "v": {}}
    for name, shape in shapes.items():
        for part, (size, _) in state_parts(rules[name], shape).items():
            by_part.setdefault(part, {})[name] = size
    return {f"{part}/{name}": size for part, of in by_part.items() for name, size in of.items()}


def identity(x: Array) -> Array:
    """x itself: `gather` and `own` on one device."""
    return x


def update(
    rule: Rule,
    xp: ArrayFunctions,
    p: Array,
    g: Array,
    state: State,
    count: object,
    lr: object,
    gather: TensorFunction = identity,
    own: TensorFunction = identity,
) -> tuple[Array, dict[str, Array]]:
    """One tensor and its state after an update; `count` is the number of updates before it."""
    if not rule.trained:
        return p, dict(state)
    step = Step(rule.config.settings, xp, count, gather, own)
    direction, new = OPTIMIZERS[rule.kind].direction(step, g, state)
    return p - lr * (rule.lr_scale * direction + rule.decay * p), new


TAILS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """peak: largest rate; final: last rate as a share of it; steps: in all, of which `warmup` at
    the start and `decay` (WSD) at the end; kind: wsd, cosine, constant; tail: one of TAILS."""

    peak: float
    steps: int
    warmup: int
    kind: str
    decay: int
    tail: str
    final: float

    def __post_init__(self) -> None:
        if self.warmup + (self.decay if self.kind == "wsd" else 0) > self.steps:
            raise UsageError(
                f"--warmup: {self.warmup} steps of warm-up and {self.decay} of decay in "
                f"{self.steps} steps (expected at most {self.steps} together)"
            )


def learning_rate(step: int, config: ScheduleConfig) -> float:
    """The rate of the update made after `step` updates (see the convention above)."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    start, value = decay_start(config), 1.0
    if start < config.steps:
        # elapsed share of the decay, 0 … 1
        done = min(max(step - start, 0) / (config.steps - start), 1.0)
        value = TAILS["cosine" if config.kind == "cosine" else config.tail](done)
    return config.peak * warm * (config.final + (1 - config.final) * value)


def decay_start(config: ScheduleConfig) -> int:
    """Number of updates before the decay: this step is the last at the peak rate.

    WSD: steps - decay; cosine: the end of the warm-up; without a decay: steps.
    """
    if config.kind == "cosine":
        return config.warmup
    return config.steps - (config.decay if config.kind == "wsd" else 0)
