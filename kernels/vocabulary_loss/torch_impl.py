"""The vocabulary loss in torch: the plain expression, and one without [B, T, V] beyond a chunk.

In the latter, `eager`, scores are computed for some tokens at a time. The functions of large ones
on a CPU are loops over their rows (kernels.row_functions); others are computed in fp32 for fewer
tokens still, so that they stay in a cache. Where the scores of all tokens fit in the budget, the
forward pass turns them into their gradients and saves these, in the dtype of the product; otherwise
the backward pass repeats the products. With p = softmax(z), z = cap·tanh(u/cap) and
s = 1 - (z/cap)² (or z = u and s = 1), (p - onehot)·s is saved. A token's gradients are those times
its g_nll + g_lse, which multiplies rows of hidden's size, and g_lse·s·onehot, which is added apart
where g_lse is not 0. The weight's gradient is summed over products in fp32. On a CPU, tokens whose
two gradients are 0, such as those of prompts, are left out of the backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sabia.kernels.row_functions.interface import log_sums, softmax_gradient
from sabia.kernels.row_functions.torch_arrays import serves
from sabia.kernels.row_products.torch_arrays import numbers
from sabia.kernels.runtime.autograd_context import Context
from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle
from sabia.kernels.runtime.torch_fp32 import (
    HAS_AMX,
    HAS_BF16_UNITS,
    computed_in_fp32,
    is_large,
    times,
)

Tensor = torch.Tensor

CPU_BLOCK_BYTES = 8 << 20
PRODUCT_BYTES = 64 << 20
WIDE_BLOCK_BYTES = 32 << 20
MOST_USED = 0.95  # a larger share of tokens with gradients is not gathered


def _used(grad_nll: Tensor, grad_lse: Tensor) -> Tensor | None:
    """The tokens with a gradient; None for all."""
    if grad_nll.device.type != "cpu":  # their number would have to be waited for
        return None
    used = ((grad_nll != 0) | (grad_lse != 0)).nonzero()[:, 0]
    return used if len(used) <= MOST_USED * len(grad_nll) else None


def _rows(parts: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The rows `tokens`, in ascending order, of one matrix in parts of equal size."""
    size = len(parts[0])
    chosen = (tokens[tokens // size == number] % size for number in range(len(parts)))
    return torch.cat([part[rows] for part, rows in zip(parts, chosen, strict=True)])


def _blocks(start: int, stop: int, rows: int) -> Iterator[slice]:
    return (slice(i, min(i + rows, stop)) for i in range(start, stop, rows))


def _make_gradient(
    scores: Tensor, targets: Tensor, cap: float | None, rows: int, lse: Tensor
) -> None:
    """scores[R, V] ← the gradient in them of the loss of each row, of its lse where the target is
    below 0; lse[R] is filled. Without loops `rows` rows are processed at a time."""
    if serves(scores):
        softmax_gradient(numbers(scores), targets.numpy(), cap or 0.0, numbers(lse))
        return
    for block in _blocks(0, len(scores), rows):
        z, slope, target = scores[block].float(), None, targets[block, None]
        if cap is not None:  # tanh's slope is 1 - (z/cap)²
            share = torch.tanh(z / cap)
            z, slope = share * cap, 1 - share.square()
        lse[block] = torch.logsumexp(z, -1)
        dz = z.sub(lse[block, None]).exp_()
        dz.scatter_add_(1, target.clamp_min(0), -(target >= 0).float())
        scores[block] = dz if slope is None else dz.mul_(slope)


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, rows: int,
    product_rows: int, save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """(nll, lse, gradients in the scores of each product if they are saved): `rows` tokens are
    processed at a time, `product_rows` (a multiple) in one matrix product."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    # [tokens] each
    lse, target_score = hidden.new_empty((2, tokens), dtype=torch.float32)
    target_column, saved = targets.clamp_min(0)[:, None], []
    buffer = None if save else hidden.new_empty((product_rows, vocabulary))
    for part in _blocks(0, tokens, product_rows):
        if buffer is None:
            saved.append(raw := times(hidden[part], weight))
        else:
            raw = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - part.start])
        picked = raw.gather(1, target_column[part])[:, 0]
        target_score[part] = _capped(picked.float(), cap)
        if save:
            _make_gradient(raw, targets[part], cap, rows, lse[part])
        elif serves(raw):
            log_sums(numbers(raw), cap or 0.0, numbers(lse[part]))
        else:
            for block in _blocks(0, len(raw), rows):
                lse[part][block] = torch.logsumexp(_capped(raw[block].float(), cap), -1)
    # results of an operator share no memory
    return torch.where(targets >= 0, lse - target_score, 0.0), lse.clone(), saved


def _backward(
    grad_nll: Tensor | None, grad_lse: Tensor | None, every: Tensor, weight: Tensor,
    targets: Tensor, nll: Tensor, lse: Tensor, saved: list[Tensor], cap: float | None, rows: int,
    product_rows: int, of_weight: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(d hidden, d weight) of `_forward`; a gradient that is None is 0."""
    of_lse = grad_lse is not None
    grad_nll, grad_lse = (torch.zeros_like(lse) if g is None else g for g in (grad_nll, grad_lse))
    grad_nll = torch.where(targets >= 0, grad_nll, 0.0)
    hidden, used = every, _used(grad_nll, grad_lse)
    if used is not None:
        hidden, targets, nll, lse = every[used], targets[used], nll[used], lse[used]
        grad_nll, grad_lse = grad_nll[used], grad_lse[used]
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    factor = (grad_nll + grad_lse)[:, None]
    weighted = (hidden * factor).to(hidden.dtype)
    d_hidden, d_weight = torch.empty_like(hidden), None
    buffer = None if saved else hidden.new_empty((product_rows, vocabulary))
    for number, part in enumerate(_blocks(0, tokens, product_rows)):
        if buffer is not None:
            d_part = buffer[: part.stop - part.start]
            torch.mm(hidden[part], weight.t(), out=d_part)
            _make_gradient(d_part, targets[part], cap, rows, torch.empty_like(lse[part]))
        else:
            d_part = saved[number] if used is None else _rows(saved, used[part])
        d_hidden[part] = times(d_part, weight.t())
        if of_weight:
            d_weight = _added(d_weight, d_part.t(), weighted[part])
    d_hidden.mul_(factor)
    # the target's part of a gradient of lse, which the factor took as one of nll
    rest = torch.where(targets >= 0, grad_lse, 0.0)
    if of_lse and (hidden.device.type != "cpu" or rest.any()):
        rest = rest if cap is None else rest * (1 - ((lse - nll) / cap).square())
        d_hidden.add_(rest[:, None] * weight[targets.clamp_min(0)])
        if d_weight is not None:
            added = (rest[:, None] * hidden).to(torch.float32)
            d_weight = d_weight.float().index_add_(0, targets.clamp_min(0), added)
    if of_weight:
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
    if used is not None:
        d_hidden = torch.zeros_like(every).index_copy_(0, used, d_hidden)
    return d_hidden, d_weight


def _sizes(hidden: Tensor, weight: Tensor, chunk_bytes: int) -> tuple[int, int]:
    """(tokens processed at a time, tokens of a product, a multiple)."""
    tokens, row_bytes = max(1, hidden.shape[0]), 4 * weight.shape[0]
    small, large = (
        min(chunk_bytes, limit) if hidden.device.type == "cpu" else chunk_bytes
        for limit in (CPU_BLOCK_BYTES, PRODUCT_BYTES)
    )
    rows = min(max(1, small // row_bytes), tokens)
    raw_bytes = hidden.element_size() * weight.shape[0]
    return rows, min(rows * max(1, large // raw_bytes // rows), tokens)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None,
        rows: int, product_rows: int, save: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.settings = cap, rows, product_rows
        ctx.set_materialize_grads(False)
        nll, lse, saved = _forward(hidden, weight, targets, *ctx.settings, save)
        ctx.save_for_backward(hidden, weight, targets, nll, lse, *saved)
        return nll, lse

    @staticmethod
    def backward(
        ctx: Context, grad_nll: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, nll, lse, *saved = ctx.saved_tensors
        cap, *sizes = ctx.settings
        given: Any = hidden, weight, targets, nll, lse, saved, cap, *sizes, ctx.needs_input_grad[1]
        d_hidden, d_weight = _backward(grad_nll, grad_lse, *given)
        # collectives of a mesh take it as it lies in memory
        return d_hidden, None if d_weight is None else d_weight.contiguous(), *[None] * 5


# For torch.compile on a CPU with units for BF16: the same as operators. What the compiler makes of
# plain expressions reads the scores more often, and their product with hidden is slow (_product).
# torch keeps compiled graphs under the names of operators: other arguments need another name.


@torch.library.custom_op("sabia::cpu_linear_cross_entropy", mutates_args=())
def _operator(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, chunk_bytes: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(nll, lse, gradients in the scores of all tokens or of none)"""
    rows, product_rows = _sizes(hidden, weight, chunk_bytes)
    product_rows = max(1, len(hidden)) if save else product_rows
    nll, lse, saved = _forward(hidden, weight, targets, cap, rows, product_rows, save)
    return nll, lse, saved[0] if saved else hidden.new_empty(0, len(weight))


@_operator.register_fake
def _(hidden: Tensor, weight: Tensor, _t: Tensor, _cap: object, _chunk: int, save: bool) -> Any:
    nll, lse = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    return nll, lse, hidden.new_empty(hidden.shape[0] if save else 0, weight.shape[0])


@torch.library.custom_op("sabia::cpu_linear_cross_entropy_backward", mutates_args=())
def _backward_operator(
    grad_nll: Tensor, grad_lse: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor,
    nll: Tensor, lse: Tensor, gradients: Tensor, cap: float | None, chunk_bytes: int,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(d hidden, the transposed d weight or an empty tensor)"""
    sizes = _sizes(hidden, weight, chunk_bytes)
    saved = list(gradients.split(sizes[1])) if len(gradients) else []
    given = grad_nll, grad_lse, hidden, weight, targets, nll, lse, saved, cap, *sizes
    d_hidden, d_weight = _backward(*given, of_weight)
    return d_hidden, weight.new_empty(0, 0) if d_weight is None else d_weight.t().contiguous()


@_backward_operator.register_fake
def _(_n: Tensor, _l: Tensor, hidden: Tensor, weight: Tensor, *others: object) -> Any:
    shape = weight.t().shape if others[-1] else (0, 0)
    return torch.empty_like(hidden), weight.new_empty(shape)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ctx.cap, ctx.chunk_bytes, _ = inputs
    ctx.save_for_backward(hidden, weight, targets, *output)
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Context, nll: Tensor, lse: Tensor, _: object) -> tuple[Tensor | None, ...]:
    of_weight = ctx.needs_input_grad[1]
    settings = ctx.cap, ctx.chunk_bytes, of_weight
    d_hidden, d_weight = _backward_operator(nll, lse, *ctx.saved_tensors, *settings)
    return d_hidden, d_weight.t().contiguous() if of_weight else None, *[None] * 4


_operator.register_autograd(_differentiate, setup_context=_keep)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left·right; the sum of several products is fp32."""
    if total is None:
        return _product(left, right)
    total = total.float()
    if right.dtype == total.dtype:
        return total.addmm_(left, right)
    return total.add_(_product(left, right))


def _product(scores: Tensor, rows: Tensor) -> Tensor:
    """scores[V, N], a transposed matrix, · rows[N, D]; AMX needs the rows of its left operand one
    after the other, oneDNN copies its right one, and D is smaller than V."""
    if HAS_AMX and rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
        return (rows.t().contiguous() @ scores.t()).t()
    return times(rows.t(), scores).t() if is_large(rows.t(), scores) else scores @ rows


def _plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> list[Tensor]:
    z = _capped(torch.mm(hidden.to(weight.dtype), weight.t()).float(), cap)
    lse = torch.logsumexp(z, -1)
    target_score = z.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return [torch.where(targets >= 0, lse - target_score, 0.0), lse]


def _fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> list[Tensor]:
    """The same for torch.compile: scores are saved in hidden's dtype, the rest is fused.

    The one-hot is a comparison, which fuses; the gradient of a gather would fill [tokens, V].
    Products are in weight's dtype, which may be wider than hidden's.
    """
    scores = (hidden.to(weight.dtype) @ weight.t()).to(hidden.dtype)
    z = _capped(scores.float(), cap)
    lse = torch.logsumexp(z, -1)
    is_target = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    return [torch.where(targets >= 0, lse - torch.where(is_target, z, 0.0).sum(-1), 0.0), lse]


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _compiled(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, rows: int
) -> tuple[Tensor, Tensor]:
    """For torch.compile: `rows` rows of scores may be saved; with more, blocks are recomputed."""
    tokens = hidden.shape[0]
    if rows < tokens:
        parts = [
            checkpoint(_plain_loss, hidden[p], weight, targets[p], cap, use_reentrant=False)
            for p in _blocks(0, tokens, rows)
        ]
    else:
        if weight.dtype != hidden.dtype:  # wider scores exist for a few rows at a time
            rows = max(1, WIDE_BLOCK_BYTES // (4 * weight.shape[0]))
        parts = [_fused_loss(hidden[p], weight, targets[p], cap) for p in _blocks(0, tokens, rows)]
    return torch.cat([nll for nll, _ in parts]), torch.cat([lse for _, lse in parts])


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    """See vocabulary_loss.linear_cross_entropy."""
    weight, on_cpu = weight.to(hidden.dtype), hidden.device.type == "cpu"
    if computed_in_fp32(hidden):  # the weight's gradient is then summed in fp32 too
        weight = weight.float()
    compiling = torch.compiler.is_compiling()
    if compiling and not (on_cpu and HAS_BF16_UNITS and hidden.dtype == torch.bfloat16):
        return _compiled(hidden, weight, targets, cap, max(1, chunk_bytes // (4 * weight.shape[0])))
    hidden = hidden.to(weight.dtype)
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    fits = hidden.shape[0] * hidden.element_size() * weight.shape[0] <= chunk_bytes
    save = bool(differentiable and fits)
    if compiling:
        nll, lse, _ = _operator(hidden, weight, targets, cap, chunk_bytes, save)
        return nll, lse
    return _LinearCrossEntropy.apply(
        hidden, weight, targets, cap, *_sizes(hidden, weight, chunk_bytes), save
    )


def choose_linear_cross_entropy(hidden: Tensor, implementation: str | None) -> Choice:
    """See vocabulary_loss.choose_linear_cross_entropy."""
    reason = "chunks of tokens, softmax and gradient in one kernel each"
    own = Option("triton", reason, triton_obstacle(hidden), automatic=hidden.is_cuda)
    chunks = Option("eager", "chunks of tokens, gradient by hand")
    return choose("linear_cross_entropy", [own, chunks, reference_option()], implementation)


def _reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    nll, lse = _plain_loss(hidden, weight.to(hidden.dtype), targets.long(), softcap)
    return nll, lse


def _triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    from sabia.kernels.vocabulary_loss.triton_impl import linear_cross_entropy

    return linear_cross_entropy(hidden, weight.to(hidden.dtype), targets, softcap, chunk_bytes)


IMPLEMENTATIONS = {
    "reference": _reference,
    "eager": linear_cross_entropy,
    "triton": _triton,
}
