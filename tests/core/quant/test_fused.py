"""Matrices that the files fuse: one stored matrix, experts one by one; what loads the result."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import stage

torch = pytest.importorskip("torch")

from sabia.core.errors import BadData, UsageError  # noqa: E402
from sabia.core.model import forward  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.model.storage.safetensors_file import write_tensors  # noqa: E402
from sabia.core.numerics.schemes import INT8_TOKENS  # noqa: E402
from sabia.core.ops.served_inputs import InputFormat, input_formats  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant import recipe  # noqa: E402
from sabia.core.quant.export import export, export_config  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.loaders import loaders  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.rounding import store  # noqa: E402
from sabia.core.spec import ModelSpec, from_config, new_config  # noqa: E402
from sabia.core.spec.tensors import FusedPart  # noqa: E402

OPS = load_ops("torch")
SHAPE: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 300, "tied": False}
EXPERTS = {"experts": 4, "chosen": 2, "expert_ffn": 96}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 16}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
GPT_OSS |= {"attention_bias": True, "sliding_window": 7}
CONFIGS = {
    "llama": new_config("llama", **SHAPE),
    "mixtral": new_config("mixtral", **SHAPE, **EXPERTS),
    "qwen3_moe": new_config("qwen3_moe", **SHAPE, **EXPERTS),
    "deepseek_v3": new_config("deepseek_v3", **SHAPE, **EXPERTS, shared=1, ffn=96),
    "qwen3_next": new_config("qwen3_next", **SHAPE | {"layers": 4}, **EXPERTS, shared=1),
    "qwen3_5": new_config("qwen3_5", **SHAPE | {"layers": 4}),
    "gpt_oss": {k: v for k, v in new_config("llama", **SHAPE).items() if k != "mlp_bias"} | GPT_OSS,
}
FUSED = ("qwen3_next", "qwen3_5", "gpt_oss")


def model(name: str) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    spec, draw = from_config(CONFIGS[name]), np.random.default_rng(0)
    return spec, {
        name: array + 0.05 * draw.standard_normal(array.shape).astype(np.float32)
        for name, array in hub.init_params(spec, 0).items()
    }


def rows() -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 300, draw.integers(5, 60)).tolist() for _ in range(30)]


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("name", ["w8a8", "mixed"])
def test_loading_back_gives_the_very_values(family: str, name: str, tmp_path: Path) -> None:
    spec, params = model(family)
    # as it is read from its own files, so with their layout
    hub.save_model(tmp_path / "m", spec, params)
    spec, params = hub.load_model(tmp_path / "m")
    made = quantize(spec, params, recipe.load_recipe(name), OPS, batches(rows()))
    export(tmp_path / "q", made, None)
    stored, loaded = hub.load_model(tmp_path / "q")
    assert loaded.keys() == made.params.keys() == params.keys()
    for tensor, value in made.params.items():
        np.testing.assert_array_equal(np.asarray(loaded[tensor], np.float32), value, err_msg=tensor)
    changed = {n for n in params if not np.array_equal(made.params[n], params[n])}
    linear = {t.name for t in spec.tensors() if t.linear and t.component not in recipe.NEVER}
    head = {"head"} if name == "w8a8" else set()
    assert changed >= linear - head
    if name == "w8a8":
        rounded = {t.name for t in spec.tensors() if t.linear and t.component in ("attention",
                   "mlp")}  # fmt: skip
        assert input_formats(stored) == dict.fromkeys(rounded, InputFormat(INT8_TOKENS))
    gptq = [row for row in made.rows if row["method"] == "gptq"]
    assert bool(gptq) == (name == "mixed")
    for row in gptq:
        assert row["output_error"] < row["output_error_rtn"], row["module"]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_fused_matrix_is_quantized_as_the_files_store_it(family: str, tmp_path: Path) -> None:
    spec, params = model(family)
    four = recipe.load_recipe("w4")
    export(tmp_path / "q", quantize(spec, params, four, OPS), None)
    written, whole = hub.read_checkpoint(tmp_path / "q"), hub.to_hf(spec, params)
    files = {t.hf.file for t in spec.tensors() if t.linear and isinstance(t.hf, FusedPart)}
    assert len(files) >= 4
    scheme = four.scheme_of(next(t for t in spec.tensors() if t.name.endswith("delta.q")))
    for file in files:
        alone = store([np.asarray(whole[file], np.float32)], scheme, four)[0].parts
        for suffix, array in alone.items():
            name = f"{file.removesuffix('weight')}{suffix}"
            np.testing.assert_array_equal(
                written[name].view(np.uint8), np.asarray(array).view(np.uint8), err_msg=name
            )


def test_parts_of_one_matrix_have_one_format(tmp_path: Path) -> None:
    spec, _ = model("qwen3_next")
    path = tmp_path / "r.toml"
    path.write_text('[components]\nattention = "w8a16"\n[[rules]]\nmatch = "attn.gate"\n'
                    'scheme = "w4a16"\n')  # fmt: skip
    with pytest.raises(UsageError, match=r"attn\.q and .*attn\.gate have different formats"):
        recipe.plan(spec, recipe.load_recipe(str(path)))


def test_the_gate_of_attention_is_a_component(tmp_path: Path) -> None:
    """It has the format of attention by default, and no other where the files fuse it with q."""
    spec, path = model("qwen3_next")[0], tmp_path / "r.toml"
    gates = [t for t in spec.tensors() if t.name.endswith("attn.gate")]
    assert gates and {recipe.component_of(t) for t in gates} == {"attention_gate"}
    for text, expected in (("", "w8a16"), ('attention_gate = "w8a16"\n', "w8a16")):
        path.write_text(f'[components]\nattention = "w8a16"\n{text}')
        given = recipe.load_recipe(str(path))
        recipe.plan(spec, given)
        assert {given.scheme_of(t).name for t in gates} == {expected}
    path.write_text('[components]\nattention = "w8a16"\nattention_gate = "bf16"\n')
    given = recipe.load_recipe(str(path))
    assert {given.scheme_of(t).name for t in gates} == {"bf16"}
    with pytest.raises(UsageError, match=r"attn\.q and .*attn\.gate have different formats"):
        recipe.plan(spec, given)
    path.write_text('[components]\nattention = "w8a16"\nattention_gate = "w8a16"\n')
    with pytest.raises(UsageError, match=r"no matrix of .* is of component attention_gate"):
        recipe.plan(model("llama")[0], recipe.load_recipe(str(path)))


def test_experts_stay_fused_where_they_are_not_quantized(tmp_path: Path) -> None:
    spec, params = model("gpt_oss")
    path = tmp_path / "r.toml"
    path.write_text('[components]\nattention = "w8a16"\n')
    export(tmp_path / "q", quantize(spec, params, recipe.load_recipe(str(path)), OPS), None)
    assert "model.layers.0.mlp.experts.gate_up_proj" in hub.read_checkpoint(tmp_path / "q")
    assert hub.load_model(tmp_path / "q")[1].keys() == params.keys()


PUBLISHED = '[components]\nexpert = "mxfp4a16"\n'


def published(root: Path) -> ModelSpec:
    """A GPT-OSS in root/m, its experts in MXFP4 in root/q, and the records for it."""
    spec, params = model("gpt_oss")
    hub.save_model(root / "m", spec, params)
    (root / "r.toml").write_text(PUBLISHED)
    (root / "rows.jsonl").write_text(
        "\n".join(json.dumps({"id": str(n), "input_ids": ids, "document_lengths": [len(ids)]})
                  for n, ids in enumerate(rows()))
    )  # fmt: skip
    stage("quantize", inputs=(str(root / "rows.jsonl"),), out=root / "q", to="jsonl",
          model=root / "m", recipe=str(root / "r.toml"), held_out=2)  # fmt: skip
    return spec


def test_gpt_oss_in_mxfp4_is_written_as_published(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec = published(tmp_path)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4" and "lm_head" in config["modules_to_not_convert"]
    report = json.loads((tmp_path / "q" / "quantization.json").read_text())
    assert {row["method"] for row in report["layers"]} == {"gptq"}
    assert [one["result"] for one in report["loaders"]] == ["loads", "loads"]
    stored = hub.read_checkpoint(tmp_path / "q")
    first = "model.layers.0.mlp.experts.gate_up_proj"
    assert {first + end for end in ("_blocks", "_scales", "_bias")} <= {*stored}
    assert not any(".experts.0." in name for name in stored)
    decoded = transformers.integrations.mxfp4.convert_moe_packed_tensors(
        *(torch.from_numpy(np.array(stored[first + end])) for end in ("_blocks", "_scales"))
    )  # [E, D, 2F], gate and up in turn
    params = hub.load_model(tmp_path / "q")[1]
    for start, name in enumerate(("gate", "up")):
        ours = torch.from_numpy(np.array(params[f"layers.0.mlp.experts.{name}"], np.float32))
        assert torch.equal(decoded[..., start::2].mT.float(), ours)
    pytest.importorskip("accelerate", reason="transformers reads such files with that package")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.tensor(rows()[:1])
    weights = OPS.to_device(params, "float32")
    with torch.no_grad():
        scores = loaded.float()(ids).logits
        ours = forward.logits(spec, weights, forward.hidden(spec, weights, ids.numpy(), OPS), OPS)
    assert (scores - ours).abs().max() < 1e-4 * ours.abs().max()


def test_the_published_form_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    published(tmp_path)
    capsys.readouterr()
    given: Any = {"json": True, "model": tmp_path / "m", "verify": tmp_path / "q"}
    stage("quantize", inputs=(str(tmp_path / "rows.jsonl"),), **given)
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    stored = {name: np.array(x) for name, x in hub.read_checkpoint(tmp_path / "q").items()}
    before, after = (hub.load_model(tmp_path / name)[1] for name in "mq")
    errors = [
        np.linalg.norm(np.asarray(after[name], np.float64) - before[name])
        / np.linalg.norm(before[name])
        for name in before if name.endswith(("experts.gate", "experts.up", "experts.down"))
    ]  # fmt: skip
    relative = sorted(row["relative_error"] for row in report["layers"])
    assert relative == pytest.approx(sorted(errors), rel=1e-4)
    assert {row["bits"] for row in report["layers"]} == {4}
    size = sum(x.nbytes for name, x in stored.items() if name.endswith(("_blocks", "_scales")))
    assert sum(row["size_bytes"] for row in report["layers"]) == size
    assert not report["unused_tensors"] and not report["missing_tensors"]
    measured = json.loads((tmp_path / "q" / "quantization.json").read_text())["divergence"]
    assert report["divergence"]["kl_nats"] == pytest.approx(measured["kl_nats"], rel=0.5)
    if report["transformers"] is None:
        assert "transformers or accelerate is not installed" in shown.err
    else:
        assert report["transformers"]["difference"] < 1e-4 and "loads it" in shown.err
    first = "model.layers.0.mlp.experts.down_proj"
    stored[first] = stored.pop(first + "_scales")
    write_tensors(tmp_path / "q" / "model.safetensors", stored)
    with pytest.raises(BadData, match=r"1 tensors .* 1 missing"):
        stage("quantize", **given)
    report = json.loads(capsys.readouterr().out)
    assert report["unused_tensors"] == [first]
    assert report["missing_tensors"] == [first + "_scales"]


RULE = '[[rules]]\nmatch = "{}"\nscheme = "{}"\n'
RECIPES = {
    "down": '[components]\nexpert = "w4a16"\n' + RULE.format("experts.down", "w8a16"),
    "half": '[components]\nexpert = "w4a16"\n' + RULE.format("layers.0.*experts", "bf16"),
    "kept": '[components]\nattention = "w8a16"\n',
    "kept-fp8": '[components]\nattention = "fp8"\n',
    "published": PUBLISHED,
    "fp4-experts": '[components]\nexpert = "nvfp4a16"\n',
    "fp8-experts": '[components]\nexpert = "fp8"\nattention = "w4a16"\n',
}
RESULTS = [
    *[("llama", name, "loads") for name in ("w8", "w8a8", "w4", "fp8", "mixed")],
    ("llama", "w4a16-asym", "refuses"),
    *[(family, name, "loads") for family in ("qwen3_5", "qwen3_next", "deepseek_v3", "mixtral")
      for name in ("w8", "fp8", "mixed")],
    *[("qwen3_moe", name, "loads") for name in ("w4", "fp8", "fp8-experts", "kept-fp8", "mxfp4")],
    *[("qwen3_moe", name, "refuses") for name in ("w8a8", "half", "kept", "mxfp8", "w4a16-asym")],
    ("qwen3_moe", "fp4-experts", "loads wrongly"),
    ("qwen3_moe", "down", "refuses or loads wrongly"),
    ("qwen3_next", "w8a8", "refuses"), ("mixtral", "w8a8", "refuses"),
    ("gpt_oss", "mixed", "loads wrongly"), ("gpt_oss", "w8a8", "loads wrongly"),
    ("gpt_oss", "kept", "loads"), ("gpt_oss", "published", "loads"),
]  # fmt: skip


def _quantized(family: str, name: str, folder: Path) -> Any:
    if name in RECIPES:
        (folder / "r.toml").write_text(RECIPES[name])
    spec, params = model(family)
    named = str(folder / "r.toml") if name in RECIPES else name
    return quantize(spec, params, recipe.load_recipe(named), OPS)


@pytest.mark.parametrize(("family", "name", "expected"), RESULTS)
def test_what_transformers_does_is_told(
    family: str, name: str, expected: str, tmp_path: Path
) -> None:
    made = _quantized(family, name, tmp_path)
    config = export_config(made.spec, made.linears)["quantization_config"]
    usual, decoded = loaders(made.spec, made.linears, config)
    assert usual.result == expected and (expected == "loads" or usual.why)
    whole = expected == "loads" or (name == "w4a16-asym" and family == "llama")
    assert whole or decoded.result == expected


@pytest.mark.parametrize(("family", "name", "expected"), RESULTS)
def test_transformers_does_what_is_told(
    family: str, name: str, expected: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers reads it with that package")
    transformers = pytest.importorskip("transformers")
    if name == "published":
        pytest.importorskip("accelerate", reason="transformers reads such files with that package")
    made = _quantized(family, name, tmp_path)
    export(tmp_path / "q", made, None)

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "q", dtype=torch.float32, output_loading_info=True
        )

    try:
        loaded, info = load()
    except RuntimeError:
        assert expected.startswith("refuses")
        return
    assert expected != "refuses"
    missing = bool(info["missing_keys"] or info["unexpected_keys"])
    assert missing <= (expected == "loads wrongly")
    if missing or any(linear.scheme.inputs for linear in made.linears):
        return
    ids = torch.tensor(rows()[:1])
    weights = OPS.to_device(made.params, "float32")
    hidden = forward.hidden(made.spec, weights, ids.numpy(), OPS)
    with torch.no_grad():
        scores = loaded(ids).logits
    # experts are decoded in BF16
    difference = (scores - forward.logits(made.spec, weights, hidden, OPS)).abs()
    bound = 0.02 if any(tensor.stacked for tensor in made.spec.tensors()) else 1e-5
    assert (float(difference.median()) < bound) == (expected == "loads")
