"""One GRPO step: sample answers, reward them, compute log-probabilities, train, update weights.

Lengths of answers are exponential and truncated at a limit: survival S(t) = e^(−t/λ) up to the
limit (after any token an answer ends with the same probability). λ is solved so that the mean, with
truncated answers, is the given one: a mean near the limit means that many answers reach it. The
longest of n answers ends a batch; its expectation is ∫ 1 − (1 − S(t))^n dt.

Generation is simulated on the slowest replica: its share of the answers, as equal slices of the
length distribution, enters free slots in a fixed shuffled order. Each step has the time of
decode_step for the running sequences and their contexts, and the longest answer of the whole batch
ends it.

  colocated       the same chips do all parts one after the other: the step is their sum; memory is
                  the larger of generation and training
  split           some chips generate, the others train. On policy (off_policy 0) they wait for each
                  other; with k steps off policy the samples of k + 1 steps are generated together,
                  their tail counts once, and the step is the longer of the two sides

Sources: GRPO, arXiv 2402.03300; in-flight generation, arXiv 2505.24298 and 2509.19128.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sabia.core.errors import UsageError
from sabia.core.plan.chips import known
from sabia.core.plan.serving.decode import Replica, decode_step, prefill
from sabia.core.plan.serving.traffic import largest_batch

STEPS = 120
FAR = 60.0  # S is below e^-60 beyond 60 λ


@dataclass(frozen=True)
class Lengths:
    """Answers of `mean` tokens on average and at most `limit` (None: no limit)."""

    mean: float
    limit: float | None = None

    def __post_init__(self) -> None:
        """Check the mean and the limit."""
        if not self.mean > 0:
            raise UsageError(f"answers of {self.mean:g} tokens (expected more than 0)")
        if self.limit is not None and self.mean >= self.limit:
            raise UsageError(
                f"answers of {self.mean:g} tokens on average with a limit of {self.limit:g} "
                "(expected a mean below the limit)"
            )

    @functools.cached_property
    def scale(self) -> float:
        """λ: by bisection with a limit, else the mean."""
        if self.limit is None:
            return self.mean
        low, high = self.mean / 4, self.mean * 1e4
        for _ in range(45):
            middle = math.sqrt(low * high)
            short = _integral(functools.partial(_alive, scale=middle), self.limit) < self.mean
            low, high = (middle, high) if short else (low, middle)
        return math.sqrt(low * high)

    @property
    def reach(self) -> float:
        """The limit, or a length above practically all answers."""
        far = self.scale * FAR
        return far if self.limit is None else min(self.limit, far)

    def quantile(self, share: float) -> float:
        """The length that `share` of the answers do not exceed."""
        return min(self.reach, self.scale * -math.log1p(-share))

    def longest_of(self, count: float) -> float:
        """Expected length of the longest of `count` answers."""
        return _integral(lambda t: 1 - (1 - _alive(t, self.scale)) ** count, self.reach)

    def strata(self, count: int) -> list[float]:
        """`count` representative answers: the middles of equal quantiles, with the exact mean."""
        lengths = [self.quantile((i + 0.5) / count) for i in range(count)]
        correction = self.mean * count / sum(lengths)
        return [length * correction for length in lengths]


def _alive(t: float, scale: float) -> float:
    """Share of answers longer than `t` tokens, without a limit."""
    return math.exp(-(t / scale))


def _integral(f: Callable[[float], float], end: float) -> float:
    """∫ f from 0 to `end`, Simpson's rule on a grid that is fine near 0."""
    pairs = itertools.pairwise(end * (i / STEPS) ** 2 for i in range(STEPS + 1))
    return sum((b - a) / 6 * (f(a) + 4 * f((a + b) / 2) + f(b)) for a, b in pairs)


SLICES = 96
STRIDE = 0.6180339887498949  # of a fixed order that mixes short and long answers


@dataclass(frozen=True)
class Sampling:
    """Samples of a step: `prompts` times `group` answers.

    slots: maximum number of sequences at the same time in a replica (None: as many as fit). The
    prefill of a group's prompt is computed once.
    """

    prompts: int
    group: int
    prompt_tokens: float
    lengths: Lengths
    slots: int | None = None

    @property
    def samples(self) -> int:
        """Answers of a step."""
        return self.prompts * self.group

    @property
    def tokens(self) -> float:
        """Tokens that are trained on, prompts included."""
        return self.samples * (self.prompt_tokens + self.lengths.mean)


@dataclass(frozen=True)
class Generation:
    """Sampling on replicas. tail_s: time with fewer than half of the slots in use."""

    seconds: float
    tail_s: float
    slots: int
    replicas: int
    longest_tokens: float
    binding: str


@dataclass(frozen=True)
class Step:
    """A GRPO step: seconds by part, whose sum is `seconds` unless the two sides overlap."""

    generation: Generation
    parts: dict[str, float]
    seconds: float
    chips: int
    binding: str
    notes: tuple[str, ...] = field(default=())

    @property
    def shares(self) -> dict[str, float]:
        """Each part as a share of the step (the sum is above 1 where sides overlap)."""
        return {name: seconds / self.seconds for name, seconds in self.parts.items()}

    @property
    def chip_s(self) -> float:
        """Chip-seconds of one step."""
        return self.seconds * self.chips


