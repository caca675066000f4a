"""The update rules of all optimizers, over a few array functions that both backends provide.

Each rule turns a gradient g (of the mean loss, clipped) into a direction u; `update` then computes
p = p - lr (lr_scale u + decay p). All fp32. Matrices are the last two axes: stacked experts
[E, a, b] are E matrices. g, p and the elementwise state may be shards of a tensor: `gather` returns
the whole tensor of a shard, and `own` this device's shard of a whole tensor.

adamw (arXiv 1711.05101): m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g²,
  u = m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps).
lion (arXiv 2302.06675): u = sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g.
muon (Jordan 2024, kellerjordan.github.io/posts/muon): m as AdamW's with the momentum μ, then
  Nesterov's μ m + (1 - μ) g, orthogonalised by five Newton-Schulz steps x ← a x + (b A + c A²) x,
  A = x xᵀ, and scaled by 0.2 sqrt(max(a, b)), the RMS of an AdamW update (Moonlight, arXiv
  2502.16982), so that one learning rate fits both.
adafactor (arXiv 1804.04235) without relative steps, parameter scale and momentum: row and column
  means of g² with b2 = 1 - t^-0.8, u = g / sqrt(row column / mean(row)), over max(1, rms(u)).
soap (arXiv 2409.11321, algorithm 3): Adam's v in the eigenbases of L = E[g gᵀ], R = E[gᵀ g]:
  u = Ql (Qlᵀ m Qr / sqrt(v)) Qrᵀ with v the mean of (Qlᵀ g Qr)². As in the authors' code, the first
  update only computes the bases (a gradient is diagonal in its own eigenbasis, where Adam would
  divide rounding errors by themselves), and t counts from the second. Every `soap_every` updates,
  one QR step of power iteration, Q = qr(L Q), follows L; columns and v are sorted by eigenvalue.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sabia.core.train.optimizer.config import Rule, soap_sides

Array = Any
State = Mapping[str, Array]
TensorFunction = Callable[[Array], Array]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_RMS = 0.2
ADAFACTOR_DECAY, ADAFACTOR_CLIP, ADAFACTOR_EPS = 0.8, 1.0, 1e-30
TINY = 1e-20


class ArrayFunctions(Protocol):
    """Functions of a backend; arrays support arithmetic, `@`, indexing, `.shape` and `.mT`."""

    def sqrt(self, x: Array) -> Array: ...
    def sign(self, x: Array) -> Array: ...
    def floor(self, x: Array, least: float) -> Array:
        """The larger of x and `least`."""

    def mean(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Mean over axes, which are kept with size 1."""

    def argsort(self, x: Array) -> Array:
        """Indices that sort the last axis in ascending order."""

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        """x's elements at `indices` along an axis, the other axes broadcast."""

    def eigenvectors(self, x: Array) -> Array:
        """Of symmetric matrices, as columns, the largest eigenvalue first."""

    def orthonormal(self, x: Array) -> Array:
        """Q of x = Q R."""

    def expm1(self, x: Any) -> Any:
        """exp(x) - 1 of a number computed from the count."""

    def cond(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """yes() or no(), which return the same shapes."""

    def repeat(self, times: int, function: TensorFunction, x: Array) -> Array:
        """function(function(… x))."""


def identity(x: Array) -> Array:
    """x itself: `gather` and `own` on one device."""
    return x


def update(
    rule: Rule,
    xp: ArrayFunctions,
    p: Array,
    g: Array,
    state: State,
    count: Any,
    lr: Any,
    gather: TensorFunction = identity,
    own: TensorFunction = identity,
) -> tuple[Array, dict[str, Array]]:
    """One tensor and its state after an update; `count` is the number of updates before it."""
    if not rule.trained:
        return p, dict(state)
    step = _Step(rule, xp, count, gather, own)
    direction, new = _DIRECTIONS[rule.kind](step, g, state)
    return p - lr * (rule.lr_scale * direction + rule.decay * p), new


DirectionAndState = tuple[Array, dict[str, Array]]


@dataclass(frozen=True)
class _Step:
    """The arguments that all rules have in common; see `update`."""

    rule: Rule
    xp: ArrayFunctions
    count: Any
    gather: TensorFunction
    own: TensorFunction


def _moving_average(old: Array, new: Array, beta: Any) -> Array:
    return beta * old + (1 - beta) * new


def _bias_correction(xp: ArrayFunctions, beta: float, t: Any) -> Any:
    """1 - beta^t, the sum of the weights of t terms in a moving average from zero, accurately."""
    return -xp.expm1(t * math.log(beta)) if beta else 1.0


def _adam_direction(step: _Step, m: Array, v: Array, t: Any) -> Array:
    """Adam's bias-corrected mean divided by the root of the bias-corrected mean square."""
    config, xp = step.rule.config, step.xp
    root = xp.sqrt(v / _bias_correction(xp, config.beta2, t))
    return m / _bias_correction(xp, config.beta1, t) / (root + config.eps)


def _adamw(step: _Step, g: Array, state: State) -> DirectionAndState:
    config = step.rule.config
    m = _moving_average(state["m"], g, config.beta1)
    v = _moving_average(state["v"], g * g, config.beta2)
    return _adam_direction(step, m, v, step.count + 1), {"m": m, "v": v}


def _lion(step: _Step, g: Array, state: State) -> DirectionAndState:
    config = step.rule.config
    direction = step.xp.sign(_moving_average(state["m"], g, config.beta1))
    return direction, {"m": _moving_average(state["m"], g, config.beta2)}


def _muon(step: _Step, g: Array, state: State) -> DirectionAndState:
    config, momentum = step.rule.config, step.rule.config.muon_momentum
    m = _moving_average(state["m"], g, momentum)
    # μ m + (1 - μ) g
    whole = step.gather(_moving_average(m, g, momentum) if config.muon_nesterov else m)
    # orthogonal [a, b] has rms 1 / sqrt(max(a, b)); the scale makes it 0.2
    scale = MUON_RMS * math.sqrt(max(whole.shape[-2:]))
    return step.own(scale * newton_schulz(step.xp, whole)), {"m": m}


def newton_schulz(xp: ArrayFunctions, x: Array) -> Array:
    """Matrices with the singular vectors of x[..., a, b] and singular values near 1 (0.7-1.2)."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(xp, x.mT).mT
    a, b, c = NEWTON_SCHULZ

    def step(y: Array) -> Array:
        gram = y @ y.mT  # A = y yᵀ, [..., a, a] with a ≤ b
        return a * y + (b * gram + c * (gram @ gram)) @ y  # a y + (b A + c A²) y

    # Frobenius norm, an upper bound of the largest singular value
    norm = xp.sqrt(xp.mean(x * x, (-2, -1)) * math.prod(x.shape[-2:]))
    return xp.repeat(NEWTON_SCHULZ_STEPS, step, x / xp.floor(norm, TINY))


def _adafactor(step: _Step, g: Array, state: State) -> DirectionAndState:
    xp = step.xp
    beta = 1 - (step.count + 1) ** -ADAFACTOR_DECAY  # b2 = 1 - t^-0.8
    if "v" in state:  # a vector
        v = _moving_average(state["v"], g * g + ADAFACTOR_EPS, beta)
        direction = g / xp.sqrt(v)
        return direction / _rms_clip(xp, step.gather(direction), (-1,)), {"v": v}
    whole = step.gather(g)
    square = whole * whole + ADAFACTOR_EPS
    # row means [..., a] and column means [..., b] of g²
    row = _moving_average(state["row"], xp.mean(square, (-1,))[..., 0], beta)
    column = _moving_average(state["column"], xp.mean(square, (-2,))[..., 0, :], beta)
    # v ≈ row column / mean(row), a rank-1 estimate
    rows = xp.sqrt(row / xp.mean(row, (-1,)))[..., None]
    direction = whole / rows / xp.sqrt(column)[..., None, :]
    direction = direction / _rms_clip(xp, direction, (-2, -1))
    return step.own(direction), {"row": row, "column": column}


def _rms_clip(xp: ArrayFunctions, x: Array, axes: tuple[int, ...]) -> Array:
    """max(1, rms(x) / clip), by which an update is divided."""
    return xp.floor(xp.sqrt(xp.mean(x * x, axes)) / ADAFACTOR_CLIP, 1.0)


def _soap(step: _Step, g: Array, state: State) -> DirectionAndState:
    xp, count, gather, own = step.xp, step.count, step.gather, step.own
    whole = gather(g)
    sides = soap_sides(step.rule, whole.shape)
    if not sides:
        return _adamw(step, g, state)
    config, bases = step.rule.config, {side: state[f"{side}_basis"] for side in sides}
    # before the first bases, which are zero, this is zero, and so are v and u
    rotated_gradient = own(_to_eigenbasis(whole, bases))
    # not updated by the first gradient
    m = _moving_average(state["m"], g, config.beta1) * (count > 0)
    # of (Qlᵀ g Qr)²
    v = _moving_average(state["v"], rotated_gradient * rotated_gradient, config.beta2)
    # Qlᵀ m Qr / sqrt(v); t counts from the second update
    rotated_m = own(_to_eigenbasis(gather(m), bases))
    rotated_direction = _adam_direction(step, rotated_m, v, count + (count == 0))
    # Ql … Qrᵀ, the inverse rotation
    inverses = {side: basis.mT for side, basis in bases.items()}
    direction = own(_to_eigenbasis(gather(rotated_direction), inverses))
    # L = E[g gᵀ] [..., a, a], R = E[gᵀ g] [..., b, b]
    outer = {"left": whole @ whole.mT, "right": whole.mT @ whole}
    factors = {side: _moving_average(state[side], outer[side], config.beta2) for side in sides}

    def first() -> Any:
        return v, {side: xp.eigenvectors(factors[side]) for side in sides}

    def later() -> Any:
        due = count % config.soap_every == 0
        return xp.cond(due, lambda: _refresh(step, factors, bases, v), lambda: (v, bases))

    v, bases = xp.cond(count == 0, first, later)
    return direction, {"m": m, "v": v, **factors} | {f"{s}_basis": bases[s] for s in sides}


def _to_eigenbasis(x: Array, bases: Mapping[str, Array]) -> Array:
    if "left" in bases:
        x = bases["left"].mT @ x
    return x @ bases["right"] if "right" in bases else x


def _refresh(step: _Step, factors: State, bases: State, v: Array) -> DirectionAndState:
    """One step of power iteration from the sorted bases; sorts v's rows and columns alike."""
    xp, whole, new = step.xp, step.gather(v), {}
    for side, factor in factors.items():
        basis = bases[side]
        # diag(Qᵀ L Q), the estimated eigenvalues
        eigenvalues = xp.mean((factor @ basis) * basis, (-2,))  # times a constant
        order = xp.argsort(-eigenvalues)
        new[side] = xp.orthonormal(factor @ xp.take(basis, order, -1))  # Q = qr(L Q)
        whole = xp.take(whole, order.mT, -2) if side == "left" else xp.take(whole, order, -1)
    return step.own(whole), new


_DIRECTIONS: Mapping[str, Callable[..., DirectionAndState]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "adafactor": _adafactor,
    "soap": _soap,
}
