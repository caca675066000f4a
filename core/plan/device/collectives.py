"""How long collectives take: bytes that a rank moves over the bandwidth that its group reaches.

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
"""

import math
from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.elementwise import Number, choose, larger, smaller


@dataclass(frozen=True)
class Group:
    """`ranks` that take part, each `stride` devices from the next."""

    ranks: Number
    stride: Number

    def domain_ranks(self, chip: Chip) -> Number:
        """Of these, in one fast domain."""
        return smaller(self.ranks, larger(1, chip.scale_up_domain / self.stride))

    def leaves(self, chip: Chip) -> Number:
        """Whether the group is larger than the fast domain."""
        return (self.ranks > 1) & (self.ranks * self.stride > chip.scale_up_domain)


def group(layout: Layout, *axes: str) -> Group:
    """The ranks that differ along neighbouring `axes` only, the fastest first."""
    stride: Number = 1
    for axis in ("tensor", "context", "expert", "fsdp", "data", "pipe"):
        if axis == axes[0]:
            break
        stride = stride * getattr(layout, axis)
    return Group(math.prod(getattr(layout, axis) for axis in axes), stride)


def known(chip: Chip, field: str) -> float:
    """A figure of the chip. Raises UsageError naming the field where the catalogue has none."""
    value = getattr(chip, field)
    if value is None:
        raise UsageError(
            f"--chip: {chip.name} has no published {field} (expected a chip that has one, or a "
            "layout that does not need it)"
        )
    return value


def bandwidth(who: Group, chips: Number, chip: Chip, stack: Stack) -> Number:
    """Bytes per second and rank, one way, nominal. Raises UsageError."""
    inside = known(chip, "scale_up_bytes_per_s") * _links(who, chips, chip)
    if not _any(who.leaves(chip)):
        return inside
    cards = 1 if stack.bare_network else who.domain_ranks(chip)
    outside = cards * known(chip, "network_bytes_per_s")
    return choose(who.leaves(chip), smaller(inside, outside), inside)


def gather_s(size: Number, who: Group, chips: Number, chip: Chip, stack: Stack) -> Number:
    """Seconds to gather, or to reduce and scatter, `size` bytes over the group."""
    if not _any(who.ranks > 1):
        return 0 * who.ranks
    return size * (who.ranks - 1) / who.ranks / bandwidth(who, chips, chip, stack)


def exchange_s(
    size: Number, who: Group, chips: Number, chip: Chip, copies: int | None = None
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


def _links(who: Group, chips: Number, chip: Chip) -> Number:
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
