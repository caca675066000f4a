"""Requests at full load: tokens a second and chip, and what a million tokens cost.

A replica that is always full gives each of its b sequences a token a step, and takes the prefill
of a new prompt whenever one ends. In the time of one answer of `output` tokens it serves b
answers: b·prefill + output·step(b, context half way through). Input and output are priced apart,
by the chip time that each takes.
"""

from dataclasses import dataclass

from sabia.core.errors import Infeasible
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.serving.capacity import MOST_CHIPS, largest_batch
from sabia.core.plan.serving.decode import Pass, Replica, decode_step, prefill

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
