"""Time of generation on one replica: a decoding step or a prefill, and its bottleneck.

A step generates one token of each of b sequences. It is a sum of parts that do not overlap, each a
roofline, max(bytes / bandwidth, FLOPs / rate):

  weights    read once per step: all shared ones, and of E experts E·(1 − (1 − k/E)^b), the expected
             number of active ones for b tokens with top-k; 2 FLOPs per weight and token
  attention  the KV cache of every sequence: 2·n_kv·d elements per layer and token, r_kv + d_r with
             latent attention (with as many products for each head), at most a window of them, or
             those that sparse attention selects; a delta net's state is read and written, for any
             length
  messages   with t chips of tensor parallelism two all-reduces per layer
  launches   latency of each operation

A replica of t chips splits an MoE model in one of two ways. "tensor": every matrix, and the cache
by key-value heads. "data": each chip has its own sequences and all weights except the experts;
experts are split over the chips, and tokens are sent to theirs and back (min(k, t) copies each).
Models with a latent cache need this, since heads cannot split it.

Bandwidth and rate are those that programs reach (serving.toml, chips.toml). Sources: reading
weights and cache limits decoding, arXiv 2211.05102; latent attention, arXiv 2405.04434 §2.1; active
experts, the expectation of distinct draws.

Formats of weights: bytes per element by part of a model, and rate of matrix products.

serving.toml has the formats, and the efficiencies that generation reaches.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.options.option import unknown
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip, known
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
    return PublishedRatio(**{key: value for key, value in entry.items() if key != "date"})


@functools.cache
def factor(name: str) -> float:
    """An efficiency of serving.toml."""
    return float(read_data(FILE)[name]["value"])


def format_names() -> tuple[str, ...]:
    """All formats on file, widest first."""
    return tuple(read_data(FILE)["format"])


def find_format(name: str) -> Format:
    """The format `name`. Raises UsageError."""
    if name not in format_names():
        raise unknown("--weights", name, format_names())
    return Format(name, **read_data(FILE)["format"][name])


# rate of a format → the formats in which a chip may multiply, the best first
WIDER = {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "int8": ("int8", "bf16"),
         "bf16": ("bf16",)}  # fmt: skip


def flops_per_s(chip: Chip, rate: str) -> float:
    """FLOP/s of matrix products on `chip`: peak times its measured ceiling.

    A chip without units for `rate` multiplies in the next wider format: FP4 and FP8 weights then
    only need less memory.
    """
    for name in WIDER[rate]:
        peak: float | None = getattr(chip, f"{name}_flops_per_s")
        ceiling = chip.matmul_ceiling if name == "bf16" else chip.fp8_matmul_ceiling
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
    layers = _each_layer(architecture, lambda kind: layer_bytes(kind, weights))
    tables = architecture.embedding_params + architecture.head_params
    return layers + tables * weights.outer + architecture.other_params * VECTOR_BYTES


ACTIVATION_BYTES = 2
ALL_REDUCES = 2  # a layer: after the mixer and after the MLP


@dataclass(frozen=True)
class Replica:
    """A copy of a model on `chips`.

    weights, cache: names of formats. attention: "tensor" or "data", how the chips split it (see
    above). memory_share: share of a chip's usable bytes that the engine takes (None: that of
    serving.toml). Raises UsageError on unknown names and missing figures of the chip.
    """

    architecture: Architecture
    chip: Chip
    chips: int = 1
    weights: str = "bf16"
    cache: str = "bf16"
    attention: str = "tensor"
    memory_share: float | None = None

    def __post_init__(self) -> None:
        """Check the name of the format, and the figures of the chip."""
        _ = self.format, self.read_bytes_per_s, self.link_bytes_per_s

    @property
    def format(self) -> Format:
        """Format of the weights."""
        return find_format(self.weights)

    @property
    def spans_nodes(self) -> bool:
        """Whether its chips are in more than one scale-up domain."""
        return self.chips > max(self.chip.scale_up_domain, self.chip.node_chips)

    @property
    def weight_bytes(self) -> float:
        """All weights, once."""
        return weight_bytes(self.architecture, self.format)

    @property
    def chip_weight_bytes(self) -> float:
        """Bytes of weights on each chip."""
        if self.attention == "tensor":
            return self.weight_bytes / self.chips
        params = _each_layer(self.architecture, lambda kind: kind.expert_params)
        return self.weight_bytes - params * self.format.experts * (1 - 1 / self.chips)

    @property
    def engine_bytes(self) -> float:
        """Bytes of each chip's memory that the engine takes."""
        share = factor("memory_share") if self.memory_share is None else self.memory_share
        return self.chip.usable_hbm_bytes * share

    @property
    def read_bytes_per_s(self) -> float:
        """Memory bandwidth that one chip reaches."""
        return known(self.chip, "hbm_bytes_per_s") * factor("hbm_share")

    @property
    def link_bytes_per_s(self) -> float:
        """One chip's bandwidth to the others of the replica."""
        inside = self.chip.scale_up_bytes_per_s or self.chip.network_bytes_per_s or math.inf
        if not self.spans_nodes:
            return inside
        return min(inside, self.chip.node_chips * known(self.chip, "network_bytes_per_s"))


