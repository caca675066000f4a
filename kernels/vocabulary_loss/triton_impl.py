"""The vocabulary loss over chunks of tokens: products by the library, the rest as Triton kernels.

One program per row of logits: forward it reads them once (running maximum and sum), backward it
overwrites them with their gradient. Logits have the dtype of hidden and are widened in registers;
the weight's gradient is summed over chunks in fp32. Registered as operators of torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from sabia.kernels.runtime.cache_folder import name_compilers_folders
from sabia.kernels.runtime.torch_support import Context
from sabia.kernels.runtime.tuned import tuned_blocks

name_compilers_folders()

Tensor = torch.Tensor
BLOCKS = (4096, 8)  # columns, warps
INTERPRETED_BLOCK = 128


@triton.jit
def _capped(z, cap, CAPPED: tl.constexpr):
    if CAPPED:
        # cap * tanh(z / cap), as tanh x = 2 sigmoid(2 x) - 1
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    return z


@triton.jit
def _loss_kernel(
    scores, targets, nll, lse, V, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    for at in range(0, V, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        z = tl.load(scores + row * V + columns, mask=columns < V, other=0.0).to(tl.float32)
        z = tl.where(columns < V, _capped(z, cap, CAPPED), -float("inf"))
        new = tl.maximum(largest, tl.max(z, 0))  # m' = max(m, max z)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)  # sum exp(z - m')
        largest = new
    whole = largest + tl.log(total)  # lse = m + log(sum exp(z - m))
    target = tl.load(targets + row)
    picked = tl.load(scores + row * V + tl.maximum(target, 0)).to(tl.float32)
    tl.store(lse + row, whole)
    # nll = lse - z[target]
    tl.store(nll + row, tl.where(target >= 0, whole - _capped(picked, cap, CAPPED), 0.0))


@triton.jit
def _gradient_kernel(
    scores, targets, lse, grad_nll, grad_lse, V, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    whole = tl.load(lse + row)
    g_nll = tl.where(target >= 0, tl.load(grad_nll + row), 0.0)
    factor = g_nll + tl.load(grad_lse + row)  # g_nll + g_lse
    for at in range(0, V, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        pointers = scores + row * V + columns
        z = tl.load(pointers, mask=columns < V, other=0.0).to(tl.float32)
        z = _capped(z, cap, CAPPED)
        # dz = (g_nll + g_lse) exp(z - lse) - g_nll onehot(target)
        d = factor * tl.exp(z - whole) - tl.where(columns == target, g_nll, 0.0)
        if CAPPED:
            d *= 1.0 - (z / cap) * (z / cap)  # du = dz (1 - (z / cap)^2)
        tl.store(pointers, d.to(scores.dtype.element_ty), mask=columns < V)


def launch_options(scores: Tensor, cap: float, kernel: str) -> dict[str, int]:
    """Block size and compiler options of the kernel `loss` or `gradient`."""
    key = str(scores.dtype).removeprefix("torch.")
    block, warps = tuned_blocks(f"vocabulary_loss.{kernel}", key, scores, BLOCKS)
    block = block if scores.is_cuda else INTERPRETED_BLOCK
    return {"CAPPED": cap > 0, "BLOCK": block, "num_warps": warps}


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


@torch.library.custom_op("sabia::vocabulary_loss_forward", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int
) -> tuple[Tensor, Tensor]:
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    nll, lse = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    buffer = hidden.new_empty(min(rows, tokens), vocabulary)
    for part in _chunks(tokens, rows):
        # [rows, V]
        scores = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - part.start])
        _loss_kernel[(scores.shape[0],)](
            scores, targets[part], nll[part], lse[part], vocabulary, cap,
            **launch_options(scores, cap, "loss"),
        )  # fmt: skip
    return nll, lse


@_forward.register_fake
def _(hidden, weight, targets, cap, rows):
    nll, lse = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    return nll, lse


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, where total is fp32; on a GPU within the product, without a rounded result."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


@torch.library.custom_op("sabia::vocabulary_loss_backward", mutates_args=())
def _backward(
    grad_nll: Tensor, grad_lse: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor,
    lse: Tensor, cap: float, rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    buffer = hidden.new_empty(min(rows, tokens), vocabulary)
    for part in _chunks(tokens, rows):
        # [rows, V]
        scores = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - part.start])
        _gradient_kernel[(scores.shape[0],)](
            scores, targets[part], lse[part], grad_nll[part], grad_lse[part], vocabulary, cap,
            **launch_options(scores, cap, "gradient"),
        )  # fmt: skip
        torch.mm(scores, weight, out=d_hidden[part])  # d_hidden = du W: [rows, D]
        _add_product(d_weight, scores.t(), hidden[part])  # d_weight = sum of du^T h: [V, D]
    return d_hidden, d_weight.to(weight.dtype)


@_backward.register_fake
def _(grad_nll, grad_lse, hidden, weight, targets, lse, cap, rows):
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, targets, *ctx.numbers = inputs
    ctx.save_for_backward(hidden, weight, targets, output[1])


def _gradients(ctx: Context, grad_nll: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = (grad_nll.contiguous(), grad_lse.contiguous())
    return *_backward(*grads, *ctx.saved_tensors, *ctx.numbers), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    """See sabia.kernels.vocabulary_loss.interface.linear_cross_entropy."""
    rows = max(1, chunk_bytes // (hidden.element_size() * weight.shape[0]))
    arrays = (hidden.contiguous(), weight.contiguous(), targets.contiguous())
    return _forward(*arrays, softcap or 0.0, rows)
