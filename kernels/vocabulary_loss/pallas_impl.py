"""The vocabulary loss as Pallas kernels for TPU: logits exist in on-chip memory only.

Logits are stored transposed, [vocabulary, tokens], so that a token's maximum, sum and target lie
along the lanes. The forward pass runs over blocks of the vocabulary for a block of tokens (running
maximum and sum). The gradient has two kernels that compute the scores again: one in the same order
for hidden, one in the other order for the weight; five products in all against four with scores in
memory, for no [N, V] at all. Block sizes are untuned. Compiled for v5e with libtpu, never run on
a TPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sabia.kernels.runtime.dispatch import pallas_interpret
from sabia.kernels.runtime.pallas_product import NN, NT, TN, product

Array = jax.Array
HIDDEN = -1e30
INTERPRETED_BLOCKS = (16, 128)
LIMIT = 100 << 20


def _scores(weight: Array, hidden: Array, cap: float | None) -> Array:
    z = product(weight, hidden, NT)  # [words, tokens]: transposed
    return z if cap is None else jnp.tanh(z / cap) * cap


def _words(shape: tuple[int, int], block: Any) -> Array:
    return block * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _loss_kernel(hidden, weight, targets, nll, lse, largest, total, picked, *, cap, vocabulary):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _begin() -> None:
        largest[...] = jnp.full_like(largest, HIDDEN)
        total[...] = jnp.zeros_like(total)
        picked[...] = jnp.zeros_like(picked)

    z = _scores(weight[...], hidden[...], cap)
    words = _words(z.shape, j)  # [words, tokens]: the token id of each row
    z = jnp.where(words < vocabulary, z, HIDDEN)  # the last block reaches beyond V
    new = jnp.maximum(largest[...], jnp.max(z, 0, keepdims=True))  # [1, tokens]: m' = max(m, max z)
    shrink = jnp.exp(largest[...] - new)
    # sum exp(z - m')
    total[...] = total[...] * shrink + jnp.sum(jnp.exp(z - new), 0, keepdims=True)
    # [1, tokens]: z[target]
    picked[...] += jnp.sum(jnp.where(words == targets[...], z, 0.0), 0, keepdims=True)
    largest[...] = new

    @pl.when(j == pl.num_programs(1) - 1)
    def _end() -> None:
        whole = largest[...] + jnp.log(total[...])  # lse = m + log(sum exp(z - m))
        lse[...] = whole
        nll[...] = jnp.where(targets[...] >= 0, whole - picked[...], 0.0)  # nll = lse - z[target]


def _gradient(hidden, weight, targets, lse, g_nll, g_sum, block, cap, vocabulary):
    """dz, transposed, 0 beyond the vocabulary; g_sum: g_nll + g_lse."""
    z = _scores(weight, hidden, cap)
    words = _words(z.shape, block)
    # dz = (g_nll + g_lse) exp(z - lse) - g_nll onehot(target): [words, tokens]
    d = g_sum * jnp.exp(z - lse) - jnp.where(words == targets, g_nll, 0.0)
    d = d if cap is None else d * (1.0 - (z / cap) ** 2)  # du = dz (1 - (z / cap)^2)
    return jnp.where(words < vocabulary, d, 0.0).astype(hidden.dtype)


def _hidden_kernel(hidden, weight, targets, lse, g_nll, g_sum, out, acc, *, cap, vocabulary):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _begin() -> None:
        acc[...] = jnp.zeros_like(acc)

    rows = _words((weight.shape[0], 1), j)
    matrix = jnp.where(rows < vocabulary, weight[...], 0)  # rows beyond the edge are undefined
    d = _gradient(
        hidden[...], matrix, targets[...], lse[...], g_nll[...], g_sum[...], j, cap, vocabulary
    )
    acc[...] += product(d, matrix, TN)  # [tokens, D]: d_hidden += du^T W

    @pl.when(j == pl.num_programs(1) - 1)
    def _end() -> None:
        out[...] = acc[...].astype(out.dtype)


def _weight_kernel(hidden, weight, targets, lse, g_nll, g_sum, out, acc, *, cap, vocabulary):
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _begin() -> None:
        acc[...] = jnp.zeros_like(acc)

    h = hidden[...]
    d = _gradient(
        h, weight[...], targets[...], lse[...], g_nll[...], g_sum[...], j, cap, vocabulary
    )
    acc[...] += product(d, h, NN)  # [words, D]: d_weight += du h

    @pl.when(i == pl.num_programs(1) - 1)
    def _end() -> None:
        out[...] = acc[...].astype(out.dtype)


def _call(
    kernel: Callable[..., None], hidden: Array, weight: Array, blocks: tuple[int, int], **spec: Any
) -> Any:
    """Run with tokens in the outer axis, or the vocabulary where `swapped`."""
    tokens, words = blocks
    counts = hidden.shape[0] // tokens, pl.cdiv(weight.shape[0], words)
    swapped, size = spec.pop("swapped", False), hidden.shape[1]

    def at(f: Any) -> Any:
        return (lambda j, i: f(i, j)) if swapped else f

    known = {
        "hidden": pl.BlockSpec((tokens, size), at(lambda i, j: (i, 0))),
        "weight": pl.BlockSpec((words, size), at(lambda i, j: (j, 0))),
        "row": pl.BlockSpec((1, tokens), at(lambda i, j: (0, i))),
    }
    return pl.pallas_call(
        functools.partial(kernel, vocabulary=weight.shape[0]),
        grid=counts[::-1] if swapped else counts,
        in_specs=[known["hidden"], known["weight"]] + [known["row"]] * spec.pop("rows"),
        out_specs=[known[name] for name in spec.pop("outs")],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
        interpret=pallas_interpret(),
        **spec,
    )


def _row(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, count), jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(hidden, weight, targets, cap, blocks):
    run = _call(
        functools.partial(_loss_kernel, cap=cap), hidden, weight, blocks, rows=1,
        outs=("row", "row"), out_shape=[_row(hidden.shape[0])] * 2,
        scratch_shapes=[pltpu.VMEM((1, blocks[0]), jnp.float32)] * 3,
    )  # fmt: skip
    return tuple(run(hidden, weight, targets))


def _loss_forward(hidden, weight, targets, cap, blocks):
    nll, lse = _loss(hidden, weight, targets, cap, blocks)
    return (nll, lse), (hidden, weight, targets, lse)


def _loss_backward(cap, blocks, saved, grads):
    hidden, weight, targets, lse = saved
    g_nll = jnp.where(targets >= 0, grads[0], 0.0)
    inputs = (hidden, weight, targets, lse, g_nll, g_nll + grads[1])
    results = []
    for name, kernel, x, rows in (
        ("hidden", _hidden_kernel, hidden, blocks[0]),
        ("weight", _weight_kernel, weight, blocks[1]),
    ):
        run = _call(
            functools.partial(kernel, cap=cap), hidden, weight, blocks, rows=4, outs=(name,),
            swapped=name == "weight", out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            scratch_shapes=[pltpu.VMEM((rows, hidden.shape[1]), jnp.float32)],
        )  # fmt: skip
        results += run(*inputs)
    return *results, None


_loss.defvjp(_loss_forward, _loss_backward)


def _blocks(columns: int) -> tuple[int, int]:
    """(tokens, words) of a block."""
    if pallas_interpret():
        return INTERPRETED_BLOCKS
    return (512, 512) if columns <= 4096 else (256, 256)


def linear_cross_entropy(
    hidden: Array, weight: Array, targets: Array, softcap: float | None
) -> tuple[Array, Array]:
    """See sabia.kernels.vocabulary_loss.interface.linear_cross_entropy."""
    blocks, count = _blocks(hidden.shape[1]), hidden.shape[0]
    spare = -count % blocks[0]
    hidden = jnp.pad(hidden, ((0, spare), (0, 0)))
    # [1, N padded]; -1 has no loss
    targets = jnp.pad(targets.astype(jnp.int32), (0, spare), constant_values=-1)[None]
    nll, lse = _loss(hidden, weight, targets, softcap, blocks)
    return nll[0, :count], lse[0, :count]
