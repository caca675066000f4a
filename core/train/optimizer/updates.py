"""The maths of every optimizer, once, over the few array functions that both backends give.

Each rule turns a gradient g (of the mean loss, clipped) into a direction u; `update` then moves
p = p - lr (lr_scale u + decay p). All fp32. Matrices are the last two axes: stacked experts
[E, a, b] are E matrices. g, p and the elementwise state may be shards of a tensor: `gather` makes
the whole of a shard and `own` cuts this device's shard out of a whole one.

adamw (arXiv 1711.05101): m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g²,
  u = m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps).
lion (arXiv 2302.06675): u = sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g.
muon (Jordan 2024, kellerjordan.github.io/posts/muon): m as AdamW's with the momentum μ, then
  Nesterov's μ m + (1 - μ) g, orthogonalised by five Newton-Schulz steps x ← a x + (b A + c A²) x,
  A = x xᵀ, and scaled by 0.2 sqrt(max(a, b)), the RMS of an AdamW update (Moonlight, arXiv
  2502.16982), so that one rate serves both.
adafactor (arXiv 1804.04235) without relative steps, parameter scale and momentum: row and column
  means of g² with b2 = 1 - t^-0.8, u = g / sqrt(row column / mean(row)), over max(1, rms(u)).
soap (arXiv 2409.11321, algorithm 3): Adam's v in the eigenbases of L = E[g gᵀ], R = E[gᵀ g]:
  u = Ql (Qlᵀ m Qr / sqrt(v)) Qrᵀ with v the mean of (Qlᵀ g Qr)². As in the authors' program the
  first update only makes the bases (a gradient is diagonal in its own, and Adam would divide
  rounding errors by themselves), and t counts from the second. Every `soap_every` updates one QR
  step of power iteration, Q = qr(L Q), follows L, the columns and v sorted by eigenvalue.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sabia.core.train.optimizer.config import Rule, soap_sides

Array = Any
State = Mapping[str, Array]
Change = Callable[[Array], Array]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_RMS = 0.2
ADAFACTOR_DECAY, ADAFACTOR_CLIP, ADAFACTOR_EPS = 0.8, 1.0, 1e-30
TINY = 1e-20


class Maths(Protocol):
    """What a backend gives; arrays know arithmetic, `@`, indexing, `.shape` and `.mT`."""

    def sqrt(self, x: Array) -> Array: ...
    def sign(self, x: Array) -> Array: ...
    def floor(self, x: Array, least: float) -> Array:
        """The larger of x and `least`."""

    def mean(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Mean over axes that stay, of size 1."""

    def argsort(self, x: Array) -> Array:
        """Indices that sort the last axis upwards."""

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        """x's elements at `indices` along an axis, the other axes broadcast."""

    def eigenvectors(self, x: Array) -> Array:
        """Of symmetric matrices, as columns, the largest eigenvalue first."""

    def orthonormal(self, x: Array) -> Array:
        """Q of x = Q R."""

    def expm1(self, x: Any) -> Any:
        """exp(x) - 1 of a number that comes from the count."""

    def cond(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """yes() or no(); both give the same shapes."""

    def repeat(self, times: int, function: Change, x: Array) -> Array:
        """function(function(… x))."""


def identity(x: Array) -> Array:
    """x: the `gather` and `own` of one device."""
    return x


def update(
    rule: Rule,
    xp: Maths,
    p: Array,
    g: Array,
    state: State,
    count: Any,
    lr: Any,
    gather: Change = identity,
    own: Change = identity,
) -> tuple[Array, dict[str, Array]]:
    """One tensor and its state after an update; `count` is the number of updates before it."""
    if not rule.trained:
        return p, dict(state)
    direction, new = DIRECTIONS[rule.kind](rule, xp, g, state, count, gather, own)
    return p - lr * (rule.lr_scale * direction + rule.decay * p), new


Step = tuple[Array, dict[str, Array]]


def _mix(old: Array, new: Array, beta: Any) -> Array:
    return beta * old + (1 - beta) * new


def _weight(xp: Maths, beta: float, t: Any) -> Any:
    """1 - beta^t, the weights that an average of t terms from zero has seen, to full precision."""
    return -xp.expm1(t * math.log(beta)) if beta else 1.0


def _ratio(rule: Rule, xp: Maths, m: Array, v: Array, t: Any) -> Array:
    """Adam's unbiased mean over the root of its unbiased mean square."""
    config = rule.config
    root = xp.sqrt(v / _weight(xp, config.beta2, t))
    return m / _weight(xp, config.beta1, t) / (root + config.eps)


def _adamw(
    rule: Rule, xp: Maths, g: Array, state: State, count: Any, gather: Change, own: Change
) -> Step:
    m, v = _mix(state["m"], g, rule.config.beta1), _mix(state["v"], g * g, rule.config.beta2)
    return _ratio(rule, xp, m, v, count + 1), {"m": m, "v": v}


def _lion(
    rule: Rule, xp: Maths, g: Array, state: State, count: Any, gather: Change, own: Change
) -> Step:
    direction = xp.sign(_mix(state["m"], g, rule.config.beta1))
    return direction, {"m": _mix(state["m"], g, rule.config.beta2)}


def _muon(
    rule: Rule, xp: Maths, g: Array, state: State, count: Any, gather: Change, own: Change
) -> Step:
    momentum = rule.config.muon_momentum
    m = _mix(state["m"], g, momentum)
    whole = gather(_mix(m, g, momentum) if rule.config.muon_nesterov else m)
    scale = MUON_RMS * math.sqrt(max(whole.shape[-2:]))
    return own(scale * newton_schulz(xp, whole)), {"m": m}


def newton_schulz(xp: Maths, x: Array) -> Array:
    """Matrices with the singular vectors of x[..., a, b] and singular values near 1 (0.7-1.2)."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(xp, x.mT).mT
    a, b, c = NEWTON_SCHULZ

    def step(y: Array) -> Array:
        gram = y @ y.mT
        return a * y + (b * gram + c * (gram @ gram)) @ y

    norm = xp.sqrt(xp.mean(x * x, (-2, -1)) * math.prod(x.shape[-2:]))
    return xp.repeat(NEWTON_SCHULZ_STEPS, step, x / xp.floor(norm, TINY))


def _adafactor(
    rule: Rule, xp: Maths, g: Array, state: State, count: Any, gather: Change, own: Change
) -> Step:
    beta = 1 - (count + 1) ** -ADAFACTOR_DECAY
    if "v" in state:  # a vector
        v = _mix(state["v"], g * g + ADAFACTOR_EPS, beta)
        direction = g / xp.sqrt(v)
        return direction / _excess(xp, gather(direction), (-1,)), {"v": v}
    whole = gather(g)
    square = whole * whole + ADAFACTOR_EPS
    row = _mix(state["row"], xp.mean(square, (-1,))[..., 0], beta)
    column = _mix(state["column"], xp.mean(square, (-2,))[..., 0, :], beta)
    rows = xp.sqrt(row / xp.mean(row, (-1,)))[..., None]
    direction = whole / rows / xp.sqrt(column)[..., None, :]
    direction = direction / _excess(xp, direction, (-2, -1))
    return own(direction), {"row": row, "column": column}


def _excess(xp: Maths, x: Array, axes: tuple[int, ...]) -> Array:
    """By how much the RMS of x is above the clip, at least 1."""
    return xp.floor(xp.sqrt(xp.mean(x * x, axes)) / ADAFACTOR_CLIP, 1.0)


def _soap(
    rule: Rule, xp: Maths, g: Array, state: State, count: Any, gather: Change, own: Change
) -> Step:
    whole = gather(g)
    sides = soap_sides(rule, whole.shape)
    if not sides:
        return _adamw(rule, xp, g, state, count, gather, own)
    config, bases = rule.config, {side: state[f"{side}_basis"] for side in sides}
    turned = own(_turn(whole, bases))  # zero before there are bases, and so are v and u
    m = _mix(state["m"], g, config.beta1) * (count > 0)
    v = _mix(state["v"], turned * turned, config.beta2)
    ratio = _ratio(rule, xp, own(_turn(gather(m), bases)), v, count + (count == 0))
    direction = own(_turn_back(gather(ratio), bases))
    seen = {"left": whole @ whole.mT, "right": whole.mT @ whole}
    factors = {side: _mix(state[side], seen[side], config.beta2) for side in sides}
    v, bases = xp.cond(
        count == 0,
        lambda: (v, {side: xp.eigenvectors(factors[side]) for side in sides}),
        lambda: xp.cond(
            count % config.soap_every == 0,
            lambda: _refresh(xp, factors, bases, v, gather, own),
            lambda: (v, bases),
        ),
    )
    return direction, {"m": m, "v": v, **factors} | {f"{s}_basis": bases[s] for s in sides}


def _turn(x: Array, bases: Mapping[str, Array]) -> Array:
    if "left" in bases:
        x = bases["left"].mT @ x
    return x @ bases["right"] if "right" in bases else x


def _turn_back(x: Array, bases: Mapping[str, Array]) -> Array:
    if "left" in bases:
        x = bases["left"] @ x
    return x @ bases["right"].mT if "right" in bases else x


def _refresh(
    xp: Maths,
    factors: Mapping[str, Array],
    bases: Mapping[str, Array],
    v: Array,
    gather: Change,
    own: Change,
) -> tuple[Array, dict[str, Array]]:
    """One step of power iteration from the sorted bases; v's rows and columns go along."""
    whole, new = gather(v), {}
    for side, factor in factors.items():
        basis = bases[side]
        eigenvalues = xp.mean((factor @ basis) * basis, (-2,))  # times a constant
        order = xp.argsort(-eigenvalues)
        new[side] = xp.orthonormal(factor @ xp.take(basis, order, -1))
        whole = xp.take(whole, order.mT, -2) if side == "left" else xp.take(whole, order, -1)
    return own(whole), new


DIRECTIONS: Mapping[str, Callable[..., Step]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "adafactor": _adafactor,
    "soap": _soap,
}