@dataclass(frozen=True)
class PassPart:
    """Seconds of one part of a pass, and its bottleneck."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True)
class Pass:
    """One pass through the model: a decoding step or a prefill."""

    parts: tuple[PassPart, ...]

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return sum(part.seconds for part in self.parts)

    @property
    def binding(self) -> str:
        """The bottleneck with the most time: memory, compute, network or launches."""
        bounds = dict.fromkeys(part.bound for part in self.parts)
        return max(bounds, key=lambda name: sum(p.seconds for p in self.parts if p.bound == name))


def active_share(kind: LayerKind, tokens: float) -> float:
    """Expected share of a layer's experts that are active for `tokens`: 1 − (1 − k/E)^tokens."""
    if not kind.experts:
        return 0.0
    return 1.0 - (1.0 - kind.top_k / kind.experts) ** tokens


def cache_split(kind: LayerKind, chips: int) -> int:
    """Number of chips that split a token's cache: by key-value heads; a latent is not split."""
    return 1 if kind.key_latent else math.gcd(chips, kind.kv_heads)


def state_bytes(kind: LayerKind, replica: Replica) -> float:
    """Bytes of one layer once per sequence: a recurrent state in FP32, or the keys of a window."""
    recurrent = kind.state_products > 0
    return kind.state_width * (STATE_BYTES if recurrent else CACHE_BYTES[replica.cache])


def cache_bytes(
    replica: Replica, context: float, *, on_chip: bool = False, read: bool = False
) -> float:
    """Cache and state of one sequence of `context` tokens.

    on_chip: the part on each chip (with attention by data, on average). read: only what a decoding
    step reads: all, or what sparse attention selects. The keys of its indexer are read too, but
    neglected: their width is 128, that of keys 512 or more.
    """
    data, total = replica.attention == "data", 0.0
    for kind in replica.architecture.layers:
        seen = context if kind.window is None else min(context, kind.window)
        cached = kind.cache_width * seen * CACHE_BYTES[replica.cache]
        if read and kind.sparse and kind.sparse.chosen is not None:
            cached *= min(1.0, kind.sparse.chosen * kind.sparse.pooled / context)
        split = replica.chips if data else cache_split(kind, replica.chips)
        state = state_bytes(kind, replica)
        if on_chip:
            cached /= split
            state /= replica.chips if kind.state_products > 0 else split
        total += kind.count * (cached + state)
    return total


def decode_step(replica: Replica, batch: float, context: float) -> Pass:
    """One token for each of `batch` sequences of `context` tokens."""
    model, t = replica.architecture, replica.chips
    # by data the fullest chip has at least one sequence
    spread = max(batch, t) if replica.attention == "data" else batch
    products = 2 * spread * (_layer_products(model) + model.vocab * model.hidden)
    # recurrent states are also written
    states = _each_layer(model, lambda kind: bool(kind.state_products) * state_bytes(kind, replica))
    cached = cache_bytes(replica, context, on_chip=True, read=True) + states / t
    scores = 2 * spread * _each_layer(model, lambda kind: _score_products(kind, context))
    return _pass(replica, batch, products / t, spread * cached, scores / t)


