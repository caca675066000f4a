"""Short causal convolution and the gated delta rule in torch, chunked and in fp32.

Within a chunk of C tokens the rule's corrections solve a unit lower triangular system (the WY
form of arXiv 2406.06484 section 3, with decay as in 2412.06464 section 3.3). With g the running
sum of log decays, D[i, j] = exp(g_i - g_j) for j ≤ i, and S the state that enters the chunk:
  (I + tril(β k kᵀ ∘ D, -1)) [U | W] = [β v | β k e^g],     u = U - W S,
  out = (q e^g) S + (q kᵀ ∘ D) u,     S' = e^{g_C} S + (k e^{g_C - g})ᵀ u.
S' is affine in S, so all products run over all chunks at once except S ← F S + E, one small
product per chunk (`affine_scan`, an opaque operation to torch.compile, which would unroll it).
A document start cuts D and the powers of e that reach over it.
"""

from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
CHUNK = 64


def _runs(segments: Tensor) -> Tensor:
    """[B, T]: how often the segment has changed so far."""
    changes = (segments[:, 1:] != segments[:, :-1]).cumsum(1)
    return F.pad(changes, (1, 0))


def _delayed(x: Tensor, steps: int) -> Tensor:
    """x[B, T, ...] as it was `steps` tokens ago (before the row: 0); negative: to come."""
    length = x.shape[1]
    steps = max(-length, min(length, steps))
    pad = [0, 0] * (x.dim() - 2)
    if steps >= 0:
        return F.pad(x[:, : length - steps], (*pad, steps, 0))
    return F.pad(x[:, -steps:], (*pad, 0, -steps))


class _CausalConv(torch.autograd.Function):
    """out[t] = Σ_j w[K-1-j]·x[t-j] over the run of t; keeps x alone, not its K delayed copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, runs: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, runs)
        wide, taps = x.float(), weight.float().unbind(1)
        out = wide * taps[-1]
        for step in range(1, len(taps)):
            out = out + _reached(wide, runs, step) * taps[-1 - step]
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, runs = ctx.saved_tensors
        wide, taps, grad = x.float(), weight.float().unbind(1), grad.float()
        dx, dtaps = grad * taps[-1], [(grad * wide).sum((0, 1))]
        for step in range(1, len(taps)):
            dtaps.append((grad * _reached(wide, runs, step)).sum((0, 1)))
            dx = dx + _reached(grad, runs, -step) * taps[-1 - step]
        return dx.to(x.dtype), torch.stack(dtaps[::-1], 1).to(weight.dtype), None


def _reached(x: Tensor, runs: Tensor | None, steps: int) -> Tensor:
    """x delayed by `steps`, 0 where that is another run."""
    moved = _delayed(x, steps)
    if runs is None:
        return moved
    return moved * (_delayed(runs, steps) == runs).unsqueeze(-1)


def causal_conv(x: Tensor, weight: Tensor, segments: Tensor | None = None) -> Tensor:
    """See Ops.causal_conv."""
    return _CausalConv.apply(x, weight, None if segments is None else _runs(segments))


@torch.library.custom_op("sabia::affine_scan", mutates_args=())
def affine_scan(factors: Tensor, terms: Tensor) -> Tensor:
    """S[0] = 0, S[i+1] = factors[i] S[i] + terms[i]: factors[n, b, N, N], S, terms[n, b, N, V]."""
    states = torch.zeros_like(terms)
    for index in range(len(terms) - 1):
        torch.baddbmm(terms[index], factors[index], states[index], out=states[index + 1])
    return states


@torch.library.custom_op("sabia::affine_scan_backward", mutates_args=())
def _affine_scan_backward(grad: Tensor, factors: Tensor) -> Tensor:
    """Gradient of the terms: G[n-1] = 0, G[i] = grad[i+1] + factors[i+1]ᵀ G[i+1]."""
    found = torch.zeros_like(grad)
    for index in range(len(grad) - 2, -1, -1):
        after = factors[index + 1].transpose(1, 2)
        torch.baddbmm(grad[index + 1], after, found[index + 1], out=found[index])
    return found


@affine_scan.register_fake
def _(factors: Tensor, terms: Tensor) -> Tensor:
    return torch.empty_like(terms)


@_affine_scan_backward.register_fake
def _(grad: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    factors, states = ctx.saved_tensors
    terms = _affine_scan_backward(grad.contiguous(), factors)
    return terms @ states.transpose(-1, -2), terms


affine_scan.register_autograd(_backward, setup_context=_keep)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
) -> Tensor:
    """See Ops.delta_rule."""
    batch, length, heads, size = v.shape
    groups, chunk = k.shape[2], min(CHUNK, length)
    spare = -length % chunk

    def chunks(x: Tensor) -> Tensor:
        """[B, T, H, X] → [n, B, K, H/K, C, X]."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, spare))
        x = x.reshape(batch, -1, chunk, groups, x.shape[2] // groups, x.shape[3])
        return x.permute(1, 0, 3, 4, 2, 5)

    q, k, v = chunks(q), chunks(k), chunks(v)
    beta, sums = chunks(beta[..., None]), chunks(log_decay[..., None])[..., 0].cumsum(-1)
    within, entering, leaving = _decays(sums, segments, spare)
    system = (k @ k.mT) * within * beta
    sides = torch.cat((beta * v, (beta * entering) * k), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, reads = solved[..., :size], solved[..., size:]
    states = _states((k * leaving).mT, values, reads, entering[..., -1:, :])
    out = (q * entering) @ states + ((q @ k.mT) * within) @ (values - reads @ states)
    out = out.permute(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, size)
    return out[:, :length].to(v.dtype)


def _decays(sums: Tensor, segments: Tensor | None, spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decay between tokens [.., C, C], from the chunk's entry and to its end [.., C, 1]."""
    chunk = sums.shape[-1]
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=sums.device).tril()
    entering, leaving = sums.exp(), (sums[..., -1:] - sums).exp()
    if segments is not None:
        runs = F.pad(_runs(segments).float(), (0, spare), mode="replicate").long()
        runs = runs.view(len(runs), -1, chunk).transpose(0, 1)[:, :, None, None]
        last = runs[..., -1:]
        allowed = allowed & (runs[..., :, None] == runs[..., None, :])
        entering = entering * (runs == torch.cat((torch.zeros_like(last[:1]), last[:-1])))
        leaving = leaving * (runs == last)
    distance = sums[..., :, None] - sums[..., None, :]
    within = distance.masked_fill(~allowed, float("-inf")).exp()
    return within, entering[..., None], leaving[..., None]


def _states(writes: Tensor, values: Tensor, reads: Tensor, kept: Tensor) -> Tensor:
    """The state that enters each chunk, [n, B, K, H/K, N, V]."""
    factors = kept * torch.eye(reads.shape[-1], device=reads.device) - writes @ reads
    terms = writes @ values
    shape = terms.shape
    flat = [x.reshape(shape[0], -1, *x.shape[-2:]) for x in (factors, terms)]
    return affine_scan(*flat).view(shape)
