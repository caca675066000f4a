"""Multi-head latent attention (DeepSeek-V3): see core.spec.latent.

Many queries: keys and values of all heads are made from the latents, then attention as usual. One
query a row with a cache: the upward projection moves to the query and the result, so that
attention reads the latents themselves, as one key-value head of kv_rank + rope.dim dimensions
(arXiv 2405.04434 section 2.1.3); otherwise every step would project the whole past again.
"""

from sabia.core.model.block import HEADS, Block
from sabia.core.model.mixers import rotated
from sabia.core.model.ops import Angles, Array, Ops
from sabia.core.spec.latent import LatentAttention

_SHARED = ("batch", "sequence", None, None)
_WHOLE_SHARED = ("batch", None, None, None)
_WHOLE_HEADS = ("batch", None, "heads", "head_dim")


def latent_attention(part: LatentAttention, block: Block, y: Array) -> Array:
    """Multi-head latent attention of y[B, T, D]."""
    ops, context = block.ops, block.context
    batch, length = y.shape[:2]
    angles = context.angles[part.rope]
    q = ops.shard(queries(part, block, y).reshape(batch, length, -1, part.key_dim), HEADS)
    plain, turned = q[..., : part.plain_dim], q[..., part.plain_dim :]
    turned = _rotated(part, turned, angles, ops)
    down = block.project("attn.kv_down", y)[:, :, None, :]
    latent = _normed(part, block, "attn.kv_norm", down[..., : part.kv_rank])
    key = _rotated(part, down[..., part.kv_rank :], angles, ops)
    if context.cache is None:
        latent, key = (ops.relayout(x, _SHARED, _WHOLE_SHARED) for x in (latent, key))
    else:
        latent, key = context.cache.extend(
            block.index, {"latent": latent, "rotated": key}, context.slots, context.reads, ops
        )
    attend = _absorbed if context.cache is not None and length == 1 else _expanded
    out = attend(part, block, plain, turned, latent, key)
    return block.project("attn.o", ops.shard(out, HEADS).reshape(batch, length, -1))


def queries(part: LatentAttention, block: Block, y: Array) -> Array:
    """[B, T, H·(plain_dim + rope.dim)], through the query latent where there is one."""
    if part.q_rank is None:
        return block.project("attn.q", y)
    latent = _normed(part, block, "attn.q_norm", block.project("attn.q_down", y))
    return block.project("attn.q_up", latent)


def _normed(part: LatentAttention, block: Block, name: str, x: Array) -> Array:
    return block.ops.rms_norm(x, block.weights[name], part.latent_eps)


def _rotated(part: LatentAttention, x: Array, angles: Angles, ops: Ops) -> Array:
    """x with its pairs rotated; what comes out is in halves, in queries and keys alike."""
    if part.interleaved:
        x = ops.concat((x[..., 0::2], x[..., 1::2]), -1)
    return rotated(x, angles, ops)


def _expanded(
    part: LatentAttention, block: Block, plain: Array, turned: Array, latent: Array, key: Array
) -> Array:
    """Attention over keys and values of all heads.

    plain, turned[B, T, H, ·]: the parts of a query; latent, key[B, S, 1, ·].
    """
    ops = block.ops
    pairs = block.project("attn.kv_up", latent[:, :, 0])
    pairs = pairs.reshape(*latent.shape[:2], -1, part.plain_dim + part.value_dim)
    plain_key, values = pairs[..., : part.plain_dim], pairs[..., part.plain_dim :]
    spread = key + ops.full((part.heads, 1), 0.0, key)  # the same key for every head
    spread = ops.relayout(spread, _WHOLE_SHARED, _WHOLE_HEADS)
    q, k = ops.concat((plain, turned), -1), ops.concat((plain_key, spread), -1)
    mask = block.context.masks[part.window]
    return ops.attention(q, k, values, mask, scale=part.scale)


def _absorbed(
    part: LatentAttention, block: Block, plain: Array, turned: Array, latent: Array, key: Array
) -> Array:
    """The same for one query a row, reading the latents as keys and values of a single head."""
    ops = block.ops
    up = block.weights["attn.kv_up"].reshape(-1, part.plain_dim + part.value_dim, part.kv_rank)
    to_key, to_value = up[:, : part.plain_dim], up[:, part.plain_dim :]
    q = (plain[:, 0].swapaxes(0, 1) @ to_key).swapaxes(0, 1)[:, None]  # [B, 1, H, kv_rank]
    q, k = ops.concat((q, turned), -1), ops.concat((latent, key), -1)
    mask = block.context.masks[part.window]
    out = ops.attention(q, k, k, mask, scale=part.scale)[..., : part.kv_rank]
    return (out[:, 0].swapaxes(0, 1) @ to_value.swapaxes(1, 2)).swapaxes(0, 1)[:, None]
