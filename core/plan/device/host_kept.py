"""Activations that a layer of this project's trainer keeps for its backward pass on CPUs (torch).

The list follows core/model (block, mixers, latent, moe and their torch operations): what autograd
saves there, tensor by tensor, in elements per token. With h the hidden size, q, k, v the widths of
queries, keys and values, a that of the heads' results, n heads and inner width f, a dense layer in
fp32 keeps

  4h (input, normed, middle, normed middle)  + 2 (the norms' factors)
  q + k + v + a + n (attention's inputs, result and logsumexp)
  4f (gate, activated, up, product)

In BF16 the norms keep two fp32 copies of their input instead of it. A CPU without BF16 units
multiplies in fp32 (kernels/runtime/torch_fp32.py): attention then keeps its inputs and result in
fp32, and the result again in BF16. Recomputation `full` keeps only a layer's input; `selective`
(--remat matmuls) also its matrix products, in the dtype of the computation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Recompute
from sabia.core.plan.device.memory_kept import KeptTensor, Split

FP32, BF16 = 4, 2


@dataclass(frozen=True)
class Formats:
    """Bytes per element: of the residual stream, of inputs of attention, of computed products."""

    stream: int
    attention: int
    product: int

    @property
    def narrow(self) -> bool:
        """Whether the residual stream is BF16."""
        return self.stream < FP32


def formats(precision: str, widened: bool) -> Formats:
    """Formats of a precision (all but fp32 compute in BF16); widened: BF16 products in fp32."""
    if precision == "fp32":
        return Formats(FP32, FP32, FP32)
    wide = FP32 if widened else BF16
    return Formats(BF16, wide, wide)


def layer_tensors(
    kind: LayerKind, hidden: int, given: Formats, recompute: Recompute = "none"
) -> Iterator[KeptTensor]:
    """All tensors that one layer keeps under a recomputation policy."""
    if recompute == "full":
        yield KeptTensor("input", hidden, given.stream)
    elif recompute == "selective":
        yield KeptTensor("input", hidden, given.stream)
        yield from _products(kind, hidden, given)
    else:
        yield from _stream(kind, hidden, given)
        yield from _attention(kind, given)
        yield from _feed_forward(kind, hidden, given)


def _norm(
    name: str, width: int, factors: int, given: Formats, split: Split = "tokens"
) -> KeptTensor:
    """Kept by a norm of `width`: its input (BF16: two fp32 copies of it), and its factors."""
    copies = 2 if given.narrow else 1
    return KeptTensor(name, copies * width + factors, FP32, split=split)


def _stream(kind: LayerKind, hidden: int, given: Formats) -> Iterator[KeptTensor]:
    for number in range(kind.stream_norms):
        yield _norm(f"norm {number + 1}", hidden, 1, given)
    yield KeptTensor("attention reads", hidden, given.stream)
    if kind.mlp_width or not given.narrow:  # a router alone reads an fp32 copy
        yield KeptTensor("feed-forward reads", hidden, given.stream)
    if kind.experts and given.narrow:
        yield KeptTensor("router reads", hidden, FP32)


def _attention(kind: LayerKind, given: Formats) -> Iterator[KeptTensor]:
    split = partial(KeptTensor, split="tensor")
    heads = kind.heads + kind.kv_heads
    if kind.head_normed:
        yield _norm("normed heads", kind.head_normed, heads, given, "tensor")
    values, attended = kind.value_width, kind.attended_width
    padded = kind.key_latent and attended < kind.query_width
    if kind.key_latent:
        yield from _latents(kind, given)
        # values are a view of keys and values together unless they are padded
        values = kind.query_width if padded else attended + kind.key_width
    result = kind.query_width if padded else attended
    yield split("query", kind.query_width, given.attention)
    yield split("key", kind.key_width, given.attention)
    yield split("value", values, given.attention)
    yield split("attended", result, given.attention)
    yield split("logsumexp", kind.heads, FP32)
    if padded or given.attention > given.stream:
        yield split("attended, as read", attended, given.stream)


def _latents(kind: LayerKind, given: Formats) -> Iterator[KeptTensor]:
    for name, width in (("query latent", kind.query_latent), ("key latent", kind.key_latent)):
        if width:
            # in fp32 the norm keeps a view of the key latent and the rotary part together
            rotated = kind.cache_width - width if name == "key latent" and not given.narrow else 0
            yield _norm(name, width, 1, given)
            yield KeptTensor(name + ", normed", width + rotated, given.stream)


def _feed_forward(kind: LayerKind, hidden: int, given: Formats) -> Iterator[KeptTensor]:
    yield from _mlp("", kind.mlp_width, kind.matrices, given.stream)
    if not kind.experts:
        return
    k, element = kind.top_k, given.stream
    # fp32 scores; per assignment of a token to an expert three int64 numbers and two gate weights
    yield KeptTensor("routing", kind.experts * FP32 + k * (3 * 8 + FP32 + element) + FP32, 1)
    yield KeptTensor("copies", k * hidden, element, routed=True)
    yield from _mlp("expert ", k * kind.expert_width, kind.matrices, element, routed=True)
    yield KeptTensor("expert output", k * hidden, element)


def _mlp(
    prefix: str, width: int, matrices: int, element: int, routed: bool = False
) -> Iterator[KeptTensor]:
    names = ("gate", "activated", "up", "product") if matrices == 3 else ("up", "product")
    for name in names if width else ():
        yield KeptTensor(prefix + name, width, element, split="tensor", routed=routed)


def _products(kind: LayerKind, hidden: int, given: Formats) -> Iterator[KeptTensor]:
    """Results of matrix products; the experts are one custom operation, which keeps none."""
    size = given.product
    widths = {"query": kind.query_width, "key": kind.key_width, "value": kind.value_width}
    if kind.key_latent:
        attended = kind.attended_width
        rotated = kind.cache_width - kind.key_latent
        pairs = kind.key_width - kind.heads * rotated + attended
        widths = {"query": kind.query_width, "keys and values": pairs}
        yield KeptTensor("query latent", kind.query_latent, size)
        yield KeptTensor("key latent", kind.cache_width, size)
    for name, width in widths.items():
        yield KeptTensor(name, width, size, split="tensor")
    yield KeptTensor("attention output", hidden, size)
    if kind.mlp_width:
        for name in ("gate", "up") if kind.matrices == 3 else ("up",):
            yield KeptTensor(name, kind.mlp_width, size, split="tensor")
        yield KeptTensor("output", hidden, size)
    if kind.experts:
        yield KeptTensor("router", kind.experts, FP32)
        yield KeptTensor("combined", hidden, given.stream)
