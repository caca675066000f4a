"""The tensors of one layer that its backward pass needs: a list, from which all sizes follow.

Each has a width (elements a token), bytes an element, and says whether tensor ranks split its
width, or (norms, residual: what arXiv 2205.05198 calls the regions outside tensor parallelism)
split its tokens, which they do only with sequence parallelism. A dense layer of GPT as of 2022
keeps, a token, in bytes (section 4.1 of that paper; h hidden, a heads, s keys):

  split by tokens  input 2h, normed 2h, mask h, middle 2h, normed_middle 2h, mlp mask h        = 10h
  split by tensor  query, key, value, attended 2h each, MLP 8h before and 8h after its gelu    = 24h
  split by tensor  softmax 2as, its mask as, its output after dropout 2as                      = 5as

and one of Llama without dropout, with an attention kernel that keeps no matrix (arXiv 2307.08691):

  2h + 2h + (2q + 2k + 2v) + 2q + 2h + 2h + (gate, up, activated, product) 2f each, logsumexp 4a

which is (12h + 4h·n_kv/n_q + 8f) where q = h; a fused activation keeps 6f. Which of these a
piece of software keeps, and which under selective recomputation, is in its preset (stacks.toml).
In a mixture the routed tensors stand for top_k copies of each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.stack import Stack


@dataclass(frozen=True)
class Kept:
    """One tensor. routed: its rows are copies of tokens, on the devices of their experts.

    split: what tensor ranks divide: its "tokens", its width ("tensor"), or the rows of experts
    that are spread over tensor ("experts"; rows are whole on each rank where these are sliced).
    """

    name: str
    width: float
    element_bytes: float
    split: Literal["tokens", "tensor", "experts"] = "tokens"
    routed: bool = False

    @property
    def token_bytes(self) -> float:
        """Bytes a token, undivided."""
        return self.width * self.element_bytes


def layer_tensors(
    kind: LayerKind, hidden: int, sequence: int, element: float, stack: Stack
) -> Iterator[Kept]:
    """All that the layer's backward pass uses, in the order in which they are made."""
    yield Kept("input", hidden, element)
    yield Kept("normed", hidden, element)
    yield from _attention(kind, sequence, element, stack)
    if stack.dropout:
        yield Kept("attention_mask", hidden, 1)
    yield Kept("middle", hidden, element)
    yield Kept("normed_middle", hidden, element)
    if kind.mlp_width:
        yield from _mlp("", kind.mlp_width, kind.matrices, element, stack, routed=False)
    if kind.experts:
        yield from _experts(kind, hidden, element, stack)
    if stack.dropout:
        yield Kept("mlp_mask", hidden, 1)


def _attention(kind: LayerKind, sequence: int, element: float, stack: Stack) -> Iterator[Kept]:
    attended = kind.score_width - kind.query_width
    yield Kept("query", kind.query_width, element, split="tensor")
    yield Kept("key", kind.key_width, element, split="tensor")
    yield Kept("value", kind.value_width, element, split="tensor")
    if stack.attention_matrix:
        pairs = kind.heads * sequence
        yield Kept("scores", pairs, element, split="tensor")
        if stack.dropout:
            yield Kept("score_mask", pairs, 1, split="tensor")
            yield Kept("dropped_scores", pairs, element, split="tensor")
    else:
        yield Kept("logsumexp", kind.heads, 4, split="tensor")
    yield Kept("attended", attended, element, split="tensor")


def _mlp(
    prefix: str, width: float, matrices: int, element: float, stack: Stack, *, routed: bool
) -> Iterator[Kept]:
    names = ["gate", "up", "activated", "product"] if matrices == 3 else ["up", "product"]
    if stack.fused_activation and matrices == 3:
        names.remove("activated")
    for name in names:
        yield Kept(prefix + name, width, element, split="tensor", routed=routed)


def _experts(kind: LayerKind, hidden: int, element: float, stack: Stack) -> Iterator[Kept]:
    yield Kept("router", kind.experts, 4)
    yield Kept("copies", kind.top_k * hidden, element, split="experts", routed=True)
    width = kind.top_k * kind.expert_width
    yield from _mlp("expert_", width, kind.matrices, element, stack, routed=True)
    yield Kept("expert_output", kind.top_k * hidden, element, split="experts", routed=True)
