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

On a CPU the list is that of this project's own trainer, tensor by tensor. With h the hidden size,
q, k, v the widths of queries, keys and values, a that of the heads' results, n heads and inner
width f, a dense layer in fp32 keeps

  4h (input, normed, middle, normed middle)  + 2 (the norms' factors)
  q + k + v + a + n (attention's inputs, result and logsumexp)
  4f (gate, activated, up, product)

A CPU without BF16 units multiplies in fp32 (kernels/runtime/torch_fp32.py): attention then keeps
its inputs and result in fp32, and the result again in BF16.

data/kept.txt has all lists.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from sabia.core.plan.catalogue import read_text
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Recompute, Stack

SCORES = ("scores", "score_mask", "dropped_scores")
KEYS = ("key", "value")
OUTPUT = "mlp_output"
FP32, BF16 = 4, 2
Sum = tuple[tuple[str, ...], ...]  # of products of numbers and names
Line = tuple[str, Sum, str, str, list[tuple[Sum, bool]]]


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
    split: str = "tokens"
    routed: bool = False

    @property
    def token_bytes(self) -> float:
        """Bytes per token, before any split."""
        return self.width * self.element_bytes


@cache
def _lists() -> dict[str, list[Line]]:
    """The lines of data/kept.txt by list: name, width, bytes, split, conditions and their truth."""
    lists: dict[str, list[Line]] = {}
    rows = (line.split() for line in read_text("kept.txt").split("\n") if line[:1] not in ("", "#"))
    for which, name, width, size, split, *conditions in rows:
        asked = [(_parsed(one.lstrip("!")), one[0] != "!") for one in conditions]
        lists.setdefault(which, []).append((name, _parsed(width), size, split, asked))
    return lists


def _parsed(text: str) -> Sum:
    return tuple(tuple(term.split("*")) for term in text.split("+"))


def _listed(which: str, kind: LayerKind, given: Mapping[str, float]) -> Iterator[KeptTensor]:
    """The tensors of one list for a layer; given: figures besides the fields of LayerKind."""
    given = {**given, "gated_mlp": kind.matrices == 3, "two_norms": kind.stream_norms > 1}

    def figure(name: str) -> float:
        if name in given:
            return given[name]
        number: float = int(name) if name[-1].isdigit() else getattr(kind, name)
        return number

    def value(width: Sum) -> float:
        return sum(math.prod(map(figure, term)) for term in width)

    for name, width, size, split, conditions in _lists()[which]:
        if all(bool(value(one)) == wanted for one, wanted in conditions):
            ranks, _, more = split.partition(":")
            times = int(value(_parsed(more[1:]))) if more[:1] == "x" else 1
            one = KeptTensor(name, value(width), figure(size), ranks, more == "routed")
            yield from [one] * times


@lru_cache(maxsize=1000)
def layer_tensors(
    kind: LayerKind, hidden: int, sequence: int, element: float, stack: Stack,
    input_element: float | None = None,
) -> tuple[KeptTensor, ...]:  # fmt: skip
    """All tensors that the layer's backward pass uses in that software, in forward order.

    input_element: bytes per element of inputs of matrix products that are kept in FP8 or FP4.
    """
    given = {
        "hidden": hidden,
        "sequence": sequence,
        "element": element,
        "input": element if input_element is None else input_element,
        "attention_matrix": stack.attention_matrix,
        "dropout": stack.dropout,
    }
    return tuple(one for one in _listed("device", kind, given) if one.name not in stack.drops)


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


@lru_cache(maxsize=1000)
def host_tensors(
    kind: LayerKind, hidden: int, given: Formats, recompute: Recompute = "none"
) -> tuple[KeptTensor, ...]:
    """All tensors that one layer of this project's trainer keeps on a CPU."""
    figures = {
        **vars(given),
        "hidden": hidden,
        "copies": 2 if given.narrow else 1,
        "wide": not given.narrow,
        "widened": given.attention > given.stream,
        "padded": bool(kind.key_latent) and kind.attended_width < kind.query_width,
    }
    return tuple(_listed("host" if recompute == "none" else f"host_{recompute}", kind, figures))
