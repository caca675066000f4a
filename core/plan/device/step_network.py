"""Time of collectives: bytes over the bandwidth of their group of ranks.

Rings (arXiv 1910.02054, 2205.05198): all-gather or reduce-scatter of V bytes over n ranks moves
V(n-1)/n per rank, all-reduce twice that. Ranks are numbered with tensor fastest, then context,
expert, fsdp, data, pipe (core.parallel.mesh), so a group of n ranks with a `stride` has
domain/stride of them in one scale-up domain (the switch of a node or rack, a TPU pod). Inside it a
rank has the chip's scale-up bandwidth. A ring across domains uses as many network cards as it has
ranks in a domain:

  bandwidth = min(scale-up, ranks in the domain x network bandwidth of a chip)

except for software with one card per group (Stack.bare_network). In a torus of k axes (TPU) a group
over n of the slice's N chips uses k·ln n / ln N of the axes, at least one, and that share of the
links. All-to-all sends each peer 1/n; the parts inside and outside the domain are sent at the same
time, the latter with the chip's own network bandwidth.

Per layer and micro-batch of T tokens per device (t tensor ranks, hidden h, b bytes per element):
  tensor    4 pairs of gather and scatter (2 without a routed MLP's), 6 where inputs of both
            products are recomputed: each 2·(t-1)/t·T·h·b; arXiv 2205.05198, section 4.2.2
            4 more, of k·T·h·b, where each rank has a slice of all experts and a part of the tokens,
            which are gathered after the all-to-all (arXiv 2504.14960, sections 3.3 and 4.4)
  context   ring of keys and values: (c-1)·T·(key + value)/t·b forward, twice that backward
  expert    dispatch and combine, forward and backward: 4 all-to-all of T/t·k·h·b, less where a
            token is sent once to each rank and node (github.com/deepseek-ai/DeepEP)
Per step, of the parameters P of a device:
  ZeRO-3    gathers of P weights forward and backward and a scatter of P gradients, every
            micro-batch. This project's trainer (Stack.wide_embedding) gathers embedding and head
            once, the embedding in FP32; a tied head gathers that again and scatters a gradient of
            its own
  ZeRO-2    one gather less: weights stay from forward to backward
            (if pipeline stages keep them whole, all of this once per step)
  below     once: gradients are scattered and weights gathered (ZeRO-1), or all-reduce of gradients
  replicas  once: all-reduce between the groups that have the same shards
Of a collective that overlaps with computation, the share `exposed` still adds time, or the part
that takes longer than the computation.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sabia.core.plan.chips import Chip, known
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Layout, Stack
from sabia.core.plan.device.memory_state import FP32
from sabia.core.plan.device.step_work import Timed
from sabia.core.plan.elementwise import Number, choose, larger, logarithm, smaller


@dataclass(frozen=True)
class RankGroup:
    """A group of `ranks`, at distances of `stride` devices."""

    ranks: Number
    stride: Number

    def domain_ranks(self, chip: Chip) -> Number:
        """Ranks in one scale-up domain."""
        return smaller(self.ranks, larger(1, chip.scale_up_domain / self.stride))

    def leaves(self, chip: Chip) -> Number:
        """Whether the group is larger than the scale-up domain."""
        return (self.ranks > 1) & (self.ranks * self.stride > chip.scale_up_domain)


NUMBERED = ("tensor", "context", "expert", "fsdp", "data", "pipe")  # the fastest first


def group(layout: Layout, *axes: str) -> RankGroup:
    """The ranks along neighbouring `axes`, the fastest first."""
    faster = NUMBERED[: NUMBERED.index(axes[0])]
    ranks, stride = (math.prod(getattr(layout, axis) for axis in some) for some in (axes, faster))
    return RankGroup(ranks, stride)


def bandwidth(who: RankGroup, chips: Number, chip: Chip, stack: Stack | None) -> Number:
    """Nominal bytes per second and rank, unidirectional; stack: of a ring, None for one pair.

    Raises UsageError.
    """
    inside = _inside(who, chips, chip)
    if not _any(who.leaves(chip)):
        return inside
    cards = who.domain_ranks(chip) if stack and not stack.bare_network else 1
    outside = cards * known(chip, "network_bytes_per_s")
    return choose(who.leaves(chip), smaller(inside, outside), inside)


def _inside(who: RankGroup, chips: Number, chip: Chip) -> Number:
    """Bytes per second and rank within a domain: over all links, or those of a torus's axes."""
    whole = known(chip, "scale_up_bytes_per_s")
    if not chip.torus_axes:
        return whole
    slice_chips = smaller(chips, chip.scale_up_domain)
    share = logarithm(smaller(who.ranks, slice_chips)) / larger(logarithm(slice_chips), 1e-9)
    return whole * larger(1 / chip.torus_axes, smaller(1, share))


