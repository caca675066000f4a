"""The update of one tensor by its rule, over the array functions of either backend."""

from collections.abc import Callable
from typing import Any

from sabia.core.numerics.optimizers import OPTIMIZERS, ArrayFunctions, State, Step
from sabia.core.train.optimizer.config import Rule

Array = Any
TensorFunction = Callable[[Array], Array]


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
