"""Named precisions of training: which products are rounded how, and which tensors they are for.

  fp32       everything in float32
  bf16       weights and activations in BF16, masters in float32
  fp8        the three products of a matrix (forward, gradient of the input, gradient of the
             weight) read E4M3 with one scale a tensor, found anew each time; gradients are E5M2
             (arXiv 2209.05433)
  fp8-block  E4M3 everywhere, scales for tiles of 1×128 along the summed axis of activations and
             gradients, of 128×128 of weights (DeepSeek-V3, arXiv 2412.19437 §3.3); they are powers
             of two, so a matrix and its transpose round alike
  nvfp4      E2M1 with E4M3 scales for 1×16 of activations and gradients and 16×16 of weights, so
             that forward and backward see the same weight; gradients rounded stochastically; both
             inputs of the weight's gradient behind a random Hadamard transform of 16; the first 2
             and the last 15 % of the layers in BF16 (NVIDIA, arXiv 2509.25149)
  qat-*      BF16 whose weights pass through the format they will be served in, the gradient
             straight to the master: int8 a row, int4 a group of columns, nvfp4 by 1×16
Embedding, head, norms, router and the maths of attention stay in BF16 or float32 in all of them.
Chance is a hash of (seed, step, part, tensor, element): a resumed run repeats it bit for bit.

`wrap` gives the operations that `forward` then computes with; `describe` says what computes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.model.ops import Array, WrappedOps, dtype_name
from sabia.core.spec.model import ModelSpec
from sabia.kernels.quantize.interface import (
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    FP8_WEIGHT_TILES,
    NVFP4,
    NVFP4_WEIGHT,
    Layout,
)


@dataclass(frozen=True)
class Products:
    """Layouts of what the products read; the last two are of gradients and of their weights'."""

    activation: Layout
    weight: Layout
    gradient: Layout
    stochastic: bool = False
    hadamard: bool = False

    @property
    def group(self) -> int:
        """Rows to whose multiples those of an expert are filled up before its weight's gradient.

        So that no tile and no transform has rows of two experts, and products are aligned.
        """
        return self.activation.tile[1] if self.activation.tile else 16


@dataclass(frozen=True)
class Served:
    """The format that weights are trained for; group: columns of a scale (None: a row)."""

    kind: str  # int8, int4 or nvfp4
    group: int | None = None


@dataclass(frozen=True)
class Precision:
    """One of PRECISIONS. first, last: layers at the start, share of them at the end, in BF16."""

    name: str
    compute: str  # dtype of weights and activations outside the products
    products: Products | None = None
    served: Served | None = None
    first: int = 0
    last: float = 0.0


_NVFP4 = Products(NVFP4, NVFP4_WEIGHT, NVFP4, stochastic=True, hadamard=True)
_FP8_BLOCK = Products(FP8_TILES, FP8_WEIGHT_TILES, FP8_TILES)
_ALL = (
    Precision("fp32", "float32"),
    Precision("bf16", "bfloat16"),
    Precision("fp8", "bfloat16", Products(FP8, FP8, FP8_GRADIENT)),
    Precision("fp8-block", "bfloat16", _FP8_BLOCK),
    Precision("nvfp4", "bfloat16", _NVFP4, first=2, last=0.15),
    Precision("qat-int8", "bfloat16", served=Served("int8")),
    Precision("qat-int4", "bfloat16", served=Served("int4", 128)),
    Precision("qat-nvfp4", "bfloat16", served=Served("nvfp4")),
)
BY_NAME: Mapping[str, Precision] = {precision.name: precision for precision in _ALL}
PRECISIONS = tuple(BY_NAME)


def precision_named(name: str) -> Precision:
    """The precision of that name; UsageError for an unknown one."""
    if name not in BY_NAME:
        raise UsageError(f"--precision: {name!r} (expected one of {', '.join(PRECISIONS)})")
    return BY_NAME[name]


def low_tensors(spec: ModelSpec, precision: Precision) -> frozenset[str]:
    """Names of the matrices that the precision rounds; UsageError where none is left to round.

    These are the matrices of attention and feed-forward parts (not the router) of all layers but
    the first `first` and the last ⌈`last` · layers⌉.
    """
    if precision.products is None and precision.served is None:
        return frozenset()
    count = len(spec.layers)
    behind = count - math.ceil(precision.last * count)
    if precision.first >= behind:
        raise UsageError(
            f"--precision {precision.name}: {precision.first} first and {count - behind} last of "
            f"{count} layers stay in BF16, which leaves none (expected fewer kept)"
        )
    return frozenset(
        tensor.name
        for tensor in spec.tensors()
        if tensor.layer is not None
        and precision.first <= tensor.layer < behind
        and tensor.dtype_class == "weight"
        and tensor.component in ("attention", "mlp")
    )


