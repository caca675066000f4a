"""Problems that every optimizer is tried on: parameters, gradients, rules."""

import numpy as np

from sabia.core.train.optimizer.config import OptimizerConfig, Rule

SHAPES = {"wide": (12, 20), "tall": (20, 12), "square": (16, 16), "vector": (20,)}
MATRICES = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
KINDS = ("adamw", "muon", "lion", "adafactor", "soap")
SOAP = {"beta1": 0.95, "beta2": 0.95, "soap_every": 3}
STEPS = 10
LR = 2e-3


def rule(kind: str, decay: float = 0.1, scale: float = 1.0, **settings) -> Rule:
    """A rule of this kind; SOAP refreshes its bases every three updates."""
    given = SOAP if kind == "soap" else {}
    return Rule(kind, decay, OptimizerConfig(name=kind, settings=given | settings), scale)


def problem(shapes=SHAPES, steps: int = STEPS, seed: int = 0):
    """Parameters, and per step the gradients: a fixed part of falling spectrum, and noise."""
    rng = np.random.default_rng(seed)

    def spread(shape):
        x = rng.standard_normal(shape)
        return x * 0.8 ** np.arange(shape[-1]) if len(shape) > 1 else x

    fixed = {k: spread(s) for k, s in shapes.items()}
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    grads = [
        {k: (fixed[k] + 0.5 * spread(s)).astype(np.float32) * 0.1 for k, s in shapes.items()}
        for _ in range(steps)
    ]
    return params, grads
