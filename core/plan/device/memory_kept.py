"""The tensors of one layer that its backward pass needs.

Each has a width (elements per token), bytes per element, and what tensor ranks split: its width, or
its tokens (norms and residual, with sequence parallelism only, arXiv 2205.05198). A GPT layer of
2022 keeps these bytes per token (section 4.1 of that paper; h hidden size, a heads, s keys):

  by tokens  input 2h, normed 2h, mask h, middle 2h, normed_middle 2h, mlp_mask h         = 10h
  by tensor  query, key, value, attended 2h each, MLP 8h before and 8h after its gelu     = 24h
  by tensor  softmax 2as, its mask as, its output after dropout 2as                       = 5as

and a Llama layer without dropout, whose attention kernel keeps no matrix (arXiv 2307.08691):

  2h + 2h + (2q + 2k + 2v) + 2q + 2h + 2h + (gate, up, activated, product) 2f each, logsumexp 4a

which is (12h + 4h·n_kv/n_q + 8f) where q = h. Latent attention adds its latents before and after
their norms, and counts whole storages of which only a part is used. A delta net adds the inputs and
outputs of its convolution, its gate and the matrices of its chunks. In an MoE layer the routed
tensors have top_k rows per token.

The preset of the software (stacks.toml) lists the tensors that it never keeps (`drops`: fused
kernels recompute them; without "activated" the MLP keeps 6f) and those that it keeps with selective
recomputation; "mlp_output" is kept only there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Stack

SCORES = ("scores", "score_mask", "dropped_scores")
KEYS = ("key", "value")
OUTPUT = "mlp_output"
INPUTS = ("normed", "attended", "normed_middle", "product", "copies", "expert_product")
CHUNK = 64  # tokens of a chunk of a delta net's matrices (arXiv 2406.06484, section 4)
Split = Literal["tokens", "gathered", "tensor", "experts"]


@dataclass(frozen=True)
class KeptTensor:
    """One tensor. routed: its rows are token–expert assignments, on the devices of the experts.

    split: what tensor ranks split: "tokens"; "gathered": tokens, unless the software keeps the
    gathered tensor; "tensor": its width; "experts": rows, if tensor ranks have different experts
    (with slices of each expert, every rank has all rows).
    """

    name: str
    width: float
    element_bytes: float
    split: Split = "tokens"
    routed: bool = False

    @property
    def token_bytes(self) -> float:
        """Bytes per token, before any split."""
        return self.width * self.element_bytes


def layer_tensors(
    kind: LayerKind, hidden: int, sequence: int, element: float, stack: Stack,
    input_element: float | None = None,
) -> Iterator[KeptTensor]:  # fmt: skip
    """All tensors that the layer's backward pass uses in that software, in forward order.

    input_element: bytes per element of inputs of matrix products that are kept in FP8 or FP4.
    """
    for one in _all_tensors(kind, hidden, sequence, element, stack):
        if one.name in INPUTS and input_element is not None:
            one = replace(one, element_bytes=input_element)
        if one.name not in stack.drops:
            yield one


def _all_tensors(
    kind: LayerKind, hidden: int, sequence: int, element: float, stack: Stack
) -> Iterator[KeptTensor]:
    yield KeptTensor("input", hidden, element)
    yield KeptTensor("normed", hidden, element, "gathered")
    if kind.state_products:
        yield from _recurrent(kind, element)
    else:
        yield from _attention(kind, sequence, element, stack)
    if stack.dropout:
        yield KeptTensor("attention_mask", hidden, 1)
    if kind.stream_norms > 1:  # else a layer is one half, attention or MLP
        yield KeptTensor("middle", hidden, element)
        yield KeptTensor("normed_middle", hidden, element, "gathered")
    if kind.mlp_width:
        yield from _mlp("", kind.mlp_width, kind.matrices, element)
    if kind.experts:
        yield from _experts(kind, hidden, element)
    for number in range(2, kind.stream_norms):  # norms of what is added to the residual stream
        yield KeptTensor(f"norm_{number}", hidden, element)
    if stack.dropout:
        yield KeptTensor("mlp_mask", hidden, 1)
    if kind.mlp_width:
        yield KeptTensor(OUTPUT, hidden, element)


def _attention(
    kind: LayerKind, sequence: int, element: float, stack: Stack
) -> Iterator[KeptTensor]:
    if kind.key_latent:
        yield KeptTensor("latents", kind.query_latent + kind.cache_width, element)
        yield KeptTensor("normed_latents", kind.query_latent + kind.key_latent, element)
    if kind.head_normed:
        yield KeptTensor("unnormed_heads", kind.head_normed, element, "tensor")
    yield KeptTensor("query", kind.query_width, element, "tensor")
    yield KeptTensor("key", kind.key_width, element, "tensor")
    yield KeptTensor("value", _value_storage(kind), element, "tensor")
    if stack.attention_matrix:
        pairs = kind.heads * sequence
        yield KeptTensor("scores", pairs, element, "tensor")
        if stack.dropout:
            yield KeptTensor("score_mask", pairs, 1, "tensor")
            yield KeptTensor("dropped_scores", pairs, element, "tensor")
    else:
        yield KeptTensor("logsumexp", kind.heads, 4, "tensor")
    yield KeptTensor("attended", kind.attended_width, element, "tensor")


def _value_storage(kind: LayerKind) -> int:
    """Values; with latent attention in one storage with the keys that have no rotary embedding."""
    if not kind.key_latent:
        return kind.value_width
    rotated = kind.heads * (kind.cache_width - kind.key_latent)
    return kind.value_width + kind.key_width - rotated


def _recurrent(kind: LayerKind, element: float) -> Iterator[KeptTensor]:
    """A gated delta net (arXiv 2412.06464)."""
    mixed = kind.query_width + kind.key_width + kind.value_width
    yield KeptTensor("projected", mixed, element, "tensor")
    yield KeptTensor("convolved", mixed, element, "tensor")
    yield KeptTensor("query", kind.query_width, element, "tensor")
    yield KeptTensor("key", kind.key_width, element, "tensor")
    yield KeptTensor("value", kind.value_width, element, "tensor")
    yield KeptTensor("output_gate", kind.value_width, element, "tensor")
    yield KeptTensor("rates", 2 * kind.heads, 4, "tensor")
    yield KeptTensor("chunk_matrices", kind.heads * CHUNK, element, "tensor")
    yield KeptTensor("attended", kind.value_width, element, "tensor")
    yield KeptTensor("gated", kind.value_width, element, "tensor")


def _mlp(
    prefix: str, width: float, matrices: int, element: float, *, routed: bool = False
) -> Iterator[KeptTensor]:
    for name in ("gate", "up", "activated", "product") if matrices == 3 else ("up", "product"):
        yield KeptTensor(prefix + name, width, element, "tensor", routed)


def _experts(kind: LayerKind, hidden: int, element: float) -> Iterator[KeptTensor]:
    yield KeptTensor("router", kind.experts, 4)
    yield KeptTensor("copies", kind.top_k * hidden, element, "experts", routed=True)
    width = kind.top_k * kind.expert_width
    yield from _mlp("expert_", width, kind.matrices, element, routed=True)
    yield KeptTensor("expert_output", kind.top_k * hidden, element, "experts", routed=True)
