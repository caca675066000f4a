"""One step of GRPO: sample answers, reward them, take log-probabilities, train, hand over weights.

Lengths of answers have a tail that is cut at a limit: survival S(t) = e^(−t/λ) up to the limit,
where the rest is cut (Weibull of shape 1: an answer is as likely to end after any token, whatever
its length). λ is found so that the mean, the cut ones included, is the given one: a mean near the
limit means that many answers reach it. The longest of n answers ends a batch; its expectation is
∫ 1 − (1 − S(t))^n dt.

Generation is played out on the slowest replica: its share of the answers, as equal slices of the
length distribution, enters free slots in a fixed mixed order; each step lasts as decode_step says
for the sequences then running and their contexts; the longest answer of the whole batch ends it.

  colocated       the same chips do all parts in turn: the step is their sum; memory is the largest
                  of generating and training, never the sum
  split           some chips generate, the others train. On policy (off_policy 0) they still wait
                  for each other; k steps off policy the samples of k + 1 steps are under way
                  together, their tail is paid once for them, and the step is the longer side

Sources: GRPO, arXiv 2402.03300; in-flight generation, arXiv 2505.24298 and 2509.19128.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sabia.core.errors import UsageError
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
        """Refuse what no distribution has."""
        if not self.mean > 0:
            raise UsageError(f"answers of {self.mean:g} tokens, shape 1 (expected > 0)")
        if self.limit is not None and self.mean >= self.limit:
            raise UsageError(
                f"answers of {self.mean:g} tokens on average with a limit of {self.limit:g} "
                "(expected a mean below the limit)"
            )

    @functools.cached_property
    def scale(self) -> float:
        """λ: found by bisection where there is a limit, the mean where not."""
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
        """The limit, or a length that practically no answer has."""
        far = self.scale * FAR
        return far if self.limit is None else min(self.limit, far)

    def quantile(self, share: float) -> float:
        """The length that `share` of the answers do not exceed."""
        return min(self.reach, self.scale * -math.log1p(-share))

    def longest_of(self, count: float) -> float:
        """Expected length of the longest of `count` answers."""
        return _integral(lambda t: 1 - (1 - _alive(t, self.scale)) ** count, self.reach)

    def strata(self, count: int) -> list[float]:
        """`count` answers that stand for all: the middles of equal shares, with the exact mean."""
        lengths = [self.quantile((i + 0.5) / count) for i in range(count)]
        correction = self.mean * count / sum(lengths)
        return [length * correction for length in lengths]


def _alive(t: float, scale: float) -> float:
    """Share of answers longer than `t` tokens, without a limit."""
    return math.exp(-(t / scale))


def _integral(f: Callable[[float], float], end: float) -> float:
    """∫ f from 0 to `end`, Simpson's rule on a grid that is fine near 0."""
    nodes = [end * (i / STEPS) ** 2 for i in range(STEPS + 1)]
    total = 0.0
    for a, b in itertools.pairwise(nodes):
        total += (b - a) / 6 * (f(a) + 4 * f((a + b) / 2) + f(b))
    return total


SLICES = 96
STRIDE = 0.6180339887498949  # a fixed order that mixes short and long


@dataclass(frozen=True)
class Sampling:
    """What a step samples: `prompts` times `group` answers. slots: most at once in a replica
    (None: as many as fit). A group's prompt is computed once."""

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
    """Sampling on replicas. tail_s: time with fewer than half of the slots
    in use."""

    seconds: float
    tail_s: float
    slots: int
    replicas: int
    longest_tokens: float
    binding: str


@dataclass(frozen=True)
class Step:
    """A step of GRPO: seconds by part, which add up to `seconds` unless sides overlap."""

    generation: Generation
    parts: dict[str, float]
    seconds: float
    chips: int
    binding: str
    notes: tuple[str, ...] = field(default=())

    @property
    def shares(self) -> dict[str, float]:
        """Each part as a share of the step (more than 1 together where sides overlap)."""
        return {name: seconds / self.seconds for name, seconds in self.parts.items()}

    @property
    def chip_s(self) -> float:
        """Chip-seconds of one step."""
        return self.seconds * self.chips


