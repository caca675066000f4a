"""The optimizer's settings for both backends, and the update rule of each tensor.

`OptimizerConfig` names an optimizer and its settings, `rules` turns it and a model's table into one
`Rule` per tensor, `core.train.optimizer.updates` computes each kind of rule. In all of them t
counts updates from 1, weight decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101), and
  p = p - lr (lr_scale u + weight_decay p)
with u the rule's direction; the decay has no `lr_scale`, so that a scaled tensor keeps its time
constant (as in the mup package, scaled_wd). Only tensors that the table marks have weight decay:
matrices, not norms and biases. The state is fp32: param/NAME, PART/NAME for every part of a rule's
state (m/NAME, v/NAME …), and `count`, the number of updates.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec

Shape = tuple[int, ...]
COUNT = "count"

# optimizer → default (beta1, beta2), those of its paper's language models
BETAS: Mapping[str, tuple[float, float]] = {
    "adamw": (0.9, 0.95),
    "muon": (0.9, 0.95),
    "lion": (0.95, 0.98),
    "adafactor": (0.9, 0.95),
    "soap": (0.95, 0.95),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its settings; `clip_norm` bounds the gradient's global norm (0: unbounded).

    beta1, beta2: of AdamW (also for the tensors that Muon and SOAP do not update), Lion and SOAP.
    soap_every: updates between two refreshes of SOAP's bases; soap_max_dim: a longer side of a
    matrix gets no basis. lr_scales: tensor name → factor of the learning rate. freeze: regular
    expression; tensors whose names match are not trained.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    name: str = "adamw"
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    soap_every: int = 10
    soap_max_dim: int = 10_000
    lr_scales: Mapping[str, float] = field(default_factory=dict, hash=False)
    freeze: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UsageError(f"--betas: {self.beta1},{self.beta2} (expected 0 to below 1)")
        if self.eps <= 0 or self.weight_decay < 0 or self.clip_norm < 0:
            raise UsageError(
                f"optimizer: eps {self.eps}, weight decay {self.weight_decay}, clip norm "
                f"{self.clip_norm} (expected eps above 0, the others 0 or more)"
            )
        if not 0 <= self.muon_momentum < 1:
            raise UsageError(f"muon momentum: {self.muon_momentum} (expected 0 to below 1)")
        if self.soap_every < 1 or self.soap_max_dim < 1:
            raise UsageError(
                f"soap: every {self.soap_every}, largest side {self.soap_max_dim} (expected 1 or "
                "more)"
            )
        for name, scale in self.lr_scales.items():
            if not (math.isfinite(scale) and scale > 0):
                raise UsageError(f"learning-rate scale of {name}: {scale} (expected above 0)")


@dataclass(frozen=True)
class Rule:
    """How one tensor is updated; `decay`: its weight decay, 0 for none."""

    kind: str
    decay: float
    config: OptimizerConfig
    lr_scale: float = 1.0
    trained: bool = True


def rules(
    spec: ModelSpec, config: OptimizerConfig, adapters: Sequence[TensorSpec] = ()
) -> dict[str, Rule]:
    """Tensor name → rule, in the order of the table, adapters last.

    With `adapters` (LoRA) only they and the new head of a classifier are trained. Raises UsageError
    if `freeze` or a name in `lr_scales` matches no tensor, and if nothing is left to train.
    """
    own = spec.tensors()
    if adapters:
        own = tuple(t for t in own if spec.classifier and t.name.startswith("classifier"))
    table = (*spec.tensors(), *adapters)
    frozen = {t.name for t in table} - {t.name for t in (*own, *adapters)}
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
    """Muon updates the matrices marked for it, SOAP all matrices; AdamW the other tensors."""
    matrix = tensor.dtype_class == "weight" and len(tensor.shape) > 1
    not_matched = (name == "muon" and not tensor.muon) or (name == "soap" and not matrix)
    return "adamw" if not_matched else name


def state_parts(rule: Rule, shape: Shape) -> dict[str, tuple[Shape, bool]]:
    """Part → (shape, whole) of the state of `rule` for a tensor of `shape`.

    A part that is not `whole` has the tensor's shape and is sharded like it; a whole one is
    replicated on every device.
    """
    if not rule.trained:
        return {}
    if rule.kind in ("muon", "lion"):
        return {"m": (shape, False)}
    # factored second moment: means of g² over rows and over columns
    if rule.kind == "adafactor" and len(shape) > 1:
        return {"row": (shape[:-1], True), "column": ((*shape[:-2], shape[-1]), True)}
    if rule.kind == "adafactor":
        return {"v": (shape, False)}
    parts: dict[str, tuple[Shape, bool]] = {"m": (shape, False), "v": (shape, False)}
    # factors L, R of g gᵀ and gᵀ g, and their eigenbases
    if rule.kind == "soap":
        for side, size in soap_sides(rule, shape).items():
            square = (*shape[:-2], size, size)
            parts |= {side: (square, True), f"{side}_basis": (square, True)}
    return parts


def init_state(
    shapes: Mapping[str, Shape], rules: Mapping[str, Rule], zeros: Callable[[str, Shape, bool], Any]
) -> dict[str, dict[str, Any]]:
    """Name → part → `zeros(name, shape, whole)`: the state before the first update."""
    state: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        parts = state_parts(rules[name], tuple(shape)).items()
        state[name] = {part: zeros(name, size, whole) for part, (size, whole) in parts}
    return state


def soap_sides(rule: Rule, shape: Shape) -> dict[str, int]:
    """`left` and `right` with their sizes, without those longer than `soap_max_dim`."""
    sides = {"left": shape[-2], "right": shape[-1]}
    return {side: n for side, n in sides.items() if n <= rule.config.soap_max_dim}


def state_shapes(shapes: Mapping[str, Shape], rules: Mapping[str, Rule]) -> dict[str, Shape]:
    """PART/NAME → shape of a whole state without `count`, in the order of checkpoints.

    Parameters come first, then part by part.
    """
    by_part: dict[str, dict[str, Shape]] = {"param": dict(shapes), "m": {}, "v": {}}
    for name, shape in shapes.items():
        for part, (size, _) in state_parts(rules[name], shape).items():
            by_part.setdefault(part, {})[name] = size
    return {f"{part}/{name}": size for part, of in by_part.items() for name, size in of.items()}