@dataclass(frozen=True)
class PrecisionSchedule:
    """A run's precision; with bf16_tail, BF16 in the `decay` last of its `steps`."""

    precision: Precision
    steps: int
    decay: int = 0
    bf16_tail: bool = False

    def __post_init__(self) -> None:
        if self.bf16_tail and not 0 < self.decay <= self.steps:
            raise UsageError(
                f"--bf16-tail: {self.decay} decay steps in {self.steps} (expected a schedule whose "
                "rate decays at the end: --schedule wsd with --decay)"
            )


def recipe_at(step: int, schedule: PrecisionSchedule) -> Precision:
    """The precision of the update made after `step` updates.

    Without bf16_tail always the run's. With it, BF16 from the first update at a decayed rate
    (step ≥ steps - decay) on: most of the loss that FP4 costs comes back there (arXiv 2509.25149
    §4: relative error 1.5 % → 0.5 %). A pure function, so a resumed run switches at the same step.
    """
    if schedule.bf16_tail and step >= schedule.steps - schedule.decay:
        return BY_NAME["bf16"]
    return schedule.precision


def words(seed: int, name: str) -> tuple[int, int]:
    """Two 32-bit words of hash key for a tensor of a run."""
    found = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:], "little")


class PlainOps(WrappedOps):
    """The operations as they are, with the `at` that the others have."""

    def at(self, step: Any, part: Any = 0) -> PlainOps:
        """Itself: nothing here is left to chance."""
        return self


class LowOps(WrappedOps):
    """Operations that round what the products of the matrices `low` read; see `wrap`.

    A backend says how: `served` is a weight as it will be served, `product` and `grouped_product`
    are x · weightᵀ of the tensor `name`, without a bias.
    """

    served: Callable[[Array], Array]
    product: Callable[[str, Array, Array], Array]
    grouped_product: Callable[[str, Array, Array, Any], Array]

    def __init__(self, base: Any, precision: Precision, low: frozenset[str], seed: int) -> None:
        super().__init__(base)
        self.precision, self.low, self.seed = precision, low, seed
        self.products: Any = precision.products  # one of these two is None
        self.format: Any = precision.served

    def linear(
        self, x: Array, weight: Array, bias: Array | None = None, *, name: str = ""
    ) -> Array:
        """See Ops.linear."""
        if name in self.low and self.products is not None:
            out = self.product(name, x, weight)
            return out if bias is None else out + self.base.cast(bias, dtype_name(out))
        weight = self.served(weight) if name in self.low else weight
        return self.base.linear(x, weight, bias, name=name)

    def grouped_matmul(
        self, rows: Array, weight: Array, plan: Any, bias: Array | None = None, *, name: str = ""
    ) -> Array:
        """See Ops.grouped_matmul."""
        if name in self.low and self.products is not None:
            out = self.grouped_product(name, rows, weight, plan)
            return self.base.biased(out, plan, bias)
        weight = self.served(weight) if name in self.low else weight
        return self.base.grouped_matmul(rows, weight, plan, bias, name=name)


def wrap(ops: Any, spec: ModelSpec, precision: Precision, seed: int = 0) -> Any:
    """Operations that compute the model's products in `precision`.

    ops: of either backend, plain or of a mesh. The result has its attributes, and
    `at(step, part=0)`, the operations of one update: call it before each, or under jit with traced
    integers. part tells apart what is rounded within a step: micro-batches, and in torch the
    processes. On a mesh in torch a scale is found in the process's own piece of a matrix.
    """
    low = low_tensors(spec, precision)
    if not low:
        return PlainOps(ops)
    if ops.name == "torch":
        from sabia.core.model.precision_torch import TorchLowOps

        return TorchLowOps(ops, precision, low, seed)
    from sabia.core.model.precision_jax import JaxLowOps

    return JaxLowOps(ops, precision, low, seed)


def describe(precision: Precision, device: Any) -> str:
    """What computes the products on a device: `fp8: emulated on cpu (…)`.

    device: of torch (or its name, `cuda:0`) or of JAX.
    """
    if precision.served is not None:
        return f"{precision.name}: weights rounded as {precision.served.kind}, products in bf16"
    if precision.products is None:
        return f"{precision.name}: products in {precision.compute}"
    if isinstance(device, str) or type(device).__module__.partition(".")[0] == "torch":
        from sabia.core.model.precision_torch_units import describe as told
    else:
        from sabia.core.model.precision_jax import describe as told
    return f"{precision.name}: {told(precision.products, device)}"
