"""Multi-head latent attention (DeepSeek-V3): see core.spec.latent.

With several queries per row, keys and values of all heads are projected up from the latents, then
attention is as usual. With one query per row and a cache, the up-projection is absorbed into the
query and the output, so that attention reads the latents themselves, as one key-value head of
kv_rank + rope.dim dimensions (arXiv 2405.04434 section 2.1.3); otherwise every decoding step would
project all cached tokens again. The parts of queries and keys with and without rotary embedding are
named q_rope, k_rope and q_nope, k_nope as in the paper's code.
"""

from sabia.core.model.block import HEADS, Block
from sabia.core.model.mixers import rotated
from sabia.core.ops.base import Angles, Array, Ops
from sabia.core.spec.latent import LatentAttention

_SHARED = ("batch", "sequence", None, None)
_WHOLE_SHARED = ("batch", None, None, None)
_WHOLE_HEADS = ("batch", None, "heads", "head_dim")


def latent_attention(part: LatentAttention, block: Block, y: Array) -> Array:
    """Multi-head latent attention of y[B, T, D], for the layer's queries."""
    ops, context = block.ops, block.context
    angles, of_queries = context.angles[part.rope], context.query_angles[part.rope]
    chosen = context.chosen(y)
    batch, length = chosen.shape[:2]
    q = ops.shard(queries(part, block, chosen).reshape(batch, length, -1, part.key_dim), HEADS)
    # [B, T, H, nope_dim], [B, T, H, rope.dim]
    q_nope, q_rope = q[..., : part.nope_dim], q[..., part.nope_dim :]
    q_rope = _rotated(part, q_rope, of_queries, ops)
    kv_down = block.project("attn.kv_down", y)[:, :, None, :]  # [B, T, 1, kv_rank + rope.dim]
    # the latent and the rotated key are all that the cache stores
    latent = _normed(part, block, "attn.kv_norm", kv_down[..., : part.kv_rank])
    k_rope = _rotated(part, kv_down[..., part.kv_rank :], angles, ops)
    if context.cache is None:
        latent, k_rope = (ops.relayout(x, _SHARED, _WHOLE_SHARED) for x in (latent, k_rope))
    else:
        latent, k_rope = context.cache.extend(
            block.index, {"latent": latent, "rotated": k_rope}, context.slots, context.reads, ops
        )
    attend = _absorbed if context.cache is not None and length == 1 else _multi_head
    out = attend(part, block, q_nope, q_rope, latent, k_rope)
    return block.project("attn.o", ops.shard(out, HEADS).reshape(batch, length, -1))


def queries(part: LatentAttention, block: Block, y: Array) -> Array:
    """[B, T, H·(nope_dim + rope.dim)], through the query latent if the model has one."""
    if part.q_rank is None:
        return block.project("attn.q", y)
    latent = _normed(part, block, "attn.q_norm", block.project("attn.q_down", y))
    return block.project("attn.q_up", latent)


def _normed(part: LatentAttention, block: Block, name: str, x: Array) -> Array:
    return block.ops.rms_norm(x, block.weights[name], part.latent_eps)


def _rotated(part: LatentAttention, x: Array, angles: Angles, ops: Ops) -> Array:
    """x with rotary embedding; interleaved pairs (2i, 2i+1) are first reordered into halves."""
    if part.interleaved:
        x = ops.concat((x[..., 0::2], x[..., 1::2]), -1)
    return rotated(x, angles, ops)


def _multi_head(
    part: LatentAttention, block: Block, q_nope: Array, q_rope: Array, latent: Array, key: Array
) -> Array:
    """Attention over keys and values of all heads.

    q_nope, q_rope[B, T, H, ·]: the two parts of a query; latent, key[B, S, 1, ·].
    """
    ops = block.ops
    keys_values = block.project("attn.kv_up", latent[:, :, 0])  # [B, S, H·(nope_dim + value_dim)]
    keys_values = keys_values.reshape(*latent.shape[:2], -1, part.nope_dim + part.value_dim)
    keys_values, key = (block.context.of_keys(x) for x in (keys_values, key))
    k_nope, values = keys_values[..., : part.nope_dim], keys_values[..., part.nope_dim :]
    k_rope = key + ops.full((part.heads, 1), 0.0, key)  # the same key for every head
    k_rope = ops.relayout(k_rope, _WHOLE_SHARED, _WHOLE_HEADS)
    q, k = ops.concat((q_nope, q_rope), -1), ops.concat((k_nope, k_rope), -1)
    mask = block.context.query_masks[part.window]
    return ops.attention(q, k, values, mask, scale=part.scale)


def _absorbed(
    part: LatentAttention, block: Block, q_nope: Array, q_rope: Array, latent: Array, key: Array
) -> Array:
    """The same for one query per row, with the latents as keys and values of a single head."""
    ops = block.ops
    # [H, nope_dim + value_dim, kv_rank]
    kv_up = block.weights["attn.kv_up"].reshape(-1, part.nope_dim + part.value_dim, part.kv_rank)
    to_key, to_value = kv_up[:, : part.nope_dim], kv_up[:, part.nope_dim :]
    # q · (W_k c) = (W_kᵀ q) · c: project the query instead of the cached latents
    q = (q_nope[:, 0].swapaxes(0, 1) @ to_key).swapaxes(0, 1)[:, None]  # [B, 1, H, kv_rank]
    q, k = ops.concat((q, q_rope), -1), ops.concat((latent, key), -1)
    mask = block.context.masks[part.window]
    out = ops.attention(q, k, k, mask, scale=part.scale)[..., : part.kv_rank]
    # Σ a_j W_v c_j = W_v Σ a_j c_j, [B, 1, H, value_dim]
    return (out[:, 0].swapaxes(0, 1) @ to_value.swapaxes(1, 2)).swapaxes(0, 1)[:, None]
