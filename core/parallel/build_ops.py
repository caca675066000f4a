"""The one place where the operations of a forward pass are composed.

A product passes the rules in this order, each of which may change its operands or its results:

  record           sees the model's own products: calibration, activations for bisecting
  adapter          adds low-rank products, which pass all rules behind it like any others
  tensor parallel  splits products over the processes of a torch mesh (in JAX the compiler does)
  precision        rounds what this process multiplies
  kernel           the backend's product (`Ops.kernel`)

`describe` says in a line what computes each operation of a run. It calls the choosers of
sabia.kernels with arrays of the model's shapes, so that a named implementation that does not work
here is an error before the first step.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.model.lora import LoraConfig
from sabia.core.ops.base import Ops, Stage
from sabia.core.ops.kernel_choice import raises_missing_backend, requested_kernels
from sabia.core.ops.precision import Precision, RoundedProducts, quantized_weights
from sabia.core.ops.product import Array, LowRankAdapter, Rule
from sabia.core.parallel.mesh import Mesh, axis_sizes
from sabia.core.spec.layers import Attention, Experts, LatentAttention
from sabia.core.spec.model import ModelSpec
from sabia.kernels.attention.interface import attention_mask, choose_attention
from sabia.kernels.rms_norm.interface import choose_rms_norm
from sabia.kernels.runtime.dispatch import Choice, framework
from sabia.kernels.vocabulary_loss.interface import choose_linear_cross_entropy

if TYPE_CHECKING:
    import torch

BACKENDS = ("torch", "jax")


def load_ops(name: str) -> Ops:
    """The operations of `torch` or `jax` on one device, without rules; see `operations_class`."""
    return operations_class(name)()


def operations_class(name: str) -> type[Ops]:
    """The class of the operations of `torch` or `jax` on one device.

    Raises UsageError for another name, MissingBackend where the package is not installed.
    """
    if name not in BACKENDS:
        raise UsageError(f"--backend: {name!r} (expected one of {', '.join(BACKENDS)})")
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingBackend(
            f"backend {name}: the package is not installed (run: pip install {name})"
        ) from None
    if name == "torch":
        from sabia.core.ops.device_torch import TorchOps

        return TorchOps
    from sabia.core.ops.device_jax import JaxOps

    return JaxOps


def build_ops(
    backend: str,
    spec: ModelSpec | None = None,
    *,
    precision: Precision | None = None,
    seed: int = 0,
    mesh: Callable[..., Ops] | None = None,
    stage: Stage | None = None,
    adapters: LoraConfig | None = None,
    record: Rule | None = None,
    exact: bool = False,
) -> Ops:
    """Operations of `torch` or `jax`.

    precision: rounds the products of the matrices of `spec` (needed with it) and the rows of the
    embedding; seed: of its random bits. mesh: a class of operations over a mesh
    (core.parallel.mesh_ops_torch or _jax) with its arguments bound; None: one device. stage: a part
    of the layers. adapters: for parameters that hold LoRA matrices. record: a rule that sees every
    product of the model first. exact: those of core.ops.exact_torch (a mesh has its own).
    """
    one_device = operations_class(backend)
    if exact and mesh is None:
        from sabia.core.ops.exact_torch import Exact

        one_device = Exact
    ops = (mesh or one_device)(stage=stage)
    if spec is not None:
        over = Mesh() if backend == "jax" else getattr(ops, "mesh", Mesh())  # JAX arrays are whole
        ops.sizes = axis_sizes(spec, over)
    ops.activations = None if precision is None else precision.compute
    chain = (
        record,
        None if adapters is None else LowRankAdapter(adapters.scale),
        *ops.mesh_rules(),
        None if spec is None or precision is None else _rounding(backend, spec, precision, seed),
    )
    ops.set_rules([rule for rule in chain if rule is not None])
    return ops


def ops_as_served(
    backend: str, spec: ModelSpec, adapters: Rule | None = None, ops: Ops | None = None
) -> Ops:
    """Operations on one device, or `ops` of a mesh, that round the inputs of products as the config
    of a quantized model says; those of `load_ops` for other models. UsageError where the backend
    does not. adapters: a rule before all others, which sees inputs that are not rounded."""
    from sabia.core.ops.served_inputs import RoundedInputs, input_formats

    formats = input_formats(spec)
    if formats and backend != "torch":
        label = min(form.rule.label() for form in formats.values())
        raise UsageError(
            f"--backend: {backend} does not round activations to {label}, as "
            "servers of this quantized model do (expected torch)"
        )
    ops = ops or build_ops(backend)
    for tensor in spec.tensors() if formats else ():
        group = formats[tensor.name].rule.group if tensor.name in formats else None
        columns = tensor.shape[-1] // ops.input_parts(tensor.name)
        if group and columns % group:
            raise UsageError(
                f"{tensor.name}: {columns:,} inputs on a device, rounded in groups of {group} "
                "(expected whole groups)"
            )
    rounding = RoundedInputs(formats, ops.largest_input) if formats else None
    rules = (adapters, rounding, *ops.mesh_rules())
    ops.set_rules([rule for rule in rules if rule is not None])
    return ops


def _rounding(
    backend: str, spec: ModelSpec, precision: Precision, seed: int
) -> RoundedProducts | None:
    """The rule of a precision; None for one that rounds no operands."""
    names = quantized_weights(spec, precision)
    if not names:
        return None
    if backend == "jax":
        from sabia.core.ops.rounding_jax import JaxRounding

        return JaxRounding(precision, names, seed)
    from sabia.core.ops.device_torch import default_device
    from sabia.core.ops.rounding_torch import TorchRounding

    return TorchRounding(precision, names, seed, default_device())


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


def describe_products(precision: Precision, device: "torch.device") -> str:
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