def prefill(replica: Replica, tokens: float, sequences: float = 1) -> Pass:
    """`sequences` prompts of `tokens` each at the same time; the head has only their last tokens.

    With attention by data each chip has its own prompt; the time is then a share of a pass with as
    many prompts as chips.
    """
    model, t, batch = replica.architecture, replica.chips, tokens * sequences
    products = 2 * (batch * _layer_products(model) + sequences * model.vocab * model.hidden)
    scores = 2 * batch * _each_layer(model, lambda kind: _mean_prefill_products(kind, tokens))
    written = sequences * cache_bytes(replica, tokens, on_chip=True)
    return _pass(replica, batch, products / t, written, scores / t)


def _pass(replica: Replica, tokens: float, products: float, cached: float, scores: float) -> Pass:
    """A pass of `tokens`: a chip's products with weights, bytes of cache, products with cache."""
    model, weights = replica.architecture, replica.format
    shared = _each_layer(model, lambda kind: layer_bytes(kind, weights, 0.0))
    shared += model.vocab * model.hidden * weights.outer
    experts = weights.experts * _each_layer(  # the active ones
        model, lambda kind: kind.expert_params * active_share(kind, tokens)
    )
    split = 1 if replica.attention == "data" else replica.chips
    read = shared / split + experts / replica.chips
    multiply = _roofline("weights", replica, weights.rate, read, products)
    attention = _roofline("attention", replica, "bf16", cached, scores)
    return Pass((multiply, attention, *_overheads(replica, tokens)))


def _each_layer(model: Architecture, width: Callable[[LayerKind], float]) -> float:
    return sum(kind.count * width(kind) for kind in model.layers)


def _layer_products(model: Architecture) -> float:
    return _each_layer(model, lambda kind: kind.matmul_params)


def _score_products(kind: LayerKind, context: float) -> float:
    """Multiply-adds of one token with the layer's cache."""
    if not kind.key_latent:
        return kind.score_products(context) + kind.state_products
    chosen = kind.score_products(context) - kind.keys(context) * kind.score_width
    return 2 * kind.heads * kind.cache_width * kind.keys(context) + chosen


def _mean_prefill_products(kind: LayerKind, tokens: float) -> float:
    """Mean multiply-adds per token of a causal prompt, with at most a window of keys."""
    if kind.sparse is not None:
        return kind.score_products(tokens / 2) + kind.state_products
    window = tokens if kind.window is None else min(tokens, kind.window)
    return kind.score_width * window * (1 - window / (2 * tokens)) + kind.state_products


def _roofline(name: str, replica: Replica, rate: str, read: float, products: float) -> PassPart:
    """max(bytes / bandwidth, FLOPs / rate), both of one chip."""
    memory = read / replica.read_bytes_per_s
    compute = products / flops_per_s(replica.chip, rate)
    return PassPart(name, max(memory, compute), "memory" if memory >= compute else "compute")


def _overheads(replica: Replica, tokens: float) -> tuple[PassPart, ...]:
    """Messages of `tokens` activations in each layer, and launches."""
    model, t = replica.architecture, replica.chips
    launching_s = model.depth * factor("operations_per_layer") * factor("operation_s")
    launches = PassPart("launches", launching_s, "launches")
    if t == 1:
        return (launches,)
    size = tokens * model.hidden * ACTIVATION_BYTES
    if replica.attention == "data":
        seconds = _each_layer(model, lambda kind: 2 * _exchange_s(replica, kind, size / t))
    else:
        ring_s = 2 * (t - 1) / t * size / replica.link_bytes_per_s
        seconds = model.depth * ALL_REDUCES * (factor("message_s") + ring_s)
    return (PassPart("messages", seconds, "network"), launches)


def _exchange_s(replica: Replica, kind: LayerKind, size: float) -> float:
    """Time to send a chip's tokens to the chips of their experts; 0 in a dense layer."""
    if not kind.experts:
        return 0.0
    copies = min(kind.top_k, replica.chips) * (1 - 1 / replica.chips)
    return factor("message_s") + size * copies / replica.link_bytes_per_s
