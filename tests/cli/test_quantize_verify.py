"""`sabia quantize --verify`: our directories, directories of others, and damaged ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import stage

from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage import hub
from sabia.core.model.storage.safetensors_file import write_tensors
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

pytest.importorskip("torch")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fp8-static", "w4a16-asym")]
Change = Callable[[dict[str, np.ndarray], dict[str, Any]], None]


def model(root: Path, family: str = "llama", **shape: int) -> Path:
    tokenizer = train_bpe(["dois mais três são cinco"] * 4, 300)
    tokenizer.save(root / "t")
    base: Any = {"hidden": 64, "layers": 2, "heads": 4, "tied": False}
    config = new_config(family, **base, vocab=tokenizer.vocab_size, **shape)
    spec, draw = from_config(config), np.random.default_rng(0)
    params = {n: a + 0.05 * draw.standard_normal(a.shape).astype("f4")
              for n, a in hub.init_params(spec, 0).items()}  # fmt: skip
    hub.save_model(root / family, spec, params, tokenizer_from=root / "t")
    words = ["dois", "mais", "três", "são", "cinco"]
    rows = [{"text": " ".join(draw.choice(words, 40)), "source": "abc"[i % 3]} for i in range(12)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / family


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("m"))


MADE: dict[tuple[Path, str], Path] = {}  # directories that tests copy


def quantized(original: Path, out: Path, recipe: str) -> Path:
    if (original, recipe) not in MADE:
        rows, made = (str(original.parent / "rows.jsonl"),), original.parent / f"q-{recipe}"
        given = {"model": original, "recipe": recipe, "held_out": 2}
        stage("quantize", inputs=rows, out=made, json=True, **given)
        MADE[original, recipe] = made
    shutil.copytree(MADE[original, recipe], out)
    return out


def verified(
    capsys: pytest.CaptureFixture, original: Path, out: Path, *inputs: Path, **settings: Any
) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    given = tuple(map(str, inputs))
    stage("quantize", inputs=given, json=True, model=original, verify=out, **settings)
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


@pytest.mark.parametrize("recipe", ["mixed", "nvfp4", "nf4-double", *SLOW])
def test_what_was_measured_is_what_is_read(
    original: Path, tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture
) -> None:
    out = quantized(original, tmp_path / "q", recipe)
    made = json.loads((out / "quantization.json").read_text())
    report, err = verified(capsys, original, out, original.parent / "rows.jsonl")
    assert not report["unused_tensors"] and not report["missing_tensors"]
    for name in ("mse", "relative_error", "size_bytes", "bits"):
        ours = {row["module"]: row[name] for row in made["layers"]}
        assert {row["module"]: row[name] for row in report["layers"]} == pytest.approx(ours)
    assert report["size_after_bytes"] == made["size_after_bytes"]
    # over all twelve rows; two of them are those that were held out
    assert report["divergence"]["kl_nats"] == pytest.approx(made["divergence"]["kl_nats"], rel=0.5)
    assert report["divergence"]["by_source"].keys() == set("abc")
    peer = report["transformers"]
    if peer is None:
        assert "is not installed" in err
    elif recipe == "w4a16-asym":
        assert "RuntimeError" in peer["error"] and "does not load" in err
    else:
        assert peer["difference"] < 1e-5 and "transformers loads it" in err


def _drop(name: str) -> Change:
    return lambda tensors, config: tensors.__delitem__(name)


def _add(name: str) -> Change:
    return lambda tensors, config: tensors.update({name: np.ones(3, np.float32)})


def _targets(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].append("re:.*q_proj")


UP = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("change", "unused", "missing"),
    [
        (_add("model.layers.1.mlp.other.weight"), ["model.layers.1.mlp.other.weight"], []),
        (_add(UP + "weight_zero_point"), [UP + "weight_zero_point"], []),
        (_add(UP + "input_scale"), [UP + "input_scale"], []),
        (_drop(UP + "weight_scale"), [], [UP + "weight_scale"]),
        (_drop("model.norm.weight"), [], ["model.norm.weight"]),
        (
            _targets,
            [f"model.layers.{n}.self_attn.q_proj.weight_{p}" for n in (0, 1)
             for p in ("packed", "scale", "shape")],
            [f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)],
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_configuration_are_named(
    original: Path, tmp_path: Path, change: Change, unused: list[str], missing: list[str],
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    out = quantized(original, tmp_path / "q", "w4a16")
    tensors = {name: np.array(x) for name, x in hub.read_checkpoint(out).items()}
    config = json.loads((out / "config.json").read_text())
    change(tensors, config)
    write_tensors(out / "model.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadData, match=rf"{len(unused)} tensors .* {len(missing)} missing"):
        verified(capsys, original, out)
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["unused_tensors"], report["missing_tensors"]) == (unused, missing)
    for name in (*unused, *missing):
        assert name in shown.err


def test_parts_of_nf4_that_do_not_fit_are_named(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of a matrix that has lost its scales, of one that has lost its state, and one too many."""
    out = quantized(original, tmp_path / "q", "nf4")
    tensors = {name: np.array(x) for name, x in hub.read_checkpoint(out).items()}
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    state = f"{down}.quant_state.bitsandbytes__nf4"
    del tensors[f"{up}.absmax"], tensors[state]
    tensors[f"{up}.nested_quant_map"] = np.ones(256, np.float32)
    write_tensors(out / "model.safetensors", tensors)
    with pytest.raises(BadData, match=r"1 tensors .* 2 missing"):
        verified(capsys, original, out)
    report = json.loads(capsys.readouterr().out)
    assert report["missing_tensors"] == sorted([f"{up}.absmax", state])
    assert report["unused_tensors"] == [f"{up}.nested_quant_map"]
    tensors[f"{up}.absmax"], tensors[state] = np.ones(1, np.float32), np.ones(3, np.uint8)
    del tensors[f"{up}.nested_quant_map"]
    write_tensors(out / "model.safetensors", tensors)
    with pytest.raises(BadData, match=rf"model: {up}.absmax is float32 \[1\]|{state} cannot be"):
        verified(capsys, original, out)


