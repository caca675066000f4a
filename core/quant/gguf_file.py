"""A quantized model as one GGUF file (version 3), which llama.cpp and programs around it read.

Families whose tensors these programs know, in the plain forms that they compute, are written; all
else is refused by name. Matrices that are not quantized are F16, vectors and routers F32. Files of
the architecture `llama` hold the rows of queries and keys in another order: the pairs of a rotation
are neighbours, not half a head apart. Norms that a family stores less 1 (Gemma) are stored whole.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from sabia.core.errors import UsageError
from sabia.core.numerics.ggml_blocks import BYTES, PART, decode_blocks
from sabia.core.quant.gguf_vocabulary import add_vocabulary
from sabia.core.quant.recipe import Recipe, name_in_layer
from sabia.core.shards.atomic import atomic_directory
from sabia.core.spec import ModelSpec, TensorSpec
from sabia.core.spec.layers import Attention, Experts, GatedMlp, Layer, Norms, Router
from sabia.core.spec.rope import Rope, inverse_frequencies
from sabia.core.text.tokenize.tokenizer import Tokenizer

FILE = "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama"}
ARCHITECTURES |= {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"}
# numbers of layers at which llama.cpp scales the scores of Gemma by the width of a head's share
OTHER_SCALE = {"gemma2": 46, "gemma3_text": 62}
OUTER = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
INNER = {"attn.norm": "attn_norm", "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
INNER |= {f"attn.{p}{end}": f"attn_{p if p != 'o' else 'output'}" for p in "qkvo"
          for end in ("", "_bias")}  # fmt: skip
INNER |= {"mlp.norm": "ffn_norm", "mlp.router": "ffn_gate_inp"}
INNER |= {"attn.post_norm": "post_attention_norm", "mlp.post_norm": "post_ffw_norm"}
INNER |= {f"mlp.{p}": f"ffn_{p}" for p in ("gate", "up", "down")}
INNER |= {f"mlp.experts.{p}": f"ffn_{p}_exps" for p in ("gate", "up", "down")}
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in BYTES}
Arrays = Mapping[str, Any]


def plain_dtype(tensor: TensorSpec) -> str:
    """The dtype of a tensor that is not quantized."""
    matrix = len(tensor.shape) - tensor.stacked > 1 and tensor.component != "router"
    return "float16" if matrix else "float32"


def plain_values(spec: ModelSpec, tensor: TensorSpec, array: np.ndarray) -> np.ndarray:
    """The float32 values that the file holds of a tensor that is not quantized."""
    offset = _norm_offset(spec, tensor)
    stored = (array + offset).astype(plain_dtype(tensor)).astype(np.float32)
    return stored - offset


def _norm_offset(spec: ModelSpec, tensor: TensorSpec) -> np.float32:
    """What the model adds to the weights of a norm, and the file holds with them; else 0."""
    if tensor.component != "norm":
        return np.float32(0)
    if tensor.layer is None:
        return np.float32(spec.norm_offset)
    return np.float32(spec.layers[tensor.layer].norms.offset)


def check_family(spec: ModelSpec) -> None:
    """Raise UsageError for a model that llama.cpp computes in another way, or not at all."""
    if spec.family not in ARCHITECTURES:
        raise UsageError(
            f"--format gguf: {spec.family} models are not written (expected one of "
            f"{', '.join(ARCHITECTURES)})"
        )
    gemma = ARCHITECTURES[spec.family].startswith("gemma")
    for layer in spec.layers:
        if layer != (_usual_gemma(spec, layer) if gemma else _usual(spec, layer)):
            raise UsageError(
                f"--format gguf: a layer of this {spec.family} model is {layer} (expected "
                "attention and norms of its family, rotations of whole heads by default, linear or "
                "llama3 frequencies, a gated MLP without biases, and softmax routers that "
                "normalize)"
            )
    if not gemma and spec.layers.count(spec.layers[0]) < len(spec.layers):
        raise UsageError(f"--format gguf: layers of this {spec.family} model differ (expected one)")
    if spec.family in ("gemma", "gemma2") and not spec.tied:
        raise UsageError(
            f"--format gguf: {spec.family} files have no head (expected tied embeddings)"
        )


def _usual(spec: ModelSpec, layer: Layer) -> Layer | None:
    """The layer as llama.cpp computes it in Llama's and Qwen's families."""
    mixer, part = layer.mixer, layer.mlp
    if not isinstance(mixer, Attention) or not _knows_rope(mixer, "llama3"):
        return None
    size, new = mixer.head_dim, spec.family.startswith("qwen3")
    usual = Attention(
        mixer.heads, mixer.kv_heads, size, size**-0.5, mixer.rope, mixer.qkv_bias,
        mixer.output_bias, qk_norm=new,
    )  # fmt: skip
    if isinstance(part, Experts):
        router = Router(part.router.experts, part.router.top_k)
        return Layer(usual, Experts(router, part.width))
    return Layer(usual, GatedMlp(part.width)) if isinstance(part, GatedMlp) else None


def _usual_gemma(spec: ModelSpec, layer: Layer) -> Layer | None:
    """The layer as llama.cpp computes it in Gemma's families: local layers have one window and one
    rotation, which in Gemma 3 is not scaled."""
    mixer, feed, one = layer.mixer, layer.mlp, spec.layers[0]
    if not isinstance(mixer, Attention) or not isinstance(one.mixer, Attention):
        return None
    new, local = spec.family == "gemma3_text", mixer.window is not None
    first = _first(spec, local)
    if first is None or not _knows_rope(first) or not isinstance(feed, GatedMlp):
        return None
    if local and new and first.rope is not None and first.rope.kind != "default":
        return None
    heads, size = one.mixer.heads, one.mixer.head_dim
    if OTHER_SCALE.get(spec.family) == len(spec.layers):
        scale = float(spec.hidden_size // heads) ** -0.5
    else:
        scale = size**-0.5
    cap = one.mixer.softcap if spec.family == "gemma2" else None
    usual = Attention(
        heads, one.mixer.kv_heads, size, scale, first.rope, window=first.window, softcap=cap,
        qk_norm=new, norm_offset=1.0 if new else 0.0,
    )  # fmt: skip
    if one.mlp != feed:
        return None
    norms = Norms(post=spec.family != "gemma", offset=1.0)
    return Layer(usual, GatedMlp(feed.width, "gelu_pytorch_tanh"), norms)


def _first(spec: ModelSpec, local: bool) -> Attention | None:
    """The attention of the first layer with a window, or without one."""
    mixers = (x.mixer for x in spec.layers if isinstance(x.mixer, Attention))
    return next((mixer for mixer in mixers if (mixer.window is not None) == local), None)


def _knows_rope(mixer: Attention, *more: str) -> bool:
    rope = mixer.rope
    return rope is not None and rope.dim == mixer.head_dim and rope.kind in (
        "default", "linear", *more
    )  # fmt: skip


def stored_name(tensor: TensorSpec) -> str:
    """The name in the file."""
    if tensor.layer is None:
        return f"{OUTER[tensor.name]}.weight"
    name = name_in_layer(tensor)
    return f"blk.{tensor.layer}.{INNER[name]}.{'bias' if name.endswith('_bias') else 'weight'}"


def write_gguf(
    out: str | Path,
    spec: ModelSpec,
    recipe: Recipe,
    tensors: Arrays,
    tokenizer: Tokenizer | None,
) -> None:
    """Write the directory `out` with FILE, atomically.

    tensors: as `export.stored_tensors` names them, blocks of quantized matrices under PART.
    """
    table = [(t, _kind(t, recipe)) for t in spec.tensors()]
    with atomic_directory(out) as temporary:
        writer = gguf.GGUFWriter(temporary / FILE, ARCHITECTURES[spec.family])
        _add_facts(writer, spec)
        add_vocabulary(writer, tokenizer, spec.vocab_size)
        extra = _frequency_factors(spec)
        for name, factors in extra.items():
            writer.add_tensor_info(name, factors.shape, factors.dtype, factors.nbytes)
        for tensor, kind in table:
            shape = list(tensor.shape)
            dtype = np.dtype(plain_dtype(tensor) if kind is None else np.uint8)
            if kind is not None:
                shape[-1] = shape[-1] // 32 * BYTES[kind]
            count = int(np.prod(shape)) * dtype.itemsize
            raw = None if kind is None else TYPES[kind]
            writer.add_tensor_info(stored_name(tensor), shape, dtype, count, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for factors in extra.values():
            writer.write_tensor_data(factors)
        for tensor, kind in table:
            writer.write_tensor_data(_data(spec, tensor, kind, tensors))
        writer.close()


def read_gguf(path: str | Path, spec: ModelSpec) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """The parameters in the file of a model of `write_gguf`, decoded to float32, in our order."""
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in spec.tensors():
        stored = held[stored_name(tensor)]
        kind = stored.tensor_type.name.lower()
        data = np.asarray(stored.data)
        if kind in BYTES:
            data = decode_blocks(data.reshape(-1, data.shape[-1]), kind)
        values = data.reshape(tensor.shape).astype(np.float32) - _norm_offset(spec, tensor)
        yield tensor, values[np.argsort(_order(spec, tensor))]


def _kind(tensor: TensorSpec, recipe: Recipe) -> str | None:
    """The type of a quantized matrix."""
    scheme = recipe.scheme_of(tensor) if tensor.linear else None
    return scheme.name if scheme is not None and scheme.quantizes else None


def _data(spec: ModelSpec, tensor: TensorSpec, kind: str | None, tensors: Arrays) -> np.ndarray:
    names = tensor.files
    if kind is not None:
        names = tuple(f"{name.removesuffix('.weight')}.{PART}" for name in names)
    parts = [np.asarray(tensors[name]) for name in names]
    data = np.stack(parts) if isinstance(tensor.hf, tuple) else parts[0]
    if offset := _norm_offset(spec, tensor):
        data = data + offset
    return np.ascontiguousarray(data[_order(spec, tensor)])


def _order(spec: ModelSpec, tensor: TensorSpec) -> np.ndarray:
    """The rows of a tensor in the order of the file."""
    rows, name = np.arange(tensor.shape[0]), tensor.name.rpartition(".")[2]
    mixer = spec.layers[0].mixer
    if ARCHITECTURES[spec.family] != "llama" or name not in ("q", "k", "q_bias", "k_bias"):
        return rows
    assert isinstance(mixer, Attention)
    halves = rows.reshape(-1, 2, mixer.head_dim // 2)  # pair i of a head: rows i and i + half
    return halves.swapaxes(1, 2).reshape(-1)


def _add_facts(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    local, mixer = (_first(spec, kind) for kind in (True, False))
    mixer, part = mixer or local, spec.layers[0].mlp
    assert mixer is not None and mixer.rope is not None
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(len(spec.layers))
    writer.add_head_count(mixer.heads)
    writer.add_head_count_kv(mixer.kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_value_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(mixer.rope.dim)
    writer.add_rope_freq_base(mixer.rope.theta)
    writer.add_vocab_size(spec.vocab_size)
    if mixer.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(mixer.rope.factor)
    if local is not None and local.window is not None and local.rope is not None:
        writer.add_sliding_window(local.window)
        kinds = [isinstance(x.mixer, Attention) and bool(x.mixer.window) for x in spec.layers]
        writer.add_sliding_window_pattern(kinds)
        writer.add_rope_freq_base_swa(local.rope.theta)
    if mixer.softcap is not None:
        writer.add_attn_logit_softcapping(mixer.softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if isinstance(part, Experts):
        writer.add_expert_count(part.router.experts)
        writer.add_expert_used_count(part.router.top_k)
        writer.add_expert_feed_forward_length(part.width)
    else:
        assert isinstance(part, GatedMlp)
    writer.add_feed_forward_length(part.width)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _frequency_factors(spec: ModelSpec) -> dict[str, np.ndarray]:
    """What llama3's rotations divide the plain frequencies by."""
    rope = spec.ropes[0]
    if rope.kind != "llama3":
        return {}
    plain = inverse_frequencies(Rope(rope.dim, rope.theta))
    pairs = zip(plain, inverse_frequencies(rope), strict=True)
    return {"rope_freqs.weight": np.array([usual / own for usual, own in pairs], np.float32)}
