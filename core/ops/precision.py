"""Named precisions of training: which products are rounded how, and which tensors they are for.

  fp32       everything in float32
  bf16       weights and activations in BF16, masters in float32
  fp8        the three products of a matrix (forward, gradient of the input, gradient of the
             weight) read E4M3 with one scale per tensor, recomputed each time; gradients are E5M2
             (arXiv 2209.05433)
  fp8-block  E4M3 everywhere, scales for tiles of 1×128 along the summed axis of activations and
             gradients, of 128×128 of weights (DeepSeek-V3, arXiv 2412.19437 §3.3); they are powers
             of two, so a matrix and its transpose round to the same values
  nvfp4      E2M1 with E4M3 scales for 1×16 of activations and gradients and 16×16 of weights, so
             that forward and backward use the same weight; gradients are rounded stochastically;
             both inputs of the weight's gradient pass a random Hadamard transform of size 16; the
             first 2 and the last 15 % of the layers stay in BF16 (NVIDIA, arXiv 2509.25149)
  qat-*      BF16; weights are rounded to the format in which the model will be served (int8 per
             row, int4 per group of columns, nvfp4 by 1×16 with one scale for the matrices that
             servers join), as core.numerics.scales does from absmax, with a straight-through
             gradient
Embedding, head, norms, router and attention scores stay in BF16 or float32 in all of them. The
random bits of stochastic rounding are a hash of (seed, step, part, tensor, element), so a resumed
run repeats them bit for bit.

`RoundedProducts` is the rule of the chain of products that applies them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.ops.product import Array, Matrix, Multiply, Product, Rule
from sabia.core.spec.model import ModelSpec
from sabia.kernels.quantize.definitions import (
    FP8,
    FP8_GRADIENT,
    FP8_TILES,
    FP8_WEIGHT_TILES,
    NVFP4,
    NVFP4_WEIGHT,
    Layout,
)


@dataclass(frozen=True)
class MatmulRecipe:
    """Layouts of the operands of the three products of a matrix.

    stochastic: gradients are rounded stochastically. hadamard: both operands of the weight's
    gradient are transformed first.
    """

    activation: Layout
    weight: Layout
    gradient: Layout
    stochastic: bool = False
    hadamard: bool = False

    @property
    def group(self) -> int:
        """The rows of an expert are padded to a multiple of this for its weight's gradient.

        Then no tile and no transform has rows of two experts, and products are aligned.
        """
        return self.activation.tile[1] if self.activation.tile else 16


@dataclass(frozen=True)
class QatTarget:
    """The format that quantization-aware training rounds weights to.

    grouped: whether the columns of a row share a scale in groups (core.numerics.integers).
    """

    kind: str  # int8, int4 or nvfp4
    grouped: bool = False

    def rounded(
        self, weights: Sequence[Array], fake: Callable[..., Array],
        fake_nvfp4: Callable[[Sequence[Array]], list[Array]],
    ) -> list[Array]:  # fmt: skip
        """The weights of one product in this format, by a backend's roundings."""
        if self.kind == "nvfp4":
            return fake_nvfp4(weights)
        from sabia.core.numerics.integers import usual_group

        bits = int(self.kind.removeprefix("int"))
        shapes = [tuple(w.shape) for w in weights]
        groups = [usual_group(x, len(x) == 3) if self.grouped else None for x in shapes]
        return [fake(w, bits, group) for w, group in zip(weights, groups, strict=True)]


@dataclass(frozen=True)
class Precision:
    """One of PRECISIONS."""

    name: str
    compute: str  # dtype of weights and activations outside the products
    recipe: MatmulRecipe | None = None  # None: products in `compute`
    qat: QatTarget | None = None
    bf16_first: int = 0  # layers at the start that stay in BF16
    bf16_last: float = 0.0  # share of the layers, at the end, that stay in BF16


_NVFP4 = MatmulRecipe(NVFP4, NVFP4_WEIGHT, NVFP4, stochastic=True, hadamard=True)
_FP8_BLOCK = MatmulRecipe(FP8_TILES, FP8_WEIGHT_TILES, FP8_TILES)
_ALL = (
    Precision("fp32", "float32"),
    Precision("bf16", "bfloat16"),
    Precision("fp8", "bfloat16", MatmulRecipe(FP8, FP8, FP8_GRADIENT)),
    Precision("fp8-block", "bfloat16", _FP8_BLOCK),
    Precision("nvfp4", "bfloat16", _NVFP4, bf16_first=2, bf16_last=0.15),
    Precision("qat-int8", "bfloat16", qat=QatTarget("int8")),
    Precision("qat-int4", "bfloat16", qat=QatTarget("int4", grouped=True)),
    Precision("qat-nvfp4", "bfloat16", qat=QatTarget("nvfp4")),
)
BY_NAME: Mapping[str, Precision] = {precision.name: precision for precision in _ALL}
PRECISIONS = tuple(BY_NAME)


