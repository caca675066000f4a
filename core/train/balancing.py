"""Balance of experts without a loss: a bias on each expert's score that follows its load.

After a step, an expert that got less than the mean load of its layer has its bias raised by
`rate`, one that got more has it lowered (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al.
2024, arXiv 2408.15664, algorithm 1). The bias changes which experts are chosen, never their
shares, and no gradient flows into it: its tensors are those with `trained` False.
"""

from typing import Any

from sabia.core.spec.experts import Experts
from sabia.core.spec.model import ModelSpec


def correction_names(spec: ModelSpec) -> tuple[str | None, ...]:
    """For each row of a loss's `expert_load`, the tensor that it moves (None: none there)."""
    routers = (
        (index, layer.mlp.router)
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mlp, Experts)
    )
    names = spec.layer_names()
    return tuple(
        names[index]["mlp.correction"] if router.correction else None for index, router in routers
    )


def balanced_bias(bias: Any, load: Any, rate: float) -> Any:
    """bias[E] + rate · sign(mean load - load[E]); arrays of NumPy, torch or JAX alike.

    load: token copies that each expert got in the whole (global) batch of the step.
    """
    step, mean = bias * 0 + rate, load.mean()  # of the bias's dtype
    return bias + (load < mean) * step - (load > mean) * step
