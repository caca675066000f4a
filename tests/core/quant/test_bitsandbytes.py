"""NF4 in the form of transformers with bitsandbytes: written, read, refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import BadData, UsageError  # noqa: E402
from sabia.core.model import forward  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.model.storage.safetensors_file import read_tensors  # noqa: E402
from sabia.core.model.storage.stored_weights import load_stored  # noqa: E402
from sabia.core.numerics import nf4  # noqa: E402
from sabia.core.numerics.floats import round_bfloat16  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant import allocation, export, recipe  # noqa: E402
from sabia.core.quant.loaders import loaders  # noqa: E402
from sabia.core.quant.quantize import QuantizedModel, quantize  # noqa: E402
from sabia.core.spec import ModelSpec, from_config, new_config  # noqa: E402

OPS = load_ops("torch")
MOE: dict[str, Any] = {"hidden": 128, "heads": 4, "vocab": 300, "experts": 4, "chosen": 2,
                       "expert_ffn": 128}  # fmt: skip
FAMILIES = {
    "llama": new_config("llama", hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab=300),
    "narrow": new_config("llama", hidden=128, layers=1, heads=4, ffn=112, vocab=300),
    "qwen3_moe": new_config("qwen3_moe", layers=2, tied=False, **MOE),
    "mixtral": new_config("mixtral", layers=2, tied=False, **MOE),
    "qwen3_next": new_config("qwen3_next", layers=4, kv_heads=2, shared=1, **MOE),
    "deepseek_v3": new_config("deepseek_v3", layers=2, ffn=128, shared=1, **MOE),
}
EXPERTS = '[components]\nattention = "nf4"\nexpert = "nf4"\n'
HALF = EXPERTS + '[[rules]]\nmatch = "layers.0.*experts"\nscheme = "bf16"\n'

DOWN = HALF.replace("experts", "experts.down")
KEPT = {EXPERTS: [], HALF: ["model.layers.0.block_sparse_moe.experts"]}
KEPT[DOWN] = [f"model.layers.0.block_sparse_moe.experts.{n}.w2" for n in range(4)]


def model(family: str) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """A random model whose values are BF16."""
    spec, draw = from_config(FAMILIES[family]), np.random.default_rng(0)
    draws = ((t.name, draw.standard_normal(t.shape)) for t in spec.tensors())
    return spec, {name: round_bfloat16(0.1 * x.astype(np.float32)) for name, x in draws}


def quantized(family: str, name: str, folder: Path) -> QuantizedModel:
    if "\n" in name:
        (folder / "r.toml").write_text(name)
        name = str(folder / "r.toml")
    return quantize(*model(family), recipe.load_recipe(name), OPS)


def logits(spec: ModelSpec, params: Any, ids: np.ndarray) -> np.ndarray:
    tensors = OPS.to_device(params, "float32")
    with torch.inference_mode():
        hidden = forward.hidden(spec, tensors, ids, OPS)
        return forward.logits(spec, tensors, hidden, OPS).numpy()


def peer() -> Any:
    """transformers, with what it reads and writes NF4 with."""
    for name in ("bitsandbytes", "accelerate"):
        pytest.importorskip(name, reason="transformers reads NF4 with that package")
    return pytest.importorskip("transformers")


def their_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    """Of transformers in float32."""
    read = peer().AutoModelForCausalLM.from_pretrained
    made, info = read(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.nn.Module.float(made)
    for part in made.modules():
        if hasattr(part, "compute_dtype"):
            part.compute_dtype, part.support_avx512bf16_for_cpu = torch.float32, False
    with torch.inference_mode():
        return made(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize("name", ["nf4", "nf4-double"])
def test_the_files_have_the_tensors_and_the_configuration(name: str, tmp_path: Path) -> None:
    made = quantized("llama", name, tmp_path)
    size = export.export(tmp_path / "q", made, None)
    tensors = read_tensors(tmp_path / "q" / "model.safetensors")
    planned = {x.tensor.name: x.stored_bytes for x in made.linears if x.scheme.quantizes}
    plain = [t for t in made.spec.tensors() if t.name not in planned]
    assert size == sum(planned.values()) + sum(2 * t.size for t in plain)
    assert size == sum(x.nbytes for x in tensors.values())
    double = name == "nf4-double"
    ends = [part for part in nf4.PARTS[:-1] if double or "nested" not in part]
    up = "model.layers.1.mlp.up_proj.weight"
    assert {k for k in tensors if k.startswith(up)} == {up + end for end in ends}
    assert tensors[up].shape == (128 * 256 // 2, 1) and tensors[up].dtype == np.uint8
    assert tensors[up + ".absmax"].dtype == (np.uint8 if double else np.float32)
    state = json.loads(tensors[f"{up}{nf4.STATE}nf4"].tobytes())
    assert state["shape"] == [256, 128] and state["quant_type"] == "nf4"
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    quantization = config["quantization_config"]
    assert quantization["bnb_4bit_use_double_quant"] == double and quantization["load_in_4bit"]
    assert quantization["llm_int8_skip_modules"] == ["lm_head"]  # tied


@pytest.mark.parametrize("double", [False, True])
def test_the_files_are_those_of_transformers(double: bool, tmp_path: Path) -> None:
    """Every byte, but for 8-bit scales and how they are told; the library's mean is another."""
    transformers = peer()
    spec, params = model("llama")
    hub.save_model(tmp_path / "m", spec, {k: x.astype("bfloat16") for k, x in params.items()})
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    read = transformers.AutoModelForCausalLM.from_pretrained
    made = read(tmp_path / "m", dtype=torch.bfloat16, quantization_config=asked)
    made.save_pretrained(tmp_path / "theirs")
    export.export(tmp_path / "ours", quantized("llama", f"nf4{'-double' * double}", tmp_path), None)
    ours, theirs = (read_tensors(tmp_path / n / "model.safetensors") for n in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].ndim) == (array.dtype, array.ndim), name
        if double and name.endswith((".absmax", ".nested_absmax", "nf4")):
            continue
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    configs = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"]
               for n in ("ours", "theirs")]  # fmt: skip
    assert configs[0].pop("llm_int8_skip_modules") == ["lm_head"]
    assert configs[1].pop("llm_int8_skip_modules") is None and configs[0] == configs[1]


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_directories_of_transformers_are_read(kind: str, double: bool, tmp_path: Path) -> None:
    transformers = peer()
    spec, params = model("llama")
    hub.save_model(tmp_path / "m", spec, params)
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double
    )
    read = transformers.AutoModelForCausalLM.from_pretrained
    made = read(tmp_path / "m", quantization_config=asked)
    made.save_pretrained(tmp_path / "q")
    ids = np.random.default_rng(1).integers(0, 300, (2, 40))
    theirs = their_logits(tmp_path / "q", ids)
    for load in (hub.load_model, load_stored):
        ours = logits(*load(tmp_path / "q"), ids)
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    far = logits(spec, params, ids)
    assert np.abs(far - theirs).max() > 1e-3 * np.abs(theirs).max()


