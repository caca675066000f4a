"""A quantized model as one GGUF file (version 3), which llama.cpp and programs around it read.

Families whose tensors these programs know, in the plain forms that they compute, are written; all
else is refused by name. Matrices that are not quantized are F16, vectors and routers F32. Files of
the architecture `llama` hold the rows of queries and keys in another order: the pairs of a rotation
are neighbours, not half a head apart.
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
from sabia.core.spec.experts import Experts, Router
from sabia.core.spec.layers import Attention, GatedMlp, Norms
from sabia.core.spec.rope import Rope, inverse_frequencies
from sabia.core.text.tokenize.tokenizer import Tokenizer

FILE = "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama"}
ARCHITECTURES |= {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
OUTER = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
INNER = {"attn.norm": "attn_norm", "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
INNER |= {f"attn.{p}{end}": f"attn_{p if p != 'o' else 'output'}" for p in "qkvo"
          for end in ("", "_bias")}  # fmt: skip
INNER |= {"mlp.norm": "ffn_norm", "mlp.router": "ffn_gate_inp"}
INNER |= {f"mlp.{p}": f"ffn_{p}" for p in ("gate", "up", "down")}
INNER |= {f"mlp.experts.{p}": f"ffn_{p}_exps" for p in ("gate", "up", "down")}
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in BYTES}
Arrays = Mapping[str, Any]


def plain_dtype(tensor: TensorSpec) -> str:
    """The dtype of a tensor that is not quantized."""
    matrix = len(tensor.shape) - tensor.stacked > 1 and tensor.component != "router"
    return "float16" if matrix else "float32"


def check_family(spec: ModelSpec) -> None:
    """Raise UsageError for a model that llama.cpp computes in another way, or not at all."""
    if spec.family not in ARCHITECTURES:
        raise UsageError(
            f"--format gguf: {spec.family} models are not written (expected one of "
            f"{', '.join(ARCHITECTURES)})"
        )
    new = spec.family.startswith("qwen3")
    for layer in spec.layers:
        mixer, part = layer.mixer, layer.mlp
        plain = isinstance(mixer, Attention) and mixer.rope is not None
        if plain:
            assert isinstance(mixer, Attention) and mixer.rope is not None
            size = mixer.head_dim
            usual = Attention(
                mixer.heads, mixer.kv_heads, size, size**-0.5, mixer.rope, mixer.qkv_bias,
                mixer.output_bias, qk_norm=new,
            )  # fmt: skip
            plain = mixer == usual and mixer.rope.dim == size
            plain &= mixer.rope.kind in ("default", "linear", "llama3")
        if isinstance(part, Experts):
            router = Router(part.router.experts, part.router.top_k)
            plain &= part == Experts(router, part.width)
        else:
            plain &= isinstance(part, GatedMlp) and part == GatedMlp(part.width)
        if not plain or layer.norms != Norms():
            raise UsageError(
                f"--format gguf: a layer of this {spec.family} model is {layer} (expected full "
                "attention, rotations of whole heads by default, linear or llama3 frequencies, "
                "SwiGLU without biases, and softmax routers that normalize)"
            )
    if spec.layers.count(spec.layers[0]) < len(spec.layers):
        raise UsageError(f"--format gguf: layers of this {spec.family} model differ (expected one)")


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
) -> int:
    """Write the directory `out` with FILE, atomically; returns the bytes of its tensors.

    tensors: as `export.stored_tensors` names them, blocks of quantized matrices under PART.
    """
    table = [(t, _kind(t, recipe)) for t in spec.tensors()]
    with atomic_directory(out) as temporary:
        writer = gguf.GGUFWriter(temporary / FILE, ARCHITECTURES[spec.family])
        _add_facts(writer, spec)
        add_vocabulary(writer, tokenizer, spec.vocab_size)
        size = 0
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
            size += count
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for factors in extra.values():
            writer.write_tensor_data(factors)
        for tensor, kind in table:
            writer.write_tensor_data(_data(spec, tensor, kind, tensors))
        writer.close()
    return size


def read_gguf(path: str | Path, spec: ModelSpec) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """The parameters in the file of a model of `write_gguf`, decoded to float32, in our order."""
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in spec.tensors():
        stored = held[stored_name(tensor)]
        kind = stored.tensor_type.name.lower()
        data = np.asarray(stored.data)
        if kind in BYTES:
            data = decode_blocks(data.reshape(-1, data.shape[-1]), kind)
        values = data.reshape(tensor.shape).astype(np.float32)
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


def _add_facts(writer: Any, spec: ModelSpec) -> None:
    mixer, part = spec.layers[0].mixer, spec.layers[0].mlp
    assert isinstance(mixer, Attention) and mixer.rope is not None
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
