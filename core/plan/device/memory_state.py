"""Weights, gradients and optimizer state of one device.

Dense weights are split over tensor and, by layers, over pipe; experts over the expert ranks and
tensor besides. What the zero level names (arXiv 1910.02054: 1 optimizer, 2 gradients, 3 weights) is
split over fsdp, too, and over context and (dense weights) expert where the software folds these
axes into it. The embedding is on the first stage, the head on the last, neither divided by layers.
Projections down to the latents of an attention are the same on all tensor ranks. Experts count
whole: one that a token does not visit still takes its room.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.device.memory_stage import Stage, over_layers
from sabia.core.plan.device.memory_term import Case, Term, billions, ways
from sabia.core.plan.elementwise import Number, choose

Cuts = tuple[tuple[str, Number], ...]
ADAPTER_BYTES = 16  # of an element of LoRA: bf16 weight and gradient, fp32 master, m and v


@dataclass(frozen=True)
class Elements:
    """Parameters on one stage before any other axis divides them.

    down: of latent attention, from the stream to its latents; dense: all others but the experts.
    """

    dense: Number
    experts: Number
    down: Number


def elements(model: Architecture, stage: Stage) -> Elements:
    """Of the stage's layers, its embedding, its head and what follows."""
    outer = stage.embedding * model.embedding_params + stage.head * head_params(model, stage)
    extra = sum(kind.count * (kind.params - kind.expert_params) for kind in model.extra)
    after = extra + model.extra_params + model.other_params
    down = over_layers(model, stage, lambda kind: downward_params(kind, model.hidden))
    dense = over_layers(model, stage, lambda kind: kind.params - kind.expert_params)
    experts = sum(kind.count * kind.expert_params for kind in model.extra)
    return Elements(
        dense=dense - down + outer + stage.head * after,
        experts=over_layers(model, stage, lambda kind: kind.expert_params) + stage.head * experts,
        down=down,
    )


def downward_params(kind: LayerKind, hidden: int) -> int:
    """Of a latent attention's projections from the stream to its latents and the rotated key."""
    return hidden * (kind.query_latent + kind.cache_width) if kind.key_latent else 0


def head_params(model: Architecture, stage: Stage) -> Number:
    """The head's; a tied one is a copy of the embedding where that is on another stage."""
    tied = 0 if model.head_params else model.vocab * model.hidden
    return model.head_params + (1 - stage.embedding) * tied


def weights(case: Case) -> Term:
    """As the recipe keeps them."""
    return _state("weights", case, case.workload.recipe.weights, 3)


def weight_copies(case: Case) -> Term:
    """All weights again in the dtype of computation, where they are cast and not gathered."""
    needed = case.stack.casts_weights and case.workload.recipe.weights > case.element
    split = case.sharding > 1 if case.layout.zero >= 3 else False
    copies = _state("weight copies", case, case.element if needed else 0, 3)
    return Term(copies.name, copies.bytes * choose(split, 0, 1), copies.formula)


def gradients(case: Case) -> Term:
    """Of all trained parameters, reduced; adapters bring their own."""
    trained = case.workload.adapter_params is None
    return _state("gradients", case, case.workload.recipe.gradients if trained else 0, 2)


def optimizer(case: Case) -> Term:
    """Master weights and moments."""
    trained = case.workload.adapter_params is None
    return _state("optimizer", case, case.workload.recipe.optimizer if trained else 0, 1)


def trained_elements(case: Case) -> Number:
    """Parameters whose update one device computes."""
    if case.workload.adapter_params is not None:
        return case.workload.adapter_params
    return _on_device(elements(case.model, case.stage), case, level=1)


def _on_device(found: Elements, case: Case, level: int) -> Number:
    return sum(
        count / math.prod(size for _, size in cut) for _, count, cut in _shares(found, case, level)
    )


def _shares(found: Elements, case: Case, level: int) -> Iterator[tuple[str, Number, Cuts]]:
    """What of the elements is cut in which ways."""
    split, tensor = case.layout.zero >= level, ("tensor", case.layout.tensor)
    zero = ("zero", case.sharding if split else 1)
    experts = ("zero", case.expert_sharding if split else 1)
    yield "", found.dense, (tensor, zero)
    yield "to latents ", found.down, (zero,)
    yield "experts ", found.experts, (("expert", case.layout.expert), tensor, experts)


def _state(name: str, case: Case, size: float, level: int) -> Term:
    found = elements(case.model, case.stage)

    def formula() -> str:
        return " + ".join(
            f"{what}{billions(count)} x {size:g} B{ways(*cut)}"
            for what, count, cut in _shares(found, case, level)
            if count
        )

    return Term(name, _on_device(found, case, level) * size, formula)


def adapters(case: Case) -> Term:
    """Weights, gradients and optimizer state of LoRA's adapters."""
    params, layout = case.workload.adapter_params or 0, case.layout
    zero = case.sharding if layout.zero >= 3 else 1
    over = (("tensor", layout.tensor), ("pipe", layout.pipe), ("zero", zero))
    return Term(
        "adapters",
        params * ADAPTER_BYTES / (layout.tensor * layout.pipe * zero),
        lambda: f"{billions(params)} x {ADAPTER_BYTES} B{ways(*over)}",
    )