LOADED = [("llama", "nf4"), ("llama", "nf4-double"), ("qwen3_moe", "nf4"), ("mixtral", "nf4"),
          ("qwen3_next", "nf4-double"), ("deepseek_v3", "nf4")]  # fmt: skip
FAST = {("llama", "nf4-double"), ("qwen3_moe", "nf4")}


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in LOADED],
)
def test_transformers_computes_the_same(family: str, name: str, tmp_path: Path) -> None:
    made = quantized(family, name, tmp_path)
    export.export(tmp_path / "q", made, None)
    config = export.export_config(made.spec, made.linears)["quantization_config"]
    assert [x.result for x in loaders(made.spec, made.linears, config)] == ["loads"]
    ids = np.random.default_rng(1).integers(0, 300, (2, 40))
    theirs, ours = their_logits(tmp_path / "q", ids), logits(made.spec, made.params, ids)
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()


@pytest.mark.parametrize(
    ("family", "text"), [("qwen3_moe", EXPERTS), ("mixtral", HALF), ("mixtral", DOWN)]
)
def test_single_experts_are_ours_alone(family: str, text: str, tmp_path: Path) -> None:
    made = quantized(family, text, tmp_path)
    export.export(tmp_path / "q", made, None)
    params = hub.load_model(tmp_path / "q")[1]
    for name, value in made.params.items():
        np.testing.assert_array_equal(np.asarray(params[name], np.float32), value, err_msg=name)
    config = export.export_config(made.spec, made.linears)["quantization_config"]
    kept = [name for name in config["llm_int8_skip_modules"] if "experts" in name]
    assert kept == KEPT[text]
    (result,) = loaders(made.spec, made.linears, config)
    assert result.result == "refuses" and "experts" in result.why
    transformers = peer()
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")


