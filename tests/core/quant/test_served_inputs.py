"""Activations as servers round them: the rule, which matrices it meets, scores of such models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.bench.loglikelihood import Row, Scorer  # noqa: E402
from sabia.core.errors import UsageError  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.ops.backend import load_ops  # noqa: E402
from sabia.core.ops.product import Matrix, Product  # noqa: E402
from sabia.core.ops.served_inputs import RoundedInputs, input_formats  # noqa: E402
from sabia.core.parallel.build_ops import ops_as_served  # noqa: E402
from sabia.core.quant import export, recipe  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.spec import from_config, new_config  # noqa: E402

OPS = load_ops("torch")


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """The rule in NumPy, one token at a time."""
    import ml_dtypes

    out = np.zeros_like(x)
    for token in np.ndindex(*x.shape[:-1]):
        row = x[token]
        largest = max(np.abs(row).max(), np.float32(1e-30))
        if form == "int8":
            scale = np.float32(largest / np.float32(127.5))
            out[token] = np.clip(np.round(row / scale), -128, 127) * scale
        else:
            scale = np.float32(largest / np.float32(448))
            out[token] = (row / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return out


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_rule(form: Any) -> None:
    ops, draw = OPS, np.random.default_rng(3)
    x = (draw.standard_normal((2, 7, 24)) * 10.0 ** draw.integers(-4, 4, (2, 7, 1))).astype("f4")
    x[0, 3] = 0
    weights = draw.standard_normal((3, 5, 24)).astype("f4")
    arrays = ops.to_device({"x": x, **{f"w{n}": w for n, w in enumerate(weights)}}, "float32")
    formats: dict[str, Any] = {"w0": form, "w2": form}
    matrices = tuple(Matrix(f"w{n}", arrays[f"w{n}"]) for n in range(3))
    rule = RoundedInputs(formats)
    results = rule.apply(Product(arrays["x"], matrices), ops.kernel)
    for n, result in enumerate(results):
        seen = rounded(x, form) if n != 1 else x
        np.testing.assert_allclose(np.asarray(result), seen @ weights[n].T, rtol=2e-5, atol=2e-5)


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
        t.name: "int8" if t.component == "attention" else "fp8"
        for t in spec.tensors()
        if t.component in ("attention", "mlp") and len(t.shape) > 1
    }
    assert input_formats(spec) == {}


def test_targets_of_other_programs(capsys: pytest.CaptureFixture) -> None:
    spec = from_config(new_config(hidden=64, layers=1, heads=2, vocab=300, tied=False))
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    static = token | {"strategy": "tensor", "dynamic": False}

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
    assert "are not rounded here to int8 (static, tensor)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_scores_are_those_of_the_served_model(
    tiny: Any, token_rows: list[list[int]], name: str, tmp_path: Path
) -> None:
    spec, params = tiny
    rows = token_rows[:6]
    made = quantize(spec, params, recipe.load_recipe(name), OPS)
    export.export(tmp_path / "q", made, None)
    pair = (OPS.to_device(params, "float32"), OPS.to_device(made.params, "float32"))
    expected = divergence(spec, *pair, made.linears, batches(rows))
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
