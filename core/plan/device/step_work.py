"""Time of a device's computation for one micro-batch: matrix products, attention, memory traffic.

The constants are fitted, never set by hand. `tests/bench/calibrate_plan.py` fits them on published
steps (tests/core/plan/calibration_rows.toml; the three for MoE models on calibration_mixtures.toml)
and writes data/calibration.toml with the rows' fingerprint and the errors by cross-validation. The
band of a prediction comes from tables that are not in the fit: `tests/bench/report_plan.py --write`
writes it to data/judged.toml. (Cross-validation alone gives a narrower band than these tables.)

Recomputation: a product of the forward pass runs again in the backward pass if its output is needed
and not kept (names of memory_kept.py). The output of a layer's last product is only needed by the
next layer, whose input is kept: XLA removes it, torch stops before it (torch.utils.checkpoint,
early stop), Megatron runs it anyway (`Stack.reruns_all`). So full recomputation adds a third of the
forward and backward work only there.

Products of T tokens with a matrix of K x N take

  2TKN / (A · ceiling · κ · (200β/A)^γ) · (1 + ω · (A/β)(1/T + 1/K + 1/N))

with A the peak rate of the format, `ceiling` the chip's measured best share of it, β its HBM
bandwidth: sustained rates are lower where the ratio of FLOP/s to bandwidth is higher (there A is
that of BF16). The bracket is the sum of the times of arithmetic and of memory traffic,
2(TK + KN + TN) bytes: small sides (few tokens, thin slices of tensor ranks, small experts) cost
more. A low-precision format makes two of the three matrices smaller. κ, γ and ω are fitted;
products of routed experts have an ω of their own for 1/T, with T the tokens of one expert, and on
TPUs a rate. Backward is twice forward, once where weights are frozen (LoRA); recomputation adds
to it. FP8, FP4 and int8 are for the layers' products only.

Attention: 2 · keys · width per token forward (causal: half of the keys on average), 2.5 times that
backward where the kernel recomputes the scores (arXiv 2307.08691), twice where they are kept; then
all pairs are computed and the matrix of scores is read or written 6.5 times forward, 13 backward.

Norms, residual sums, rotary embedding and activations are memory traffic; a fused implementation
reads and writes 8h + 3(q + k) + v + attended + (gated: 3, else 2)·f elements per token forward,
twice that backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip, known
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Layout, Precision, Setting, Stack
from sabia.core.plan.elementwise import Number, choose, larger


@dataclass(frozen=True)
class Constants:
    """Fitted constants, the same for all chips and stacks.

    gpu, tpu: sustained rate of large matrix products in training over the chip's measured ceiling
    (its peak where none is published). balance: power of (peak FLOP per HBM byte) / 200 by which
    that rate decreases. shape: loss of a product by small sides, over the time of its memory
    traffic at full HBM rate. attention: rate of the attention kernel over that of large products.
    elementwise: bytes moved by norms, activations and residuals over those of a fused
    implementation. collective: bandwidth of a ring collective over the nominal one. exposed: share
    of an overlapped collective that still adds time. grouped: `shape` for the
    side of an expert's tokens, whose number differs from expert to expert. routed_tpu: rate of
    products of routed experts on TPUs over that of large ones. exposed_routed: `exposed` for the
    gathers of split weights in MoE models, whose experts wait for the counts of their tokens.
    launch_s: seconds in which the host launches the kernels of an MoE layer for one micro-batch,
    forward and backward. sinks: time of attention with learned scores in the softmax over that
    without, where no kernel fuses them (`Stack.fused_sinks`).
    """

    gpu: float
    tpu: float
    balance: float
    shape: float
    attention: float
    elementwise: float
    collective: float
    exposed: float
    grouped: float
    routed_tpu: float
    exposed_routed: float
    launch_s: float
    sinks: float


@dataclass(frozen=True)
class Band:
    """10th (`fast`) and 90th (`slow`) percentile of published over predicted step time.

    By rows and by tables, of which each has the same weight: the wider of both.
    """

    fast: float
    slow: float


@cache
def load_constants() -> Constants:
    """The constants of data/calibration.toml."""
    return Constants(**read_data("calibration.toml")["constants"])


@cache
def load_bands() -> dict[str, Band]:
    """The bands of data/judged.toml by kind of step (step_time.py)."""
    bands = read_data("judged.toml")["band"]
    return {kind: Band(each["fast"], each["slow"]) for kind, each in bands.items()}


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer: `params` elements of weight, `output` its name if kept.

    inner: its smaller side, before tensor ranks split it. routed: of the active experts.
    """

    output: str
    params: float
    inner: float
    routed: bool = False


