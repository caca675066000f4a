"""A model quantized, written and loaded back: exact values, bounded errors, outside judges."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import UsageError  # noqa: E402
from sabia.core.model import forward  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.numerics.floats import round_bfloat16  # noqa: E402
from sabia.core.ops.served_inputs import InputFormat, RoundedInputs, rounded  # noqa: E402
from sabia.core.parallel.build_ops import build_ops, load_ops  # noqa: E402
from sabia.core.quant import export, hessians, recipe  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.hessians import (  # noqa: E402
    CalibrationStage,
    Hessians,
    batches,
    run_block,
)
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.spec import from_config  # noqa: E402

OPS = load_ops("torch")


def logits(spec: Any, params: dict, ids: np.ndarray) -> np.ndarray:
    tensors = OPS.to_device(params, "float32")
    hidden = forward.hidden(spec, tensors, ids, OPS)
    return forward.logits(spec, tensors, hidden, OPS).numpy()


# the others differ from these in the inputs or a component
DIFFERENT = [n for n in recipe.BUILT_IN if n not in ("w8a16", "mxfp8a16", "mxfp4a16", "nvfp4a16")]


@pytest.mark.parametrize("name", DIFFERENT)
def test_loading_back_gives_the_very_values_and_logits(wide, token_rows, name, tmp_path) -> None:
    spec, params = wide
    made = quantize(spec, params, recipe.load_recipe(name), OPS, batches(token_rows))
    size = export.export(tmp_path / "q", made, None)
    loaded_spec, loaded = hub.load_model(tmp_path / "q")
    assert loaded_spec == spec
    for tensor, value in made.params.items():
        np.testing.assert_array_equal(np.asarray(loaded[tensor], np.float32), value, err_msg=tensor)
    ids = np.array(token_rows[0])[None]
    np.testing.assert_array_equal(logits(spec, loaded, ids), logits(spec, made.params, ids))
    assert size < 0.55 * sum(array.nbytes for array in params.values())


def test_components_get_what_figure_ten_says(tiny, token_rows) -> None:
    spec, params = tiny
    made = quantize(spec, params, recipe.load_recipe("mixed"), OPS, batches(token_rows))
    by_component = {row["component"]: row for row in made.rows}
    assert {k: (r["bits"], r["method"]) for k, r in by_component.items()} == {
        "attention": (8, "rtn"), "mlp": (4, "gptq"), "head": (8, "rtn"),
    }  # fmt: skip
    assert len(made.rows) == 3 * 7 + 1
    embed = made.params["embed"]
    np.testing.assert_array_equal(embed.view(np.uint32) & 0xFFFF, 0)  # BF16 values


@pytest.mark.parametrize(("name", "layers"), [("mixed", 3), ("w4a16", 2)])
def test_layers_run_again_where_a_later_part_is_calibrated(
    tiny, token_rows, name: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three layers, with a head in 8 bits and with one in BF16."""
    spec, params = tiny
    data, runs = batches(token_rows), Counter[str]()

    def counted(*given: Any) -> Any:
        runs[name] += 1
        return hessians.run_block(*given)

    monkeypatch.setattr("sabia.core.quant.quantize.run_block", counted)
    quantize(spec, params, recipe.load_recipe(name), OPS, data)
    assert runs[name] == layers * len(data)


@pytest.mark.parametrize("name", ["w4", "w4a16-asym", "mxfp4a16", "nvfp4"])
def test_gptq_is_below_rounding_to_nearest_and_brings_the_logits_closer(
    tiny, token_rows, name
) -> None:
    spec, params = tiny
    four = recipe.load_recipe(name)
    rows, held_out = batches(token_rows[:30]), batches(token_rows[30:])
    clever = quantize(spec, params, four, OPS, rows)
    plain = quantize(spec, params, recipe.with_overrides(four, rounding="rtn"), OPS, rows)
    gptq = [row for row in clever.rows if row["method"] == "gptq"]
    assert len(gptq) == 3 * 7
    assert all(row["output_error"] < row["output_error_rtn"] for row in gptq)
    assert {row["method"] for row in plain.rows} == {"rtn"}

    def kl(made: Any) -> float:
        pair = (OPS.to_device(params, "float32"), OPS.to_device(made.params, "float32"))
        seen = divergence(spec, *pair, made.linears, held_out, (), made.input_scales)
        return seen.kl_nats

    assert 0 < kl(clever) < kl(plain)


def test_without_calibration_all_is_rounded_to_nearest(tiny) -> None:
    spec, params = tiny
    made = quantize(spec, params, recipe.load_recipe("w4"), OPS)
    assert {row["method"] for row in made.rows} == {"rtn"}
    assert {row["output_error"] for row in made.rows} == {None}
    demanding = recipe.with_overrides(recipe.load_recipe("w4"), rounding="gptq")
    with pytest.raises(UsageError, match="needs calibration inputs"):
        quantize(spec, params, demanding, OPS)


