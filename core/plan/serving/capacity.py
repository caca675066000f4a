"""What fits: a model on so many chips, and so many sequences beside it.

An engine takes a share of usable memory (serving.toml). Each chip holds its part of the weights,
the workspace of the largest pass, and the cache of the running sequences; key-value heads that
are fewer than the chips are held more than once, as is a latent cache (decode.cache_split).
"""

import math
from dataclasses import dataclass, replace

from sabia.core.errors import Infeasible
from sabia.core.plan.serving.decode import ACTIVATION_BYTES, Replica, cache_bytes
from sabia.core.plan.serving.formats import factor, find_format, format_names

PASS_TOKENS = 8192  # tokens of a prefill pass, long prompts are cut into such pieces
MOST_CHIPS = 1024  # of a replica
LIVE_WIDTHS = 4  # of the widest inner width, alive at once in a pass


@dataclass(frozen=True)
class Room:
    """Bytes on each chip of a replica."""

    chip_bytes: float
    weights: float
    workspace: float

    @property
    def cache(self) -> float:
        """What is left for the cache of sequences; negative where not even the weights fit."""
        return self.chip_bytes - self.weights - self.workspace

    @property
    def fits(self) -> bool:
        """Whether anything is left."""
        return self.cache > 0


def room(replica: Replica, memory_share: float | None = None) -> Room:
    """Each chip's memory: `memory_share` of what is usable (default: serving.toml's)."""
    share = factor("memory_share") if memory_share is None else memory_share
    return Room(
        chip_bytes=replica.chip.usable_hbm_bytes * share,
        weights=replica.chip_weight_bytes,
        workspace=_workspace(replica),
    )


def _workspace(replica: Replica) -> float:
    """Activations of one pass: residual stream and the widest layer's inner tensors."""
    model = replica.architecture
    inner = max(kind.mlp_width + kind.top_k * kind.expert_width for kind in model.layers)
    split = replica.chips if replica.attention == "tensor" else 1
    widths = LIVE_WIDTHS * (model.hidden + inner / split)
    return PASS_TOKENS * widths * ACTIVATION_BYTES


def largest_batch(replica: Replica, context: float, memory_share: float | None = None) -> int:
    """Sequences of `context` tokens that run at once. Raises Infeasible where none does."""
    found = room(replica, memory_share)
    each = cache_bytes(replica, context, on_chip=True)
    batch = math.floor(found.cache / each) if found.fits else 0
    if batch < 1:
        raise Infeasible(_too_small(replica, context, found))
    return batch


def _too_small(replica: Replica, context: float, found: Room) -> str:
    need = found.weights + found.workspace + cache_bytes(replica, context, on_chip=True)
    have = f"{replica.chips} x {replica.chip.name}"
    return (
        f"{have}: {replica.architecture.name} in {replica.weights} needs {need / 1e9:,.0f} GB a "
        f"chip with one sequence of {context:,.0f} tokens (expected at most "
        f"{found.chip_bytes / 1e9:,.0f}); {_what_fits(replica, context, found)}"
    )


def _what_fits(replica: Replica, context: float, found: Room) -> str:
    """The next larger replica that holds one sequence, and the formats that do on this one."""
    share = found.chip_bytes / replica.chip.usable_hbm_bytes

    def holds(other: Replica) -> bool:
        return room(other, share).cache >= cache_bytes(other, context, on_chip=True)

    sizes = [replica.chips << i for i in range(1, 11) if replica.chips << i <= MOST_CHIPS]
    larger = next((f"{n} chips" for n in sizes if holds(replace(replica, chips=n))), None)
    smaller = [
        f"--weights {name}"
        for name in format_names()
        if find_format(name).experts < replica.format.experts
        and holds(replace(replica, weights=name))
    ]
    ways = [way for way in (larger, *smaller[:2]) if way]
    return f"use {' or '.join(ways)}" if ways else "use shorter sequences or another chip"
