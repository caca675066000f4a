"""The runner of a backend."""

from sabia.core.generate.runner.interface import Model, Runner


def load_runner(
    model: Model, capacity: int, context: int, pages: int = 0, states: int = 0, slack: int = 0
) -> Runner:
    """A runner of the backend of the model's operations: a cache of `capacity` rows of `context`
    positions, and so many pages and states of what prompts begin with."""
    if model.ops.name == "jax":
        from sabia.core.generate.runner.runner_jax import JaxRunner

        return JaxRunner(model, capacity, context, pages, states, slack)
    from sabia.core.generate.runner.runner_torch import TorchRunner

    return TorchRunner(model, capacity, context, pages, states, slack)
