"""Which implementation computes attention, expert products, norms and the vocabulary loss.

By default sabia.kernels chooses one for the arrays and the device. The environment variable
`SABIA_KERNELS`, read when a backend's operations are imported, changes this:

  auto    the default
  NAME    reference, eager, library, triton (torch) or pallas (JAX), for every operation that has
          this implementation in the backend; the other operations stay at auto
  OPERATION=NAME,…    for these operations: attention, grouped_matmul, rms_norm, vocabulary_loss

A named implementation is used or the run ends with an error (UsageError: there is no such name;
MissingBackend: it does not work here); it is never replaced. XLA computes the norms in JAX. On CPU,
kernels run interpreted with TRITON_INTERPRET=1 or PALLAS_INTERPRET=1.

`describe` says in a line what computes each operation. It calls the choosers of sabia.kernels with
arrays of the model's shapes, so that a named implementation that does not work here is an error
before the first step.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.ops.precision import Precision
from sabia.core.ops.product import Array
from sabia.core.spec.layers import Attention, Experts, LatentAttention
from sabia.core.spec.model import ModelSpec
from sabia.kernels.attention.interface import attention_mask, choose_attention
from sabia.kernels.rms_norm.interface import choose_rms_norm
from sabia.kernels.runtime.dispatch import (
    IMPLEMENTATIONS,
    KERNELS,
    Choice,
    Implementations,
    Unavailable,
    framework,
)
from sabia.kernels.vocabulary_loss.interface import choose_linear_cross_entropy

VARIABLE = "SABIA_KERNELS"
_OPERATIONS = {
    "torch": ("attention", "grouped_matmul", "rms_norm", "vocabulary_loss"),
    "jax": ("attention", "grouped_matmul", "vocabulary_loss"),
}
OFFERED: Mapping[str, Implementations] = {
    backend: {name: KERNELS[name].implementations[backend] for name in names}
    for backend, names in _OPERATIONS.items()
}


def requested_kernels(backend: str) -> Mapping[str, str | None]:
    """The implementation of each operation that SABIA_KERNELS names, None where it names none.

    Raises UsageError for unknown names.
    """
    return _parsed(os.environ.get(VARIABLE) or "auto", backend)


@functools.cache
def _parsed(text: str, backend: str) -> dict[str, str | None]:
    offered, requested = OFFERED[backend], dict.fromkeys(OFFERED[backend])
    if "=" in text:
        for operation, _, name in (word.strip().partition("=") for word in text.split(",")):
            if operation not in offered or name not in (*offered[operation], "auto"):
                raise UsageError(f"{VARIABLE}: {operation}={name} with {backend} (expected "
                                 + "; ".join(_offers(offered)) + ")")  # fmt: skip
            requested[operation] = None if name == "auto" else name
        return requested
    if text == "auto":
        return requested
    if text not in {name for names in offered.values() for name in names}:
        known = ", ".join(("auto", *IMPLEMENTATIONS))
        with_backend = f" with {backend}" if text in IMPLEMENTATIONS else ""
        raise UsageError(f"{VARIABLE}: {text!r}{with_backend} (expected one of {known}; triton is "
                         "for torch only, pallas for jax only)")  # fmt: skip
    return {operation: text if text in names else None for operation, names in offered.items()}


def _offers(offered: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    return (f"{operation}={'|'.join(('auto', *names))}" for operation, names in offered.items())


def raises_missing_backend(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which raises MissingBackend if a named implementation does not work here."""

    @functools.wraps(kernel)
    def call(*args: object, **options: object) -> Any:
        try:
            return kernel(*args, **options)
        except Unavailable as error:
            raise unavailable(str(error)) from None

    return call


def unavailable(why: str) -> MissingBackend:
    """The error for a named implementation that does not work here."""
    return MissingBackend(f"{VARIABLE}: {why}; use {VARIABLE}=auto")


