"""The optimizers: one record each, with its name, settings, state and update.

`OPTIMIZERS` is the only list of them: the choices, defaults and help of the command line, the state
in checkpoints, the planner's bytes and the updates of both backends are read from it, so that a new
optimizer is one record (and an option in `core.options.training` for a setting that none had).

Each optimizer turns a gradient g (of the mean loss, clipped) into a direction u, over a few array
functions that both backends provide; `core.train.optimizer.config` then computes
p = p - lr (lr_scale u + decay p). All fp32. Matrices are the last two axes: stacked experts
[E, a, b] are E matrices. g and the elementwise state may be shards of a tensor: `Step.gather`
returns the whole tensor of a shard, `Step.own` this device's shard of a whole tensor. `t` counts
updates from 1. The sources and equations are at the records.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Array = Any
Shape = tuple[int, ...]
State = Mapping[str, Array]
Settings = Mapping[str, Any]
Parts = dict[str, tuple[Shape, bool]]
TensorFunction = Callable[[Array], Array]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_RMS = 0.2
ADAFACTOR_DECAY, ADAFACTOR_CLIP = 0.8, 1.0
TINY = 1e-20


class ArrayFunctions(Protocol):
    """Functions of a backend; arrays support arithmetic, `@`, indexing, `.shape` and `.mT`."""

    sqrt: TensorFunction
    sign: TensorFunction
    floor: Callable[[Array, float], Array]  # the larger of x and a number
    mean: Callable[[Array, tuple[int, ...]], Array]  # over axes, which are kept with size 1
    argsort: TensorFunction  # indices that sort the last axis in ascending order
    take: Callable[[Array, Array, int], Array]  # elements at indices along an axis
    eigenvectors: TensorFunction  # of symmetric matrices, as columns, largest eigenvalue first
    orthonormal: TensorFunction  # Q of x = Q R
    expm1: Callable[[Any], Any]  # exp(x) - 1 of a number computed from the count
    # cond(condition, yes, no): yes() or no(), which return the same shapes
    cond: Callable[[Any, Callable[[], Any], Callable[[], Any]], Any]
    repeat: Callable[[int, TensorFunction, Array], Array]  # function(function(… x))


DirectionAndState = tuple[Array, dict[str, Array]]


@dataclass(frozen=True)
class Step:
    """What every optimizer needs besides the gradient and the state of a tensor.

    count: updates before this one, a number or a traced scalar. gather(x): the whole tensor of this
    device's shard; own(x): this device's shard of a whole tensor.
    """

    settings: Settings
    xp: ArrayFunctions
    count: Any
    gather: TensorFunction
    own: TensorFunction


def _moving_average(old: Array, new: Array, beta: float) -> Array:
    return beta * old + (1 - beta) * new


def _bias_correction(xp: ArrayFunctions, beta: float, t: Array) -> Any:
    """1 - beta^t, the sum of the weights of t terms in a moving average from zero, accurately."""
    return -xp.expm1(t * math.log(beta)) if beta else 1.0


def _adam_direction(step: Step, m: Array, v: Array, t: object) -> Array:
    """Adam's bias-corrected mean divided by the root of the bias-corrected mean square."""
    settings, xp = step.settings, step.xp
    root = xp.sqrt(v / _bias_correction(xp, settings["beta2"], t))
    return m / _bias_correction(xp, settings["beta1"], t) / (root + settings["eps"])


def _adamw(step: Step, g: Array, state: State) -> DirectionAndState:
    settings = step.settings
    m = _moving_average(state["m"], g, settings["beta1"])
    v = _moving_average(state["v"], g * g, settings["beta2"])
    return _adam_direction(step, m, v, step.count + 1), {"m": m, "v": v}


def _lion(step: Step, g: Array, state: State) -> DirectionAndState:
    settings = step.settings
    direction = step.xp.sign(_moving_average(state["m"], g, settings["beta1"]))
    return direction, {"m": _moving_average(state["m"], g, settings["beta2"])}


def _muon(step: Step, g: Array, state: State) -> DirectionAndState:
    settings, momentum = step.settings, step.settings["momentum"]
    m = _moving_average(state["m"], g, momentum)
    # μ m + (1 - μ) g
    whole = step.gather(_moving_average(m, g, momentum) if settings["nesterov"] else m)
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


def _adafactor(step: Step, g: Array, state: State) -> DirectionAndState:
    xp, eps = step.xp, step.settings["eps"]
    beta = 1 - (step.count + 1) ** -ADAFACTOR_DECAY  # b2 = 1 - t^-0.8
    if "v" in state:  # a vector
        v = _moving_average(state["v"], g * g + eps, beta)
        direction = g / xp.sqrt(v)
        return direction / _rms_clip(xp, step.gather(direction), (-1,)), {"v": v}
    whole = step.gather(g)
    square = whole * whole + eps
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