def gather_s(size: Number, who: RankGroup, chips: Number, chip: Chip, stack: Stack) -> Number:
    """Seconds of an all-gather or reduce-scatter of `size` bytes over the group."""
    if not _any(who.ranks > 1):
        return 0 * who.ranks
    return size * (who.ranks - 1) / who.ranks / bandwidth(who, chips, chip, stack)


def exchange_s(
    size: Number, who: RankGroup, chips: Number, chip: Chip, copies: int | None = None
) -> Number:
    """Seconds of an all-to-all in which each rank sends `size` bytes, evenly to all ranks.

    copies: `size` has so many copies of each token, and a token is sent only once to each rank and
    to each domain with any of them (None: every copy is sent).
    """
    if not _any(who.ranks > 1):
        return 0 * who.ranks
    near = who.domain_ranks(chip)
    local = size * _once(who.ranks, copies) * (near - 1) / who.ranks / _inside(who, chips, chip)
    if not _any(who.leaves(chip)):
        return local
    away = size * _once(who.ranks / near, copies) * (1 - near / who.ranks)
    return larger(local, away / known(chip, "network_bytes_per_s"))


def _once(targets: Number, copies: int | None) -> Number:
    """Expected number of different targets of a token's copies (at random), over the copies."""
    return 1 if copies is None else targets * (1 - (1 - 1 / targets) ** copies) / copies


def send_s(size: Number, layout: Layout, chip: Chip) -> Number:
    """Seconds to send `size` bytes to the next stage of the pipeline; 0 without one."""
    stages = group(layout, "pipe")
    if not _any(stages.ranks > 1):
        return 0 * stages.ranks
    return size / bandwidth(stages, layout.chips, chip, None)


def _any(condition: Number) -> bool:
    return bool(condition.any()) if hasattr(condition, "any") else bool(condition)


def tensor_s(at: Timed, kind: LayerKind) -> Number:
    """Exposed time of gathers and scatters of a layer over the tensor ranks."""
    # routed tokens may be left out of them
    routed_apart = at.layout.experts_over_tensor or at.layout.sequence_parallel
    pairs: float = 2 if kind.experts and not kind.mlp_width and routed_apart else 4
    pairs = pairs * (1.5 if at.layout.recompute == "full" else 1)
    size = at.tokens * at.model.hidden * at.element
    seconds = 2 * pairs * _ring(at, size, group(at.layout, "tensor"))
    return seconds * (at.constants.exposed if at.stack.hides_tensor else 1)


def context_s(at: Timed, kind: LayerKind, attention: Number) -> Number:
    """Exposed time of the ring of keys and values, which overlaps with attention."""
    who = group(at.layout, "context")
    whole = who.ranks * at.tokens * (kind.key_width + kind.value_width) * at.element
    return _exposed(at, 3 * _ring(at, whole / at.layout.tensor, who), attention, hidden=True)


def expert_s(at: Timed, kind: LayerKind) -> Number:
    """Exposed time of tokens that are sent to their experts and back."""
    if not kind.experts:
        return 0
    folded = at.layout.experts_over_tensor
    who = RankGroup(at.layout.expert_ranks, 1 if folded else at.layout.tensor * at.layout.context)
    sent = at.tokens / (at.layout.tensor if folded else at.token_split) * kind.top_k
    size = sent * at.model.hidden * at.element
    times = 6 if at.layout.recompute == "full" else 4
    copies = kind.top_k if at.stack.sends_once else None
    seconds = exchange_s(size, who, at.layout.chips, at.chip, copies) / at.constants.collective
    seconds = seconds * (1 - at.stack.expert_overlap)
    if not folded and at.layout.sequence_parallel:  # tensor ranks have slices of each expert
        whole = at.tokens * kind.top_k * at.model.hidden * at.element
        seconds = seconds + _ring(at, whole, group(at.layout, "tensor"))
    return times * seconds


def stage_s(at: Timed) -> Number:
    """Exposed time of sends between stages for one micro-batch; each tensor rank sends a part."""
    size = at.tokens * at.model.hidden * at.element / at.layout.tensor
    seconds = 2 * at.layout.virtual * send_s(size, at.layout, at.chip) / at.constants.collective
    return seconds * (at.layout.pipe > 1) * (at.constants.exposed if at.stack.hides_pipe else 1)


