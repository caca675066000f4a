"""Cross-entropy over the vocabulary projection in torch, without [B, T, V] beyond a chunk.

Rows (tokens) are taken in chunks: project, log-sum-exp, pick the target. Where all logits fit
into the budget they are kept for the gradient, otherwise computed again chunk by chunk. With
p = softmax(z): dz = g_nll·(p - onehot) + g_lse·p; for z = cap·tanh(u/cap),
du = dz·(1 - (z/cap)²).
The weight's gradient is summed over chunks in fp32.
"""

from collections.abc import Iterator
from typing import Any

import torch

Tensor = torch.Tensor
DEFAULT_CHUNK_BYTES = 256 << 20


def _logits(hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    scores = (hidden @ weight.t()).float()
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, tokens, rows))


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, rows: int
    ) -> tuple[Tensor, Tensor]:
        lse = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        picked = torch.empty_like(lse)
        kept = None
        for part in _chunks(hidden.shape[0], rows):
            kept = _logits(hidden[part], weight, cap)
            torch.logsumexp(kept, -1, out=lse[part])
            picked[part] = kept.gather(1, targets[part, None].clamp_min(0))[:, 0]
        keep = rows >= hidden.shape[0] and any(ctx.needs_input_grad[:2])
        ctx.save_for_backward(hidden, weight, targets, lse, kept if keep else None)
        ctx.cap, ctx.rows = cap, rows
        nll = torch.where(targets >= 0, lse - picked, 0.0)
        return nll, lse

    @staticmethod
    def backward(
        ctx: Any, grad_nll: Tensor, grad_lse: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, lse, kept = ctx.saved_tensors
        grad_nll = torch.where(targets >= 0, grad_nll, 0.0)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(hidden.shape[0], ctx.rows):
            z = _logits(hidden[part], weight, ctx.cap) if kept is None else kept
            slope = None if ctx.cap is None else 1 - (z / ctx.cap).square()
            dz = torch.sub(z, lse[part, None], out=z if kept is None else None)
            dz.exp_().mul_((grad_nll + grad_lse)[part, None])
            dz.scatter_add_(1, targets[part, None].clamp_min(0), -grad_nll[part, None])
            dz = (dz if slope is None else dz.mul_(slope)).to(hidden.dtype)
            torch.mm(dz, weight, out=d_hidden[part])
            _accumulate(d_weight, dz.t(), hidden[part])
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See Ops.linear_cross_entropy."""
    if weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
    flat, goals = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = max(1, (chunk_bytes or DEFAULT_CHUNK_BYTES) // (4 * weight.shape[0]))
    nll, lse = _LinearCrossEntropy.apply(flat, weight, goals, softcap, rows)
    return nll.view(targets.shape), lse.view(targets.shape)