def test_rows_that_blocks_do_not_divide(tmp_path: Path) -> None:
    """Are ours as bitsandbytes writes them; that its kernel for some CPUs errs is told."""
    made = quantized("narrow", "nf4", tmp_path)
    export.export(tmp_path / "q", made, None)
    params = hub.load_model(tmp_path / "q")[1]
    assert all(np.array_equal(np.asarray(params[n], np.float32), x) for n, x in made.params.items())
    config = export.export_config(made.spec, made.linears)["quantization_config"]
    results = loaders(made.spec, made.linears, config)
    assert [x.result for x in results] == ["loads", "loads wrongly"] and "CPU" in results[1].loader


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounding": "gptq"}, "rounding is gptq with format nf4, .*expected auto or rtn"),
        ({"rounding": "learned"}, "rounding is learned with format nf4"),
        ({"rounding": "trained", "scale": "absmax"}, "rounding is trained with format nf4"),
        ({"smooth": "awq"}, "smooth is awq with format nf4"),
        ({"match": "llmcompressor"}, "match is llmcompressor with format nf4"),
    ],
)
def test_other_roundings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe.with_overrides(recipe.load_recipe("nf4"), **changes)


def test_a_directory_has_one_method(tmp_path: Path) -> None:
    spec = model("llama")[0]
    mixed = replace(recipe.load_recipe("nf4"), components={"attention": "w8a16", "mlp": "nf4"})
    with pytest.raises(UsageError, match="nf4 beside w8a16 in a directory, which has one method"):
        recipe.plan(spec, mixed)
    assert recipe.plan(spec, replace(mixed, container="dense"))
    both = replace(mixed, components={"attention": "nf4", "mlp": "nf4-double"})
    assert {x.scheme.name for x in recipe.plan(spec, both)} == {"nf4", "nf4-double"}
    with pytest.raises(UsageError, match="--format gguf has no form of nf4"):
        recipe.plan(spec, replace(recipe.load_recipe("nf4"), container="gguf"))
    with pytest.raises(UsageError, match="--formats: nf4 beside w4a16"):
        allocation.parse_choices("nf4,w4a16,bf16")
    assert len(allocation.parse_choices("nf4,nf4-double,bf16")) == 3


@pytest.mark.parametrize("load", [hub.load_model, load_stored])
def test_damage_is_named(load: Any, tmp_path: Path) -> None:
    from sabia.core.model.storage.safetensors_file import write_tensors

    export.export(tmp_path / "q", quantized("llama", "nf4", tmp_path), None)
    file = tmp_path / "q" / "model.safetensors"
    whole = {name: np.array(x) for name, x in read_tensors(file).items()}
    up, down = (f"model.layers.1.mlp.{n}_proj.weight" for n in ("up", "down"))
    for change, message in (
        ({f"{up}.absmax": None}, rf"tensor {up}.absmax is missing"),
        ({up: whole[up][:-1]}, rf"model: {up} is uint8 \[16383, 1\] \(expected 16384 values"),
        ({up: None}, rf"tensor {up} is missing"),
        # another matrix of this size
        ({f"{up}{nf4.STATE}nf4": whole[f"{down}{nf4.STATE}nf4"]}, r"has shape \(128, 256\)"),
        ({f"{up}.SCB": np.ones(3, np.float32)}, rf"{up}.SCB: 8 bits of bitsandbytes"),
    ):
        write_tensors(file, {n: x for n, x in (whole | change).items() if x is not None})
        with pytest.raises(BadData, match=message):
            load(tmp_path / "q")
    write_tensors(file, whole)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadData, match=r"safetensors: .* is cut short"):
        load(tmp_path / "q")
