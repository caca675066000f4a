"""Exact operations: the bits of a token do not depend on the tokens beside it, and gradients are
those of any other operations."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.ops.device_torch import TorchOps
from sabia.core.ops.exact_torch import Exact
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.packed_torch import packed
from sabia.core.ops.product import Matrix, Product
from sabia.core.parallel.build_ops import build_ops
from sabia.core.spec import from_config, new_config
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses.next_token import next_token_loss
from sabia.kernels.runtime.torch_fp32 import HAS_ONEDNN

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="exact operations are those of oneDNN")
SIZES: Any = {"hidden": 48, "layers": 2, "vocab": 90, "heads": 4, "kv_heads": 2, "context": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 9,
    },
}  # fmt: skip

CHOSEN = [pytest.param(kind, marks=() if kind == "qwen3_moe" else pytest.mark.slow)
          for kind in KINDS]  # fmt: skip


def model(kind: str, dtype: str = "float32") -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    spec = from_config(new_config(**SIZES) | KINDS[kind])
    drawn = hub.init_params(spec, 0)
    params = {n: x * (4 if x.ndim > 1 else 1) for n, x in drawn.items()}
    return spec, build_ops("torch").to_device(params, dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_any_number_of_rows(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    random, ops = np.random.default_rng(0), Exact()
    for trial in range(12 // threads):
        shapes = random.choice([1, 3, 8, 17, 64, 100, 256, 700], 3)
        wide, *outs = (int(n) for n in shapes)
        if trial == 0:  # oneDNN sums a vector of so many in another order
            wide = 4096
        torch.manual_seed(trial)
        x = torch.randn(260, wide).to(dtype)
        plain = {f"m{i}": torch.randn(n, wide).to(dtype) for i, n in enumerate(outs)}
        bias = [None, torch.randn(outs[1]).to(dtype)]
        matrices = [
            tuple(Matrix(n, w, b) for (n, w), b in zip(from_.items(), bias, strict=True))
            for from_ in (plain, packed(plain, {}, 1 << 40))
        ]
        whole = ops.kernel(Product(x, matrices[0]))
        for rows in (1, 2, 3, *random.integers(4, 250, 3).tolist()):
            start = int(random.integers(0, 260 - rows))
            with torch.no_grad():
                some = x[start : start + rows].clone()
                made = ops.kernel(Product(some[None], matrices[rows % 2]))
            for ours, all_of_them in zip(made, whole, strict=True):
                assert torch.equal(ours[0], all_of_them[start : start + rows])


def test_activations_of_any_number_of_elements() -> None:
    ops, plain, x = Exact(), TorchOps(), torch.randn(5000) * 4
    for exact, like in (
        (ops.silu, plain.silu), (ops.sigmoid, plain.sigmoid), (ops.gelu, plain.gelu),
        (lambda y: ops.gelu(y, True), lambda y: plain.gelu(y, True)),
    ):  # fmt: skip
        given, whole = x.clone().requires_grad_(), exact(x)
        torch.testing.assert_close(whole, like(x))
        (mine,) = torch.autograd.grad(exact(given).sum(), given)
        (theirs,) = torch.autograd.grad(like(given).sum(), given)
        torch.testing.assert_close(mine, theirs)
        for start in range(0, 4900, 97):
            some = slice(start, start + start % 41 + 1)
            assert torch.equal(exact(x[some].clone()), whole[some])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CHOSEN)
def test_prefill_and_decoding_have_the_bits_of_whole_rows(kind: str, dtype: str) -> None:
    spec, params = model(kind, dtype)
    ops, random = build_ops("torch", spec, exact=True), np.random.default_rng(1)
    ids = random.integers(0, 90, (5, 31))
    whole = forward.logits(spec, params, forward.hidden(spec, params, ids, ops), ops)
    with torch.inference_mode():
        rows, at = [4, 1, 2], 11
        cache = KVCache.create(spec, 3, 48, ops, dtype, params["embed"])
        x = forward.hidden(spec, params, ids[rows, :at], ops, cache=cache)
        for t in range(at, 31):
            ours = forward.logits(spec, params, x[:, -1:], ops)[:, 0]
            assert torch.equal(ours, whole[rows, t - 1])
            if t == 20:  # a row has ended
                rows, cache = rows[:1], cache.first(1)
            positions = np.full((len(rows), 1), t)
            given: Any = {"cache": cache.upto(-(-(t + 1) // 16) * 16), "positions": positions}
            x = forward.hidden(spec, params, ids[rows, t : t + 1], ops, **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CHOSEN)
def test_gradients_are_those_of_other_operations(kind: str, dtype: str) -> None:
    spec, params = model(kind, dtype)
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, 90, (3, 20)))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": torch.ones(3, 19)}
    found = []
    for exact in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
        total, *_ = next_token_loss(spec, leaves, batch, build_ops("torch", spec, exact=exact))
        found.append(torch.autograd.grad(total, list(leaves.values())))
    for ours, theirs in zip(*found, strict=True):
        scale = theirs.float().norm() + 1e-6
        assert (ours - theirs).float().norm() <= (1e-4 if dtype == "float32" else 0.15) * scale


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_of_drawn_tokens(temperature: float) -> None:
    spec, params = model("llama")
    ops, x = build_ops("torch", spec, exact=True), torch.randn(2, 9, 48, requires_grad=True)
    targets = torch.randint(0, 90, (2, 9))
    targets[1, 6:] = -1
    ours = forward.drawn_losses(spec, params, x, targets, ops, temperature)
    theirs, _ = forward.token_losses(spec, params, x, targets, TorchOps(), temperature)
    torch.testing.assert_close(ours, theirs)
    gradients = [
        torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for loss in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)
