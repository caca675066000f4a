"""Load balancing of experts without an auxiliary loss: a bias on each expert's router score.

After a step, the bias of an expert whose load was below the mean of its layer is raised by `rate`,
the bias of one above the mean is lowered (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al.
2024, arXiv 2408.15664, algorithm 1). The bias changes which experts are selected, never their
gates, and has no gradient: its tensors are those with `trained` False.
"""

from typing import Any

from sabia.core.ops.product import Array
from sabia.core.spec.layers import Experts
from sabia.core.spec.model import ModelSpec


def bias_names(spec: ModelSpec) -> tuple[str | None, ...]:
    """For each row of a loss's `expert_load`, the name of the bias (None: the layer has none)."""
    biases: list[str | None] = []
    for names, layer in zip(spec.layer_names(), spec.layers, strict=True):
        if isinstance(layer.mlp, Experts):
            biases.append(names["mlp.correction"] if layer.mlp.router.expert_bias else None)
    return tuple(biases)


def balanced_bias(bias: Array, load: Array, rate: float) -> Any:
    """bias[E] + rate · sign(mean load - load[E]); for arrays of NumPy, torch or JAX.

    load: assignments of each expert in the whole (global) batch of the step.
    """
    step, mean = bias * 0 + rate, load.mean()  # in the bias's dtype
    return bias + (load < mean) * step - (load > mean) * step
