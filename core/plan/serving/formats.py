"""Formats of weights: bytes per element by part of a model, and rate of matrix products.

serving.toml has the formats, and the efficiencies that generation reaches.
"""

import functools
from dataclasses import dataclass

from sabia.core.errors import BadData, UsageError
from sabia.core.options.option import unknown
from sabia.core.plan.catalogue import check_entry, read_data
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.architecture import Architecture, LayerKind

FILE = "serving.toml"
CACHE_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0}
STATE_BYTES = 4  # recurrent states are kept in FP32
WIDEST = 0.45
VECTOR_BYTES = 2  # norms and biases stay in BF16 in every format


@dataclass(frozen=True)
class Format:
    """Bytes per element of embeddings and head (outer), mixers, shared MLPs, routed experts."""

    name: str
    rate: str
    outer: float
    mixer: float
    mlp: float
    experts: float
    about: str


@dataclass(frozen=True)
class PublishedRatio:
    """Published over predicted time of `rows` runs: 10th percentile, median and 90th."""

    low: float
    middle: float
    high: float
    rows: int
    about: str

    @property
    def is_band(self) -> bool:
        """Whether both ends lie within WIDEST of the median; a wider one bounds nothing."""
        return max(self.high / self.middle - 1, 1 - self.low / self.middle) <= WIDEST


def published_ratio(kind: str) -> PublishedRatio:
    """Comparison of the predictions of `kind` (dense, sparse, grpo) with published runs."""
    entry = read_data(FILE)["judged"][kind]
    check_entry(FILE, kind, entry, {"low", "middle", "high", "rows", "about", "date"}, set())
    return PublishedRatio(**{key: value for key, value in entry.items() if key != "date"})


@functools.cache
def factor(name: str) -> float:
    """An efficiency of serving.toml. Raises BadData where its source or date is missing."""
    entry = read_data(FILE)[name]
    check_entry(FILE, name, entry, {"value", "source", "date"}, set())
    return float(entry["value"])


def format_names() -> tuple[str, ...]:
    """All formats on file, widest first."""
    return tuple(read_data(FILE)["format"])


def find_format(name: str) -> Format:
    """The format `name`. Raises UsageError."""
    if name not in format_names():
        raise unknown("--weights", name, format_names())
    formats = read_data(FILE)["format"]
    keys = {"rate", "outer", "mixer", "mlp", "experts", "about"}
    check_entry(FILE, name, formats[name], keys, set())
    return Format(name, **formats[name])


def flops_per_s(chip: Chip, rate: str) -> float:
    """FLOP/s of matrix products on `chip`: peak times its measured ceiling.

    A chip without units for `rate` multiplies in the next wider format: FP4 and FP8 weights then
    only need less memory.
    """
    peaks = {
        "fp4": (chip.fp4_flops_per_s, chip.fp8_matmul_ceiling),
        "fp8": (chip.fp8_flops_per_s, chip.fp8_matmul_ceiling),
        "int8": (chip.int8_flops_per_s, chip.fp8_matmul_ceiling),
        "bf16": (chip.bf16_flops_per_s, chip.matmul_ceiling),
    }
    if rate not in peaks:
        raise BadData(f"{FILE}: rate {rate!r} (expected one of {', '.join(peaks)})")
    wider = {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "int8": ("int8", "bf16")}
    for name in wider.get(rate, ("bf16",)):
        peak, ceiling = peaks[name]
        if peak:
            return peak * (ceiling or chip.matmul_ceiling or factor("matmul_share"))
    raise UsageError(f"--chip: {chip.name} has no rate of matrix products on file")


def layer_bytes(kind: LayerKind, weights: Format, active: float = 1.0) -> float:
    """Bytes of one layer with the share `active` of its routed experts."""
    return (
        kind.mixer_params * weights.mixer
        + kind.mlp_params * weights.mlp
        + kind.vector_params * VECTOR_BYTES
        + kind.expert_params * weights.experts * active
    )


def weight_bytes(architecture: Architecture, weights: Format) -> float:
    """Bytes of the whole model in memory, without MTP layers."""
    layers = sum(kind.count * layer_bytes(kind, weights) for kind in architecture.layers)
    tables = architecture.embedding_params + architecture.head_params
    return layers + tables * weights.outer + architecture.other_params * VECTOR_BYTES