LAST = "layer_output"


def products(kind: LayerKind) -> Iterator[Product]:
    """All products of a layer. A mixer's elements are divided by the widths of its tensors."""
    sides = kind.query_width, kind.key_width, kind.value_width, kind.attended_width
    widths = dict(zip(("query", "key", "value", "middle"), sides, strict=True))
    whole = sum(sides)
    for name, width in widths.items():
        if width:
            yield Product(name, kind.mixer_params * width / whole, width)
    if kind.mixer_params and not whole:
        yield Product("middle", kind.mixer_params, kind.mixer_params)
    if kind.mlp_params and not kind.mlp_width:
        yield Product("router", kind.mlp_params, kind.experts)
    yield from _mlp("", kind.mlp_params, kind.mlp_width, kind.matrices, routed=False)
    width = kind.expert_width
    yield from _mlp("expert_", kind.active_expert_params, width, kind.matrices, routed=True)


def _mlp(prefix: str, params: float, width: int, matrices: int, routed: bool) -> Iterator[Product]:
    if not params or not width:
        return
    for name in ("gate", "up") if matrices == 3 else ("up",):
        yield Product(prefix + name, params / matrices, width, routed)
    yield Product(LAST, params / matrices, width, routed)


def runs_again(output: str, layout: Layout, stack: Stack) -> bool:
    """Whether the product (or "attended": the attention kernel) runs twice."""
    if layout.recompute == "none":
        return False
    if layout.recompute == "full":
        return output != LAST or stack.reruns_all
    if stack.selective_keeps:
        return output != LAST and output not in stack.selective_keeps
    return output == "attended" and stack.attention_matrix


RATE_FIELD = {
    "fp32": "bf16_flops_per_s", "bf16": "bf16_flops_per_s", "fp8": "fp8_flops_per_s",
    "mxfp8": "fp8_flops_per_s", "nvfp4": "fp4_flops_per_s", "int8": "int8_flops_per_s",
}  # fmt: skip
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 0.5, "int8": 1}
USUAL_BALANCE = 200
# medians of the ceilings in chips.toml, and of FP8's over them, when the constants were fitted
USUAL_CEILING, USUAL_FP8 = 0.7525, 0.8830083565459611
SCORE_PASSES = 6.5
LOGIT_BYTES = 16  # bf16 and float32 copies written and read: softmax, loss, gradient


@dataclass(frozen=True)
class Timed(Setting):
    """Inputs of the formulas of one device's time."""

    chip: Chip
    constants: Constants


def ceiling(chip: Chip, precision: Precision) -> float:
    """Best measured share of the peak; for a GPU without one the usual one, for a TPU 1."""
    if chip.torus_axes:
        return 1.0
    best = chip.matmul_ceiling or USUAL_CEILING
    if RATE_FIELD[precision] == "bf16_flops_per_s":
        return best
    return chip.fp8_matmul_ceiling or best * USUAL_FP8


def peak(chip: Chip, precision: Precision) -> float:
    """Peak rate of the format, a quarter for float32. Raises UsageError naming the field."""
    return known(chip, RATE_FIELD[precision]) * (0.25 if precision == "fp32" else 1)


def sustained(at: Timed, precision: Precision) -> float:
    """FLOP/s of large products in training."""
    share = at.constants.tpu if at.chip.torus_axes else at.constants.gpu
    outgrown = (USUAL_BALANCE / balance(at.chip, "bf16")) ** at.constants.balance
    return peak(at.chip, precision) * ceiling(at.chip, precision) * share * outgrown


def balance(chip: Chip, precision: Precision) -> float:
    """Peak FLOP per byte of HBM traffic. Raises UsageError."""
    return peak(chip, precision) / known(chip, "hbm_bytes_per_s")


def product_s(at: Timed, one: Product, experts: Number, top_k: int) -> Number:
    """Seconds of a product of the micro-batch forward; `experts` are those of the whole layer."""
    precision = at.workload.precision
    slices = 1 if one.routed and at.layout.experts_over_tensor else at.layout.tensor
    rows = at.tokens * top_k * at.layout.expert / experts if one.routed else at.tokens
    lost = at.constants.shape * (1 / at.model.hidden + slices / one.inner)
    seconds = 2 * one.params * at.tokens / at.layout.tensor / sustained(at, precision)
    if not one.routed:
        return seconds * _slowed(at, precision, lost + at.constants.shape / rows)
    rate = at.constants.routed_tpu if at.chip.torus_axes else 1
    slowed = _slowed(at, precision, lost + at.constants.grouped / rows)
    # tokens of the fullest device over the mean
    imbalance = choose(at.layout.expert_ranks > 1, at.stack.expert_imbalance, 1)
    return seconds / rate * slowed * imbalance


