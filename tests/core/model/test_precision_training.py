"""What low precision costs in a short training: loss beside BF16, bias of the gradient.

So short a training of so small a model does not tell chance and transform from their absence;
the mean of the gradient does.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from sabia.core.model import forward
from sabia.core.model.storage.hub import init_params
from sabia.core.ops import precision as p
from sabia.core.parallel.build_ops import build_ops
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper

torch = pytest.importorskip("torch")
SHAPE = {"hidden": 64, "layers": 2, "vocab": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
SPEC = from_config(new_config("llama", **SHAPE, ffn=160, context=64))
NVFP4 = replace(p.BY_NAME["nvfp4"], bf16_first=0, bf16_last=0.0)
BARE = replace(NVFP4, recipe=replace(NVFP4.recipe, stochastic=False, hadamard=False))


def rows_of(steps: int, rows: int = 8, length: int = 32) -> np.ndarray:
    """Tokens of a chain in which the last two choose among four successors."""
    random = np.random.default_rng(0)
    successors = random.integers(0, 128, (8, 128, 4))
    ids = random.integers(0, 128, (steps, rows, length + 1))
    choice = random.choice(4, ids.shape, p=[0.7, 0.15, 0.1, 0.05])
    for t in range(2, length + 1):
        ids[:, :, t] = successors[ids[:, :, t - 2] % 8, ids[:, :, t - 1], choice[:, :, t]]
    return ids


@cache
def last_loss(precision: p.Precision, steps: int) -> float:
    """Mean loss of the last tenth of a training with AdamW."""
    random, peak = np.random.default_rng(0), 3e-3
    ops = build_ops("torch", SPEC, precision=precision, seed=1)
    params = {
        t.name: (random.standard_normal(t.shape) * t.init.std).astype(np.float32)
        + np.float32(t.init.kind == "ones")
        for t in SPEC.tensors()
    }
    held = {name: torch.from_numpy(x).requires_grad_() for name, x in params.items()}
    optimizer = torch.optim.AdamW(held.values(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step, ids in enumerate(rows_of(steps)):
        here = ops.at(step)
        narrow = {name: x.bfloat16() if x.ndim > 1 else x for name, x in held.items()}
        hidden = forward.hidden(SPEC, narrow, ids[:, :-1], here)
        loss = forward.token_losses(SPEC, narrow, hidden, ids[:, 1:], here)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(held.values(), 1.0)
        optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / 20, 5 * (1 - step / steps))
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses[-steps // 10 :]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "fp8-block", "nvfp4"])
def test_two_hundred_steps_end_near_bf16(name: str) -> None:
    """NVFP4 with one of two layers in BF16; in both it costs about 3 % at this size."""
    precision = replace(NVFP4, bf16_first=1) if name == "nvfp4" else p.BY_NAME[name]
    assert last_loss(precision, 200) == pytest.approx(last_loss(p.BY_NAME["bf16"], 200), rel=0.02)


def test_the_first_steps_go_as_in_bf16() -> None:
    assert last_loss(NVFP4, 12) == pytest.approx(last_loss(p.BY_NAME["bf16"], 12), rel=0.01)


def test_without_chance_and_transform_the_gradient_is_biased() -> None:
    """Averaged over draws, the recipe's gradients come near the true ones; the bare ones do not."""
    name = "layers.0.mlp.up"
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=random)
    weight = torch.randn(48, 64, generator=random) * 0.1
    dy = torch.randn(64, 48, generator=random) * torch.randn(64, 48, generator=random) ** 4
    seen = _rounded_weight(weight)
    wanted = (dy @ seen).flatten()

    def error(precision: p.Precision, draws: int) -> float:
        low, total = build_ops("torch", SPEC, precision=precision, seed=1), torch.zeros(64, 64)
        for step in range(draws):
            given = x.clone().requires_grad_()
            low.at(step).linear(given, weight, name=name).backward(dy)
            total += given.grad
        return float((total.flatten() / draws - wanted).norm() / wanted.norm())

    once, many, bare = error(NVFP4, 1), error(NVFP4, 100), error(BARE, 2)
    assert many < once / 4, "errors of chance do not average out"  # a clipped rest stays
    assert many < bare / 3, "rounding to nearest is as good"


def _rounded_weight(weight: torch.Tensor) -> torch.Tensor:
    from sabia.kernels.quantize.torch_arithmetic import rounded

    values, scale = rounded(weight, NVFP4.recipe.weight)
    return values * scale


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_a_frequent_token_is_a_sum_in_fp32(backend: str, tied: bool) -> None:
    spec = from_config(new_config("llama", **SHAPE, ffn=160, context=2048, tied=tied))
    ids = np.full((1, 1500), 5, np.int32)
    rows = {"input_ids": ids, "targets": ids + 2, "loss_mask": np.ones(ids.shape, "f4")}
    narrow, wide = (
        make_stepper(backend, spec, init_params(spec, 0), next_token_loss, precision=precision)
        for precision in ("bf16", "fp32")
    )
    found, true = (step.gradients(rows)["embed"][5] for step in (narrow, wide))
    assert np.linalg.norm(found - true) <= 0.05 * np.linalg.norm(true)
