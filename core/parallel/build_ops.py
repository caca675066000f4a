"""The one place where the operations of a forward pass are composed.

A product passes the rules in this order, each of which may change its operands or its results:

  record           sees the model's own products: calibration, activations for bisecting
  adapter          adds low-rank products, which pass all rules behind it like any others
  tensor parallel  splits products over the processes of a torch mesh (in JAX the compiler does)
  precision        rounds what this process multiplies
  kernel           the backend's product (`Ops.kernel`)
"""

from collections.abc import Callable
from importlib import import_module

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.model.lora import LoraConfig
from sabia.core.ops.base import Ops, Stage
from sabia.core.ops.precision import Precision, RoundedProducts, quantized_weights
from sabia.core.ops.product import LowRankAdapter, Rule
from sabia.core.parallel.mesh import Mesh, axis_sizes
from sabia.core.spec.model import ModelSpec

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