def _soap(step: Step, g: Array, state: State) -> DirectionAndState:
    xp, count, gather, own = step.xp, step.count, step.gather, step.own
    whole = gather(g)
    sides = _soap_sides(whole.shape, step.settings)
    if not sides:
        return _adamw(step, g, state)
    settings, bases = step.settings, {side: state[f"{side}_basis"] for side in sides}
    # before the first bases, which are zero, this is zero, and so are v and u
    rotated_gradient = own(_to_eigenbasis(whole, bases))
    # not updated by the first gradient
    m = _moving_average(state["m"], g, settings["beta1"]) * (count > 0)
    # of (Qlᵀ g Qr)²
    v = _moving_average(state["v"], rotated_gradient * rotated_gradient, settings["beta2"])
    # Qlᵀ m Qr / sqrt(v); t counts from the second update
    rotated_m = own(_to_eigenbasis(gather(m), bases))
    rotated_direction = _adam_direction(step, rotated_m, v, count + (count == 0))
    # Ql … Qrᵀ, the inverse rotation
    inverses = {side: basis.mT for side, basis in bases.items()}
    direction = own(_to_eigenbasis(gather(rotated_direction), inverses))
    # L = E[g gᵀ] [..., a, a], R = E[gᵀ g] [..., b, b]
    outer = {"left": whole @ whole.mT, "right": whole.mT @ whole}
    factors = {side: _moving_average(state[side], outer[side], settings["beta2"]) for side in sides}

    def first() -> Any:
        return v, {side: xp.eigenvectors(factors[side]) for side in sides}

    def later() -> Any:
        due = count % settings["soap_every"] == 0
        return xp.cond(due, lambda: _refresh(step, factors, bases, v), lambda: (v, bases))

    v, bases = xp.cond(count == 0, first, later)
    return direction, {"m": m, "v": v, **factors} | {f"{s}_basis": bases[s] for s in sides}


def _to_eigenbasis(x: Array, bases: Mapping[str, Array]) -> Array:
    if "left" in bases:
        x = bases["left"].mT @ x
    return x @ bases["right"] if "right" in bases else x


def _refresh(step: Step, factors: State, bases: State, v: Array) -> DirectionAndState:
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


Scope = Literal["all", "matrices", "hidden matrices"]


@dataclass(frozen=True)
class Optimizer:
    """One optimizer.

    help: one sentence for `--optimizer`, behind the name. settings: setting → default; each has
    an entry in `LIMITS` and an option of that name (`beta1`, `beta2`: `--betas`). parts(shape,
    settings): part → (shape, whole) of a tensor's state; a part that is not whole has the tensor's
    shape and is sharded like it, a whole one is replicated on every device. direction(step, g,
    state) → (u, new state). scope: the tensors it updates; AdamW, whose settings it then needs,
    updates the others. mup_exponent: under μP the rate of a hidden matrix is multiplied by (base
    width / width) to this power, None without μP. keeps_expert_shards: the update of stacked
    experts needs no gathering over `expert`. update_copies: copies of a tensor that its update
    makes in torch on a CPU (measured; the planner's).
    """

    name: str
    help: str
    settings: Settings
    parts: Callable[[Shape, Settings], Parts]
    direction: Callable[[Step, Array, State], DirectionAndState]
    scope: Scope = "all"
    mup_exponent: float | None = None
    keeps_expert_shards: bool = False
    update_copies: int = 0

    @property
    def state_per_parameter(self) -> int:
        """fp32 elements of state per parameter of a large square matrix, rounded."""
        side = 8192
        parts = self.parts((side, side), self.settings).values()
        return round(sum(math.prod(shape) for shape, _ in parts) / side**2)


def _first_moment(shape: Shape, settings: Settings) -> Parts:
    return {"m": (shape, False)}


def _two_moments(shape: Shape, settings: Settings) -> Parts:
    return {"m": (shape, False), "v": (shape, False)}


def _row_and_column_means(shape: Shape, settings: Settings) -> Parts:
    """Adafactor's means of g² over rows and over columns; of a vector g² itself."""
    if len(shape) == 1:
        return {"v": (shape, False)}
    return {"row": (shape[:-1], True), "column": ((*shape[:-2], shape[-1]), True)}


def _moments_and_bases(shape: Shape, settings: Settings) -> Parts:
    """SOAP's moments, the factors L, R of g gᵀ and gᵀ g, and their eigenbases."""
    parts = _two_moments(shape, settings)
    for side, size in _soap_sides(shape, settings).items():
        square = (*shape[:-2], size, size)
        parts |= {side: (square, True), f"{side}_basis": (square, True)}
    return parts


def _soap_sides(shape: Shape, settings: Settings) -> dict[str, int]:
    """`left` and `right` with their sizes, without those longer than `soap_max_dim`."""
    sides = {"left": shape[-2], "right": shape[-1]}
    return {side: n for side, n in sides.items() if n <= settings["soap_max_dim"]}


ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

