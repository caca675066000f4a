"""DeepSeek-V3 (arXiv 2412.19437): latent attention, sigmoid routing with group limits and a bias.

The first `first_k_dense_replace` layers are dense, the others route to experts and a shared one.
Layers for multi-token prediction follow the other layers in the files; they are not computed with
and are copied unchanged.
"""

from dataclasses import replace

from sabia.core.spec.families import llama, qwen3_moe
from sabia.core.spec.fields import Fields
from sabia.core.spec.layers import Experts, GatedMlp, LatentAttention, Layer, Router
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.rope import read_rope, score_factor

_ATTENTION = {"q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
_ATTENTION |= {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
NAMES = llama.NAMES | qwen3_moe.NAMES
NAMES |= {f"attn.{p}": f"{llama.LAYER}self_attn.{m}.weight" for p, m in _ATTENTION.items()}
NAMES |= {f"attn.{p}_bias": f"{llama.LAYER}self_attn.{m}.bias" for p, m in _ATTENTION.items()}
NAMES |= {"mlp.correction": llama.LAYER + "mlp.gate.e_score_correction_bias"}
for _p in ("gate", "up", "down"):
    NAMES[f"mlp.shared.{_p}"] = f"{llama.LAYER}mlp.shared_experts.{_p}_proj.weight"


def attention(fields: Fields, value_dim: int | None = 128) -> LatentAttention:
    """Read the attention fields; value_dim: default (None: hidden / heads)."""
    heads = fields.size("num_attention_heads")
    fields.expect("num_key_value_heads", (heads,), heads)
    fields.expect("attention_dropout", (0, 0.0), 0.0)
    rotated, plain = fields.size("qk_rope_head_dim", 64), fields.size("qk_nope_head_dim", 128)
    for name, size in (("head_dim", rotated), ("qk_head_dim", plain + rotated)):
        fields.expect(name, (size,), size)
    rope = read_rope(fields, rotated)
    scale = (plain + rotated) ** -0.5 * score_factor(rope)
    values = fields.size("v_head_dim", value_dim or fields.hidden // heads)
    latent = fields.size("kv_lora_rank", 512)
    interleaved = fields.take("rope_interleave", bool, False)
    bias = fields.take("attention_bias", bool, False)
    ranks = (latent, fields.size("q_lora_rank", None))
    return LatentAttention(heads, plain, values, *ranks, scale, rope, interleaved, bias)


def experts(fields: Fields) -> Experts:
    """Read the fields of the routed layers."""
    fields.expect("scoring_func", ("sigmoid",), "sigmoid")
    fields.expect("topk_method", ("noaux_tc",), "noaux_tc")
    router = Router(
        fields.size("n_routed_experts", 256),
        fields.size("num_experts_per_tok", 8),
        "sigmoid",
        fields.take("norm_topk_prob", bool, False),
        fields.take("routed_scaling_factor", float, 2.5),
        fields.size("n_group", 8),
        fields.size("topk_group", 4),
        expert_bias=True,
    )
    inner = fields.size("moe_intermediate_size", 2048)
    return Experts(router, inner, shared=inner * fields.size("n_shared_experts", 1))


def read(fields: Fields) -> ModelSpec:
    """The model of a `deepseek_v3` configuration."""
    fields.defaults(q_lora_rank=1536, max_position_embeddings=4096, num_key_value_heads=128)
    fields.defaults(rope_interleave=True, norm_topk_prob=True)  # null is false, as in transformers
    depth = fields.depth
    mixer, routed = attention(fields), experts(fields)
    fields.expect("hidden_act", ("silu",), "silu")
    fields.expect("moe_layer_freq", (1,), 1)
    dense = GatedMlp(fields.size("intermediate_size"))
    first = fields.take("first_k_dense_replace", int, 3)
    predicted = fields.take("num_mtp_layers", int, 1)
    predicted = fields.take("num_nextn_predict_layers", int, predicted)
    fields.take("ep_size", int, 1)
    qwen3_moe.read_router_losses(fields)
    layers = tuple(Layer(mixer, dense if index < first else routed) for index in range(depth))
    kept = tuple(rf"model\.layers\.{depth + n}\..+" for n in range(predicted))
    return replace(llama.decoder(fields, layers, NAMES), kept=kept)
