"""Wrap a backend's operations in a precision, and describe which hardware units compute it."""

from typing import Any

from sabia.core.model.precision import PlainOps, Precision, quantized_weights
from sabia.core.spec.model import ModelSpec


def wrap(ops: Any, spec: ModelSpec, precision: Precision, seed: int = 0) -> Any:
    """Operations that compute the model's products in `precision`.

    ops: of either backend, plain or of a mesh. The returned object has the same attributes and
    `at(step, part=0)`, which returns the operations of one update: call it before each update, or
    under jit with traced integers. `part` separates the random bits within a step: micro-batches
    and, in torch, processes. On a torch mesh a scale is computed from the process's own shard.
    """
    names = quantized_weights(spec, precision)
    if not names:
        return PlainOps(ops)
    if ops.name == "torch":
        from sabia.core.model.precision_torch import TorchQuantizedOps

        return TorchQuantizedOps(ops, precision, names, seed)
    from sabia.core.model.precision_jax import JaxQuantizedOps

    return JaxQuantizedOps(ops, precision, names, seed)


def describe(precision: Precision, device: Any) -> str:
    """What computes the products on a device, for example `fp8: emulated on cpu`.

    device: a torch device (or its name, `cuda:0`) or a JAX device.
    """
    if precision.qat is not None:
        return f"{precision.name}: weights rounded as {precision.qat.kind}, products in bf16"
    if precision.recipe is None:
        return f"{precision.name}: products in {precision.compute}"
    if isinstance(device, str) or type(device).__module__.partition(".")[0] == "torch":
        from sabia.core.model.precision_torch_units import describe_units
    else:
        from sabia.core.model.precision_jax import describe_units
    return f"{precision.name}: {describe_units(precision.recipe, device)}"
