"""A description of the hardware units that compute the products of a precision."""

import torch

from sabia.core.ops.precision import Precision


def describe(precision: Precision, device: torch.device) -> str:
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
