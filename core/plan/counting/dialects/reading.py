"""Common parts of the readers: ignored fields, attention, MLPs, embedding and head.

A reader takes every field that changes parameters or FLOPs. Those of data/families.toml change
neither (rotary embedding, epsilons, activations, scalings), or have only one value that is counted;
any other field is an error that names it (core.spec.fields).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting import blocks
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.counting.blocks import LayerHalf
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Attention, Experts, GatedMlp, LatentAttention, Router
from sabia.core.spec.rope import Rope

SIGNED = {"moe_layer_end_index"}  # where -1 is the last layer


class CountFields(Fields):
    """Fields of a configuration; those that families.toml ignores may remain unread."""

    def __init__(self, config: Mapping[str, Any], inside: str = "") -> None:
        """Check the fields of which one value is counted; inside: name of an inner table."""
        super().__init__(config)
        data = read_data("families.toml")
        self._silent = frozenset(data["silent"])
        for name in self._left.keys() - self._silent - SIGNED:
            value = self._left[name]
            if isinstance(value, int | float) and value < 0:
                raise UsageError(f"config.json: {name} is {value} (expected 0 or more)")
        own = data["inside"][inside] if inside else data["family"][self.family]
        self.ignore(*own.get("ignored", ()))
        for name, only in own.get("only", {}).items():
            self.expect(name, (only,), only)

    def finish(self) -> None:
        """Refuse unread fields that may change a count."""
        self.ignore(*self._silent)
        super().finish()

    def ignore(self, *names: str) -> None:
        """Skip fields that change no count in this family."""
        for name in names:
            self._left.pop(name, None)


def attention(fields: CountFields, window: int | None = None, **flags: bool) -> LayerHalf:
    """Read the sizes of grouped-query attention; flags: as `grouped`."""
    return grouped(fields.hidden, *head_sizes(fields), window, **flags)


def head_sizes(fields: CountFields, heads: int | None = None) -> tuple[int, int, int]:
    """Read heads (unless given), key-value heads and head size."""
    heads = heads or fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    return heads, kv_heads, fields.size("head_dim", fields.hidden // heads)


def biases(fields: CountFields, name: str = "attention_bias") -> dict[str, Any]:
    """Read whether all projections of attention have biases: flags of `grouped`."""
    return dict.fromkeys(("qkv_bias", "output_bias"), fields.take(name, bool, False))


def grouped(
    hidden: int, heads: int, kv_heads: int, size: int, window: int | None = None,
    qkv_bias: bool = False, output_bias: bool = False, **flags: bool,
) -> LayerHalf:  # fmt: skip
    """Grouped-query attention of heads of `size`; flags: of core.spec's Attention."""
    if heads % kv_heads:
        raise UsageError(
            f"config.json: num_key_value_heads is {kv_heads} (expected a divisor of the {heads} "
            "heads)"
        )
    mixer = Attention(
        heads, kv_heads, size, 1.0, None, qkv_bias, output_bias, window=window, **flags
    )
    return blocks.mixer_block(mixer, hidden)


def latent(fields: Fields) -> LatentAttention:
    """Read the sizes of multi-head latent attention."""
    fields.defaults(q_lora_rank=1536)
    heads = fields.size("num_attention_heads")
    fields.expect("num_key_value_heads", (heads,), heads)
    rope, nope = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    fields.expect("qk_head_dim", (nope + rope,), nope + rope)
    values, rank = fields.size("v_head_dim"), fields.size("kv_lora_rank")
    return LatentAttention(
        heads, nope, values, rank, fields.take("q_lora_rank", int, None), 1.0,
        Rope(rope, 10000.0), bias=fields.take("attention_bias", bool, False),
    )  # fmt: skip


def gated(hidden: int, inner: int, *, bias: bool = False) -> LayerHalf:
    """A gated MLP."""
    return blocks.feed_block(GatedMlp(inner, bias=bias), hidden)


def plain(hidden: int, inner: int, *, bias: bool = False) -> LayerHalf:
    """An MLP of two matrices."""
    shapes = ((inner, hidden), (hidden, inner))
    return blocks.of_shapes(shapes, vectors=bias * (inner + hidden), mlp_width=inner, matrices=2)


def moe(
    hidden: int, experts: int, chosen: int, inner: int, shared: int = 0, *,
    correction: bool = False, shared_gate: bool = False,
) -> LayerHalf:  # fmt: skip
    """Gated experts of inner width `inner`, and shared experts of width `shared`."""
    router = Router(experts, chosen, expert_bias=correction)
    return blocks.feed_block(Experts(router, inner, shared=shared, shared_gate=shared_gate), hidden)


def routed(
    fields: CountFields, experts: str, inner: str = "moe_intermediate_size",
    chosen: str = "num_experts_per_tok", alike: str | int = 0, **more: Any,
) -> LayerHalf:  # fmt: skip
    """Read an MoE layer by the names of its fields; more: as `moe`.

    alike: the number of shared experts, or its field.
    """
    sizes = fields.size(experts), fields.size(chosen), fields.size(inner)
    if alike:
        shared = alike if isinstance(alike, int) else fields.take(alike, int, 0)
        more["shared"] = sizes[2] * shared
    return moe(fields.hidden, *sizes, **more)


def decoder(
    fields: CountFields, layers: Iterable[LayerKind], *, tied: bool = False,
    vocab: int | None = None, other: int | None = None, positions: int = 0, **more: Any,
) -> Architecture:  # fmt: skip
    """Read the tensors outside the layers; tied: the family's default; other: final norm etc.

    vocab: where it is already read; positions: learned ones; more: of Architecture.
    """
    vocab, hidden = vocab or fields.size("vocab_size"), fields.hidden
    tied = fields.take("tie_word_embeddings", bool, tied)
    return Architecture(
        name=fields.family,
        hidden=hidden,
        vocab=vocab,
        layers=blocks.merged(layers),
        embedding_params=(vocab + positions) * hidden,
        head_params=0 if tied else vocab * hidden,
        other_params=hidden if other is None else other,
        **more,
    )


def stacked(
    fields: CountFields, mixers: Sequence[LayerHalf], feeds: Sequence[LayerHalf], *,
    tied: bool = False,
) -> Architecture:  # fmt: skip
    """Layers of one of `mixers` and one of `feeds` each, with two RMS norms."""
    kinds = [blocks.layer(*halves, 2 * fields.hidden) for halves in zip(mixers, feeds, strict=True)]
    return decoder(fields, kinds, tied=tied)


def dense_first(fields: CountFields, *, correction: bool = True) -> list[LayerHalf]:
    """Read DeepSeek's MoE: dense first layers, then layers with routed and shared experts."""
    depth = fields.depth
    fields.expect("moe_layer_freq", (1, [1] * depth), 1)
    first = min(depth, fields.take("first_k_dense_replace", int, 0))
    usual = ["dense"] * first + ["sparse"] * (depth - first)
    fields.expect("mlp_layer_types", (usual,), usual)
    sparse = routed(fields, "n_routed_experts", alike="n_shared_experts", correction=correction)
    count = sparse.sizes["experts"]
    fields.expect("num_experts", (count,), count)
    dense = gated(fields.hidden, fields.size("intermediate_size"))
    return [dense] * first + [sparse] * (depth - first)


def flags(fields: Fields, name: str, depth: int) -> list[bool]:
    """Read a list of 0 and 1, one per layer."""
    values = fields.take(name, list)
    if len(values) != depth or not set(values) <= {0, 1}:
        raise UsageError(f"config.json: {name} is {values!r} (expected {depth} of 0 and 1)")
    return [bool(flag) for flag in values]
