"""Short causal convolution and the gated delta rule in torch, in chunks and in fp32.

Within a chunk of C tokens the rule's corrections solve a unit lower triangular system (the WY
form of arXiv 2406.06484 section 3, with decay as in 2412.06464 section 3.3). With g the cumulative
sum of log decays, D[i, j] = exp(g_i - g_j) for j ≤ i, and S the state at the start of the chunk:
  (I + tril(β k kᵀ ∘ D, -1)) [U | W] = [β v | β k e^g],     u = U - W S,
  out = (q e^g) S + (q kᵀ ∘ D) u,     S' = e^{g_C} S + (k e^{g_C - g})ᵀ u.
S' is affine in S, so all products run over all chunks at once except S ← F S + E, one small
product per chunk (`affine_scan`, an opaque operation to torch.compile, which would unroll it).
Factors D, e^g and e^{g_C - g} between tokens of two documents are 0.
"""

import torch
import torch.nn.functional as F

from sabia.core.ops.product import check_shared_axes
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor
CHUNK = 64


def _document_index(segments: Tensor) -> Tensor:
    """[B, T]: index of each token's document, the number of changes of segment before it."""
    changes = (segments[:, 1:] != segments[:, :-1]).cumsum(1)
    return F.pad(changes, (1, 0))


def _shifted(x: Tensor, steps: int) -> Tensor:
    """x[B, t - steps, ...] at every t, 0 outside the row; `steps` may be negative."""
    length = x.shape[1]
    steps = max(-length, min(length, steps))
    pad = [0, 0] * (x.dim() - 2)
    if steps >= 0:
        return F.pad(x[:, : length - steps], (*pad, steps, 0))
    return F.pad(x[:, -steps:], (*pad, 0, -steps))