def precision_named(name: str) -> Precision:
    """The precision of that name; UsageError for an unknown one."""
    if name not in BY_NAME:
        raise UsageError(f"--precision: {name!r} (expected one of {', '.join(PRECISIONS)})")
    return BY_NAME[name]


def quantized_weights(spec: ModelSpec, precision: Precision) -> frozenset[str]:
    """Names of the matrices that the precision rounds; UsageError where there are none.

    These are the matrices of attention and feed-forward parts (not the router) of all layers but
    the first `bf16_first` and the last ⌈`bf16_last` · layers⌉.
    """
    if precision.recipe is None and precision.qat is None:
        return frozenset()
    count, first = len(spec.layers), precision.bf16_first
    end = count - math.ceil(precision.bf16_last * count)
    if first >= end:
        raise UsageError(
            f"--precision {precision.name}: {first} first and {count - end} last of {count} layers "
            "stay in BF16, so no layer is quantized (expected a model with more layers)"
        )
    parts = ("attention", "mlp")
    inner = (t for t in spec.tensors() if t.layer is not None and first <= t.layer < end)
    return frozenset(t.name for t in inner if t.dtype_class == "weight" and t.component in parts)


@dataclass(frozen=True)
class PrecisionSchedule:
    """A run's precision; with bf16_tail, its last `decay` of `steps` steps are in BF16."""

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


def precision_at(step: int, schedule: PrecisionSchedule) -> Precision:
    """The precision of the update made after `step` updates.

    Without bf16_tail this is the run's precision. With it, updates from step = steps - decay on,
    where the learning rate decays, are in BF16: this recovers most of the loss that FP4 costs
    (arXiv 2509.25149 §4: relative error 1.5 % → 0.5 %). A pure function, so a resumed run switches
    at the same step.
    """
    if schedule.bf16_tail and step >= schedule.steps - schedule.decay:
        return BY_NAME["bf16"]
    return schedule.precision


def hash_words(seed: int, name: str) -> tuple[int, int]:
    """Two 32-bit words that key the random bits of a tensor in a run."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class RoundedProducts(Rule):
    """Rounds the operands of the matrices `names`; a rule of the chain of products.

    A backend implements `fake_quantize`, weights rounded to the QAT format, of which those that
    servers join have one scale as wholes, and `product` and
    `grouped_product`, x · weightᵀ of the tensor `name` without a bias (`multiply(rows, weight,
    plan)` is the product of experts without rounding), and `biased`.
    """

    fake_quantize: Callable[[list[Array]], list[Array]]
    product: Callable[[str, Array, Array], Array]
    grouped_product: Callable[[str, Array, Array, Any, Any], Array]
    biased: Callable[[Array, Array | None, Any], Array]

    def __init__(self, precision: Precision, names: frozenset[str], seed: int) -> None:
        self.precision, self.names, self.seed = precision, names, seed
        self.recipe: Any = precision.recipe  # one of these two is None
        self.qat: Any = precision.qat

    def apply(self, product: Product, proceed: Multiply) -> list[Array]:
        """See Rule.apply."""
        if self.qat is not None:
            product = product._replace(matrices=self._simulated(product.matrices))
            return proceed(product)
        return [self._result(product, matrix, proceed) for matrix in product.matrices]

    def _simulated(self, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        from sabia.core.numerics.schemes import served_together

        joined: dict[Any, list[Matrix]] = {}
        for matrix in matrices:
            if matrix.name in self.names:
                joined.setdefault(served_together(matrix.name), []).append(matrix)
        made = {
            matrix.name: weight
            for members in joined.values()
            for matrix, weight in zip(
                members, self.fake_quantize([m.weight for m in members]), strict=True
            )
        }
        return tuple(m._replace(weight=made.get(m.name, m.weight)) for m in matrices)

    def _result(self, product: Product, matrix: Matrix, proceed: Multiply) -> Array:
        x, plan, (name, weight, bias, _) = product.x, product.plan, matrix
        if name in self.names and self.recipe is not None:
            if plan is None:
                return self.biased(self.product(name, x, weight), bias, None)
            multiply = partial(_without_name, proceed)
            return self.biased(self.grouped_product(name, x, weight, plan, multiply), bias, plan)
        return proceed(Product(x, (matrix,), plan))[0]


def _without_name(proceed: Multiply, rows: Array, weight: Array, plan: object) -> Array:
    return proceed(Product(rows, (Matrix("", weight),), plan))[0]
