"""The list of tensors that a layer keeps, beside what autograd saves of the same layer in torch.

The layers here are written for this test from plain operations; their saved tensors are counted by
storage, weights left out. Norms save a factor or two a token besides, which the list leaves out.
"""

from dataclasses import replace

import pytest
from plain_models import attention_layer, with_experts

from sabia.core.plan.device.layout import Stack
from sabia.core.plan.device.memory_kept import OUTPUT, SCORES, layer_tensors

torch = pytest.importorskip("torch")
F = torch.nn.functional

LLAMA = Stack("llama")
GPT_2022 = Stack("gpt-2022", attention_matrix=True, dropout=True)
B, S, H, HEADS, KV, SIZE, INNER = 2, 64, 96, 6, 2, 16, 256
TOKENS = B * S
FACTORS = 2 * 2 * 4 * TOKENS  # mean and deviation of both norms, fp32 at most
ROUNDING = 0.001  # seeds of the attention kernel


def listed(kind, stack, sequence=S, hidden=H):
    """Bytes a token by the list."""
    tensors = layer_tensors(kind, hidden, sequence, 2, stack)
    return sum(one.token_bytes for one in tensors if one.name != OUTPUT)


def saved(run, x, weights):
    """Bytes that autograd keeps of run(x), storages of the weights left out."""
    own = {w.untyped_storage().data_ptr() for w in weights.values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(x, weights)
    assert out.requires_grad
    return sum(size for size, _ in kept.values())


def matrices(**shapes):
    make = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=make).mul_(0.02).bfloat16().requires_grad_()
        for name, shape in shapes.items()
    }


def heads(x, count):
    return x.view(B, S, count, -1).transpose(1, 2)


def fused_norm(x, w):
    return F.layer_norm(x, (H,), w["norm"])  # fused on CPUs too, which rms_norm is not: keeps x


def dropout(x):
    return torch.native_dropout(x, 0.1, True)[0]  # as on GPUs: keeps a mask of one byte


