"""Experts of MoE layers in quantization: components, inputs as routed, what has too few of them."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import BadData, UsageError  # noqa: E402
from sabia.core.ops.product import Multiply, Product, Rule  # noqa: E402
from sabia.core.parallel.build_ops import build_ops, load_ops  # noqa: E402
from sabia.core.quant import quantize as module  # noqa: E402
from sabia.core.quant import recipe  # noqa: E402
from sabia.core.quant.divergence import embeddings  # noqa: E402
from sabia.core.quant.hessians import (  # noqa: E402
    CalibrationStage,
    Hessians,
    batches,
    run_block,
    send_all,
)
from sabia.core.quant.quantize import LEAST_TOKENS, quantize  # noqa: E402
from sabia.core.spec import ModelSpec, from_config, new_config  # noqa: E402

OPS = load_ops("torch")


@pytest.fixture(scope="module")
def moe() -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """A first dense layer, then layers of 8 experts (2 chosen) and a shared one."""
    from sabia.core.model.storage import hub

    config = new_config(
        "deepseek_v3", hidden=64, layers=3, heads=4, ffn=96, vocab=300, tied=False,
        experts=8, chosen=2, expert_ffn=32, shared=1,
    )  # fmt: skip
    spec, draw = from_config(config), np.random.default_rng(0)
    return spec, {
        name: array + 0.05 * draw.standard_normal(array.shape).astype(np.float32)
        for name, array in hub.init_params(spec, 0).items()
    }


def rows_of(count: int) -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 300, draw.integers(5, 60)).tolist() for _ in range(count)]


def test_experts_are_components_of_their_own(moe: Any, tmp_path: Path) -> None:
    spec, params = moe
    path = tmp_path / "r.toml"
    path.write_text(
        '[components]\nmlp = "w8a16"\nexpert = "w4a16"\nshared_expert = "w8a8"\nattention = "fp8"\n'
    )
    made = quantize(spec, params, recipe.load_recipe(str(path)), OPS)
    bits = defaultdict(set)
    for row in made.rows:
        bits[row["component"]].add(row["scheme"].split()[0])
    assert bits == {
        "mlp": {"w8a16"}, "expert": {"w4a16"}, "shared_expert": {"w8a8"}, "attention": {"fp8"},
    }  # fmt: skip
    assert sum(row["component"] == "expert" for row in made.rows) == 2 * 8 * 3
    assert sum(row["component"] == "shared_expert" for row in made.rows) == 2 * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[components]\nexpert = "w4a16"', "of component expert .it has attention, head, mlp"),
        ('[components]\nhead = "w8a16"', "of component head; its head is the embedding"),
        ('[[rules]]\nmatch = "layer0"\nscheme = "w8a16"', "rule 'layer0' matches no matrix"),
    ],
)
def test_keys_without_a_tensor_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    tied = "tied" in message or "embedding" in message
    spec = from_config(new_config(hidden=128, layers=1, heads=2, ffn=256, vocab=50, tied=tied))
    with pytest.raises(UsageError, match=message):
        recipe.plan(spec, recipe.load_recipe(str(tmp_path / "r.toml")))
    for name in recipe.BUILT_IN:
        recipe.plan(spec, recipe.load_recipe(name))


class _Inputs(Rule):
    """The rows of each expert, written down one by one."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)

    def apply(self, product: Product, proceed: Multiply) -> list[Any]:
        if product.plan is not None:
            for row, expert in zip(product.x, product.plan.experts.tolist(), strict=True):
                for matrix in product.matrices:
                    self.rows[matrix.name, expert].append(row.double().numpy())
        return proceed(product)


def test_hessians_of_experts_are_those_of_their_tokens(moe: Any) -> None:
    """Beside sums over rows without padding, one row of text at a time."""
    spec, params = moe
    weights, rows = OPS.to_device(params, "float32"), rows_of(24)
    written, found = _Inputs(), Hessians(range(8))
    for batch in batches(rows, 1):  # no padding
        run_block(spec, weights, build_ops("torch", record=written), batch)
    for batch in batches(rows, 400):  # small products, whose rounding does not change the routing
        found.begin(batch.mask)
        run_block(spec, weights, build_ops("torch", record=found), batch)
    assert written.rows and all(found.tokens(*key) for key in written.rows)
    for key, inputs in written.rows.items():
        x = np.array(inputs)
        assert found.tokens(*key) == len(x)
        np.testing.assert_allclose(found.of(*key), 2 / len(x) * x.T @ x, rtol=1e-4, atol=1e-6)


def test_experts_are_calibrated_in_bounded_memory(moe: Any, monkeypatch: Any) -> None:
    spec, params = moe
    seen, four = batches(rows_of(40), 700), recipe.load_recipe("w4")
    whole = quantize(spec, params, four, OPS, seen)
    windows = []
    plain = module.expert_windows
    monkeypatch.setattr(module, "HESSIAN_BYTES", 3 * 4 * (64**2 + 32**2))
    monkeypatch.setattr(module, "expert_windows", lambda *given: windows.append(plain(*given)) or
                        windows[-1])  # fmt: skip
    parts = quantize(spec, params, four, OPS, seen)
    assert [len(one) for one in windows] == [1, 3, 3, 1]
    for name, value in whole.params.items():
        np.testing.assert_array_equal(parts.params[name], value, err_msg=name)
    experts = [row for row in whole.rows if row["component"] == "expert"]
    by_gptq = [row for row in experts if row["method"] == "gptq"]
    assert {row["tokens"] >= LEAST_TOKENS for row in by_gptq} == {True} and len(by_gptq) > 20
    assert all(row["output_error"] < row["output_error_rtn"] for row in by_gptq)


