"""Seconds of one training step of a layout by part, with a band from known prediction errors.

  T = m · t_slowest + (p-1)/v · t_stage + exposed(data parallel) + optimizer

for m micro-batches, p stages, and v virtual stages per device (arXiv 2104.04473, section 2.2: the
bubble is (p-1)/(v·m) of the work). t_stage: a stage's layers, each with its products, attention,
elementwise work and exposed collectives (step_work.py, step_network.py); the slowest stage also has
the head, and one layer fewer where the depth is uneven. Constants and band: step_work.py. Arguments
are numbers or NumPy arrays (elementwise.py); `recompute`, `zero` and the booleans of a layout are
one value per call.

How far a predicted step lies from the published ones that predictions were compared with.

data/judged.toml has the band of each kind of step, with its rows, and what was compared: chips,
formats, the longest rows, the most chips (tests/bench/report_plan.py). A kind of too few rows, such
as LoRA, and what was not compared take the widest band of those with enough.
"""

from dataclasses import dataclass

from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip
from sabia.core.plan.device import step_network as network
from sabia.core.plan.device import step_work as work
from sabia.core.plan.device.layout import Layout, Stack, Workload
from sabia.core.plan.device.step_work import Band, Constants, Timed, load_bands, load_constants
from sabia.core.plan.elementwise import Number, choose, larger, rounded_up

FEWEST = 20  # rows of a band of its own
LONG = 16_384  # tokens of a long row
WORDS = {
    "dense": "dense models", "long": f"rows of {LONG} tokens and more", "mixture": "MoE models",
    "lora": "LoRA",
}  # fmt: skip


def kind_of(workload: Workload) -> str:
    """The kind of a step: lora, mixture (MoE), long (rows), or dense."""
    if workload.adapter_params is not None:
        return "lora"
    if workload.architecture.expert_params:
        return "mixture"
    return "long" if workload.sequence >= LONG else "dense"


def band_kind(workload: Workload, chip: Chip) -> str:
    """The kind whose band the step has."""
    bands = read_data("judged.toml")["band"]
    enough = {kind: band for kind, band in bands.items() if band["rows"] >= FEWEST}
    own = kind_of(workload)
    if own in enough and not _beyond(workload, chip):
        return own
    return max(enough, key=lambda kind: float(enough[kind]["slow"] / enough[kind]["fast"]))


def _beyond(workload: Workload, chip: Chip) -> list[str]:
    seen, words = read_data("judged.toml")["compared"], list[str]()
    if chip.name not in seen["chips"]:
        words.append(f"on {chip.name}")
    if workload.precision not in seen["precisions"]:
        words.append(f"in {workload.precision}")
    if workload.sequence > seen["longest_row"]:
        words.append(f"with rows of more than {seen['longest_row']} tokens")
    if any(kind.state_products for kind in workload.architecture.layers):
        words.append("with recurrent layers")
    return words


def outside(workload: Workload, chip: Chip, chips: int) -> str:
    """In words, why the band may not hold; empty where the step is like those compared."""
    data, words = read_data("judged.toml"), _beyond(workload, chip)
    if chips > data["compared"]["most_chips"]:
        words.append(f"on more than {data['compared']['most_chips']} chips")
    lines = [f"no published step {' or '.join(words)} was compared with"] if words else []
    rows = data["band"][kind_of(workload)]["rows"]
    if rows < FEWEST:
        lines.append(f"only {rows} steps with {WORDS[kind_of(workload)]} were")
    band = f"the band is that of {WORDS[band_kind(workload, chip)]}"
    return "; ".join([*lines, band]) if lines else ""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: `parts` by name, over all its micro-batches on the slowest stage.

    matmul, attention, elementwise, head: computation. tensor, expert, context: exposed collectives
    within layers. stages: sends between stages. bubble: filling and draining the pipeline. shards:
    weights gathered and gradients scattered per micro-batch (ZeRO-2, 3), replicas: gradients once
    per step; both exposed time. optimizer: the update. band: published over predicted time of four
    of five published steps of this kind of model.
    """

    parts: dict[str, Number]
    band: Band

    @property
    def total_s(self) -> Number:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def low_s(self) -> Number:
        """Lower end of the band."""
        return self.total_s * self.band.fast

    @property
    def high_s(self) -> Number:
        """Upper end of the band."""
        return self.total_s * self.band.slow

    @property
    def binding(self) -> str:
        """Name of the largest part of one layout's step."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_time(
    workload: Workload, layout: Layout, chip: Chip, stack: Stack,
    constants: Constants | None = None,
) -> StepTime:  # fmt: skip
    """Predict the step; `constants` replace the calibrated ones.

    Raises UsageError naming the field of the chip that has no published figure but is needed.
    """
    at = Timed(workload, layout, stack, chip, constants or load_constants())
    passes = larger(1, layout.accumulation(workload.batch_rows))
    layers = _layers(at)
    stage = sum(layers.values()) + network.stage_s(at)
    # the last stage has one layer less than the longest, if the depth is uneven
    uneven = _longest(at) * layout.pipe > workload.architecture.depth
    spare = choose(uneven & (layout.pipe > 1), 1 / _longest(at), 0)
    head = larger(0, work.head_s(at) - spare * stage)
    waiting = larger(0, _launched(at) - stage)
    stage = stage + waiting
    slowest = stage + head
    shards = network.shard_s(at, slowest)
    parts = {name: passes * layers[name] for name in ("matmul", "attention", "elementwise")}
    parts["head"] = passes * head
    parts |= {name: passes * layers[name] for name in ("tensor", "expert", "context")}
    parts |= {
        "stages": passes * network.stage_s(at),
        "launches": passes * waiting,
        "bubble": (layout.pipe - 1) / layout.virtual * (stage + shards),
        "shards": passes * shards,
        "replicas": network.replica_s(at, slowest * 2 / 3),  # beside the last backward pass
        "optimizer": network.optimizer_s(at),
    }
    return StepTime(parts, Band(1, 1) if constants else load_bands()[band_kind(workload, chip)])


def _longest(at: Timed) -> Number:
    """Layers of the longest stage."""
    return at.layout.virtual * rounded_up(at.model.depth / (at.layout.pipe * at.layout.virtual))


def _share(at: Timed) -> Number:
    """Share of the layers in the longest stage."""
    return choose(at.layout.pipe > 1, _longest(at) / at.model.depth, 1)


def _launched(at: Timed) -> Number:
    """Seconds in which the host launches the kernels of the longest stage's MoE layers."""
    routed = sum(kind.count for kind in at.model.layers if kind.experts)
    slowness = 0 if at.chip.torus_axes else at.stack.launched * at.constants.launch_s
    return routed * _share(at) * slowness


def _layers(at: Timed) -> dict[str, Number]:
    """Seconds by part of the longest stage's layers, for one micro-batch.

    Further-token layers lie on the last stage.
    """
    weights = [(kind, kind.count * _share(at)) for kind in at.model.layers]
    weights += [(kind, kind.count) for kind in at.model.extra]
    totals: dict[str, Number] = {}
    for kind, weight in weights:
        attention = work.attention_s(at, kind)
        parts = {
            "matmul": work.matmul_s(at, kind),
            "elementwise": work.elementwise_s(at, kind),
            "tensor": network.tensor_s(at, kind),
            "expert": network.expert_s(at, kind),
            "attention": attention,
            "context": network.context_s(at, kind, attention),
        }
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0) + weight * seconds
    return totals