def llama(x, w):
    """A layer of Llama: fused norms, grouped queries, an attention kernel, eager SwiGLU."""
    y = fused_norm(x, w)
    q, k, v = heads(y @ w["q"], HEADS), heads(y @ w["k"], KV), heads(y @ w["v"], KV)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + a.transpose(1, 2).reshape(B, S, HEADS * SIZE) @ w["o"]
    y = fused_norm(x, w)
    return x + (F.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def gpt(x, w):
    """A layer of GPT as of 2022: attention written out, dropout, GELU."""
    y = fused_norm(x, w)
    q, k, v = (heads(y @ w[name], HEADS).contiguous() for name in "qkv")
    p = F.softmax((q * SIZE**-0.5) @ k.transpose(-1, -2), -1)
    a = (dropout(p) @ v).transpose(1, 2).reshape(B, S, H)
    x = x + dropout(a @ w["o"])
    y = fused_norm(x, w)
    return x + dropout(F.gelu(y @ w["up"]) @ w["down"])


def test_a_layer_of_llama_keeps_what_autograd_saves():
    q, kv = HEADS * SIZE, KV * SIZE
    w = matrices(norm=(H,), q=(H, q), k=(H, kv), v=(H, kv), o=(q, H))
    w |= matrices(gate=(H, INNER), up=(H, INNER), down=(INNER, H))
    x = torch.randn(B, S, H).bfloat16().requires_grad_()
    kind = attention_layer(H, HEADS, KV, SIZE, INNER)
    ours = listed(kind, LLAMA) * TOKENS
    assert ours <= saved(llama, x, w) <= ours + FACTORS + ROUNDING * ours


def test_a_layer_of_gpt_keeps_what_autograd_saves():
    size = HEADS * SIZE
    assert size == H
    w = matrices(norm=(H,), q=(H, H), k=(H, H), v=(H, H), o=(H, H), up=(H, 4 * H), down=(4 * H, H))
    x = torch.randn(B, S, H).bfloat16().requires_grad_()
    kind = attention_layer(H, HEADS, HEADS, SIZE, 4 * H, gated=False)
    ours = listed(kind, GPT_2022) * TOKENS
    assert ours <= saved(gpt, x, w) <= ours + FACTORS + ROUNDING * ours


Q_LATENT, KV_LATENT, PLAIN, ROTATED, VALUE = 40, 24, 16, 8, 12


def latent(x, w):
    """A layer of DeepSeek-V3: latents, keys in two parts, an eager SwiGLU."""
    y = fused_norm(x, w)
    q = F.layer_norm(y @ w["q_down"], (Q_LATENT,), w["q_norm"]) @ w["q_up"]
    q = heads(q, HEADS)
    q = torch.cat([q[..., :PLAIN], q[..., PLAIN:] * 0.5], -1)
    low, rotated = (y @ w["kv_down"]).split([KV_LATENT, ROTATED], -1)
    up = F.layer_norm(low, (KV_LATENT,), w["kv_norm"]) @ w["kv_up"]
    k, v = up.view(B, S, HEADS, PLAIN + VALUE).transpose(1, 2).split([PLAIN, VALUE], -1)
    k = torch.cat([k, rotated.view(B, 1, S, ROTATED).expand(B, HEADS, S, ROTATED) * 0.5], -1)
    a = kernel(q, k, v)
    x = x + a.transpose(1, 2).reshape(B, S, HEADS * VALUE) @ w["o"]
    y = fused_norm(x, w)
    return x + (F.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


class Kernel(torch.autograd.Function):
    """An attention kernel whose values are of another size: keeps what such kernels keep."""

    @staticmethod
    def forward(ctx, q, k, v):
        scores = q.float() @ k.float().transpose(-1, -2)
        out = (scores.softmax(-1) @ v.float()).to(q.dtype)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as kernels lay it out
        ctx.save_for_backward(q, k, v, out, scores.logsumexp(-1))
        return out

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


kernel = Kernel.apply


def test_a_layer_of_latent_attention_keeps_what_autograd_saves():
    key, up = HEADS * (PLAIN + ROTATED), HEADS * (PLAIN + VALUE)
    w = matrices(norm=(H,), q_down=(H, Q_LATENT), q_norm=(Q_LATENT,), q_up=(Q_LATENT, key))
    w |= matrices(kv_down=(H, KV_LATENT + ROTATED), kv_norm=(KV_LATENT,), kv_up=(KV_LATENT, up))
    w |= matrices(o=(HEADS * VALUE, H), gate=(H, INNER), up=(H, INNER), down=(INNER, H))
    x = torch.randn(B, S, H).bfloat16().requires_grad_()
    kind = replace(
        attention_layer(H, HEADS, HEADS, PLAIN + ROTATED, INNER),
        value_width=HEADS * VALUE,
        score_width=key + HEADS * VALUE,
        cache_width=KV_LATENT + ROTATED,
        query_latent=Q_LATENT,
        key_latent=KV_LATENT,
    )
    ours = listed(kind, LLAMA) * TOKENS
    assert ours <= saved(latent, x, w) <= ours + 2 * FACTORS + ROUNDING * ours


def test_the_list_of_gpt_is_the_formula_of_the_paper():
    kind = attention_layer(6144, 64, 64, 96, 4 * 6144, gated=False)
    by_paper = 34 * 6144 + 5 * 64 * 2048
    assert listed(kind, GPT_2022, 2048, 6144) == by_paper
    tensors = layer_tensors(kind, 6144, 2048, 2, GPT_2022)
    assert sum(one.token_bytes for one in tensors if one.name in SCORES) == 5 * 64 * 2048


def test_the_list_of_llama_by_hand():
    kind = attention_layer(4096, 32, 8, 128, 14336)
    by_hand = 12 * 4096 + 4 * 4096 * 8 / 32 + 8 * 14336 + 4 * 32
    assert listed(kind, LLAMA, 8192, 4096) == by_hand
    fused = Stack("fused", drops=("activated",))
    assert listed(kind, fused, 8192, 4096) == by_hand - 2 * 14336


def test_a_kernel_keeps_no_matrix_whatever_the_length():
    kind = attention_layer(4096, 32, 8, 128, 14336)
    assert listed(kind, LLAMA, 8192, 4096) == listed(kind, LLAMA, 131072, 4096)
    longer = listed(kind, GPT_2022, 16384, 4096) - listed(kind, GPT_2022, 8192, 4096)
    assert longer == 5 * 32 * 8192


def test_a_mixture_keeps_copies_of_each_token():
    dense = attention_layer(2048, 32, 4, 128, 0)
    sparse = with_experts(dense, 2048, 128, 8, 768)
    copies = 8 * (2 * 2048 + 4 * 768 * 2 + 2 * 2048)
    router = 4 * 128
    assert listed(sparse, LLAMA, S, 2048) - listed(dense, LLAMA, S, 2048) == copies + router


def test_a_layer_of_one_half_keeps_one_norm():
    """As Nemotron-H has them."""
    whole = attention_layer(4096, 32, 8, 128, 14336)
    attention = replace(whole, mlp_width=0, stream_norms=1)
    names = [one.name for one in layer_tensors(attention, 4096, 8192, 2, LLAMA)]
    assert names == ["input", "normed", "query", "key", "value", "logsumexp", "attended"]
    feed = replace(attention, mlp_width=14336, query_width=0, key_width=0, value_width=0)
    feed = replace(feed, score_width=0, heads=0)
    assert listed(feed, LLAMA, 8192, 4096) == 4 * 4096 + 8 * 14336


def test_a_recurrent_layer_keeps_no_more_for_a_longer_row():
    kind = replace(
        attention_layer(2048, 32, 16, 128, 5632), score_width=0, query_width=2048, key_width=2048,
        value_width=4096, heads=32, state_products=3 * 32 * 128 * 128,
    )  # fmt: skip
    assert listed(kind, LLAMA, 8192, 2048) == listed(kind, LLAMA, 131072, 2048)
    names = {one.name for one in layer_tensors(kind, 2048, 8192, 2, LLAMA)}
    assert {"projected", "convolved", "output_gate", "chunk_matrices", "gated"} <= names
