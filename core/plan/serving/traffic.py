"""What fits on some chips, and what they do at full load: tokens a second, costs of a million.

An engine takes a share of usable memory (serving.toml). Each chip holds its part of the weights,
the workspace of the largest pass, and the cache of the running sequences; key-value heads that
are fewer than the chips are held more than once, as is a latent cache (decode.cache_split).

A replica that is always full gives each of its b sequences a token a step, and takes the prefill
of a new prompt whenever one ends. In the time of one answer of `output` tokens it serves b
answers: b·prefill + output·step(b, context half way through). Input and output are priced apart,
by the chip time that each takes.
"""

import math
from dataclasses import dataclass, replace

from sabia.core.errors import Infeasible
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.serving.decode import (
    ACTIVATION_BYTES,
    Pass,
    Replica,
    cache_bytes,
    decode_step,
    prefill,
)
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
    batch = math.floor(found.cache / each) if found.cache > 0 else 0
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


MILLION = 1e6


@dataclass(frozen=True)
class Load:
    """A replica at full load with requests of one size; seconds, tokens."""

    replica: Replica
    prompt: float
    output: float
    batch: int
    step: Pass
    first: Pass

    @property
    def prefill_chip_s(self) -> float:
        """Chip-seconds of one prompt."""
        return self.replica.chips * self.first.seconds

    @property
    def decode_chip_s(self) -> float:
        """Chip-seconds of one answer."""
        return self.replica.chips * self.output * self.step.seconds / self.batch

    @property
    def request_chip_s(self) -> float:
        """Chip-seconds of one request."""
        return self.prefill_chip_s + self.decode_chip_s

    @property
    def output_tokens_per_s_chip(self) -> float:
        """Generated tokens a second and chip, prefills included in the time."""
        return self.output / self.request_chip_s

    @property
    def seconds_per_answer(self) -> float:
        """From a request's start to its last token, with the prefills of others in between."""
        return self.batch * self.first.seconds + self.output * self.step.seconds

    def usd_per_million_input(self, usd_per_chip_hour: float) -> float:
        """Price of a million prompt tokens."""
        return self.prefill_chip_s / self.prompt * MILLION * usd_per_chip_hour / 3600

    def usd_per_million_output(self, usd_per_chip_hour: float) -> float:
        """Price of a million generated tokens."""
        return self.decode_chip_s / self.output * MILLION * usd_per_chip_hour / 3600


def full_load(
    replica: Replica, prompt: float, output: float, batch: int | None = None,
    memory_share: float | None = None,
) -> Load:  # fmt: skip
    """`replica` with `batch` requests at once (default: as many as fit). Raises Infeasible."""
    most = largest_batch(replica, prompt + output, memory_share)
    running = most if batch is None else min(batch, most)
    return Load(
        replica=replica,
        prompt=prompt,
        output=output,
        batch=running,
        step=decode_step(replica, running, prompt + output / 2),
        first=prefill(replica, prompt),
    )


def loads(
    architecture: Architecture, chip: Chip, prompt: float, output: float, *,
    weights: str = "bf16", cache: str = "bf16", most_chips: int | None = None,
    batch: int | None = None, memory_share: float | None = None,
) -> list[Load]:  # fmt: skip
    """Replicas of 1, 2, 4 … chips that hold the model, at full load, within one fast domain.

    Mixtures are split both ways (decode.py). A model that no domain holds gets the smallest replica
    across nodes. `most_chips` bounds them. Raises Infeasible where nothing of it holds a request.
    """
    found: list[Load] = []
    domain = min(max(chip.scale_up_domain, chip.node_chips), 2 * chip.node_chips)
    chips, most = 1, min(most_chips or MOST_CHIPS, MOST_CHIPS)
    while chips <= most and not (found and chips > domain):
        for attention in _splits(architecture, chips):
            replica = Replica(architecture, chip, chips, weights, cache, attention)
            try:
                found.append(full_load(replica, prompt, output, batch, memory_share))
            except Infeasible as error:
                refused = error
        chips *= 2
    if not found:
        raise refused
    return found


def _splits(architecture: Architecture, chips: int) -> tuple[str, ...]:
    """By tensor last, whose refusal names the least that is missing."""
    mixture = chips > 1 and any(kind.experts >= chips for kind in architecture.layers)
    return ("data", "tensor") if mixture else ("tensor",)


def cheapest(found: list[Load]) -> Load:
    """The load that serves a request with the least chip time."""
    return min(found, key=lambda load: load.request_chip_s)
