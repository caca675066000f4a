"""Seconds of one training step of a layout by part, with a band from known prediction errors.

  T = m · t_slowest + (p-1)/v · t_stage + exposed(data parallel) + optimizer

for m micro-batches, p stages, and v virtual stages per device (arXiv 2104.04473, section 2.2: the
bubble is (p-1)/(v·m) of the work). t_stage: a stage's layers, each with its products, attention,
elementwise work and exposed collectives (step_work.py, step_network.py); the slowest stage also has
the head, and one layer fewer where the depth is uneven. Constants and band: step_work.py. Arguments
are numbers or NumPy arrays (elementwise.py); `recompute`, `zero` and the booleans of a layout are
one value per call.
"""

from dataclasses import dataclass

from sabia.core.plan.chips import Chip
from sabia.core.plan.device import step_network as network
from sabia.core.plan.device import step_work as work
from sabia.core.plan.device.compared import band_kind
from sabia.core.plan.device.layout import Layout, Workload
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.step_work import Band, Constants, Timed, load_bands, load_constants
from sabia.core.plan.elementwise import Number, choose, larger, rounded_up


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
    workload: Workload,
    layout: Layout,
    chip: Chip,
    stack: Stack,
    constants: Constants | None = None,
) -> StepTime:
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
    last_backward = slowest * 2 / 3
    parts = {name: passes * layers[name] for name in ("matmul", "attention", "elementwise")}
    parts["head"] = passes * head
    parts |= {name: passes * layers[name] for name in ("tensor", "expert", "context")}
    parts |= {
        "stages": passes * network.stage_s(at),
        "launches": passes * waiting,
        "bubble": (layout.pipe - 1) / layout.virtual * (stage + shards),
        "shards": passes * shards,
        "replicas": network.replica_s(at, last_backward),
        "optimizer": network.optimizer_s(at),
    }
    band = Band(1, 1) if constants else load_bands()[band_kind(workload, chip)]
    return StepTime(parts, band)


def _longest(at: Timed) -> Number:
    """Layers of the longest stage."""
    runs = at.layout.pipe * at.layout.virtual
    return at.layout.virtual * rounded_up(at.workload.architecture.depth / runs)


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
