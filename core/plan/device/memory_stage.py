"""The stages of a pipeline that can be the fullest: what each holds, and how much is in flight.

Under 1F1B (arXiv 2006.09503) stage r of p holds the activations of p - r micro-batches; with v
virtual stages a device (arXiv 2104.04473) of 2(p-1-r) + (v-1)p + 1 runs of its L/(pv) layers, that
is of p + (p-1)/v micro-batches on the first (arXiv 2205.05198, section 4.2.3); never of more
than a step has. Where the depth does not divide, the first and the last stage, which also hold the
embedding and the head, take the shorter runs (arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number, choose, larger, rounded_up, smaller

FEW = 1 / 8


@dataclass(frozen=True)
class Stage:
    """layers: how many of the model's it runs; leading: dense ones of them, before a mixture's.

    in_flight: micro-batches whose activations it holds. embedding, head: 1 where it has them.
    """

    name: Number
    layers: Number
    leading: Number
    in_flight: Number
    embedding: Number
    head: Number


def stages_of(workload: Workload, layout: Layout) -> Iterator[Stage]:
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
    yield Stage(name, ends, leading, _in_flight(layout, 0, passes), 1, only)
    if not hasattr(pipe, "shape") and pipe == 1:
        return
    last = larger(0, pipe - 1)
    yield Stage("last", ends, only * leading, _in_flight(layout, last, passes), only, 1)
    middle = choose(pipe > 2, longest, 0)
    yield Stage("second", middle, 0, _in_flight(layout, 1, passes), 0, 0)


def leading_kinds(model: Architecture) -> tuple[LayerKind, ...]:
    """Dense layers of a mixture that are so few that they are its first (as DeepSeek-V3's)."""
    dense = tuple(kind for kind in model.layers if not kind.experts)
    few = sum(kind.count for kind in dense) <= model.depth * FEW
    return dense if few and len(dense) < len(model.layers) else ()


def over_layers(model: Architecture, stage: Stage, of: Callable[[LayerKind], Number]) -> Number:
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
