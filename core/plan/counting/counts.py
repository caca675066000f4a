"""Count a model from its config.json, with the same table that builds and trains it."""

from sabia.core import spec
from sabia.core.plan.request import Counts


def count_model(path: str, sequence: int) -> Counts:
    """Counts of the config.json at `path` (or in that directory).

    Operations are those of spec.training_flops_per_token in the 6ND convention; the share that
    attention would add is at `sequence` tokens. Raises UsageError or BadData as load_spec does.
    """
    model = spec.load_spec(path)
    plain = spec.training_flops_per_token(model, sequence, "6nd")
    causal = spec.training_flops_per_token(model, sequence, "causal")
    return Counts(
        params=spec.parameter_count(model),
        active_params=spec.active_parameter_count(model),
        matmul_params=spec.matmul_parameter_count(model),
        layers=len(model.layers),
        hidden=model.hidden_size,
        origin=f"counted from a {model.family} config",
        attention_share=causal / plain - 1,
    )