def test_hessians_are_those_of_a_whole_pass(tiny, token_rows) -> None:
    """Block by block from kept states gives the same H as one pass that hooks every product."""
    spec, params = tiny
    weights = OPS.to_device(params, "float32")
    rows = batches(token_rows, 200)
    assert len(rows) > 3
    whole = Hessians()
    for batch in rows:
        whole.begin(batch.mask)
        run_block(spec, weights, build_ops("torch", record=whole), batch)
    states: list = [None] * len(rows)
    for layer in range(len(spec.layers)):
        alone = Hessians()
        for number, batch in enumerate(rows):
            stage = CalibrationStage(layer, states[number])
            alone.begin(batch.mask)
            ops = build_ops("torch", stage=stage, record=alone)
            states[number] = run_block(spec, weights, ops, batch)
        assert {n for n, _ in alone.sums} == {f"layers.{layer}.{n}" for n in ("attn.q", "attn.k",
                               "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")}  # fmt: skip
        for name, _ in alone.sums:
            torch.testing.assert_close(alone.of(name), whole.of(name), rtol=1e-5, atol=1e-6)
            assert alone.tokens(name) == sum(map(len, token_rows))


def test_padding_is_not_counted(tiny, token_rows) -> None:
    spec, params = tiny
    weights = OPS.to_device(params, "float32")
    sums = []
    for rows in (batches(token_rows, 10_000), batches(token_rows, 1)):
        h = Hessians()
        for batch in rows:
            h.begin(batch.mask)
            run_block(spec, weights, build_ops("torch", record=h), batch)
        sums.append(h.of("layers.2.mlp.down"))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-6)


def test_divergence_of_a_model_from_itself_is_zero(tiny, token_rows) -> None:
    spec, params = tiny
    weights = OPS.to_device(params, "float32")
    same = divergence(spec, weights, weights, (), batches(token_rows))
    assert (same.kl_nats, same.same_top_share) == (0, 1)
    assert same.loss_before_nats == same.loss_after_nats
    ids = np.array(token_rows[0])
    logs = torch.log_softmax(torch.from_numpy(logits(spec, params, ids[None])), -1)[0]
    expected = -np.mean([float(logs[t, ids[t + 1]]) for t in range(len(ids) - 1)])
    one = divergence(spec, weights, weights, (), batches(token_rows[:1]))
    assert one.loss_before_nats == pytest.approx(expected, rel=1e-5)


def test_activations_are_simulated_where_the_scheme_says_so(tiny, token_rows) -> None:
    spec, params = tiny
    rows = batches(token_rows)
    made = quantize(spec, params, recipe.load_recipe("w8a8"), OPS, rows)
    pair = (OPS.to_device(params, "float32"), OPS.to_device(made.params, "float32"))
    weights_only = [
        dataclasses.replace(x, scheme=dataclasses.replace(x.scheme, inputs=None))
        for x in made.linears
    ]
    with_both = divergence(spec, *pair, made.linears, rows).kl_nats
    assert with_both > divergence(spec, *pair, weights_only, rows).kl_nats > 0


def test_groups_that_do_not_divide(tiny) -> None:
    spec, params = tiny
    four = recipe.load_recipe("w4")
    made = quantize(spec, params, four, OPS)  # widths 64 and 160: groups of 64 and of 32
    labels = {row["module"].rpartition(".")[2]: row["scheme"] for row in made.rows}
    assert labels["q_proj"] == "w4a16 g64" and labels["down_proj"] == "w4a16 g32"
    with pytest.raises(UsageError, match=r"down: group size 64 does not divide 160 .* 32 fit"):
        quantize(spec, params, recipe.with_overrides(four, group=64), OPS)


