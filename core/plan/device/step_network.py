"""What a device waits for: collectives, as bytes over the bandwidth that their group reaches.

Rings (arXiv 1910.02054, 2205.05198): gathering or scattering a whole of V bytes over n ranks moves
V(n-1)/n per rank, reducing to all twice that. Ranks count with tensor fastest, then context,
expert, fsdp, data, pipe (core.parallel.mesh), so a group of n ranks, `stride` apart, has
domain/stride of them in one fast domain (a node's or rack's switch, a TPU pod). Inside it a rank
has the chip's scale-up bandwidth. A ring that leaves it has as many network cards at work as ranks
of the group in the domain:

  bandwidth = min(scale-up, ranks in the domain x network share of a chip)

save for software that drives one card a group (Stack.bare_network). In a torus of k axes (TPU) a
group over n of the slice's N chips lies along k·ln n / ln N of them, at least one, and has that
share of the links. An exchange (all to all) sends each peer 1/n: its part inside the domain and
its part outside go their own ways at the same time, the latter by the chip's own network share.

Per layer and micro-batch of T tokens a device (t tensor ranks, hidden h, b bytes an element):
  tensor    4 pairs of gather and scatter (2 without a routed MLP's), 6 where both products' inputs
            are made again: each 2·(t-1)/t·T·h·b; arXiv 2205.05198, section 4.2.2
            4 more, of k·T·h·b, where each holds a slice of all experts and a part of the tokens:
            copies are gathered after the exchange (arXiv 2504.14960, sections 3.3 and 4.4)
  context   keys and values pass the ring: (c-1)·T·(key + value)/t·b forward, twice that backward
  expert    dispatch and combine, forward and backward: 4 exchanges of T/t·k·h·b, less where a
            token goes once to each rank and node (github.com/deepseek-ai/DeepEP)
Per step, of the parameters P that a device works with:
  zero 3    gathers of 2P forward and backward and a scatter of P gradients, every micro-batch;
  zero 2    one gather less: weights stay from forward to backward
            (where a pipeline's stages keep them whole, all of this once a step)
  below     gradients are scattered and weights gathered (zero 1) or gradients reduced to all once
  copies    what is held alike by several groups is reduced between them once
What software hides beside computation is seen by the share `exposed`, and where it takes longer
than the computation by the rest.
"""

import math
from dataclasses import dataclass

from sabia.core.plan.chips import Chip, known
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.step_work import Timed
from sabia.core.plan.elementwise import Number, choose, larger, smaller


@dataclass(frozen=True)
class RankGroup:
    """`ranks` that take part, each `stride` devices from the next."""

    ranks: Number
    stride: Number

    def domain_ranks(self, chip: Chip) -> Number:
        """Of these, in one fast domain."""
        return smaller(self.ranks, larger(1, chip.scale_up_domain / self.stride))

    def leaves(self, chip: Chip) -> Number:
        """Whether the group is larger than the fast domain."""
        return (self.ranks > 1) & (self.ranks * self.stride > chip.scale_up_domain)


def group(layout: Layout, *axes: str) -> RankGroup:
    """The ranks that differ along neighbouring `axes` only, the fastest first."""
    stride: Number = 1
    for axis in ("tensor", "context", "expert", "fsdp", "data", "pipe"):
        if axis == axes[0]:
            break
        stride = stride * getattr(layout, axis)
    return RankGroup(math.prod(getattr(layout, axis) for axis in axes), stride)


def bandwidth(who: RankGroup, chips: Number, chip: Chip, stack: Stack) -> Number:
    """Bytes per second and rank, one way, nominal. Raises UsageError."""
    inside = known(chip, "scale_up_bytes_per_s") * _links(who, chips, chip)
    if not _any(who.leaves(chip)):
        return inside
    cards = 1 if stack.bare_network else who.domain_ranks(chip)
    outside = cards * known(chip, "network_bytes_per_s")
    return choose(who.leaves(chip), smaller(inside, outside), inside)


def gather_s(size: Number, who: RankGroup, chips: Number, chip: Chip, stack: Stack) -> Number:
    """Seconds to gather, or to reduce and scatter, `size` bytes over the group."""
    if not _any(who.ranks > 1):
        return 0 * who.ranks
    return size * (who.ranks - 1) / who.ranks / bandwidth(who, chips, chip, stack)


