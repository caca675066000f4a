"""Batches that fit on some chips, and their throughput and cost per million tokens at full load.

An engine uses a share of usable memory (serving.toml). Each chip has its part of the weights, the
workspace of the largest pass, and the KV cache of the running sequences. With fewer key-value heads
than chips they are replicated, and so is a latent cache (decode.cache_split).

A replica at full load generates a token of each of its b sequences per step, and computes the
prefill of a new prompt whenever one ends. In the time of one answer of `output` tokens it completes
b answers: b·prefill + output·step(b, context at half of the output). Input and output have separate
costs, by their chip time.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from sabia.core.errors import Infeasible
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.serving import decode
from sabia.core.plan.serving.decode import Pass, Replica, cache_bytes

PASS_TOKENS = 8192  # tokens of a prefill pass; longer prompts are split into chunks
MOST_CHIPS = 1024  # of a replica
LIVE_WIDTHS = 4  # tensors of the widest inner width that exist at the same time in a pass


def workspace_bytes(replica: Replica) -> float:
    """Bytes of the largest pass on each chip: the residual stream, and inner tensors."""
    model = replica.architecture
    inner = max(kind.mlp_width + kind.top_k * kind.expert_width for kind in model.layers)
    split = replica.chips if replica.attention == "tensor" else 1
    widths = LIVE_WIDTHS * (model.hidden + inner / split)
    return PASS_TOKENS * widths * decode.ACTIVATION_BYTES


def cache_room(replica: Replica) -> float:
    """Bytes on each chip for the cache of sequences; negative if not even the weights fit."""
    return replica.engine_bytes - replica.chip_weight_bytes - workspace_bytes(replica)


def largest_batch(replica: Replica, context: float) -> int:
    """Sequences of `context` tokens that run at the same time. Raises Infeasible if none fits."""
    free, each = cache_room(replica), cache_bytes(replica, context, on_chip=True)
    batch = math.floor(free / each) if free > 0 else 0
    if batch < 1:
        need = replica.chip_weight_bytes + workspace_bytes(replica) + each
        where = f"{replica.chips} x {replica.chip.name}: {replica.architecture.name}"
        raise Infeasible(
            f"{where} in {replica.weights} needs {need / 1e9:,.0f} GB per chip with one sequence "
            f"of {context:,.0f} tokens (expected at most {replica.engine_bytes / 1e9:,.0f}); "
            f"{_what_fits(replica, context)}"
        )
    return batch


def _what_fits(replica: Replica, context: float) -> str:
    """The next larger replica that holds one sequence, and formats with which this one does."""

    def holds(other: Replica) -> bool:
        return cache_room(other) >= cache_bytes(other, context, on_chip=True)

    sizes = [replica.chips << i for i in range(1, 11) if replica.chips << i <= MOST_CHIPS]
    larger = next((f"{n} chips" for n in sizes if holds(replace(replica, chips=n))), None)
    smaller = [
        f"--weights {name}"
        for name in decode.format_names()
        if decode.find_format(name).experts < replica.format.experts
        and holds(replace(replica, weights=name))
    ]
    ways = [way for way in (larger, *smaller[:2]) if way]
    return f"use {' or '.join(ways)}" if ways else "use shorter sequences or another chip"


MILLION = 1e6


@dataclass(frozen=True)
class Load:
    """A replica at full load with requests of one size; seconds, tokens.

    batch: running answers; each request has `samples` of them.
    """

    replica: Replica
    prompt: float
    output: float
    batch: int
    samples: int = 1

    @cached_property
    def step(self) -> Pass:
        """A token of each running answer, at half of its length."""
        return decode.decode_step(self.replica, self.batch, self.prompt + self.output / 2)

    @cached_property
    def first(self) -> Pass:
        """The prefill of one prompt."""
        return decode.prefill(self.replica, self.prompt)

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
        return self.prefill_chip_s + self.samples * self.decode_chip_s

    @property
    def prefill_chip_share(self) -> float:
        """Share of the chips' time that prompts take."""
        return self.prefill_chip_s / self.request_chip_s

    @property
    def output_tokens_per_s_chip(self) -> float:
        """Generated tokens per second and chip, with the time of prefills."""
        return self.samples * self.output / self.request_chip_s

    @property
    def seconds_per_answer(self) -> float:
        """From a request's start to its last token, with the prefills of other requests."""
        return self.batch / self.samples * self.first.seconds + self.output * self.step.seconds

    def usd_per_million_input(self, usd_per_chip_hour: float) -> float:
        """Cost of a million prompt tokens."""
        return self.prefill_chip_s / self.prompt * MILLION * usd_per_chip_hour / 3600

    def usd_per_million_output(self, usd_per_chip_hour: float) -> float:
        """Cost of a million generated tokens."""
        return self.decode_chip_s / self.output * MILLION * usd_per_chip_hour / 3600


def full_load(
    replica: Replica, prompt: float, output: float, batch: int | None = None, samples: int = 1
) -> Load:
    """`replica` with `batch` running requests (default: as many as fit). Raises Infeasible."""
    most = largest_batch(replica, prompt + output)
    return Load(replica, prompt, output, most if batch is None else min(batch, most), samples)


def loads(
    architecture: Architecture, chip: Chip, prompt: float, output: float, *,
    weights: str = "bf16", cache: str = "bf16", most_chips: int | None = None,
    batch: int | None = None, memory_share: float | None = None, samples: int = 1,
) -> list[Load]:  # fmt: skip
    """Replicas of 1, 2, 4 … chips that hold the model, at full load, within one scale-up domain.

    MoE models are split both ways (decode.py). A model that is too large for a domain gets the
    smallest replica across nodes. most_chips: upper bound. Raises Infeasible if no replica holds a
    request.
    """
    possible: list[Load] = []
    domain = min(max(chip.scale_up_domain, chip.node_chips), 2 * chip.node_chips)
    chips, most = 1, min(most_chips or MOST_CHIPS, MOST_CHIPS)
    while chips <= most and not (possible and chips > domain):
        moe = chips > 1 and any(kind.experts >= chips for kind in architecture.layers)
        # "tensor" last: its error names the smallest change
        for attention in ("data", "tensor") if moe else ("tensor",):
            replica = Replica(architecture, chip, chips, weights, cache, attention, memory_share)
            try:
                possible.append(full_load(replica, prompt, output, batch, samples))
            except Infeasible as error:
                refused = error
        chips *= 2
    if not possible:
        raise refused
    return possible


def cheapest(possible: list[Load]) -> Load:
    """The load with the least chip time per request."""
    return min(possible, key=lambda load: load.request_chip_s)
