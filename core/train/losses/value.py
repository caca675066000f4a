"""A value head and generalized advantage estimation: PPO's advantages of tokens, without groups.

The head is a score of each token, V_t = w · h_t + b, h_t the policy's last normed hidden state that
predicts token t; w and b begin at 0, and b has as many times the learning rate of w as h has
elements. Its loss trains the policy's matrices too. With the reward of a token r_t, the discount g
and the parameter l:
  advantage   A_t = d_t + g l A_(t+1), d_t = r_t + g V_(t+1) - V_t; V is 0 behind the last token
  return      A_t + V_t, what the head learns; the V are those at the time of sampling, constants
  loss        max((v - R)², (v' - R)²) / 2, v' = v within V ± the clip range
Advantages are then normalised to mean 0 and standard deviation 1 over the tokens of a step.
Sources: arXiv 1506.02438 (GAE), 1707.06347 (PPO); the clipped loss as in the baselines of OpenAI.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sabia.core.model.forward import gather_tensors
from sabia.core.ops.base import Array, Ops, Params
from sabia.core.options.grpo import ValueOptions
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import Init, TensorSpec

WEIGHT, BIAS = "value_head", "value_bias"
WHITENING_EPSILON = 1e-8


def value_head(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The tensors of the head of a model, in fp32 in all precisions."""
    shapes = {WEIGHT: ((1, spec.hidden_size), ("label", "embed")), BIAS: ((1,), ("label",))}
    return tuple(
        TensorSpec(name, shape, axes, Init("zeros"), "vector", "head", name, False, False)
        for name, (shape, axes) in shapes.items()
    )


def without_head(params: Params) -> dict[str, Array]:
    """The parameters of the model alone."""
    return {name: p for name, p in params.items() if name not in (WEIGHT, BIAS)}


def token_values(params: Params, x: Array, ops: Ops) -> Any:
    """Values, fp32 [B, T], of hidden states x[B, T, D]."""
    w = gather_tensors(params, ops, WEIGHT, BIAS)
    return ops.linear(ops.cast(x, "float32"), w[WEIGHT], w[BIAS], name=WEIGHT)[..., 0]


def token_advantages(
    rewards: np.ndarray, values: np.ndarray, present: np.ndarray, discount: float, decay: float
) -> np.ndarray:
    """Advantages float64 [..., T] of rewards, values and present tokens (the first ones of a row,
    1 or 0), all [..., T]."""
    present = present.astype(np.float64)
    shape = values[..., :1].shape
    later = np.concatenate([values[..., 1:] * present[..., 1:], np.zeros(shape)], -1)
    difference = (rewards + discount * later - values) * present
    made, last = np.zeros(values.shape), np.zeros(shape[:-1])
    for t in reversed(range(values.shape[-1])):
        last = difference[..., t] + discount * decay * last
        made[..., t] = last
    return made


def moments(arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """(number, sum, sum of squares) of the elements where a mask is 1."""
    chosen = np.concatenate([np.zeros(0), *(a[m > 0] for a, m in zip(arrays, masks, strict=True))])
    return np.array([chosen.size, chosen.sum(), np.square(chosen).sum()])


def mean_and_scale(total: np.ndarray) -> tuple[float, float]:
    """The mean, and what normalises a difference from it: 1 / √(variance + 1e-8), the variance with
    Bessel's correction. Of one number or none there is none: it stays as it is."""
    count, first, second = total.tolist()
    if count <= 1:
        return 0.0, 1.0
    variance = max(second - first * first / count, 0.0) / (count - 1)
    return first / count, float((variance + WHITENING_EPSILON) ** -0.5)


def value_losses(
    value: Array, before: Array, returns: Array, options: ValueOptions, ops: Ops
) -> tuple[Any, Any]:
    """(loss, whether it is clipped) of values [B, T]; `before`: those at the time of sampling."""
    loss = (value - returns) * (value - returns)
    if not options.value_clip:
        return loss / 2, loss < 0
    change, bound = value - before, options.value_clip
    near = ops.where(change > bound, bound, ops.where(change < -bound, -bound, change)) + before
    other = (near - returns) * (near - returns)
    return ops.where(other > loss, other, loss) / 2, other > loss
