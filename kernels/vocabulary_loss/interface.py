"""Cross-entropy of a projection onto the vocabulary: definition and implementations.

With u = hidden · weightᵀ and z = u, or softcap · tanh(u / softcap):
    lse = log Σ exp(z),  nll = lse - z[target], or 0 where the target is below 0
    dz = (g_nll + g_lse) · exp(z - lse) - g_nll · onehot(target),  du = dz · (1 - (z / softcap)²)
Both results are differentiable, so a z-loss (a · lse²) or weights for tokens need nothing more.
Logits are never stored: the backward pass computes them again. (Computing gradients in the
forward pass, as Liger does, arXiv 2410.10989, saves that product but fixes the loss to a mean.)

Order of choice
    torch on CUDA   triton: products by cuBLAS over chunks of tokens, one kernel for softmax and
                    loss of a chunk's rows and one that turns its scores into their gradient in
                    place. (torch's own linear_cross_entropy gives no lse and knows no cap.)
    torch elsewhere eager: chunks of tokens whose scores are saved while they fit, with a gradient
                    by hand; plain expressions that fuse under torch.compile.
    JAX on TPU      pallas: products and softmax in one kernel, logits stay in on-chip memory.
    JAX elsewhere   eager: chunks of tokens.
The reference stores all logits: [N, V] in fp32. A TPU kernel cannot be partitioned by the compiler:
on a mesh call it inside `shard_map`.
"""

from typing import Any

from sabia.kernels.runtime.dispatch import Choice, framework

Array = Any
DEFAULT_CHUNK_BYTES = 256 << 20


def _library_module(x: Array) -> Any:
    if framework(x) == "torch":
        from sabia.kernels.vocabulary_loss import torch_impl

        return torch_impl
    from sabia.kernels.vocabulary_loss import jax_impl

    return jax_impl


def choose_linear_cross_entropy(hidden: Array, *, implementation: str | None = None) -> Choice:
    """The implementation that `linear_cross_entropy` uses for these arguments, and the reason."""
    return _library_module(hidden).choose_linear_cross_entropy(hidden, implementation)


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    softcap: float | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """hidden[N, D], weight[V, D], targets[N] → (nll[N], logsumexp[N]), fp32.

    `chunk_bytes` bounds the scores that exist at a time, where chunks are taken. Differentiable in
    hidden and weight. Raises ValueError for shapes that do not fit, dispatch.Unavailable if the
    named implementation is unavailable.
    """
    if hidden.ndim != 2 or hidden.shape[1:] != weight.shape[1:] or targets.ndim != 1:
        shapes = [tuple(a.shape) for a in (hidden, weight, targets)]
        raise ValueError(f"linear_cross_entropy: {shapes} (expected [N, D], [V, D], [N])")
    module = _library_module(hidden)
    name = module.choose_linear_cross_entropy(hidden, implementation).implementation
    return module.IMPLEMENTATIONS[name](hidden, weight, targets, softcap, chunk_bytes)
