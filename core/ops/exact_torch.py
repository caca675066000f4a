"""Operations of torch on a CPU whose results for a token do not depend on the tokens beside it.

A sampler that decodes a token and a trainer that computes whole rows then agree to the last bit.
Products are those of matrices in panels (kernels.panel_products) where a CPU has vectors of 16
numbers; elsewhere, and those of experts, oneDNN's: each row of a result has the same bits whatever
the number of rows, if there are two or more, and two or more outputs, and whatever the layout of
the matrix (a vector is computed as two). Attention is computed query by query. Activations are
composed of operations whose vector and scalar code agree:
torch's own differ at the ends of an array. Norms, softmax and additions have that property already.
Gradients are those of any other run. tests/core/model/test_exact.py has the evidence.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sabia.core.ops.base import Array, Ops
from sabia.core.ops.device_torch import TorchOps, plain_rope
from sabia.core.ops.experts_torch import DispatchPlan, biased, per_token
from sabia.core.ops.packed_torch import Joined, joined, products, takes
from sabia.core.ops.product import Matrix, Product, check_product
from sabia.kernels.attention.torch_rows import attention, row_mask
from sabia.kernels.runtime.torch_fp32 import (
    HAS_AMX,
    HAS_AVX512,
    computed_in_fp32,
    onednn_linear,
    over_rows,
    times,
)

Tensor = torch.Tensor
LOSS_BYTES = 64 << 20  # logits of a chunk


class _Linear(torch.autograd.Function):
    """x[M, in] · weight[out, in]ᵀ, computed by `product`; M is at least 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        y: Tensor = product(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        kept, dx, dw = x.dtype, None, None
        if computed_in_fp32(x):
            grad, x, weight = grad.float(), x.float(), weight.float()
        if ctx.needs_input_grad[0]:
            dx = times(grad, weight.t()) if grad.dtype == torch.float32 else grad @ weight
        if ctx.needs_input_grad[1]:
            dw = over_rows(grad.flatten(0, -2), x.flatten(0, -2))
        return None if dx is None else dx.to(kept), None if dw is None else dw.to(kept), None


def _in_fp32(x: Tensor) -> bool:
    """Whether products are computed in fp32: with AMX, a row's bits of those in BF16 depend on the
    number of rows."""
    return computed_in_fp32(x) or (HAS_AMX and x.dtype == torch.bfloat16)


def _in_panels(x: Tensor) -> bool:
    """Whether rows like x are multiplied by matrices in panels, in a generation and in training."""
    return HAS_AVX512 and (x.dtype == torch.float32 or _in_fp32(x))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if _in_panels(x):
        return Joined([Matrix("", weight.detach())]).in_panels(x)
    return _of_onednn(x, weight)


def _of_onednn(x: Tensor, weight: Tensor) -> Tensor:
    if _in_fp32(x):
        return onednn_linear(x.float(), weight.float()).to(x.dtype)
    return onednn_linear(x, weight)


def _linear(x: Tensor, weight: Tensor, product: Callable[..., Tensor] = _product) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ."""
    if not x.numel():
        return F.linear(x, weight)
    if len(weight) == 1:  # a vector
        return _linear(x, weight.expand(2, -1).contiguous(), product)[..., :1]
    rows = _two(x)
    if torch.is_grad_enabled():
        y: Tensor = _Linear.apply(rows, weight, product)
    else:
        y = product(rows, weight)
    return y if rows.shape == x.shape else y[:1].view(*x.shape[:-1], -1)


def _two(x: Tensor) -> Tensor:
    """x[..., in], or its one row twice."""
    if x.numel() == x.shape[-1]:
        return x.reshape(1, -1).repeat(2, 1)
    return x if x.is_contiguous() else x.contiguous()


class _Elementwise(torch.autograd.Function):
    """forward(x), of the gradient backward(grad, x, y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        y: Tensor = forward(x.float()).to(x.dtype)
        ctx.save_for_backward(x, y)
        ctx.gradient = backward
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad, *ctx.saved_tensors), None, None


_ATEN = torch.ops.aten


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x * math.sqrt(0.5))) * 0.5


def _gelu_tanh(x: Tensor) -> Tensor:
    # multiplied, not added in place: each operation rounds once
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2 / math.pi)
    return x * (1 + torch.tanh(inner)) * 0.5


def _elementwise(forward: Callable[[Tensor], Tensor], backward: Any) -> Callable[..., Tensor]:
    return lambda x: _Elementwise.apply(x, forward, backward)