class _CausalConv(torch.autograd.Function):
    """out[t] = Σ_j w[K-1-j]·x[t-j] within the document of t; saves x, not its K shifted copies."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, documents)
        wide, taps = x.float(), weight.float().unbind(1)
        out = wide * taps[-1]
        for step in range(1, len(taps)):
            out = out + _shifted_within(wide, documents, step) * taps[-1 - step]
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, documents = ctx.saved_tensors
        wide, taps, grad = x.float(), weight.float().unbind(1), grad.float()
        dx, dtaps = grad * taps[-1], [(grad * wide).sum((0, 1))]
        for step in range(1, len(taps)):
            dtaps.append((grad * _shifted_within(wide, documents, step)).sum((0, 1)))
            dx = dx + _shifted_within(grad, documents, -step) * taps[-1 - step]
        return dx.to(x.dtype), torch.stack(dtaps[::-1], 1).to(weight.dtype), None


def _shifted_within(x: Tensor, documents: Tensor | None, steps: int) -> Tensor:
    """x shifted by `steps`, 0 where that token is in another document."""
    shifted = _shifted(x, steps)
    if documents is None:
        return shifted
    return shifted * (_shifted(documents, steps) == documents).unsqueeze(-1)


def causal_conv(x: Tensor, weight: Tensor, segments: Tensor | None = None) -> Tensor:
    """See Ops.causal_conv."""
    check_shared_axes("causal_conv", x=(x, "BTC"), segments=(segments, "BT"))
    return _CausalConv.apply(x, weight, None if segments is None else _document_index(segments))


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
    gradients = torch.zeros_like(grad)
    for index in range(len(grad) - 2, -1, -1):
        factor = factors[index + 1].transpose(1, 2)
        torch.baddbmm(grad[index + 1], factor, gradients[index + 1], out=gradients[index])
    return gradients


@affine_scan.register_fake
def _(factors: Tensor, terms: Tensor) -> Tensor:
    return torch.empty_like(terms)


@_affine_scan_backward.register_fake
def _(grad: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _save_for_backward(ctx: Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
    factors, states = ctx.saved_tensors
    terms = _affine_scan_backward(grad.contiguous(), factors)
    return terms @ states.transpose(-1, -2), terms


affine_scan.register_autograd(_backward, setup_context=_save_for_backward)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    segments: Tensor | None = None, state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See Ops.delta_rule."""
    of_heads = {"v": (v, "BTHV"), "log_decay": (log_decay, "BTH"), "beta": (beta, "BTH")}
    of_keys = {"q": (q, "BTKN"), "k": (k, "BTKN"), "segments": (segments, "BT")}
    check_shared_axes("delta_rule", **of_keys, **of_heads)
    batch, length, heads, size = v.shape
    groups, chunk, dtype = k.shape[2], min(CHUNK, length), v.dtype
    padding = -length % chunk

    def chunks(x: Tensor) -> Tensor:
        """[B, T, H, X] → [n, B, K, H/K, C, X]."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, padding))
        x = x.reshape(batch, -1, chunk, groups, x.shape[2] // groups, x.shape[3])
        return x.permute(1, 0, 3, 4, 2, 5)

    q, k, v = chunks(q), chunks(k), chunks(v)
    beta, log_decay = chunks(beta[..., None]), chunks(log_decay[..., None])[..., 0]
    within, from_start, to_end = _decays(log_decay, segments, padding)
    system = (k @ k.mT) * within * beta  # β k kᵀ ∘ D, [n, B, K, H/K, C, C]
    # [β v | β k e^g], [.., C, V + N]
    right_sides = torch.cat((beta * v, (beta * from_start) * k), -1)
    # uses the part below the diagonal, with ones on it
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    values, from_state = solved[..., :size], solved[..., size:]  # U [.., C, V], W [.., C, N]
    if state is not None:  # [B, K, H/K, N, V]
        state = state.view(batch, groups, -1, *state.shape[2:])
    moves = ((k * to_end).mT, values, from_state, from_start[..., -1:, :])
    states, after = _chunk_states(*moves, state)
    # out = (q e^g) S + (q kᵀ ∘ D) (U - W S)
    out = (q * from_start) @ states + ((q @ k.mT) * within) @ (values - from_state @ states)
    out = out.permute(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, size)  # [B, n·C, H, V]
    return out[:, :length].to(dtype), None if after is None else after.flatten(1, 2)


def _decays(
    log_decay: Tensor, segments: Tensor | None, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Decays between tokens [.., C, C], from the chunk's start and to its end [.., C, 1].

    The sums g_i - g_j are added up from token j: differences of the cumulative sums g would lose
    digits to the decays of earlier tokens, which may be of other documents.
    """
    chunk = log_decay.shape[-1]
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).tril()
    # log decays of the tokens after j, [n, B, K, H/K, C, C], summed up to token i: g_i - g_j
    distance = torch.where(allowed.tril(-1), log_decay[..., :, None], 0.0).cumsum(-2)
    from_start, to_end = log_decay.cumsum(-1).exp(), distance[..., -1, :].exp()
    if segments is not None:
        documents = F.pad(_document_index(segments).float(), (0, padding), mode="replicate").long()
        # [n, B, 1, 1, C]
        documents = documents.view(len(documents), -1, chunk).transpose(0, 1)[:, :, None, None]
        last = documents[..., -1:]
        allowed = allowed & (documents[..., :, None] == documents[..., None, :])
        # 0 unless the token's document already ran at the end of the chunk before
        from_start = from_start * (documents == torch.cat((torch.zeros_like(last[:1]), last[:-1])))
        to_end = to_end * (documents == last)
    within = distance.masked_fill(~allowed, float("-inf")).exp()  # D
    return within, from_start[..., None], to_end[..., None]


def _chunk_states(
    writes: Tensor, values: Tensor, from_state: Tensor, decay: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The state at the start of each chunk, [n, B, K, H/K, N, V], and, with a `first`, the last."""
    # F = e^{g_C} I - (k e^{g_C - g})ᵀ W, [.., N, N]
    identity = torch.eye(from_state.shape[-1], device=from_state.device)
    factors = decay * identity - writes @ from_state
    terms = writes @ values  # E = (k e^{g_C - g})ᵀ U, [.., N, V]
    if first is not None:  # a chunk before them that leaves the first state
        factors = torch.cat((torch.zeros_like(factors[:1]), factors))
        terms = torch.cat((first[None], terms))
    shape = terms.shape
    flat = [x.reshape(shape[0], -1, *x.shape[-2:]) for x in (factors, terms)]
    states = affine_scan(*flat).view(shape)
    if first is None:
        return states, None
    return states[1:], factors[-1] @ states[-1] + terms[-1]