def shard_s(at: Timed, beside: Number) -> Number:
    """Exposed time of gathers and scatters of split weights, per micro-batch.

    beside: seconds of computation that can overlap.
    """
    if at.layout.zero < 2:
        return 0
    gathers = 2 if at.layout.zero == 3 else 1
    tables = _tables(at) / (at.layout.tensor * at.layout.pipe) if at.stack.wide_embedding else 0
    total: Number = 0
    for params, shards, _ in _weights(at):
        wire = gathers * at.element * params + at.stack.reduce_bytes * _trained(at, params)
        total = total + _ring(at, wire + tables, shards)
        tables = 0  # not of experts
    if at.stack.pipe_keeps_whole:  # one gather for all micro-batches of a step
        passes = larger(1, at.layout.accumulation(at.workload.batch_rows))
        total = total / choose(at.layout.pipe > 1, passes, 1)
    if at.model.expert_params and at.stack.hides_data:
        return larger(total * at.constants.exposed_routed, total - beside)
    return _exposed(at, total, beside, hidden=at.stack.hides_data)


def _tables(at: Timed) -> Number:
    """Bytes that gathers and scatters of embedding and head take more than those of layers."""
    model = at.model
    table = 0 if model.head_params else model.vocab * model.hidden  # of a tied head, once more
    once = FP32 * (model.embedding_params + table) + at.element * model.head_params
    once = once + at.stack.reduce_bytes * _trained(at, table)
    return once - 2 * at.element * (model.embedding_params + model.head_params)


def replica_s(at: Timed, beside: Number) -> Number:
    """Once per step: gradients (and weights with ZeRO-1) between ranks with the same shards."""
    layout, recipe = at.layout, at.workload.recipe
    gradient = recipe.gradients or at.element
    trained = [(_trained(at, params), *groups) for params, *groups in _weights(at)]
    if layout.zero < 2:
        both = gradient + (gradient if layout.zero == 0 else at.element)
        total = sum(_ring(at, both * params, everyone) for params, _, everyone in trained)
        return _exposed(at, total, beside, hidden=at.stack.hides_data)
    dense, routed = (params / shards.ranks for params, shards, _ in trained)
    total = 2 * gradient * _ring(at, dense + routed, group(layout, "data"))
    near = [axis for axis in ("context", "expert") if axis not in _folded(at)]
    if near:
        total = total + 2 * gradient * _ring(at, dense, group(layout, *near))
    return _exposed(at, total, beside, hidden=at.stack.hides_data)


def optimizer_s(at: Timed) -> Number:
    """The optimizer step: reads gradients, weights and state, writes state and weights."""
    recipe, split = at.workload.recipe, at.layout.zero > 0
    parts = _weights(at)
    held = sum(_trained(at, params) / (shards.ranks if split else 1) for params, shards, _ in parts)
    moved = 2 * recipe.optimizer + 2 * recipe.weights + recipe.gradients
    return held * moved / known(at.chip, "hbm_bytes_per_s")


def _folded(at: Timed) -> tuple[str, ...]:
    """Further axes over which the software splits dense weights like fsdp."""
    folded = {"context": at.stack.folded_context, "expert": at.stack.folded_experts}
    return tuple(axis for axis, yes in folded.items() if yes)


def _weights(at: Timed) -> Iterator[tuple[Number, RankGroup, RankGroup]]:
    """A device's parameters outside the routed experts, and those of its experts.

    Each with the ranks over which fsdp splits them, and all that have the same ones without it.
    """
    model, layout, folded = at.model, at.layout, _folded(at)
    dense = (model.params - model.expert_params) / (layout.tensor * layout.pipe)
    everyone = group(layout, "context", "expert", "fsdp", "data")
    yield dense, group(layout, *folded, "fsdp"), everyone
    routed = model.expert_params / (layout.expert * layout.tensor * layout.pipe)
    own = [axis for axis in folded if axis != "expert"]
    yield routed, group(layout, *own, "fsdp"), group(layout, "fsdp", "data")


def _trained(at: Timed, params: Number) -> Number:
    """The trained part of `params`."""
    if at.workload.adapter_params is None:
        return params
    return params * (at.workload.adapter_params / at.model.params)


def _ring(at: Timed, size: Number, who: RankGroup) -> Number:
    return gather_s(size, who, at.layout.chips, at.chip, at.stack) / at.constants.collective


def _exposed(at: Timed, seconds: Number, beside: Number, *, hidden: bool) -> Number:
    """Exposed time of a collective, which overlaps with `beside` seconds if `hidden`."""
    if not hidden:
        return seconds
    return larger(seconds * at.constants.exposed, seconds - beside)
