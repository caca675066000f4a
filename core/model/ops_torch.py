"""The operations in torch. Eager mode on CPU matters, so the most expensive ones are fused by hand.

RMSNorm, rotary embedding and the vocabulary loss have hand-written gradients: they read and write
memory fewer times than autograd's chains, and never store [B, T, V] beyond a chunk. Inside
torch.compile plain expressions are used, because the compiler fuses them better. On accelerators,
and where SABIA_KERNELS names one (core.model.kernel_choice), the kernels of sabia.kernels are used.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils import checkpoint

from sabia.core.errors import UsageError
from sabia.core.model.kernel_choice import kernels_of, raises_missing_backend
from sabia.core.model.ops import FORWARD_DTYPES, Angles, Axes, Remat, dtype_name
from sabia.core.model.ops_torch_attention import attention, attention_mask  # noqa: F401
from sabia.core.model.ops_torch_delta import causal_conv, delta_rule  # noqa: F401
from sabia.core.model.ops_torch_loss import linear_cross_entropy  # noqa: F401
from sabia.core.model.ops_torch_moe import (  # noqa: F401
    biased,
    combine,
    dispatch,
    grouped_matmul,
    weighted_bincount,
)
from sabia.core.model.ops_torch_wide import computed_in_fp32, fp32_linear
from sabia.core.model.storage.safetensors_file import numpy_dtype
from sabia.kernels.rms_norm.interface import rms_norm as rms_norm_kernel

Tensor = torch.Tensor
name = "torch"
KERNELS = kernels_of("torch")
_rms_norm_kernel = raises_missing_backend(rms_norm_kernel)

# dtypes that NumPy has only through ml_dtypes: copied as integers of the same size
_BITS = {torch.bfloat16: torch.int16}
_BITS |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.uint8)


def _dtype(dtype: str) -> torch.dtype:
    if dtype not in FORWARD_DTYPES:
        raise UsageError(f"dtype: {dtype!r} (expected one of {', '.join(FORWARD_DTYPES)})")
    return getattr(torch, dtype)


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tensor(array: np.ndarray) -> Tensor:
    array = np.array(array, order="C")  # a copy: files are mapped read-only
    dtype = getattr(torch, array.dtype.name)
    if dtype not in _BITS:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(dtype)


def to_device(
    params: Mapping[str, np.ndarray], dtype: str | None = None, device: Any = None
) -> dict[str, Tensor]:
    """See Ops.to_device; `device` defaults to `default_device()`."""
    on_device = torch.device(device) if device is not None else default_device()
    torch_dtype = None if dtype is None else _dtype(dtype)
    return {key: _tensor(array).to(on_device, torch_dtype) for key, array in params.items()}


def host_array(x: Tensor) -> np.ndarray:
    """x in host memory; on a CPU a view of x."""
    x = x.detach().cpu()
    if x.dtype not in _BITS:
        return x.numpy()
    return x.contiguous().view(_BITS[x.dtype]).numpy().view(numpy_dtype(dtype_name(x)))


def to_numpy(params: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """See Ops.to_numpy."""
    return {key: np.array(host_array(value), order="C") for key, value in params.items()}


def integers(values: Any, like: Tensor) -> Tensor:
    """See Ops.integers."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch warns about read-only arrays
    x = torch.as_tensor(values, device=like.device)
    return x if x.dtype == torch.int64 else x.long()


def arange(count: int, like: Tensor) -> Tensor:
    """See Ops.arange."""
    return torch.arange(count, device=like.device)


def zeros(shape: Sequence[int], dtype: str, like: Tensor | None = None) -> Tensor:
    """See Ops.zeros."""
    device = default_device() if like is None else like.device
    return torch.zeros(tuple(shape), dtype=_dtype(dtype), device=device)


def full(shape: Sequence[int], value: float, like: Tensor) -> Tensor:
    """See Ops.full."""
    return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)


def positions(length: int, like: Tensor) -> Tensor:
    """See Ops.positions."""
    return arange(length, like)[None, :]


def cast(x: Tensor, dtype: str) -> Tensor:
    """See Ops.cast."""
    return x.to(_dtype(dtype))


def concat(xs: Sequence[Tensor], axis: int) -> Tensor:
    """See Ops.concat."""
    return torch.cat(tuple(xs), axis)