class Exact(TorchOps):
    """Mixed into the operations of a device or of a mesh; see above."""

    exact = True
    # loops over the rows of large arrays round otherwise
    requested = {**TorchOps.requested, "rms_norm": TorchOps.requested["rms_norm"] or "reference"}
    rope, silu_product = staticmethod(plain_rope), Ops.silu_product
    silu = staticmethod(_elementwise(
        lambda x: x / (1 + torch.exp(-x)), lambda grad, x, _: _ATEN.silu_backward(grad, x)
    ))  # fmt: skip
    sigmoid = staticmethod(_elementwise(
        _logistic, lambda grad, _, y: _ATEN.sigmoid_backward(grad, y)
    ))  # fmt: skip

    def gelu(self, x: Tensor, tanh: bool = False) -> Tensor:
        """See Ops.gelu."""
        kind = "tanh" if tanh else "none"
        return _Elementwise.apply(
            x, _gelu_tanh if tanh else _gelu,
            lambda grad, x, _: _ATEN.gelu_backward(grad, x, approximate=kind),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """See Ops.rms_norm; sums of rows that are apart in memory have another order."""
        return super().rms_norm(x.contiguous(), weight, eps, offset)

    def kernel(self, product: Product) -> list[Tensor]:
        """See Ops.kernel."""
        x, matrices, plan = product
        if plan is not None:
            return [_of_experts(x, matrix, plan) for matrix in matrices]
        packed = takes(x, matrices, plan)
        if packed and _in_panels(x):
            whole = joined([matrix._replace(bias=None) for matrix in matrices])
            results = list(whole.in_panels(x).split(whole.sizes, -1))
        elif packed and not _in_fp32(x) and all(len(matrix.weight) > 1 for matrix in matrices):
            rows, bare = _two(x), [matrix._replace(bias=None) for matrix in matrices]
            results = products(rows, bare)
            if rows.shape[:-1] != x.shape[:-1]:
                results = [y[:1].view(*x.shape[:-1], -1) for y in results]
        else:
            for matrix in matrices:
                check_product(matrix.name, x, matrix.weight)
            results = [_linear(x, matrix.weight.to(x.dtype)) for matrix in matrices]
        pairs = zip(results, matrices, strict=True)
        return [biased(y, matrix.bias, None) for y, matrix in pairs]

    def combine(self, rows: Tensor, plan: DispatchPlan, gates: Tensor) -> Tensor:
        """See Ops.combine: in the order of the gates."""
        parts, gates = per_token(rows, plan).float(), gates.reshape(-1, plan.shape[-1], 1).float()
        total = parts[:, 0] * gates[:, 0]
        for i in range(1, plan.shape[-1]):
            total = total + parts[:, i] * gates[:, i]
        return total.to(rows.dtype).view(*plan.shape[:-1], rows.shape[-1])

    def attention_mask(
        self, like: Array, keys: int, *, segments: Array | None = None, slots: Array | None = None,
        **settings: Any,
    ) -> Any:  # fmt: skip
        """See Ops.attention_mask; causal."""
        return row_mask(like, like.shape[1], keys, segments, slots, settings.get("window"))

    def attention(self, q: Array, k: Array, v: Array, mask: Any, *, scale: float, **_: Any) -> Any:
        """See Ops.attention, without a cap and sinks."""
        return attention(q, k, v, mask, scale)

    def drawn_losses(
        self, logits: Callable[[Array], Array], hidden: Array, targets: Array, temperature: float,
        vocabulary: int,
    ) -> Array:  # fmt: skip
        """See Ops.drawn_losses."""
        used = targets >= 0
        rows, ids = hidden[used], targets[used].long()
        size = max(1, LOSS_BYTES // (4 * vocabulary))
        divisor = torch.tensor(temperature, dtype=torch.float32)

        def part(h: Tensor, target: Tensor) -> Tensor:
            scores = torch.log_softmax(logits(h[:, None])[:, 0] / divisor, -1)
            return -scores.gather(1, target[:, None])[:, 0]

        chunks = zip(rows.split(size), ids.split(size), strict=True)
        if len(rows) <= size or not torch.is_grad_enabled():
            parts = [part(*chunk) for chunk in chunks]
        else:
            parts = [checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]
        nll = torch.zeros(targets.shape, dtype=torch.float32)
        return nll.masked_scatter(used, torch.cat(parts))


def _of_experts(rows: Tensor, matrix: Matrix, plan: DispatchPlan) -> Tensor:
    """rows[M, in], sorted by expert, times its expert's matrix."""
    weights = matrix.weight.to(rows.dtype).unbind()
    sizes = plan.ends.diff(prepend=plan.ends.new_zeros(1)).tolist()
    pairs = zip(rows.split(sizes), weights, strict=True)
    return biased(torch.cat([_linear(*pair, _of_onednn) for pair in pairs]), matrix.bias, plan)
