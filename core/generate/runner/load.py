"""The runner of a backend."""

from sabia.core.generate.runner.interface import Model, Runner


def load_runner(model: Model, capacity: int, context: int) -> Runner:
    """A runner of the backend of the model's operations."""
    from sabia.core.generate.runner.runner_torch import TorchRunner

    return TorchRunner(model, capacity, context)
