"""Families by a description in data/families.toml (`layers`): dense decoders, and MoE models alike.

Each layer has norms, attention and an MLP, or experts instead of it. A value of `layers` is a fact
of the family, or the list of a field of the configuration and its default. Norms are RMS norms, of
one vector, unless `norm_bias` makes them LayerNorms of two. Windows change FLOPs, not parameters.
The tests compare the counts with the models of transformers.
"""

from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import LayerHalf, layer
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec.families import qwen3


class Description:
    """What families.toml says of a family, with the values that a configuration gives."""

    def __init__(self, fields: CountFields, more: dict[str, Any]) -> None:
        """more: values besides those of the file."""
        own = read_data("families.toml")["family"][fields.family].get("layers", {})
        self.fields, self.own = fields, own | more

    def __call__(self, name: str, usual: Any = False) -> Any:
        """The value of `name`: given, or read from the configuration, or `usual`."""
        value = self.own.get(name, usual)
        if not isinstance(value, list):
            return value
        field, *default = value
        if default and isinstance(default[0], bool):
            return self.fields.take(field, bool, default[0])
        return self.fields.size(field, *default)

    def size(self, name: str) -> int:
        """A size by its usual name, which is another one in some families."""
        names = self("names", {}).get(name, [name])
        return self.fields.size(next((each for each in names if each in self.fields), names[-1]))


def described(fields: CountFields, **more: Any) -> Architecture:
    """Read a model by its family's description; more: further values of it."""
    own = Description(fields, more)
    for name in own.own.get("null", ()):
        fields.expect(name, (None,), None)
    if own("names"):
        fields.hidden, fields.depth = own.size("hidden_size"), own.size("num_hidden_layers")
    hidden, heads = fields.hidden, own.size("num_attention_heads")
    alike = heads, heads, hidden // heads
    sizes = alike if own("equal_heads") else reading.head_sizes(fields, heads)
    every = own("bias")
    both = own("attention_bias", every)
    flags = {"qkv_bias": own("qkv_bias", both), "output_bias": own("output_bias", both)}
    flags |= {name: own(name) for name in ("qk_norm", "qk_norm_whole")}
    windows = _windows(own)
    mixers = {each: reading.grouped(hidden, *sizes, each, **flags) for each in set(windows)}
    apart = own("normed_apart") * (sizes[0] + sizes[1]) * sizes[2]
    norms, norm = own("norms", 2), (1 + own("norm_bias")) * hidden
    around = norms * norm + own("vectors", 0) + apart
    pairs = zip(windows, _feeds(own, every), strict=True)
    vocab = fields.size("vocab_size")
    return reading.decoder(
        fields,
        [layer(mixers[window], feed, around, norms=norms) for window, feed in pairs],
        tied=own("tied"),
        vocab=vocab,
        other=own("outer_norms", 1) * norm + own("head_bias") * vocab,
        positions=own("positions", 0) + own("more_positions", 0),
    )


def _windows(own: Description) -> list[int | None]:
    """Read the window of each layer, None for none."""
    fields, how = own.fields, own("windows", "")
    if how == "listed":
        return list(qwen3.windows(fields))
    if how == "one":
        return [fields.take("sliding_window", int, None)] * fields.depth
    every = own("period", 0)
    if not every:
        return [None] * fields.depth
    usual = [qwen3.KINDS[(index + 1) % every != 0] for index in range(fields.depth)]
    window = fields.take("sliding_window", int, None)
    kinds = fields.each("layer_types", fields.depth, qwen3.KINDS, usual)
    return [window if kind == qwen3.KINDS[1] else None for kind in kinds]


def _feeds(own: Description, bias: bool) -> list[LayerHalf]:
    """Read the second half of each layer: an MLP, experts, or DeepSeek's layers."""
    fields = own.fields
    if own("dense_first"):
        return reading.dense_first(fields)
    if own("moe", {}):
        routed = reading.routed(fields, **own("moe"), correction=own("correction"))
        return [routed] * fields.depth
    bias = own("mlp_bias", bias if "bias" in own.own else ["mlp_bias", False])
    usual = [times * fields.hidden] if (times := own("inner_times", 0)) else []
    name = own("inner", "" if usual else "intermediate_size")
    width = fields.size(name, *usual) if name else usual[0]
    make = reading.plain if own("mlp") == "plain" else reading.gated
    return [make(fields.hidden, width, bias=bias)] * fields.depth


def exaone4(fields: CountFields) -> Architecture:
    """EXAONE 4, where layers without a window follow a pattern such as LLLG, or a number."""
    pattern: Any = fields.take("sliding_window_pattern", object, "")
    if not isinstance(pattern, str | int):
        raise UsageError(
            "config.json: sliding_window_pattern is no text or number (expected LLLG or 4)"
        )
    every = pattern if isinstance(pattern, int) else len(pattern)
    local = "sliding_window" in fields and every > 0
    return described(fields, period=every if local else 1)


def minimax_m2(fields: CountFields) -> Architecture:
    """MiniMax-M2, whose layers all have the same attention."""
    fields.expect("attn_type_list", ([1] * fields.depth,), [1] * fields.depth)
    return described(fields)


def mpt(fields: CountFields) -> Architecture:
    """MPT, which has a table for attention."""
    CountFields(fields.take("attn_config", dict), "mpt.attn_config").finish()
    return described(fields)


def opt(fields: CountFields) -> Architecture:
    """OPT, without the projection of its embeddings."""
    fields.expect("word_embed_proj_dim", (fields.hidden,), fields.hidden)
    return described(fields)


def stablelm(fields: CountFields) -> Architecture:
    """StableLM 2, perhaps with attention and MLP in parallel."""
    return described(fields, norms=2 - fields.take("use_parallel_residual", bool, False))


def falcon(fields: CountFields) -> Architecture:
    """Falcon (arXiv 2311.16867): one key-value head, or groups in the new architecture."""
    hidden = fields.hidden
    heads, new = fields.size("num_attention_heads"), fields.take("new_decoder_architecture", bool)
    multi, parallel = fields.take("multi_query", bool), fields.take("parallel_attn", bool)
    bias, groups = fields.take("bias", bool), fields.size("num_kv_heads", heads)
    kv_heads = groups if new else 1 if multi else heads
    norms = fields.take("num_ln_in_parallel_attn", int, 2 if new else 1 if parallel else 2)
    mixer = reading.grouped(hidden, heads, kv_heads, hidden // heads, None, bias, bias)
    feed = reading.plain(hidden, fields.size("ffn_hidden_size", 4 * hidden), bias=bias)
    kinds = [layer(mixer, feed, norms * 2 * hidden, norms=norms)] * fields.depth
    return reading.decoder(fields, kinds, tied=True, other=2 * hidden)