def test_recipe_files_rules_and_refusals(tiny, tmp_path: Path) -> None:
    spec, params = tiny
    path = tmp_path / "r.toml"
    path.write_text(
        'group = 32\nscale = "absmax"\n[components]\nmlp = "w4a16"\n'
        '[[rules]]\nmatch = "layers\\\\.0\\\\."\nscheme = "w8a16"\n'
    )
    made = quantize(spec, params, recipe.load_recipe(str(path)), OPS)
    schemes = {row["module"]: row["scheme"] for row in made.rows}
    assert schemes["model.layers.0.mlp.up_proj"] == "w8a16"
    assert schemes["model.layers.1.mlp.up_proj"] == "w4a16 g32"
    assert "model.layers.1.self_attn.q_proj" not in schemes
    for text, message in (
        ('[components]\nmpl = "w4a16"', "component 'mpl'"),
        ('[components]\nmlp = "w3"', "no number format 'w3'"),
        ("grup = 3", "no key 'grup'"),
        ('order = "random"', "order is 'random'"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            recipe.load_recipe(str(path))
    path.write_text('[components]\nembedding = "w8a16"')
    # embeddings are never among the matrices that are quantized, whatever a recipe says
    with pytest.raises(UsageError, match="embed"):
        recipe.load_recipe(str(path)).scheme_of(spec.tensors()[0])


def test_config_names_every_module_once(tiny, token_rows) -> None:
    import re

    spec, params = tiny
    made = quantize(spec, params, recipe.load_recipe("mixed"), OPS)
    written = export.export_config(spec, made.linears)["quantization_config"]
    assert written["format"] == "pack-quantized"
    for linear in made.linears:
        hits = [
            group
            for group in written["config_groups"].values()
            for target in group["targets"]
            if (
                re.match(target[3:], linear.module)
                if target[:3] == "re:"
                else target == linear.module
            )
        ]
        assert [g["weights"]["num_bits"] for g in hits] == [linear.scheme.bits]


def test_tied_heads_stay_with_the_embedding(tiny, tmp_path: Path) -> None:
    spec, params = tiny
    tied = from_config({**spec.config, "tie_word_embeddings": True})
    made = quantize(
        tied, {n: a for n, a in params.items() if n != "head"}, recipe.load_recipe("w8"), OPS
    )
    assert all(row["component"] != "head" for row in made.rows)
    config = export.export_config(tied, made.linears)["quantization_config"]
    assert "lm_head" in config["ignore"]
    export.export(tmp_path / "t", made, None)
    assert set(hub.load_model(tmp_path / "t")[1]) == set(made.params)


def test_batches_hold_every_row_once(token_rows) -> None:
    made = hessians.batches(token_rows, 100)
    rows = [ids[seg > 0].tolist() for b in made for ids, seg in zip(b.ids, b.segments, strict=True)]
    assert sorted(rows) == sorted(token_rows)


@pytest.mark.parametrize(
    "name", [n for n in recipe.BUILT_IN if n != "w4a16-asym" and not n.startswith("nf4")]
)
def test_transformers_reads_the_directory(wide, token_rows, name, tmp_path) -> None:
    """Its weights are ours to the last bit; so are its logits, where inputs are not rounded."""
    pytest.importorskip("compressed_tensors", reason="transformers reads it with that package")
    transformers = pytest.importorskip("transformers")
    spec, params = wide
    made = quantize(spec, params, recipe.load_recipe(name), OPS, batches(token_rows))
    export.export(tmp_path / "q", made, None)
    integers = all(x.scheme.element.startswith("int") for x in made.linears if x.scheme.quantizes)
    ids = torch.tensor(token_rows[:1])

    def load(dtype: Any) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=dtype)
        with torch.no_grad():
            assert model(ids).logits.isfinite().all()  # the first pass decompresses the weights
        return model

    model = load(torch.bfloat16)
    state = model.state_dict()
    for tensor in spec.tensors():
        theirs = state[tensor.hf].float().numpy()
        ours = made.params[tensor.name]
        np.testing.assert_array_equal(
            theirs, torch.from_numpy(ours).bfloat16().float().numpy(), err_msg=tensor.name
        )
    model = load(torch.float32) if integers else torch.nn.Module.float(model)
    seen: dict[str, Any] = {}
    for module, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda _, x, y, n=module: seen.update({n: (x[0], y)}))
    with torch.no_grad():
        theirs = model(ids).logits.numpy()
    # it holds other formats than integers in BF16
    values = made.params if integers else {n: round_bfloat16(x) for n, x in made.params.items()}
    weights = OPS.to_device(values, "float32")
    ops = build_ops("torch", record=RoundedInputs(_served(made)))
    hidden = forward.hidden(spec, weights, ids.numpy(), ops)
    ours = forward.logits(spec, weights, hidden, ops).numpy()
    difference = np.abs(theirs - ours) / np.abs(ours).max()
    served = _served(made)
    for tensor in spec.tensors():
        if tensor.name in served:  # the output of each matrix, from equal inputs
            x, y = seen[str(tensor.hf).removesuffix(".weight")]
            made_here = rounded(x, served[tensor.name]) @ weights[tensor.name].T
            assert (made_here - y).abs().max() <= 1e-5 * y.abs().max(), tensor.name
    # max|x| lies between two codes of INT8 (`served_inputs`), and other numbers may: their rounding
    # depends on the last bit of what comes before
    assert difference.max() < (0.1 if served else 1e-5)


def _served(made: Any) -> dict[str, InputFormat]:
    return {
        tensor.name: InputFormat(x.scheme.inputs, made.input_scales.get(tensor.name))
        for x in made.linears
        if x.scheme.inputs
        for tensor in x.tensors
    }