def _slowed(at: Timed, precision: Precision, lost: Number) -> Number:
    """Time of a product over that of its arithmetic; `lost`: sum of ω/side."""
    narrow = (1 + ELEMENT_BYTES[precision]) / 3
    return 1 + lost * balance(at.chip, precision) * narrow


def matmul_s(at: Timed, kind: LayerKind) -> Number:
    """All products of a layer: forward, backward and recomputation."""
    return sum(
        (2 + at.trained + runs_again(one.output, at.layout, at.stack))
        * product_s(at, one, kind.experts, kind.top_k)
        for one in products(kind)
    )


def attention_s(at: Timed, kind: LayerKind) -> Number:
    """Scores and weighted values of a layer, or its recurrent state, in all passes."""
    matrix = at.stack.attention_matrix
    flops = 2 * (_visible(at, kind) + kind.state_products) * at.tokens / at.layout.tensor
    again = runs_again("attended", at.layout, at.stack)
    passes = 1 + (2 if matrix else 2.5) + again
    precision = at.workload.precision if at.stack.narrow_attention else "bf16"
    rate = sustained(at, precision) * at.constants.attention / at.stack.attention_slowdown
    seconds = flops * passes / rate
    if kind.sinks and not at.stack.fused_sinks:
        seconds = seconds * at.constants.sinks
    if matrix:  # which is read and written
        pairs = kind.heads * at.workload.sequence * at.tokens / at.layout.tensor
        moved = pairs * at.element * (SCORE_PASSES * (3 + again))
        seconds = seconds + moved / known(at.chip, "hbm_bytes_per_s")
    return seconds


def _visible(at: Timed, kind: LayerKind) -> Number:
    """Multiply-adds per token of the scores that are computed, with masked ones if computed."""
    sequence = at.workload.sequence
    products_per_token = kind.score_products(sequence)
    if at.model.causal and not at.stack.attention_matrix:
        products_per_token = products_per_token * (1 - kind.keys(sequence) / (2 * sequence))
    if not at.stack.whole_context:
        return products_per_token
    whole = replace(kind, window=None).score_products(sequence)
    return choose(at.layout.context > 1, whole, products_per_token)


def elementwise_s(at: Timed, kind: LayerKind) -> Number:
    """Memory traffic of a layer between products, in all passes."""
    stream = 8 * at.model.hidden + 4 * kind.top_k * at.model.hidden
    mixer = 3 * (kind.query_width + kind.key_width) + kind.value_width + kind.attended_width
    inner = mixer + kind.matrices * kind.mlp_width
    routed = kind.matrices * kind.top_k * kind.expert_width
    elements = stream / at.token_split + (inner + routed) / at.layout.tensor
    passes = 3 + (at.layout.recompute == "full")
    moved = elements * at.tokens * at.element * passes * at.constants.elementwise
    return (moved + _casts(at, kind)) / known(at.chip, "hbm_bytes_per_s")


def _casts(at: Timed, kind: LayerKind) -> Number:
    """Bytes read and written to cast inputs and gradients of products to a low precision."""
    if RATE_FIELD[at.workload.precision] == "bf16_flops_per_s":
        return 0
    widths = 2 * at.model.hidden + kind.query_width + kind.mlp_width
    widths = widths + kind.top_k * kind.expert_width
    return 3 * 3 * widths * at.tokens / at.layout.tensor  # read 2, write 1; both ways and weights


def head_s(at: Timed) -> Number:
    """Logits and loss of the micro-batch, once for the model and once for each MTP layer."""
    model, tensor = at.model, at.layout.tensor
    passes = 1 + sum(kind.count for kind in model.extra)
    one = Product(LAST, passes * model.vocab * model.hidden + model.extra_params, model.vocab)
    sides = 1 / larger(1, at.tokens) + 1 / model.hidden + tensor / one.inner
    flops = (2 + at.trained) * 2 * one.params * at.tokens / tensor
    slowed = _slowed(at, "bf16", at.constants.shape * sides)
    moved = LOGIT_BYTES * at.tokens * passes * model.vocab / tensor
    return flops / sustained(at, "bf16") * slowed + moved / known(at.chip, "hbm_bytes_per_s")
