"""What the optimizer's settings mean, one for both backends: which rule updates which tensor.

`OptimizerConfig` names an optimizer and its settings, `rules` turns it and a model's table into one
`Rule` per tensor, `core.train.optimizer.updates` computes each kind of rule. In all of them t
counts updates from 1, weight decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101), and
  p = p - lr (lr_scale u + weight_decay p)
with u the rule's direction; the decay takes no `lr_scale`, so that a scaled tensor keeps its time
constant (as in the mup package, scaled_wd). Only tensors that the table marks decay: matrices, not
norms and biases. The state is fp32: param/NAME, PART/NAME for every part of a rule's state (m/NAME,
v/NAME …), and `count`, the number of updates.
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

# optimizer → (beta1, beta2) of its paper's language models, for those who name none
BETAS: Mapping[str, tuple[float, float]] = {
    "adamw": (0.9, 0.95),
    "muon": (0.9, 0.95),
    "lion": (0.95, 0.98),
    "adafactor": (0.9, 0.95),
    "soap": (0.95, 0.95),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its numbers; `clip_norm` bounds the gradient's global norm (0: unbounded).

    beta1, beta2: AdamW (also of what Muon and SOAP leave to it), Lion, SOAP; Adafactor has none.
    soap_every: updates between two refreshes of SOAP's bases; soap_max_dim: a longer side of a
    matrix is not turned. lr_scales: tensor name → factor of the rate. freeze: regular expression,
    searched in tensor names; what it finds is not trained.
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
    """How one tensor is updated; `decay` is its rate of weight decay, 0 where it has none."""

    kind: str
    decay: float
    config: OptimizerConfig
    lr_scale: float = 1.0
    trained: bool = True


def rules(
    spec: ModelSpec, config: OptimizerConfig, adapters: Sequence[TensorSpec] = ()
) -> dict[str, Rule]:
    """Tensor name → rule, in the order of the table, adapters after it.

    With `adapters` (LoRA) only they are trained, and the head of a classifier, which the model did
    not come with. Raises UsageError where `freeze` or a name in
    `lr_scales` fits no tensor, and where nothing is left to train.
    """
    own = spec.tensors()
    if adapters:
        own = tuple(t for t in own if spec.classifier and t.name.startswith("classifier"))
    table = (*spec.tensors(), *adapters)
    frozen = {t.name for t in table} - {t.name for t in (*own, *adapters)}
    frozen |= _frozen(table, config.freeze) | {t.name for t in table if not t.trained}
    unknown = set(config.lr_scales) - {t.name for t in table}
    if unknown:
        raise UsageError(f"learning-rate scale: no tensor is called {min(unknown)!r}")
    if len(frozen) == len(table):
        raise UsageError(f"--freeze: {config.freeze!r} leaves nothing to train (expected less)")
    return {t.name: _rule(t, config, t.name not in frozen) for t in table}


def _rule(tensor: TensorSpec, config: OptimizerConfig, trained: bool) -> Rule:
    scale = config.lr_scales.get(tensor.name, 1.0)
    decay = config.weight_decay if tensor.decay else 0.0
    return Rule(_kind(tensor, config.name), decay, config, scale, trained)


def _kind(tensor: TensorSpec, name: str) -> str:
    """Muon takes the matrices marked for it, SOAP all matrices; AdamW takes what they leave."""
    matrix = tensor.dtype_class == "weight" and len(tensor.shape) > 1
    left = (name == "muon" and not tensor.muon) or (name == "soap" and not matrix)
    return "adamw" if left else name


def _frozen(table: Sequence[TensorSpec], pattern: str) -> set[str]:
    """Names that `pattern` is found in; none for ''."""
    if not pattern:
        return set()
    found = {t.name for t in table if re.search(pattern, t.name)}
    if not found:
        names = f"{table[0].name} … {table[-1].name}"
        raise UsageError(f"--freeze: {pattern!r} fits no tensor (expected some of {names})")
    return found


def state_parts(rule: Rule, shape: Shape) -> dict[str, tuple[Shape, bool]]:
    """Part → (shape, whole) of the state that `rule` keeps for a tensor of `shape`.

    Parts that are not `whole` have the tensor's shape and are sharded like it; whole ones are
    kept whole on every device.
    """
    if not rule.trained:
        return {}
    if rule.kind in ("muon", "lion"):
        return {"m": (shape, False)}
    if rule.kind == "adafactor" and len(shape) > 1:
        return {"row": (shape[:-1], True), "column": ((*shape[:-2], shape[-1]), True)}
    if rule.kind == "adafactor":
        return {"v": (shape, False)}
    parts: dict[str, tuple[Shape, bool]] = {"m": (shape, False), "v": (shape, False)}
    if rule.kind == "soap":
        for side, size in soap_sides(rule, shape).items():
            square = (*shape[:-2], size, size)
            parts |= {side: (square, True), f"{side}_basis": (square, True)}
    return parts


def init_state(
    shapes: Mapping[str, Shape], rules: Mapping[str, Rule], zeros: Callable[[str, Shape, bool], Any]
) -> dict[str, dict[str, Any]]:
    """Name → part → what `zeros(name, shape, whole)` gives: the state before the first update."""
    return {
        name: {
            part: zeros(name, size, whole)
            for part, (size, whole) in state_parts(rules[name], tuple(shape)).items()
        }
        for name, shape in shapes.items()
    }


def soap_sides(rule: Rule, shape: Shape) -> dict[str, int]:
    """`left` and `right` with their sizes, those left out that are too long to be turned."""
    sides = {"left": shape[-2], "right": shape[-1]}
    return {side: n for side, n in sides.items() if n <= rule.config.soap_max_dim}


def state_shapes(shapes: Mapping[str, Shape], rules: Mapping[str, Rule]) -> dict[str, Shape]:
    """PART/NAME → shape of a whole state but `count`, in the order of checkpoints.

    Parameters come first, then part by part.
    """
    found: dict[str, dict[str, Shape]] = {"param": dict(shapes), "m": {}, "v": {}}
    for name, shape in shapes.items():
        for part, (size, _) in state_parts(rules[name], shape).items():
            found.setdefault(part, {})[name] = size
    return {f"{part}/{name}": size for part, of in found.items() for name, size in of.items()}
