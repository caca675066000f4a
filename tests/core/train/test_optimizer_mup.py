"""μP: the coordinate check (what a step changes does not grow with the width), and refusals."""

from dataclasses import replace

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model.storage.hub import init_params
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.train.optimizer.config import OptimizerConfig, rules
from sabia.core.train.optimizer.mup import mup

BASE, VOCAB = 64, 61
LR = 2.5e-4
WIDTHS = (64, 128, 256)


def model(width: int, heads: int | None = None, **settings) -> ModelSpec:
    shape = {"layers": 2, "vocab": VOCAB, "ffn": 2 * width, "tied": False} | settings
    return from_config(new_config("llama", hidden=width, heads=heads or width // 16, **shape))


def changes(width: int, config: OptimizerConfig, scaled: bool) -> tuple[float, float]:
    """RMS of how four steps change the last hidden state and the logits.

    The head starts at zero: what its initial values make of a change falls as 1/sqrt(width).
    """
    torch = pytest.importorskip("torch", reason="the torch backend")
    from sabia.core.model.forward import hidden, logits
    from sabia.core.parallel.build_ops import load_ops
    from sabia.core.train.optimizer.updates_torch import apply_torch, init_torch

    spec, ops, stds = model(width), load_ops("torch"), None
    if scaled:
        stds, lr_scales = mup(spec, BASE, config)
        config = replace(config, lr_scales=lr_scales)
    table = rules(spec, config)
    start = init_params(spec, 0, stds)
    params = ops.to_device(start | {"head": np.zeros_like(start["head"])}, "float32")
    state = init_torch(params, table)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (8, 17)))

    def outputs():
        h = hidden(spec, params, ids[:, :-1], ops)
        return h, logits(spec, params, h, ops)

    with torch.no_grad():
        before = outputs()
    for p in params.values():
        p.requires_grad_()
    for count in range(4):
        scores = outputs()[1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten())
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        apply_torch(params, grads, state, table, count, LR)
    with torch.no_grad():
        after = outputs()
    moved = [float((a - b).square().mean().sqrt()) for a, b in zip(after, before, strict=True)]
    return moved[0], moved[1]


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_coordinate_check(name: str) -> None:
    config = OptimizerConfig(name=name, weight_decay=0.0)
    usual = np.array([changes(width, config, False) for width in WIDTHS])
    scaled = np.array([changes(width, config, True) for width in WIDTHS])
    np.testing.assert_allclose(scaled[0], usual[0], rtol=1e-3)  # at the base width they are one
    growth, stable = usual[-1] / usual[0], scaled[-1] / scaled[0]
    assert (stable > 0.7).all(), (usual, scaled)
    assert (stable < 1.4).all(), (usual, scaled)
    assert (growth > 2).all(), (usual, scaled)


def test_at_the_base_width_it_is_the_usual_model() -> None:
    spec = model(BASE)
    stds, scales = mup(spec, BASE, OptimizerConfig())
    assert set(scales.values()) == {1.0}
    usual = {t.name: t.init.std for t in spec.tensors() if t.init.kind == "normal"}
    assert stds == pytest.approx(usual)


def test_table_three() -> None:
    spec = model(256)
    stds, scales = mup(spec, 64, OptimizerConfig(lr_scales={"head": 2.0}))
    assert stds["embed"] == pytest.approx(64**-0.5)
    assert stds["layers.0.attn.q"] == pytest.approx(256**-0.5)
    assert stds["layers.0.mlp.down"] == pytest.approx(256**-0.5 * 0.5)  # 1/sqrt(2L), L = 2
    assert stds["head"] == pytest.approx(64**0.5 / 256)
    assert "final_norm" not in stds
    assert scales["embed"] == scales["final_norm"] == 1.0
    assert scales["layers.1.mlp.gate"] == pytest.approx(0.25)
    assert scales["head"] == pytest.approx(0.5)
    muon = mup(spec, 64, OptimizerConfig(name="muon")).lr_scales
    assert (muon["layers.0.attn.q"], muon["head"]) == pytest.approx((0.5, 0.25))


def test_the_standard_deviations_reach_the_values() -> None:
    spec = model(256)
    params = init_params(spec, 0, mup(spec, 64, OptimizerConfig()).stds)
    assert params["head"].std() == pytest.approx(64**0.5 / 256, rel=0.02)
    assert (params["final_norm"] == 1).all()
    same = init_params(spec, 0)["head"] * (
        params["head"][0, 0] / init_params(spec, 0)["head"][0, 0]
    )
    np.testing.assert_allclose(params["head"], same, rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (model(256, tied=True), {}, "the head is the embedding"),
        (model(256, heads=2), {}, "0.5 at width 64"),
        (replace(model(256), embed_scale=12.0), {}, "embeddings are multiplied by 12"),
        (replace(model(256), logit_scale=0.5), {}, "the states before the head are multiplied"),
        (model(256), {"name": "soap"}, "optimizer soap"),
        (model(256), {"base_width": 0}, "base width 0"),
    ],
)
def test_refusals(spec: ModelSpec, settings: dict, message: str) -> None:
    given = {"base_width": 64} | settings
    config = OptimizerConfig(name=given.pop("name", "adamw"))
    with pytest.raises(UsageError, match=message):
        mup(spec, given["base_width"], config)