def test_other_values_show(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A scale that is wrong, and a norm that was not copied."""
    out = quantized(original, tmp_path / "q", "w4a16")
    tensors = {name: np.array(x) for name, x in hub.read_checkpoint(out).items()}
    tensors[UP + "weight_scale"] *= 2
    tensors["model.norm.weight"] += 1
    write_tensors(out / "model.safetensors", tensors)
    report, _ = verified(capsys, original, out, original.parent / "rows.jsonl")
    errors = {row["module"]: row["relative_error"] for row in report["layers"]}
    assert errors.pop("model.layers.1.mlp.up_proj") > 0.9 and errors.pop("model.norm") > 0.4
    assert max(errors.values()) < 0.2
    tensors[UP + "weight_scale"][0] = np.nan
    write_tensors(out / "model.safetensors", tensors)
    with pytest.raises(BadData, match=r"layers\.1\.mlp\.up of --verify has 64 NaN"):
        verified(capsys, original, out)
    tensors[UP + "weight_packed"] = tensors[UP + "weight_packed"][:3]
    write_tensors(out / "model.safetensors", tensors)
    with pytest.raises(BadData, match=r"up_proj: cannot decode"):
        verified(capsys, original, out)


def test_experts_are_read_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    original = model(tmp_path, "qwen3_moe", experts=4, chosen=2, expert_ffn=32)
    out = quantized(original, tmp_path / "q", "nvfp4a16")
    report, shown = verified(capsys, original, out)
    experts = [row for row in report["layers"] if row["component"] == "expert"]
    assert len(experts) == 2 * 4 * 3 and len({row["module"] for row in experts}) == 2 * 4 * 3
    if report["transformers"] is not None:  # it drops the experts' scales of whole matrices
        assert report["transformers"]["difference"] > 1e-2 and "with other values" in shown


def test_what_cannot_be_compared(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(UsageError, match="is no compressed-tensors directory"):
        verified(capsys, original, original)
    other = model(tmp_path, "qwen3", ffn=96)
    out = quantized(other, tmp_path / "q", "w8a16")
    with pytest.raises(UsageError, match="have different shapes"):
        verified(capsys, original, out)
    with pytest.raises(UsageError, match="--length: only with records to compare on"):
        verified(capsys, other, other.parent / "q-w8a16", length="1k")
    with pytest.raises(UsageError, match="--verify: not together with --recipe"):
        verified(capsys, other, out, recipe="w4")
