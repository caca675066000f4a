"""The operations of one device in torch.

Attention, norms, expert products and the vocabulary loss are those of sabia.kernels. Rotary
embeddings and gated activations on a CPU are its loops over rows where they are large or decoded;
other rotary embeddings have a gradient by hand in fp32, which reads and writes memory fewer times
than autograd's chain. Inside torch.compile plain expressions are used, because the compiler fuses
them.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils import checkpoint

from sabia.core.errors import UsageError
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.ops.base import FORWARD_DTYPES, Angles, Ops, Params, Remat, dtype_name, is_stored
from sabia.core.ops.kernel_choice import requested_kernels
from sabia.core.ops.product import Product, check_product
from sabia.kernels.row_functions.torch_arrays import rotate, serves, silu_product
from sabia.kernels.runtime.torch_fp32 import linear
from sabia.kernels.runtime.torch_support import Context

if TYPE_CHECKING:
    from sabia.core.ops.decoded_torch import DecodedRows
    from sabia.core.ops.experts_torch import DispatchPlan

Tensor = torch.Tensor
PLAIN = (torch.Tensor, torch.nn.Parameter)

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


def _on_device(array: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if is_stored(array):
        from sabia.core.ops.stored_torch import codes_on

        return codes_on(array, device)
    array = np.array(array, order="C")  # a copy: files are mapped read-only
    own = getattr(torch, array.dtype.name)
    bits = array.view(f"u{array.itemsize}") if own in _BITS else array
    return torch.from_numpy(bits).view(own).to(device, dtype)


def host_array(x: Tensor) -> np.ndarray:
    """x in host memory; on a CPU a view of x."""
    x = x.detach().cpu()
    if x.dtype not in _BITS:
        return x.numpy()
    return x.contiguous().view(_BITS[x.dtype]).numpy().view(numpy_dtype(dtype_name(x)))


def _by_hand(x: Tensor) -> bool:
    """Whether to use the hand-written path: fp32, and no compiler that fuses by itself."""
    return x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32[N] on the device, copied there once: the host waits for a copy. Compilers keep it."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=torch.float32, device=device)
    return _copied_constants(values, device)


@functools.lru_cache(64)
def _copied_constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@torch.library.custom_op("sabia::cpu_cos_and_sin", mutates_args=())
def _compiled_cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Once for all heads and layers: torch's compiler would compute them again for each number."""
    return angles.cos(), angles.sin()


@_compiled_cos_and_sin.register_fake
def _(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)


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
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def plain_rope(x: Tensor, angles: Angles) -> Tensor:
    """See Ops.rope; its elements do not depend on the size of x."""
    cos, sin = angles
    if _by_hand(x):
        return (_Rope.apply if torch.is_grad_enabled() else _rotate)(x, cos, sin)
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def _row_numbers(count: int, device: torch.device) -> Tensor:
    """[count, 1]; computed once for all layers and steps. Compilers keep it."""
    if torch.compiler.is_compiling():
        return torch.arange(count, device=device)[:, None]
    return _kept_row_numbers(count, device)


@functools.lru_cache(64)
def _kept_row_numbers(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, device=device)[:, None]


_ATEN = torch.ops.aten
_MATMULS = frozenset((_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default))


def _keep_matmuls(ctx: Context, operation: object, *args: object, **kwargs: object) -> Any:
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if operation in _MATMULS else policy.PREFER_RECOMPUTE