def exchange_s(
    size: Number, who: RankGroup, chips: Number, chip: Chip, copies: int | None = None
) -> Number:
    """Seconds for each rank to send `size` bytes, evenly to all of the group (itself included).

    copies: so many of a token are in `size`; it is sent once to each rank, and once to each domain,
    that any of them go to (None: every copy travels).
    """
    if not _any(who.ranks > 1):
        return 0 * who.ranks
    near = who.domain_ranks(chip)
    inside = known(chip, "scale_up_bytes_per_s") * _links(who, chips, chip)
    local = size * _once(who.ranks, copies) * (near - 1) / who.ranks / inside
    if not _any(who.leaves(chip)):
        return local
    away = size * _once(who.ranks / near, copies) * (1 - near / who.ranks)
    return larger(local, away / known(chip, "network_bytes_per_s"))


def _once(places: Number, copies: int | None) -> Number:
    """Places that a token's copies go to, each to one at random, over the copies."""
    return 1 if copies is None else places * (1 - (1 - 1 / places) ** copies) / copies


def send_s(size: Number, layout: Layout, chip: Chip) -> Number:
    """Seconds to send `size` bytes to the next stage of the pipeline."""
    stages = group(layout, "pipe")
    inside = known(chip, "scale_up_bytes_per_s") * _links(stages, layout.chips, chip)
    if not _any(stages.leaves(chip)):
        return size / inside
    outside = smaller(inside, known(chip, "network_bytes_per_s"))
    return size / choose(stages.leaves(chip), outside, inside)


def _links(who: RankGroup, chips: Number, chip: Chip) -> Number:
    """Share of a chip's links that the group uses: all behind a switch, those of its axes else."""
    if not chip.torus_axes:
        return 1
    slice_chips = smaller(chips, chip.scale_up_domain)
    share = _log(smaller(who.ranks, slice_chips)) / larger(_log(slice_chips), 1e-9)
    return larger(1 / chip.torus_axes, smaller(1, share))


def _log(value: Number) -> Number:
    if hasattr(value, "shape"):
        import numpy as np

        return np.log(value)
    return math.log(value)


def _any(condition: Number) -> bool:
    return bool(condition.any()) if hasattr(condition, "any") else bool(condition)


WEIGHT_BYTES = 2


def tensor_s(at: Timed, kind: LayerKind) -> Number:
    """Gathers and scatters of a layer over the tensor ranks, as seen."""
    pairs: float = 2 if kind.experts and not kind.mlp_width and _own_way(at) else 4
    pairs = pairs * (1.5 if at.layout.recompute == "full" else 1)
    size = at.tokens * at.workload.architecture.hidden * at.element
    seconds = 2 * pairs * _ring(at, size, group(at.layout, "tensor"))
    return seconds * (at.constants.exposed if at.stack.hides_tensor else 1)


def _own_way(at: Timed) -> bool:
    """Whether routed tokens do not take part in the gathers of tensor ranks."""
    return at.layout.experts_over_tensor or at.layout.sequence_parallel


def context_s(at: Timed, kind: LayerKind, attention: Number) -> Number:
    """Keys and values that travel, beyond the attention that they travel beside."""
    who = group(at.layout, "context")
    whole = who.ranks * at.tokens * (kind.key_width + kind.value_width) * at.element
    seconds = 3 * _ring(at, whole / at.layout.tensor, who)
    return _seen(at, seconds, attention, hidden=True)


def expert_s(at: Timed, kind: LayerKind) -> Number:
    """Tokens that travel to their experts and back, as seen."""
    if not kind.experts:
        return 0
    folded = at.layout.experts_over_tensor
    stride = 1 if folded else at.layout.tensor * at.layout.context
    who = RankGroup(at.layout.expert_ranks, stride)
    sent = at.tokens / (at.layout.tensor if folded else at.token_split) * kind.top_k
    size = sent * at.workload.architecture.hidden * at.element
    times = 6 if at.layout.recompute == "full" else 4
    copies = kind.top_k if at.stack.sends_once else None
    seconds = exchange_s(size, who, at.layout.chips, at.chip, copies) / at.constants.collective
    seconds = seconds * (1 - at.stack.expert_overlap) + _slices_s(at, kind)
    return times * seconds


def _slices_s(at: Timed, kind: LayerKind) -> Number:
    """Gather, or scatter, over tensor ranks that hold a slice of each expert, of all copies."""
    if at.layout.experts_over_tensor or not at.layout.sequence_parallel:
        return 0
    size = at.tokens * kind.top_k * at.workload.architecture.hidden * at.element
    return _ring(at, size, group(at.layout, "tensor"))


def stage_s(at: Timed) -> Number:
    """Sends between stages for one micro-batch, each tensor rank its part, as seen."""
    size = at.tokens * at.workload.architecture.hidden * at.element / at.layout.tensor
    seconds = 2 * at.layout.virtual * send_s(size, at.layout, at.chip) / at.constants.collective
    return seconds * (at.layout.pipe > 1) * (at.constants.exposed if at.stack.hides_pipe else 1)


