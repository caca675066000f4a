"""The plain plan's counts of a config.json, from its Architecture."""

from sabia.core.plan.counting.known import architecture_of
from sabia.core.plan.counting.operations import training_flops_per_token
from sabia.core.plan.request import Counts


def count_model(path: str, sequence: int) -> Counts:
    """Counts of the config.json at `path` (or in that directory).

    Operations are in the 6ND convention; the share that attention would add, causally counted, is
    at `sequence` tokens. Raises UsageError or BadData as architecture_of does.
    """
    architecture = architecture_of(path)
    plain = training_flops_per_token(architecture, sequence, "6nd")
    causal = training_flops_per_token(architecture, sequence, "causal")
    return Counts(
        params=architecture.params,
        active_params=round(architecture.active_params),
        matmul_params=round(architecture.matmul_params),
        layers=architecture.depth,
        hidden=architecture.hidden,
        origin=f"counted from a {architecture.name} config",
        attention_share=causal / plain - 1,
    )