def _repeat(times: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(times):
        x = function(x)
    return x


class TorchOps(Ops):
    """The operations of one device; their descriptions are those of Ops."""

    name = "torch"
    requested = requested_kernels("torch")

    silu, sigmoid = staticmethod(F.silu), staticmethod(torch.sigmoid)
    softplus, where = staticmethod(F.softplus), staticmethod(torch.where)
    exp, tanh = staticmethod(torch.exp), staticmethod(torch.tanh)
    log1mexp = staticmethod(lambda x: torch.log(-torch.expm1(x)))
    stop_gradient, topk = staticmethod(torch.Tensor.detach), staticmethod(torch.topk)

    # of the optimizers
    sqrt, sign, expm1 = staticmethod(torch.sqrt), staticmethod(torch.sign), staticmethod(math.expm1)
    floor = staticmethod(lambda x, least: torch.clamp(x, min=least))
    mean = staticmethod(lambda x, axes: torch.mean(x, axes, keepdim=True))
    argsort = staticmethod(lambda x: torch.argsort(x, dim=-1, stable=True))
    take = staticmethod(torch.take_along_dim)
    eigenvectors = staticmethod(lambda x: torch.linalg.eigh(x)[1].flip(-1))
    orthonormal = staticmethod(lambda x: torch.linalg.qr(x)[0])
    cond = staticmethod(lambda condition, yes, no: yes() if condition else no())
    repeat = staticmethod(_repeat)

    def to_device(
        self, params: Mapping[str, np.ndarray], dtype: str | None = None
    ) -> dict[str, Tensor]:
        """See Ops.to_device."""
        device, kind = default_device(), None if dtype is None else _dtype(dtype)
        return {key: _on_device(array, device, kind) for key, array in params.items()}

    def to_numpy(self, params: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """See Ops.to_numpy."""
        return {key: np.array(host_array(value), order="C") for key, value in params.items()}

    def integers(self, values: Any, like: Tensor) -> Tensor:
        """See Ops.integers."""
        if isinstance(values, np.ndarray) and not values.flags.writeable:
            values = values.copy()  # torch warns about read-only arrays
        x = torch.as_tensor(values, device=like.device)
        return x if x.dtype == torch.int64 else x.long()

    def arange(self, count: int, like: Tensor) -> Tensor:
        """See Ops.arange."""
        return torch.arange(count, device=like.device)

    def zeros(self, shape: Sequence[int], dtype: str, like: Tensor | None = None) -> Tensor:
        """See Ops.zeros. On a CPU memory is taken when it is first written (torch.zeros fills)."""
        device = default_device() if like is None else like.device
        if device.type != "cpu":
            return torch.zeros(tuple(shape), dtype=_dtype(dtype), device=device)
        bits = np.zeros(tuple(shape), f"i{_dtype(dtype).itemsize}")
        return torch.from_numpy(bits).view(_dtype(dtype))

    def full(self, shape: Sequence[int], value: float, like: Tensor) -> Tensor:
        """See Ops.full."""
        return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """See Ops.cast."""
        return x.to(_dtype(dtype))

    def concat(self, xs: Sequence[Tensor], axis: int) -> Tensor:
        """See Ops.concat."""
        return torch.cat(tuple(xs), axis)

    def known_max(self, x: Tensor) -> int | None:
        """See Ops.known_max: on CPU, and not while compiling."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        return int(x.max())

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops.layer_norm."""
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), eps=eps).to(x.dtype)

    def gelu(self, x: Tensor, tanh: bool = False) -> Tensor:
        """See Ops.gelu."""
        return F.gelu(x, approximate="tanh" if tanh else "none")

    def softmax(self, x: Tensor) -> Tensor:
        """See Ops.softmax."""
        return torch.softmax(x, -1, dtype=torch.float32)

    def logsumexp(self, x: Tensor) -> Tensor:
        """See Ops.logsumexp."""
        return torch.logsumexp(x.float(), -1)

    def rope_angles(
        self, positions: Tensor, frequencies: tuple[float, ...], growth: Tensor | None = None
    ) -> Angles:
        """See Ops.rope_angles."""
        # both halves of the head dimension rotate by the same angles
        table = _constants(frequencies * 2, positions.device)
        if growth is not None:
            last = len(frequencies) - 1
            exponents = tuple(-pair / last for pair in range(last + 1))
            table = table * growth[:, :, None] ** _constants(exponents * 2, positions.device)
        angles = (positions[:, :, None].float() * table)[:, :, None, :]  # [B or 1, T, 1, N]
        if torch.compiler.is_compiling() and angles.device.type == "cpu":
            return _compiled_cos_and_sin(angles)
        return angles.cos(), angles.sin()

    def rope(self, x: Tensor, angles: Angles) -> Tensor:
        """See Ops.rope."""
        return rotate(x, *angles) if serves(x, decodes=True) else plain_rope(x, angles)

    def cache_write(self, cache: Tensor, new: Tensor, slots: Tensor) -> Tensor:
        """See Ops.cache_write: in place."""
        # slots [B, T], new [B, T, K, N]
        cache[_row_numbers(cache.shape[0], cache.device), slots] = new.to(cache.dtype)
        return cache

    def remat(self, function: Callable[..., Tensor], policy: Remat) -> Callable[..., Tensor]:
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
        return functools.partial(checkpoint.checkpoint, function, **options)

    def weighted_bincount(self, indices: Tensor, weights: Tensor, count: int) -> Tensor:
        """See Ops.weighted_bincount."""
        sums = weights.new_zeros((len(indices), count), dtype=torch.float32)
        return sums.scatter_add_(1, indices, weights.detach().float())

    def prepared(self, params: Params, former: Params, most_bytes: int) -> Params:
        """See Ops.prepared."""
        from sabia.core.ops.packed_torch import packed

        return packed(params, former, most_bytes)

    def decoded_rows(self, context: Any, x: Tensor) -> "DecodedRows | None":
        """See Ops.decoded_rows."""
        from sabia.core.ops.decoded_torch import decoded_rows

        return decoded_rows(self, context, x)

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """See Ops.silu_product."""
        if serves(gate, decodes=True) and gate.dtype == up.dtype:
            return silu_product(gate, up)
        return self.silu(gate) * up

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """See Ops.embedding."""
        return F.embedding(ids, table)

    def take_along(self, x: Tensor, indices: Tensor) -> Tensor:
        """See Ops.take_along."""
        return x.gather(-1, indices)

    def tokens_at(self, x: Tensor, at: Tensor) -> Tensor:
        """See Ops.tokens_at."""
        if len(x) > 1:
            at = at + x.shape[1] * torch.arange(len(at), device=at.device)[:, None]
        # the gradient of index_select adds whole rows, that of an index array element by element
        return x.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, at.shape)

    def put_along(self, x: Tensor, indices: Tensor, value: float) -> Tensor:
        """See Ops.put_along."""
        return x.scatter(-1, indices, value)

    # -- mixers and experts

    def causal_conv(self, x: Tensor, weight: Tensor, segments: Tensor | None = None) -> Tensor:
        """See Ops.causal_conv."""
        from sabia.core.ops.delta_torch import causal_conv

        return causal_conv(x, weight, segments)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
        segments: Tensor | None = None, state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """See Ops.delta_rule."""
        from sabia.core.ops.delta_torch import delta_rule

        return delta_rule(q, k, v, log_decay, beta, segments, state)

    def dispatch(
        self, y: Tensor, experts_of_tokens: Tensor, experts: int
    ) -> "tuple[Tensor, DispatchPlan]":
        """See Ops.dispatch."""
        from sabia.core.ops.experts_torch import dispatch

        return dispatch(y, experts_of_tokens, experts)

    def combine(self, rows: Tensor, plan: "DispatchPlan", gates: Tensor) -> Tensor:
        """See Ops.combine."""
        from sabia.core.ops.experts_torch import combine

        return combine(rows, plan, gates)

    # -- products

    def kernel(self, product: Product) -> list[Tensor]:
        """See Ops.kernel."""
        x, matrices, plan = product
        if type(matrices[0].weight) not in PLAIN:
            from sabia.core.ops.packed_torch import products, takes

            if takes(x, matrices, plan):
                return products(x, matrices)
        multiply = linear
        if plan is not None:
            from sabia.core.ops.experts_torch import of_experts

            multiply = functools.partial(of_experts, plan=plan)
        results = []
        for matrix in matrices:
            check_product(matrix.name, x, matrix.weight)
            weight = matrix.weight.to(x.dtype)
            bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
            if isinstance(matrix.weight, Tensor) or not x.requires_grad:
                results.append(multiply(x, weight, bias))
                continue
            from sabia.core.ops.stored_torch import decoded_again

            with decoded_again(matrix.weight, weight):
                results.append(multiply(x, weight, bias))
        return results
