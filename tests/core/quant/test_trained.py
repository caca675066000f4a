"""Weights of quantization-aware training are exported with the codes that the training computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import sabia

torch = pytest.importorskip("torch")

from sabia.core.errors import UsageError  # noqa: E402
from sabia.core.model import forward  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.numerics.floats import round_bfloat16  # noqa: E402
from sabia.core.ops.precision import BY_NAME  # noqa: E402
from sabia.core.parallel.build_ops import build_ops, load_ops  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.recipe import TRAINED, load_recipe, with_overrides  # noqa: E402
from sabia.core.spec import from_config, new_config  # noqa: E402

OPS = load_ops("torch")
MOE = {"experts": 4, "chosen": 2, "expert_ffn": 96}


def multiplied(spec: Any, params: dict[str, np.ndarray], precision: str) -> dict[str, np.ndarray]:
    """The weights that a forward pass of training multiplies by, by name."""
    ops = build_ops("torch", spec, precision=BY_NAME[precision])
    (rule,) = ops.rules
    apply, seen = rule.apply, dict[str, np.ndarray]()

    def recorded(product: Any, proceed: Any) -> list[Any]:
        def kernel(inner: Any) -> list[Any]:
            seen.update({m.name: m.weight.float().numpy() for m in inner.matrices})
            return list(proceed(inner))

        return list(apply(product, kernel))

    rule.apply = recorded
    ops.set_rules([rule])
    weights = OPS.to_device(params, "bfloat16")
    with torch.no_grad():
        forward.hidden(spec, weights, np.arange(40).reshape(2, 20), ops)
    return seen


@pytest.mark.parametrize("precision", TRAINED)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_the_exported_values_are_those_of_training(precision: str, family: str) -> None:
    spec = little(family)
    rng = np.random.default_rng(5)
    params = {n: (a * np.exp(rng.standard_normal(a.shape[-1]))).astype(np.float32)
              for n, a in hub.init_params(spec, 3).items()}  # fmt: skip
    made = quantize(spec, params, load_recipe(precision), OPS)
    seen = multiplied(spec, params, precision)
    rounded = {t.name for x in made.linears if x.scheme.quantizes for t in x.tensors}
    assert {n.rpartition(".")[2] for n in rounded} >= {"gate", "up", "down", "o"}
    for name in rounded:
        np.testing.assert_array_equal(round_bfloat16(made.params[name]), seen[name], err_msg=name)
    for name in seen.keys() - rounded:
        np.testing.assert_array_equal(made.params[name], seen[name], err_msg=name)


def little(family: str) -> Any:
    shape: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 99, "tied": False}
    if family != "llama":
        shape |= MOE
    return from_config(new_config(family, **shape))


def test_a_run_says_what_it_was_trained_for(tmp_path: Path) -> None:
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    train_bpe(["dois mais três são cinco"] * 4, 300).save(tmp_path / "t")
    ids = np.random.default_rng(0).integers(0, 99, (8, 32))
    table = pa.table({"id": [str(i) for i in range(8)], "input_ids": ids.tolist(),
                      "document_lengths": [[32]] * 8})  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    shape = ["--shape", "d=64,layers=2,heads=4"]
    common = ["--tokenizer", tmp_path / "t", "--steps", 2, "--batch", 4, "--warmup", 0]
    first, second = tmp_path / "first", tmp_path / "second"
    rows = tmp_path / "rows.parquet"
    done = sabia("pretrain", rows, *shape, *common, "--precision", "qat-int4", "-o", first)
    assert done.exit_code == 0, done.output
    config = json.loads((first / "final/config.json").read_text())
    assert config["quantization_aware_training"] == {"precision": "qat-int4"}
    made = sabia("quantize", "--model", first / "final", "-o", tmp_path / "q", "--json")
    assert made.exit_code == 0, made.output
    report = json.loads(made.stdout)
    assert report["recipe"]["name"] == "qat-int4"
    assert {(r["scheme"], r["method"]) for r in report["layers"]} == {("w4a16 g64", "rtn")}
    assert "quantization_aware" not in (tmp_path / "q/config.json").read_text()
    other = sabia("quantize", "--model", first / "final", "-o", tmp_path / "o", "--recipe", "w8",
                  "--rounding", "rtn")  # fmt: skip
    assert "has simulated qat-int4" in other.output
    done = sabia("pretrain", rows, "--model", first / "final", *common, "-o", second)
    assert done.exit_code == 0, done.output
    assert "quantization_aware" not in (second / "final/config.json").read_text()


def test_settings_that_training_does_not_simulate_are_refused() -> None:
    with pytest.raises(UsageError, match="expected absmax and none"):
        with_overrides(load_recipe("qat-int4"), scale="mse")
