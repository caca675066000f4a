"""The vocabulary loss in torch: the plain expression."""

import torch

from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle
from sabia.kernels.vocabulary_loss import torch_chunks

Tensor = torch.Tensor


def choose_linear_cross_entropy(hidden: Tensor, implementation: str | None) -> Choice:
    """See vocabulary_loss.choose_linear_cross_entropy."""
    reason = "chunks of tokens, softmax and gradient in one kernel each"
    own = Option("triton", reason, triton_obstacle(hidden), automatic=hidden.is_cuda)
    chunks = Option("eager", "chunks of tokens, gradient by hand")
    return choose("linear_cross_entropy", [own, chunks, reference_option()], implementation)


def _reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    z = (hidden @ weight.to(hidden.dtype).t()).float()  # [N, V]
    z = z if softcap is None else torch.tanh(z / softcap) * softcap
    lse = torch.logsumexp(z, -1)  # [N]
    picked = z.gather(1, targets.clamp_min(0)[:, None].long())[:, 0]  # [N]: z[target]
    return torch.where(targets >= 0, lse - picked, 0.0), lse


def _triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    from sabia.kernels.vocabulary_loss.triton_impl import linear_cross_entropy

    return linear_cross_entropy(hidden, weight.to(hidden.dtype), targets, softcap, chunk_bytes)


IMPLEMENTATIONS = {
    "reference": _reference,
    "eager": torch_chunks.linear_cross_entropy,
    "triton": _triton,
}