def generate(replica: Replica, sampling: Sampling, chips: int) -> Generation:
    """Time of sampling a step's answers on `chips`, in copies of `replica`.

    Raises UsageError on fewer chips than a replica, Infeasible if it cannot hold a sequence.
    """
    replicas = min(chips // replica.chips, sampling.samples)
    if replicas < 1:
        raise UsageError(
            f"generation on {chips} chips in replicas of {replica.chips} (expected one or more)"
        )
    lengths, share = sampling.lengths, math.ceil(sampling.samples / replicas)
    longest = lengths.longest_of(sampling.samples)
    most = largest_batch(replica, sampling.prompt_tokens + lengths.mean)
    slots = max(1, min(share, most, sampling.slots or most))
    first_s = max(1.0, share / sampling.group) * prefill(replica, sampling.prompt_tokens).seconds
    count = min(share, SLICES)
    strata = [*lengths.strata(count)[:-1], longest]
    keys = [(i * STRIDE) % 1 for i in range(len(strata))]
    answers = [length for _, length in sorted(zip(keys, strata, strict=True))]
    decoding_s, tail_s = play(replica, answers, share / count, slots, sampling.prompt_tokens)
    return Generation(
        seconds=first_s + decoding_s,
        tail_s=tail_s,
        slots=slots,
        replicas=replicas,
        longest_tokens=longest,
        binding=decode_step(replica, slots, sampling.prompt_tokens + lengths.mean / 2).binding,
    )


def play(
    replica: Replica, answers: list[float], weight: float, slots: int, prompt: float
) -> tuple[float, float]:
    """Simulate `answers`, each representing `weight` sequences, in slots, event by event.

    Returns seconds of decoding, and of these the ones with fewer than half of the slots in use.
    Every running sequence gets one token per step, so its end is known; between two ends the batch
    is constant and the mean context grows by one per step.
    """
    positions = max(1, round(slots / weight))
    waiting = answers[::-1]
    running: list[tuple[float, float]] = []  # (step at which it ends, step at which it began)
    full = min(positions, len(answers))
    total_s = tail_s = now = began = 0.0
    while waiting or running:
        while waiting and len(running) < positions:
            heapq.heappush(running, (now + waiting.pop(), now))
            began += now
        end, start = heapq.heappop(running)
        active = len(running) + 1
        context = prompt + (now + end) / 2 - began / active
        seconds = (end - now) * decode_step(replica, min(active * weight, slots), context).seconds
        total_s += seconds
        tail_s += seconds if 2 * active < full else 0
        now, began = end, began - start
    return total_s, tail_s


def hand_over_seconds(replica: Replica, apart: bool) -> float:
    """Time to send new weights to a replica: over the network if `apart`, else in the domain."""
    chip = replica.chip
    rate = chip.network_bytes_per_s if apart or replica.spans_nodes else chip.scale_up_bytes_per_s
    return replica.chip_weight_bytes / (rate or known(chip, "network_bytes_per_s"))


def colocated(replica: Replica, sampling: Sampling, chips: int, parts: dict[str, float]) -> Step:
    """All parts one after the other on the same chips. parts: seconds by name, of all others."""
    made = generate(replica, sampling, chips)
    named = {"generation": made.seconds} | parts
    return Step(made, named, sum(named.values()), chips, _binding(made, named))


def split(
    replica: Replica, sampling: Sampling, generation_chips: int, training_chips: int,
    parts: dict[str, float], off_policy: int = 1,
) -> Step:  # fmt: skip
    """Generation on its own chips, `off_policy` steps ahead of training."""
    together = off_policy + 1
    ahead = replace(sampling, prompts=sampling.prompts * together)
    made = generate(replica, ahead, generation_chips)
    made = replace(made, seconds=made.seconds / together, tail_s=made.tail_s / together)
    named = {"generation": made.seconds} | parts
    sides = (made.seconds + parts["reward"], parts["log-probs"] + parts["training"])
    seconds = (max(sides) if off_policy else sum(sides)) + parts["weights"]
    idle = 1 - min(sides) / max(sides)
    side = "training" if sides[0] > sides[1] else "generation"
    note = f"generation and training overlap; the chips of {side} wait {idle:.0%} of the time"
    if not off_policy:
        note = (
            "on policy, generation and training wait for each other; use the same chips for both, "
            "or train off policy"
        )
    chips = generation_chips + training_chips
    return Step(made, named, seconds, chips, _binding(made, named), (note,))


def _binding(made: Generation, named: dict[str, float]) -> str:
    """The longest part; for generation with its bottleneck."""
    longest = max(named, key=lambda name: named[name])
    if longest != "generation":
        return longest
    tail = made.tail_s > made.seconds / 2
    return "generation (its longest answers)" if tail else f"generation ({made.binding})"