def test_all_tokens_to_all_experts(moe: Any) -> None:
    """The sums of inputs beside a layer computed by hand, window by window; padding is left out."""
    spec, params = moe
    weights, rows = OPS.to_device(params, "float32"), rows_of(40)
    states: list[np.ndarray] = []

    class Layer(Rule):
        def apply(self, product: Product, proceed: Multiply) -> list[Any]:
            if product.matrices[0].name == "layers.1.mlp.router":
                states.append(product.x[0].double().numpy())
            return proceed(product)

    for batch in batches(rows, 1):
        run_block(spec, weights, build_ops("torch", record=Layer()), batch)
    x = np.concatenate(states)  # [tokens, D]
    stage = [embeddings(spec, weights, [batch], OPS)[0] for batch in batches(rows, 700)]
    stage = [run_block(spec, weights, build_ops("torch", stage=CalibrationStage(0, s)), batch)
             for s, batch in zip(stage, batches(rows, 700), strict=True)]  # fmt: skip
    for experts in (range(3), range(3, 5)):
        sums = Hessians(experts, every=True)
        for states_in, batch in zip(stage, batches(rows, 700), strict=True):
            sums.begin(batch.mask)
            ops = build_ops("torch", stage=CalibrationStage(1, states_in), record=sums)
            send_all(ops, experts)
            run_block(spec, weights, ops, batch)
        assert {i for name, i in sums.sums if name.startswith("layers.1.mlp.experts")} == {*experts}
        for expert in experts:
            gate, up, _ = (
                params[f"layers.1.mlp.experts.{n}"][expert] for n in ("gate", "up", "down")
            )
            g = x @ gate.T
            inner = g / (1 + np.exp(-g)) * (x @ up.T)
            for name, wanted in (("gate", x), ("up", x), ("down", inner)):
                key = f"layers.1.mlp.experts.{name}", expert
                assert sums.tokens(*key) == len(x) == sum(map(len, rows))
                expected = 2 / len(x) * wanted.T @ wanted
                np.testing.assert_allclose(sums.of(*key), expected, rtol=1e-3, atol=1e-6)


def test_experts_that_are_seldom_chosen_are_calibrated_on_all_tokens(
    moe: Any, monkeypatch: Any
) -> None:
    spec, params = moe
    params = dict(params)
    name = next(n for n in params if n.startswith("layers.1") and n.endswith("correction"))
    params[name] = params[name] - 100 * (np.arange(8) == 5)  # never chosen
    seen = batches(rows_of(20), 700)
    windows = []
    plain = module.expert_windows
    monkeypatch.setattr(module, "expert_windows", lambda *given: windows.append(plain(*given)) or
                        windows[-1])  # fmt: skip
    four = replace(recipe.load_recipe("w4"), experts="all")
    made = quantize(spec, params, four, OPS, seen)
    assert [len(one) for one in windows] == [1, 4, 4, 1]  # two experts each, as many as are chosen
    experts = [row for row in made.rows if row["component"] == "expert"]
    assert {(row["method"], row["tokens"]) for row in experts} == {
        ("gptq", sum(int(batch.mask.sum()) for batch in seen))
    }
    assert all(row["output_error"] < row["output_error_rtn"] for row in experts)
    routed = quantize(spec, params, recipe.load_recipe("w4"), OPS, seen)
    dense = [name for name in made.params if name.startswith("layers.0") and "router" not in name]
    for name in dense:  # before the first layer of experts nothing changes
        np.testing.assert_array_equal(made.params[name], routed.params[name], err_msg=name)


def test_an_expert_with_few_tokens_is_rounded_to_nearest(moe: Any) -> None:
    spec, params = moe
    params = dict(params)
    name = next(n for n in params if n.startswith("layers.1") and n.endswith("correction"))
    params[name] = params[name] - 100 * (np.arange(8) == 5)  # never chosen
    made = quantize(spec, params, recipe.load_recipe("w4"), OPS, batches(rows_of(40), 700))
    never = [row for row in made.rows if ".1.mlp.experts.5." in row["module"]]
    assert [(row["method"], row["tokens"], row["output_error"]) for row in never] == [
        ("rtn", 0, None)
    ] * 3
    few = quantize(spec, params, recipe.load_recipe("w4"), OPS, batches([[7] * LEAST_TOKENS]))
    assert {row["method"] for row in few.rows if row["component"] == "mlp"} == {"gptq"}
    counts = {(row["tokens"] >= LEAST_TOKENS, row["method"]) for row in few.rows
              if row["component"] == "expert"}  # fmt: skip
    assert counts <= {(True, "gptq"), (False, "rtn")} and (False, "rtn") in counts


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("calibrated", [False, True])
def test_values_that_are_no_numbers_are_named(moe: Any, value: float, calibrated: bool) -> None:
    spec, params = moe
    name = "layers.2.mlp.experts.down"
    broken = params | {name: params[name].copy()}
    broken[name][3, 1, 2] = value
    seen = batches(rows_of(3)) if calibrated else ()
    with pytest.raises(BadData, match=r"layers\.2\.mlp\.experts\.down has 1 NaN or infinite"):
        quantize(spec, broken, recipe.load_recipe("w8"), OPS, seen)