def generate(
    replica: Replica, sampling: Sampling, chips: int, memory_share: float | None = None
) -> Generation:
    """Time for `chips`, in copies of `replica`, to sample a step's answers.

    Raises UsageError if there is not one whole replica, Infeasible if it cannot hold a sequence.
    """
    replicas = min(chips // replica.chips, sampling.samples)
    if replicas < 1:
        raise UsageError(
            f"generation on {chips} chips in replicas of {replica.chips} (expected one or more)"
        )
    lengths, share = sampling.lengths, math.ceil(sampling.samples / replicas)
    longest = lengths.longest_of(sampling.samples)
    most = largest_batch(replica, sampling.prompt_tokens + lengths.mean, memory_share)
    slots = max(1, min(share, most, sampling.slots or most))
    first_s = max(1.0, share / sampling.group) * prefill(replica, sampling.prompt_tokens).seconds
    count = min(share, SLICES)
    answers = _mixed([*lengths.strata(count)[:-1], longest])
    decoding_s, tail_s = play(replica, answers, share / count, slots, sampling.prompt_tokens)
    return Generation(
        seconds=first_s + decoding_s,
        tail_s=tail_s,
        slots=slots,
        replicas=replicas,
        longest_tokens=longest,
        binding=decode_step(replica, slots, sampling.prompt_tokens + lengths.mean / 2).binding,
    )


def _mixed(values: list[float]) -> list[float]:
    """The values in an order that is fixed and far from sorted."""
    keys = [(i * STRIDE) % 1 for i in range(len(values))]
    return [value for _, value in sorted(zip(keys, values, strict=True))]


def play(
    replica: Replica, answers: list[float], weight: float, slots: int, prompt: float
) -> tuple[float, float]:
    """Run `answers`, each standing for `weight` sequences, through slots; times by events.

    Seconds of decoding, and of these the ones with fewer than half of the slots in use.
    Every running sequence gains a token a step, so ends are known in steps; between two ends the
    batch is constant and the mean context grows by one a step.
    """
    places = max(1, round(slots / weight))
    waiting = answers[::-1]
    running: list[tuple[float, float]] = []  # (step at which it ends, step at which it began)
    full = min(places, len(answers))
    total_s = tail_s = now = began = 0.0
    while waiting or running:
        while waiting and len(running) < places:
            heapq.heappush(running, (now + waiting.pop(), now))
            began += now
        end, start = heapq.heappop(running)
        active = len(running) + 1
        context = prompt + (now + end) / 2 - began / active
        batch = min(active * weight, slots)
        seconds = (end - now) * decode_step(replica, batch, context).seconds
        total_s += seconds
        tail_s += seconds if 2 * active < full else 0
        now, began = end, began - start
    return total_s, tail_s


def hand_over_seconds(replica: Replica, apart: bool) -> float:
    """Bring new weights to a replica: over the network where `apart`, else inside the domain."""
    chip = replica.chip
    rate = chip.network_bytes_per_s if apart or replica.spans_nodes else chip.scale_up_bytes_per_s
    rate = rate or chip.network_bytes_per_s
    if rate is None:
        raise UsageError(f"--chip: no network_bytes_per_s of {chip.name} is on file")
    return replica.chip_weight_bytes / rate


def colocated(
    replica: Replica, sampling: Sampling, chips: int, parts: dict[str, float],
    memory_share: float | None = None,
) -> Step:  # fmt: skip
    """All parts in turn on the same chips. parts: seconds by name, those of generation left out."""
    made = generate(replica, sampling, chips, memory_share)
    named = {"generation": made.seconds} | parts
    return Step(made, named, sum(named.values()), chips, _binding(made, named))


def split(
    replica: Replica, sampling: Sampling, generation_chips: int, training_chips: int,
    parts: dict[str, float], off_policy: int = 1, memory_share: float | None = None,
) -> Step:  # fmt: skip
    """Generation on its own chips, `off_policy` steps ahead of training."""
    together = off_policy + 1
    ahead = replace(sampling, prompts=sampling.prompts * together)
    made = generate(replica, ahead, generation_chips, memory_share)
    made = replace(
        made,
        seconds=made.seconds / together,
        tail_s=made.tail_s / together,
    )
    named = {"generation": made.seconds} | parts
    sides = (made.seconds + parts["reward"], parts["log-probs"] + parts["training"])
    seconds = (max(sides) if off_policy else sum(sides)) + parts["weights"]
    idle = 1 - min(sides) / max(sides)
    side = "training" if sides[0] > sides[1] else "generation"
    note = f"the sides overlap; the chips of {side} wait {idle:.0%} of the time"
    if not off_policy:
        note = "on policy the sides wait for each other: share the chips, or go off policy"
    chips = generation_chips + training_chips
    return Step(made, named, seconds, chips, _binding(made, named), (note,))


def _binding(made: Generation, named: dict[str, float]) -> str:
    """The longest part; of generation also why."""
    longest = max(named, key=lambda name: named[name])
    if longest != "generation":
        return longest
    tail = made.tail_s > made.seconds / 2
    return "generation (its longest answers)" if tail else f"generation ({made.binding})"
