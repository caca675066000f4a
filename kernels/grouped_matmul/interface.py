"""Products of rows with their group's matrix (experts of an MoE): definition, implementations.

x[M, D] holds the rows of group 0, then of group 1, …, counts[E] of each; weight[E, F, D] is one
matrix a group: out[row] = weight[group of row] @ x[row]. Rows beyond sum(counts) give 0 and get no
gradient (buffers of a fixed size, as expert parallelism needs). Counts stay on the device: only
the loops in torch synchronize to read them.

Order of choice
    torch           library: `torch.nn.functional.grouped_mm` (CUTLASS on CUDA, bfloat16, compute
                    capability 8.0 and above; a loop in C++ on CPU), where rows are multiples of
                    16 bytes; else on CUDA the Triton kernel, which takes any shape, float32 too;
                    else eager: a loop over the groups.
    JAX on TPU      library: megablox, for bfloat16 and float32 with M a multiple of 128; else the
                    Pallas kernel.
    JAX elsewhere   library: `jax.lax.ragged_dot`.
A TPU kernel cannot be partitioned by the compiler: on a mesh call it inside `shard_map`.
"""

from typing import Any

from sabia.kernels.runtime.dispatch import Choice, framework

Array = Any


def _library_module(x: Array) -> Any:
    if framework(x) == "torch":
        from sabia.kernels.grouped_matmul import torch_impl

        return torch_impl
    from sabia.kernels.grouped_matmul import jax_impl

    return jax_impl


def choose_grouped_matmul(x: Array, weight: Array, *, implementation: str | None = None) -> Choice:
    """The implementation that `grouped_matmul` uses for these arguments, and the reason."""
    return _library_module(x).choose_grouped_matmul(x, weight, implementation)


def grouped_matmul(
    x: Array,
    weight: Array,
    counts: Array,
    *,
    full: bool = False,
    implementation: str | None = None,
) -> Array:
    """x[M, D], weight[E, F, D], counts[E] (integers, sum at most M) → [M, F] in x's dtype.

    `full`: the caller knows that the sum is M, so that no rows must be cleared. Products are summed
    in fp32. Differentiable in x and weight. Raises ValueError for shapes that do not fit,
    dispatch.Unavailable if the named implementation is unavailable.
    """
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[2] != x.shape[1]:
        shapes = f"x{tuple(x.shape)}, weight{tuple(weight.shape)}"
        raise ValueError(f"grouped_matmul: {shapes} (expected [M, D], [E, F, D])")
    if tuple(counts.shape) != (weight.shape[0],):
        raise ValueError(
            f"grouped_matmul: counts{tuple(counts.shape)} for {weight.shape[0]} groups"
        )
    module = _library_module(x)
    name = module.choose_grouped_matmul(x, weight, implementation).implementation
    return module.IMPLEMENTATIONS[name](x, weight, counts, full)
