"""Activations as servers round them: the rule, which matrices it meets, scores of such models."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.bench.loglikelihood import Row, Scorer  # noqa: E402
from sabia.core.errors import UsageError  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.numerics import floats  # noqa: E402
from sabia.core.numerics.schemes import FP8_TOKENS, INT8_TOKENS, SCHEMES  # noqa: E402
from sabia.core.ops.product import Matrix, Product  # noqa: E402
from sabia.core.ops.served_inputs import InputFormat, RoundedInputs, input_formats  # noqa: E402
from sabia.core.parallel.build_ops import load_ops, ops_as_served  # noqa: E402
from sabia.core.quant import export, recipe  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.spec import from_config, new_config  # noqa: E402

OPS = load_ops("torch")


def rounded(x: np.ndarray, form: InputFormat) -> np.ndarray:
    """The rule in NumPy, one token, or group of a token, at a time."""
    out, rule = np.zeros_like(x), form.rule
    width = rule.group or x.shape[-1]
    for token in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], width):
            at = (*token, slice(start, start + width))
            out[at] = _rounded(x[at], form)
    return out


def _rounded(row: np.ndarray, form: InputFormat) -> np.ndarray:
    import ml_dtypes

    element, scale = form.rule.element, np.float32(form.scale or 1)
    largest = np.float32(max(np.abs(row).max(), np.float32(1e-30)))
    top = np.float32({"int8": 127.5, "e4m3": 448, "e2m1": 6}[element])
    if form.rule.dynamic == "local":
        small = min(scale * (largest / top), np.float32(448))
        step = max(np.float32(ml_dtypes.float8_e4m3fn(small)), np.float32(2**-9)) / scale
    elif not form.rule.dynamic:
        step = scale
    elif form.rule.scale == "e8m0":  # up to 1.75 times a power of two
        power = math.floor(math.log2(float(largest)))
        power += float(largest) / 2.0**power >= 1.75
        step = np.float32(2.0 ** (power - math.floor(math.log2(top))))
    else:
        step = np.float32(largest / top)
    scaled = row / step
    if element == "int8":
        return np.clip(np.round(scaled), -128, 127) * step
    codes = floats.FORMATS[element]
    return codes.decode(codes.encode(scaled)) * step


RULES = [scheme.inputs for scheme in SCHEMES.values() if scheme.inputs]
FORMS = [InputFormat(rule, {False: 0.05, "local": 70.0}.get(rule.dynamic)) for rule in RULES]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.rule.label() + form.rule.scale)
def test_the_rule(form: Any) -> None:
    ops, draw = OPS, np.random.default_rng(3)
    x = (draw.standard_normal((2, 7, 256)) * 10.0 ** draw.integers(-4, 4, (2, 7, 1))).astype("f4")
    x[0, 3] = 0
    weights = (draw.standard_normal((3, 5, 256)) / 16).astype("f4")
    arrays = ops.to_device({"x": x, **{f"w{n}": w for n, w in enumerate(weights)}}, "float32")
    formats: dict[str, Any] = {"w0": form, "w2": form}
    matrices = tuple(Matrix(f"w{n}", arrays[f"w{n}"]) for n in range(3))
    rule = RoundedInputs(formats)
    results = rule.apply(Product(arrays["x"], matrices), ops.kernel)
    for n, result in enumerate(results):
        seen = rounded(x, form) if n != 1 else x
        bound = 2e-6 * np.abs(x).max()
        np.testing.assert_allclose(np.asarray(result), seen @ weights[n].T, rtol=2e-5, atol=bound)


def test_which_matrices(tmp_path: Path) -> None:
    spec = from_config(new_config(hidden=64, layers=2, heads=2, vocab=300, tied=False))
    params = hub.init_params(spec, 0)
    (tmp_path / "r.toml").write_text(
        '[components]\nattention = "w8a8"\nmlp = "fp8"\nhead = "w8a16"'
    )
    made = quantize(spec, params, recipe.load_recipe(str(tmp_path / "r.toml")), OPS)
    export.export(tmp_path / "q", made, None)
    read, _ = hub.load_model(tmp_path / "q")
    assert input_formats(read) == {
        t.name: InputFormat(INT8_TOKENS if t.component == "attention" else FP8_TOKENS)
        for t in spec.tensors()
        if t.component in ("attention", "mlp") and len(t.shape) > 1
    }
    assert input_formats(spec) == {}


def test_targets_of_other_programs(capsys: pytest.CaptureFixture) -> None:
    spec = from_config(new_config(hidden=64, layers=1, heads=2, vocab=300, tied=False))
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    static = token | {"symmetric": False}

    def formats(targets: list[str], ignore: list[str], arguments: dict[str, Any]) -> set[str]:
        group = {"targets": targets, "input_activations": arguments}
        config = {"ignore": ignore, "config_groups": {"group_0": group}}
        return set(input_formats(from_config(spec.config | {"quantization_config": config | {
            "quant_method": "compressed-tensors", "format": "int-quantized"}})))  # fmt: skip

    matrices = {t.name for t in spec.tensors() if len(t.shape) > 1 and t.component != "embedding"}
    assert formats(["Linear"], [], token) == matrices
    assert formats(["Linear"], ["lm_head"], token) == matrices - {"head"}
    assert formats(["Linear"], ["re:.*self_attn.*", "lm_head"], token) == {
        "layers.0.mlp.gate", "layers.0.mlp.up", "layers.0.mlp.down",
    }  # fmt: skip
    assert formats(["model.layers.0.mlp.up_proj"], [], token) == {"layers.0.mlp.up"}
    assert capsys.readouterr().err == ""
    assert formats(["Linear"], [], static) == set()
    assert "are not rounded here to int8 (dynamic, token)" in capsys.readouterr().err


WITH_INPUTS = [scheme.name for scheme in SCHEMES.values() if scheme.inputs]


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_scores_are_those_of_the_served_model(
    wide: Any, token_rows: list[list[int]], name: str, tmp_path: Path
) -> None:
    spec, params = wide
    rows = token_rows[:6]
    made = quantize(spec, params, recipe.load_recipe(name), OPS, batches(token_rows))
    export.export(tmp_path / "q", made, None)
    pair = (OPS.to_device(params, "float32"), OPS.to_device(made.params, "float32"))
    expected = divergence(spec, *pair, made.linears, batches(rows), (), made.input_scales)
    served, values = hub.load_model(tmp_path / "q")
    plain = Scorer(from_config({k: v for k, v in served.config.items()
                                if k != "quantization_config"}), values)  # fmt: skip
    losses = []
    for scorer in (Scorer(served, values), plain):
        scores = scorer.score([[Row(tuple(ids), len(ids) - 1)] for ids in rows])
        losses.append(-sum(float(x[0]) for x in scores) / sum(len(ids) - 1 for ids in rows))
    assert losses[0] == pytest.approx(expected.loss_after_nats, abs=2e-4)
    assert abs(losses[1] - losses[0]) > 1e-6
    with pytest.raises(UsageError, match="--backend: jax does not round activations to"):
        ops_as_served("jax", served)


def test_static_scales_of_experts_are_one(tmp_path: Path) -> None:
    """The largest of all experts, which servers take; with few tokens there is one too."""
    shape: dict[str, Any] = {"hidden": 128, "layers": 1, "heads": 4, "vocab": 300, "tied": False}
    config = new_config("qwen3_moe", **shape, experts=8, chosen=1, expert_ffn=128)
    spec = from_config(config)
    params = hub.init_params(spec, 0)
    rows = [[1, 2, 3]]
    for name, suffix in (("fp8-static", "input_scale"), ("nvfp4", "input_global_scale")):
        made = quantize(spec, params, recipe.load_recipe(name), OPS, batches(rows))
        found = {
            float(stored.parts[suffix][0])
            for (name, index), stored in made.stored.items()
            if name == "layers.0.mlp.experts.down"
        }
        assert len(found) == 1 and found == {made.input_scales["layers.0.mlp.experts.down"]}
        export.export(tmp_path / name, made, None)
        read, _ = hub.load_model(tmp_path / name)
        scales = {n: form.scale for n, form in input_formats(read).items()}
        assert scales == made.input_scales
        with pytest.raises(UsageError, match="stores scales of inputs, which are measured on"):
            quantize(spec, params, recipe.load_recipe(name), OPS)
