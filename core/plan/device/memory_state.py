"""Stages of a pipeline, the terms of a device's memory, and its weights, gradients and optimizer.

Of the stages those that can be the fullest are weighed. Under 1F1B (arXiv 2006.09503) stage r of p
holds the activations of p - r micro-batches; with v virtual stages a device (arXiv 2104.04473) of
2(p-1-r) + (v-1)p + 1 runs of its L/(pv) layers, that is of p + (p-1)/v micro-batches on the first
(arXiv 2205.05198, section 4.2.3); never of more than a step has. Where the depth does not divide,
the first and the last stage, which also hold the embedding and the head, take the shorter runs
(arXiv 2407.21783, section 3.3.2).

Dense weights are split over tensor and, by layers, over pipe; experts over the expert ranks and
tensor besides. What the zero level names (arXiv 1910.02054: 1 optimizer, 2 gradients, 3 weights) is
split over fsdp, too, and over context and (dense weights) expert where the software folds these
axes into it. The embedding is on the first stage, the head on the last, neither divided by layers.
Projections down to the latents of an attention are the same on all tensor ranks. Experts count
whole: one that a token does not visit still takes its room.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.device.layout import Layout, Setting, Workload
from sabia.core.plan.elementwise import Number, choose, larger, rounded_up, smaller

FEW = 1 / 8


@dataclass(frozen=True)
class PipelineStage:
    """layers: how many of the model's it runs; leading: dense ones of them, before a mixture's.

    in_flight: micro-batches whose activations it holds. embedding, head: 1 where it has them.
    """

    name: Number
    layers: Number
    leading: Number
    in_flight: Number
    embedding: Number
    head: Number


def stages_of(workload: Workload, layout: Layout) -> Iterator[PipelineStage]:
    """The first stage, the last, and the second as one of the middle."""
    pipe, depth = layout.pipe, workload.architecture.depth
    passes = larger(1, layout.accumulation(workload.batch_rows))
    longest = rounded_up(depth / pipe)
    shortest = depth // pipe
    fits = (pipe - 2) * longest + 2 * shortest >= depth
    ends = choose(fits, shortest, longest)
    only = choose(pipe == 1, 1, 0)
    name = choose(pipe == 1, "only", "first")
    leading = smaller(ends, sum(kind.count for kind in leading_kinds(workload.architecture)))
    yield PipelineStage(name, ends, leading, _in_flight(layout, 0, passes), 1, only)
    if not hasattr(pipe, "shape") and pipe == 1:
        return
    last = larger(0, pipe - 1)
    yield PipelineStage("last", ends, only * leading, _in_flight(layout, last, passes), only, 1)
    middle = choose(pipe > 2, longest, 0)
    yield PipelineStage("second", middle, 0, _in_flight(layout, 1, passes), 0, 0)


def leading_kinds(model: Architecture) -> tuple[LayerKind, ...]:
    """Dense layers of a mixture that are so few that they are its first (as DeepSeek-V3's)."""
    dense = tuple(kind for kind in model.layers if not kind.experts)
    few = sum(kind.count for kind in dense) <= model.depth * FEW
    return dense if few and len(dense) < len(model.layers) else ()


def over_layers(
    model: Architecture, stage: PipelineStage, of: Callable[[LayerKind], Number]
) -> Number:
    """Sum of a figure over the stage's layers: its leading ones, and the mean of the others."""
    first = leading_kinds(model)
    others = tuple(kind for kind in model.layers if kind not in first)
    found = (stage.layers - stage.leading) * _mean(others, of)
    return found + stage.leading * _mean(first, of) if first else found


def _mean(kinds: tuple[LayerKind, ...], of: Callable[[LayerKind], Number]) -> Number:
    return sum(kind.count * of(kind) for kind in kinds) / sum(kind.count for kind in kinds)


def _in_flight(layout: Layout, stage: Number, passes: Number) -> Number:
    pipe, virtual = layout.pipe, layout.virtual
    runs = 2 * (pipe - 1 - stage) + (virtual - 1) * pipe + 1
    held = choose(virtual > 1, runs / virtual, pipe - stage)
    return smaller(passes, larger(1, held))


@dataclass(frozen=True)
class Term:
    """`bytes` on one device; an array in a search. formula: makes the text of `how` on demand."""

    name: str
    bytes: Number
    formula: Callable[[], str] = lambda: ""

    @property
    def how(self) -> str:
        """The formula with its numbers, for `--explain`."""
        return self.formula()


@dataclass(frozen=True)
class LayerFigures:
    """Of one layer on one device, before zero splits anything.

    kept: bytes a token that the policy keeps of each kind; extra: of all layers beside the model's;
    again: most bytes a token that come back in one layer's backward pass; elements: of the largest
    layer.
    """

    kept: Mapping[LayerKind, Number]
    extra: Number
    again: Number
    elements: Number


@dataclass(frozen=True)
class StageCase(Setting):
    """One device of one stage: all that a term depends on."""

    stage: PipelineStage
    layers: LayerFigures


def billions(count: float) -> str:
    """8030261248 as 8.03B; small counts as 12.6M or 4096."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:.6g}"


def ways(*splits: tuple[str, Number]) -> str:
    """' / (tensor 8 x pipe 4)' of the splits that divide; empty where none does."""
    cut = [f"{name} {size:g}" for name, size in splits if size > 1]
    return f" / ({' x '.join(cut)})" if len(cut) > 1 else f" / {cut[0]}" if cut else ""


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


def elements(model: Architecture, stage: PipelineStage) -> Elements:
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


def head_params(model: Architecture, stage: PipelineStage) -> Number:
    """The head's; a tied one is a copy of the embedding where that is on another stage."""
    tied = 0 if model.head_params else model.vocab * model.hidden
    return model.head_params + (1 - stage.embedding) * tied


def weights(case: StageCase) -> Term:
    """As the recipe keeps them."""
    return _state("weights", case, case.workload.recipe.weights, 3)


def weight_copies(case: StageCase) -> Term:
    """All weights again in the dtype of computation, where they are cast and not gathered."""
    needed = case.stack.casts_weights and case.workload.recipe.weights > case.element
    split = case.sharding > 1 if case.layout.zero >= 3 else False
    copies = _state("weight copies", case, case.element if needed else 0, 3)
    return Term(copies.name, copies.bytes * choose(split, 0, 1), copies.formula)


def gradients(case: StageCase) -> Term:
    """Of all trained parameters, reduced; adapters bring their own."""
    trained = case.workload.adapter_params is None
    return _state("gradients", case, case.workload.recipe.gradients if trained else 0, 2)


def optimizer(case: StageCase) -> Term:
    """Master weights and moments."""
    trained = case.workload.adapter_params is None
    return _state("optimizer", case, case.workload.recipe.optimizer if trained else 0, 1)


def trained_elements(case: StageCase) -> Number:
    """Parameters whose update one device computes."""
    if case.workload.adapter_params is not None:
        return case.workload.adapter_params
    return _on_device(elements(case.model, case.stage), case, level=1)


def _on_device(found: Elements, case: StageCase, level: int) -> Number:
    return sum(
        count / math.prod(size for _, size in cut) for _, count, cut in _shares(found, case, level)
    )


def _shares(found: Elements, case: StageCase, level: int) -> Iterator[tuple[str, Number, Cuts]]:
    """What of the elements is cut in which ways."""
    split, tensor = case.layout.zero >= level, ("tensor", case.layout.tensor)
    zero = ("zero", case.sharding if split else 1)
    experts = ("zero", case.expert_sharding if split else 1)
    yield "", found.dense, (tensor, zero)
    yield "to latents ", found.down, (zero,)
    yield "experts ", found.experts, (("expert", case.layout.expert), tensor, experts)


def _state(name: str, case: StageCase, size: float, level: int) -> Term:
    found = elements(case.model, case.stage)

    def formula() -> str:
        return " + ".join(
            f"{what}{billions(count)} x {size:g} B{ways(*cut)}"
            for what, count, cut in _shares(found, case, level)
            if count
        )

    return Term(name, _on_device(found, case, level) * size, formula)


def adapters(case: StageCase) -> Term:
    """Weights, gradients and optimizer state of LoRA's adapters."""
    params, layout = case.workload.adapter_params or 0, case.layout
    zero = case.sharding if layout.zero >= 3 else 1
    over = (("tensor", layout.tensor), ("pipe", layout.pipe), ("zero", zero))
    return Term(
        "adapters",
        params * ADAPTER_BYTES / (layout.tensor * layout.pipe * zero),
        lambda: f"{billions(params)} x {ADAPTER_BYTES} B{ways(*over)}",
    )