def describe(spec: ModelSpec, backend: str, dtype: str, length: int, packed: bool) -> str:
    """`kernels on cuda: attention by library (...); ...` for rows of `length` tokens.

    dtype: of activations; packed: rows hold several documents. For this process's default device.
    Raises MissingBackend if an implementation that SABIA_KERNELS names does not work here.
    """
    like, platform = (_torch if backend == "torch" else _jax)(dtype)
    choose, parts = raises_missing_backend(_choices), []
    for operation, name in requested_kernels(backend).items():
        choices = dict.fromkeys(choose(operation, spec, like, length, packed, name))
        text = " and ".join(f"{choice.implementation} ({choice.reason})" for choice in choices)
        parts += [f"{operation} by {text}"] if choices else []
    return f"kernels on {platform}: {'; '.join(parts)}"


def _torch(dtype: str) -> tuple[Any, str]:
    """(a scalar on the default device, platform); other arrays take device and dtype from it."""
    import torch

    from sabia.core.ops.device_torch import default_device

    like = torch.zeros((), dtype=getattr(torch, dtype), device=default_device())
    return like, like.device.type


def _jax(dtype: str) -> tuple[Any, str]:
    import jax
    import jax.numpy as jnp

    return jnp.zeros((), dtype), jax.default_backend()


def _shaped(like: Array, *shape: int) -> Any:
    """An array of that shape without memory of its own."""
    if framework(like) == "torch":
        return like.expand(shape)
    import jax

    return jax.ShapeDtypeStruct(shape, like.dtype)


def _choices(
    operation: str, spec: ModelSpec, like: Array, length: int, packed: bool, name: str | None
) -> list[Choice]:
    """The implementations for the model's shapes; [] if it does not have the operation."""
    x = _shaped(like, length, spec.hidden_size)
    if operation == "attention":
        mixers = dict.fromkeys(layer.mixer for layer in spec.layers)
        parts = [part for part in mixers if isinstance(part, Attention | LatentAttention)]
        return [_attention(part, like, length, packed, spec.causal, name) for part in parts]
    if operation == "grouped_matmul":
        widths = [layer.mlp.width for layer in spec.layers if isinstance(layer.mlp, Experts)]
        if not widths:
            return []
        from sabia.kernels.grouped_matmul.interface import choose_grouped_matmul

        weight = _shaped(like, 1, widths[0], spec.hidden_size)
        return [choose_grouped_matmul(x, weight, implementation=name)]
    if operation == "rms_norm":
        scale = _shaped(like, spec.hidden_size)
        # norm weights stay fp32 whatever the dtype of activations
        scale = scale.float() if framework(like) == "torch" else scale
        return [choose_rms_norm(x, scale, implementation=name)] if spec.norm_kind == "rms" else []
    return [choose_linear_cross_entropy(x, implementation=name)] if spec.classifier is None else []


def _one_document(like: Array, length: int) -> Any:
    """[1, length] segment numbers."""
    if framework(like) == "torch":
        return like.new_ones((1, length)).int()
    import jax.numpy as jnp

    return jnp.ones((1, length), jnp.int32)


def _attention(
    part: Any, like: Array, length: int, packed: bool, causal: bool, name: str | None
) -> Choice:
    latent = isinstance(part, LatentAttention)
    keys = (length, part.heads, part.key_dim) if latent else (length, part.kv_heads, part.head_dim)
    values = (length, part.heads, part.value_dim) if latent else keys
    segments = _one_document(like, length) if packed else None
    shape: Any = {"segments": segments, "window": part.window, "causal": causal}
    mask = attention_mask(like, length, length, **shape)
    return choose_attention(
        _shaped(like, 1, length, part.heads, keys[-1]),
        _shaped(like, 1, *keys),
        _shaped(like, 1, *values),
        mask,
        softcap=None if latent else part.softcap,
        sinks=_shaped(like, part.heads) if not latent and part.sinks else None,
        implementation=name,
    )


def describe_products(precision: Precision, device: torch.device) -> str:
    """What computes the products on a device, for example `fp8: emulated on cpu`.

    device: a torch device (or its name, `cuda:0`) or a JAX device.
    """
    if precision.qat is not None:
        return f"{precision.name}: weights rounded as {precision.qat.kind}, products in bf16"
    if precision.recipe is None:
        return f"{precision.name}: products in {precision.compute}"
    if isinstance(device, str) or type(device).__module__.partition(".")[0] == "torch":
        from sabia.core.ops.rounding_units_torch import describe_units
    else:
        from sabia.core.ops.rounding_jax import describe_units
    return f"{precision.name}: {describe_units(precision.recipe, device)}"