def known_max(x: Tensor) -> int | None:
    """See Ops.known_max: on CPU, and not while compiling."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return int(x.max())


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """See Ops.embedding."""
    return F.embedding(ids, table)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, name: str = "") -> Tensor:
    """See Ops.linear."""
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    return fp32_linear(x, weight, bias) if computed_in_fp32(x) else F.linear(x, weight, bias)


def _by_hand(x: Tensor) -> bool:
    """Whether to use the hand-written path: fp32, and no compiler that fuses by itself."""
    return x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    # 1 / sqrt(mean(x²) + eps), [..., 1]; mean(x²) = ‖x‖² / D
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """y = x·r·w, r = 1/rms(x): dx = r·(g·w - x̂·mean(g·w·x̂)), dw = Σ g·x̂, with x̂ = x·r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse  # x̂
        product = (grad * unit).flatten(0, -2)  # g·x̂, [rows, D]
        # mean over D of g·w·x̂
        mean = torch.mv(product, weight).div_(x.shape[-1]).view(inverse.shape)
        # dx = r (g·w - x̂·mean(g·w·x̂)); unit is overwritten
        dx = unit.mul_(mean).neg_().addcmul_(grad, weight).mul_(inverse)
        return dx, product.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See Ops.rms_norm."""
    implementation, eager = KERNELS.requested["rms_norm"], not torch.compiler.is_compiling()
    # on CUDA without a request, unless torch.compile fuses the plain expression
    if implementation is not None or (eager and KERNELS.use("rms_norm", x.device.type)):
        weight = weight.float() if offset else weight
        # the kernels compute weight or 1 + weight; other offsets are added here
        if offset not in (0, 1):
            weight, offset = weight + offset, 0
        return _rms_norm_kernel(x, weight, eps, plus_one=offset == 1, implementation=implementation)
    if offset:
        weight = weight.float() + offset
    if _by_hand(x) and weight.dtype == x.dtype:
        if torch.is_grad_enabled():
            return _RmsNorm.apply(x, weight, eps)
        return (x * _inverse_rms(x, eps)).mul_(weight)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Ops.layer_norm."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), eps=eps).to(x.dtype)


# functions that are torch's own; see Ops
silu = F.silu
softplus = F.softplus
sigmoid = torch.sigmoid
exp = torch.exp
where = torch.where
topk = torch.topk


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """See Ops.gelu."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def stop_gradient(x: Tensor) -> Tensor:
    """See Ops.stop_gradient."""
    return x.detach()


def softmax(x: Tensor) -> Tensor:
    """See Ops.softmax."""
    return torch.softmax(x, -1, dtype=torch.float32)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See Ops.softcap."""
    return torch.tanh(x / cap) * cap


def take_along(x: Tensor, indices: Tensor) -> Tensor:
    """See Ops.take_along."""
    return x.gather(-1, indices)


def logsumexp(x: Tensor) -> Tensor:
    """See Ops.logsumexp."""
    return torch.logsumexp(x.float(), -1)


def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32[N] on the device, copied there once: the host waits for a copy. Compilers keep it."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=torch.float32, device=device)
    return _copied_constants(values, device)


@functools.lru_cache(64)
def _copied_constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def rope_angles(
    positions: Tensor, frequencies: tuple[float, ...], growth: Tensor | None = None
) -> Angles:
    """See Ops.rope_angles."""
    # both halves of the head dimension rotate by the same angles
    table = _constants(frequencies * 2, positions.device)
    if growth is not None:
        last = len(frequencies) - 1
        exponents = tuple(-pair / last for pair in range(last + 1))
        table = table * growth[:, :, None] ** _constants(exponents * 2, positions.device)
    angles = (positions[:, :, None].float() * table)[:, :, None, :]  # [B or 1, T, 1, N]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    # (x1 cos - x2 sin, x2 cos + x1 sin)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _Rope(torch.autograd.Function):
    """A rotation; its gradient is the inverse rotation, so x need not be saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def rope(x: Tensor, angles: Angles) -> Tensor:
    """See Ops.rope."""
    cos, sin = angles
    if _by_hand(x):
        return (_Rope.apply if torch.is_grad_enabled() else _rotate)(x, cos, sin)
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def whole_segments(segments: Tensor) -> Tensor:
    """See Ops.whole_segments: one device, so segments itself."""
    return segments


def cache_write(cache: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    """See Ops.cache_write: in place."""
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]  # [B, 1]
    cache[rows, slots] = new.to(cache.dtype)  # slots [B, T], new [B, T, K, N]
    return cache


def stage_input(embed: Callable[[], Tensor], layers: int) -> tuple[Tensor, range]:
    """See Ops.stage_input: without a pipeline, all layers."""
    return embed(), range(layers)


def stage_output(x: Tensor, stats: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """See Ops.stage_output: without a pipeline, the input itself."""
    return x, stats


def gather(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """See Ops.gather: one device, so weights itself."""
    return weights


def relayout(x: Tensor, from_axes: Axes, to_axes: Axes) -> Tensor:
    """See Ops.relayout: one device, so x itself."""
    return x


def shard(x: Tensor, axes: Axes) -> Tensor:
    """See Ops.shard: one device, so x itself."""
    return x


_ATEN = torch.ops.aten
_MATMULS = frozenset((_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default))


def _keep_matmuls(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if operation in _MATMULS else policy.PREFER_RECOMPUTE


def remat(function: Callable[..., Tensor], policy: Remat) -> Callable[..., Tensor]:
    """See Ops.remat."""
    if policy == "none":
        return function
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if policy == "matmuls":
        # a partial, because torch.compile cannot trace a lambda here
        create = checkpoint.create_selective_checkpoint_contexts
        options["context_fn"] = functools.partial(create, _keep_matmuls)
    elif policy != "full":
        raise UsageError(f"remat: {policy!r} (expected none, matmuls or full)")
    return lambda *args: checkpoint.checkpoint(function, *args, **options)