# name → record; the first is the default of `--optimizer`, default betas are those of each paper's
# language models
OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        # Loshchilov and Hutter 2019 (arXiv 1711.05101)
        # m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g²
        # u = m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps)
        Optimizer(
            name="adamw",
            help="is Adam with decoupled weight decay",
            settings=ADAM,
            parts=_two_moments,
            direction=_adamw,
            mup_exponent=1.0,
        ),
        # Jordan 2024 (kellerjordan.github.io/posts/muon): m as AdamW's with the momentum μ, then
        # Nesterov's μ m + (1 - μ) g, orthogonalised by five Newton-Schulz steps
        # x ← a x + (b A + c A²) x, A = x xᵀ, and scaled by 0.2 sqrt(max(a, b)), the RMS of an AdamW
        # update (Moonlight, arXiv 2502.16982), so that one learning rate fits both
        Optimizer(
            name="muon",
            help="updates the matrices inside the layers and AdamW the rest; its updates are "
            "scaled to the size of AdamW's, so that one learning rate fits both",
            settings={**ADAM, "momentum": 0.95, "nesterov": True},
            parts=_first_moment,
            direction=_muon,
            scope="hidden matrices",
            mup_exponent=0.5,
            keeps_expert_shards=True,
            update_copies=6,
        ),
        # Chen et al. 2023 (arXiv 2302.06675): u = sign(b1 m + (1 - b1) g), then
        # m = b2 m + (1 - b2) g
        Optimizer(
            name="lion",
            help="keeps half of AdamW's state and needs a learning rate several times lower",
            settings={"beta1": 0.95, "beta2": 0.98},
            parts=_first_moment,
            direction=_lion,
            mup_exponent=1.0,
        ),
        # Shazeer and Stern 2018 (arXiv 1804.04235) without relative steps, parameter scale and
        # momentum: row and column means of g² + eps with b2 = 1 - t^-0.8,
        # u = g / sqrt(row column / mean(row)), over max(1, rms(u))
        Optimizer(
            name="adafactor",
            help="keeps the least state: row and column means of squared gradients",
            settings={"eps": 1e-30},
            parts=_row_and_column_means,
            direction=_adafactor,
            mup_exponent=1.0,
            update_copies=5,
        ),
        # Vyas et al. 2024 (arXiv 2409.11321, algorithm 3): Adam's v in the eigenbases of
        # L = E[g gᵀ], R = E[gᵀ g]: u = Ql (Qlᵀ m Qr / sqrt(v)) Qrᵀ with v the mean of (Qlᵀ g Qr)².
        # As in the authors' code, the first update only computes the bases (a gradient is diagonal
        # in its own eigenbasis, where Adam would divide rounding errors by themselves), and t
        # counts from the second. Every `soap_every` updates, one QR step of power iteration,
        # Q = qr(L Q), follows L; columns and v are sorted by eigenvalue.
        Optimizer(
            name="soap",
            help="is Adam in the eigenbasis of each matrix's gradients, with AdamW for the rest; "
            "it keeps the most state",
            settings={**ADAM, "beta1": 0.95, "soap_every": 10, "soap_max_dim": 10_000},
            parts=_moments_and_bases,
            direction=_soap,
            scope="matrices",
        ),
    )
}

_SHARE = (lambda x: 0 <= x < 1, "0 to below 1")
_COUNT = (lambda x: x == int(x) and x >= 1, "a whole number, 1 or more")
# setting → (whether a value is valid, the values that are)
LIMITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "beta1": _SHARE,
    "beta2": _SHARE,
    "eps": (lambda x: x > 0, "above 0"),
    "momentum": _SHARE,
    "nesterov": (lambda x: isinstance(x, bool), "true or false"),
    "soap_every": _COUNT,
    "soap_max_dim": _COUNT,
}


def with_setting(setting: str) -> tuple[str, ...]:
    """The names of the optimizers that have a setting."""
    return tuple(name for name, record in OPTIMIZERS.items() if setting in record.settings)


def with_mup() -> tuple[str, ...]:
    """The names of the optimizers that have a rule for μP."""
    return tuple(name for name, record in OPTIMIZERS.items() if record.mup_exponent is not None)


def defaults_text(*settings: str) -> str:
    """The defaults of settings for help: '0.9,0.95; 0.95,0.98 for lion'."""
    names: dict[str, list[str]] = {}
    for name in with_setting(settings[0]):
        values = (OPTIMIZERS[name].settings[setting] for setting in settings)
        names.setdefault(",".join(map(_default_text, values)), []).append(name)
    first, *others = names.items()
    return "; ".join([first[0], *(f"{text} for {', '.join(of)}" for text, of in others)])


def _default_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}".replace("e-0", "e-")