def shard_s(at: Timed, beside: Number) -> Number:
    """Gathers and scatters of split weights for a micro-batch beside `beside` seconds of work."""
    if at.layout.zero < 2:
        return 0
    gathers = 2 if at.layout.zero == 3 else 1
    wire = gathers * WEIGHT_BYTES * _dense(at) + at.stack.reduce_bytes * _trained(at, _dense(at))
    total = _ring(at, wire, _sharding(at))
    routed = _routed(at)
    wire = gathers * WEIGHT_BYTES * routed + at.stack.reduce_bytes * _trained(at, routed)
    total = total + _ring(at, wire, _sharding(at, routed=True))
    return _seen(at, total / _passes_a_gather(at), beside, hidden=at.stack.hides_data)


def _passes_a_gather(at: Timed) -> Number:
    """Micro-batches that one gather serves."""
    if not at.stack.pipe_keeps_whole:
        return 1
    passes = larger(1, at.layout.accumulation(at.workload.batch_rows))
    return choose(at.layout.pipe > 1, passes, 1)


def replica_s(at: Timed, beside: Number) -> Number:
    """Once a step: gradients (and weights under zero 1) between ranks that hold the same."""
    layout, recipe = at.layout, at.workload.recipe
    gradient = recipe.gradients or WEIGHT_BYTES
    dense, routed = _trained(at, _dense(at)), _trained(at, _routed(at))
    if layout.zero < 2:
        back = gradient if layout.zero == 0 else WEIGHT_BYTES
        everyone = group(layout, "context", "expert", "fsdp", "data")
        total = _ring(at, (gradient + back) * dense, everyone)
        total = total + _ring(at, (gradient + back) * routed, group(layout, "fsdp", "data"))
        return _seen(at, total, beside, hidden=at.stack.hides_data)
    shards = dense / _sharding(at).ranks + routed / _sharding(at, routed=True).ranks
    total = 2 * gradient * _ring(at, shards, group(layout, "data"))
    near = [axis for axis in ("context", "expert") if axis not in _folded(at)]
    if near:
        total = total + 2 * gradient * _ring(at, dense / _sharding(at).ranks, group(layout, *near))
    return _seen(at, total, beside, hidden=at.stack.hides_data)


def optimizer_s(at: Timed) -> Number:
    """The update: gradients, weights and state read, state and weights written."""
    recipe, layout = at.workload.recipe, at.layout
    split = layout.zero > 0
    held = _trained(at, _dense(at)) / (_sharding(at).ranks if split else 1)
    held = held + _trained(at, _routed(at)) / (_sharding(at, routed=True).ranks if split else 1)
    moved = 2 * recipe.optimizer + 2 * recipe.weights + recipe.gradients
    return held * moved / known(at.chip, "hbm_bytes_per_s")


def _folded(at: Timed) -> tuple[str, ...]:
    """Axes over which the software splits dense weights as over fsdp."""
    folded = {"context": at.stack.folded_context, "expert": at.stack.folded_experts}
    return tuple(axis for axis, yes in folded.items() if yes)


def _sharding(at: Timed, *, routed: bool = False) -> RankGroup:
    """The ranks that split dense weights (or those of routed experts, which expert splits)."""
    axes = [axis for axis in _folded(at) if not (routed and axis == "expert")]
    return group(at.layout, *axes, "fsdp")


def _dense(at: Timed) -> Number:
    """Parameters of a device outside the routed experts, before fsdp splits them."""
    model, layout = at.workload.architecture, at.layout
    return (model.params - model.expert_params) / (layout.tensor * layout.pipe)


def _routed(at: Timed) -> Number:
    """Parameters of the device's experts, before fsdp splits them."""
    model, layout = at.workload.architecture, at.layout
    return model.expert_params / (layout.expert * layout.tensor * layout.pipe)


def _trained(at: Timed, params: Number) -> Number:
    """Of these, those with a gradient."""
    if at.workload.adapter_params is None:
        return params
    return params * (at.workload.adapter_params / at.workload.architecture.params)


def _ring(at: Timed, size: Number, who: RankGroup) -> Number:
    nominal = gather_s(size, who, at.layout.chips, at.chip, at.stack)
    return nominal / at.constants.collective


def _seen(at: Timed, seconds: Number, beside: Number, *, hidden: bool) -> Number:
    """What of a collective is waited for."""
    if not hidden:
        return seconds
    return larger(seconds * at.constants.exposed, seconds - beside)
