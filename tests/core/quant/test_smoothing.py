"""Factors moved between norms and matrices: nothing changes but the rounding, which gets better."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import UsageError  # noqa: E402
from sabia.core.model import forward  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.parallel.build_ops import build_ops, load_ops  # noqa: E402
from sabia.core.quant import recipe, smoothing  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.hessians import Hessians, batches, run_block  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.spec import ModelSpec, from_config, new_config  # noqa: E402

OPS = load_ops("torch")
SHAPE: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 300, "tied": False}
EXPERTS = {"experts": 4, "chosen": 2, "expert_ffn": 96}
FAMILIES = {
    "llama": {},
    "gemma3": {},
    "olmo2": {},
    "qwen3": {},
    "mixtral": EXPERTS,
    "deepseek_v3": EXPERTS | {"shared": 1, "ffn": 96},
    "qwen3_next": EXPERTS | {"shared": 1, "layers": 4},
}


def model(family: str) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """A random model whose norms have large channels, which are small in the matrices."""
    spec = from_config(new_config(family, **SHAPE | FAMILIES[family]))
    draw = np.random.default_rng(0)
    params = {
        name: array + 0.05 * draw.standard_normal(array.shape).astype(np.float32)
        for name, array in hub.init_params(spec, 0).items()
    }
    for layer in range(len(spec.layers)):
        for move in smoothing.moves(spec, layer):
            sizes = np.exp(draw.standard_normal(64)).astype(np.float32)
            params[move.norm] = (params[move.norm] + move.offset) * sizes - move.offset
            for tensor in move.readers:
                params[tensor.name] = params[tensor.name] / sizes
    return spec, params


def rows(seed: int = 1) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 300, draw.integers(5, 60)).tolist() for _ in range(24)]


def logits(spec: ModelSpec, params: dict[str, np.ndarray]) -> np.ndarray:
    weights, ids = OPS.to_device(params, "float32"), np.array([rows()[0]])
    hidden = forward.hidden(spec, weights, ids, OPS)
    return forward.logits(spec, weights, hidden, OPS).numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["awq", "smoothquant"])
def test_without_rounding_the_model_is_the_same(
    family: str, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, params = model(family)
    four = recipe.with_overrides(recipe.load_recipe("w4a16"), smooth=how)
    form = recipe.stored_form(spec, four)
    linears = recipe.plan(form, four)
    whole = Hessians(range(0))
    for batch in batches(rows()):
        whole.begin(batch.mask)
        run_block(spec, OPS.to_device(params, "float32"), build_ops("torch", record=whole), batch)
    moved = dict(params)
    # no tensor is rounded, so that all are exact; only norms are rounded to BF16
    everything = {t.name for t in spec.tensors()}
    apply = smoothing._apply
    monkeypatch.setattr(smoothing, "_apply", lambda *given: apply(*given[:3], everything))
    for layer in range(len(spec.layers)):
        own = [x for x in linears if x.tensor.layer == layer and x.scheme.quantizes]
        smoothing.smooth(form, layer, moved, own, four, whole)
    changed = {name for name in params if not np.array_equal(params[name], moved[name])}
    expected = {t.name for x in linears if x.scheme.quantizes for t in x.tensors}
    norms = {n for n in params if n.endswith((".attn.norm", ".mlp.norm"))}
    assert norms <= changed and bool(expected & changed) == bool(norms)
    before, after = logits(spec, params), logits(spec, moved)
    np.testing.assert_allclose(after, before, atol=3e-5 * np.abs(before).max())


def kl(made: Any, spec: ModelSpec, params: dict[str, np.ndarray]) -> float:
    pair = (OPS.to_device(params, "float32"), OPS.to_device(made.params, "float32"))
    held_out = batches(rows(seed=2))
    return divergence(spec, *pair, made.linears, held_out, (), made.input_scales).kl_nats


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_awq_is_closer_than_rounding_to_nearest(family: str) -> None:
    spec, params = model(family)
    plain = recipe.with_overrides(recipe.load_recipe("w4a16"), rounding="rtn")
    results = {
        how: kl(quantize(spec, params, recipe.with_overrides(plain, smooth=how), OPS,
                         batches(rows())), spec, params)
        for how in ("none", "awq")
    }  # fmt: skip
    assert results["awq"] < 0.5 * results["none"]


def test_smoothquant_is_closer_where_activations_are_rounded() -> None:
    spec, params = model("llama")
    w8a8 = recipe.load_recipe("w8a8")
    results = {
        how: kl(quantize(spec, params, recipe.with_overrides(w8a8, smooth=how), OPS,
                         batches(rows())), spec, params)
        for how in ("none", "smoothquant")
    }  # fmt: skip
    assert results["smoothquant"] < 0.9 * results["none"]


def test_refusals() -> None:
    spec, params = model("llama")
    awq = recipe.with_overrides(recipe.load_recipe("w4"), smooth="awq")
    with pytest.raises(UsageError, match="--smooth: awq needs calibration inputs"):
        quantize(spec, params, awq, OPS)
    with pytest.raises(UsageError, match=r"smooth is 'all' .expected none or awq or smoothquant"):
        recipe.with_overrides(awq, smooth="all")
