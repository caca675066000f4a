"""The parameter counts of a model: from options, or counted from a config.json."""

from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.units import format_count

LEAST_PARAMS = 1000


@dataclass(frozen=True)
class ModelCounts:
    """Counts of a model: from options, or from a config.json.

    matmul_params: those of matrix products (without the input lookup; all active ones where only
    options are known). attention_share: FLOPs of causal attention at the run's sequence length,
    over those of matmul_params (None: not known).
    """

    params: float
    active_params: float
    matmul_params: float
    layers: int
    hidden: int
    origin: str
    attention_share: float | None = None


def given_counts(
    params: float | None, active: float | None = None, layers: int | None = None,
    hidden: int | None = None,
) -> ModelCounts:  # fmt: skip
    """Counts from options; dense unless `active` is given; a published shape unless given."""
    if params is None:
        raise UsageError(
            "--params: the size of the model is missing; give --params 1.6T or --model DIR, or "
            "--chips 64 --deadline 30d to be told a size"
        )
    if params < LEAST_PARAMS:
        hint = f"; did you mean {params:g}B?" if params >= 0.1 else ""
        raise UsageError(f"--params: {params:g} (expected {LEAST_PARAMS:g} or more){hint}")
    active = params if active is None else active
    if not 0 < active <= params:
        raise UsageError(
            f"--active: {format_count(active)} (expected more than 0 and at most --params "
            f"{format_count(params)})"
        )
    if layers and hidden:
        return ModelCounts(params, active, active, layers, hidden, "given")
    from sabia.core.plan.counting.assumed import nearest_shape

    shape = nearest_shape(params, active)
    sizes = layers or shape.config["num_hidden_layers"], hidden or shape.config["hidden_size"]
    return ModelCounts(params, active, active, *sizes, f"assumed as {shape.name}")


def count_model(path: str, sequence: int) -> ModelCounts:
    """Counts of the config.json at `path` (or in that directory).

    attention_share is at `sequence` tokens. Raises UsageError or BadData as architecture_of does.
    """
    from sabia.core.plan.counting.known import architecture_of
    from sabia.core.plan.counting.operations import training_flops_per_token

    architecture = architecture_of(path)
    plain = training_flops_per_token(architecture, sequence, "6nd")
    causal = training_flops_per_token(architecture, sequence, "causal")
    return ModelCounts(
        params=architecture.params,
        active_params=round(architecture.active_params),
        matmul_params=round(architecture.matmul_params),
        layers=architecture.depth,
        hidden=architecture.hidden,
        origin=f"counted from a {architecture.name} config",
        attention_share=causal / plain - 1,
    )
