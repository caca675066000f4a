"""LoRA: the wrapped forward pass is that of the merged matrices, and peft reads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model.forward import hidden, logits
from sabia.core.model.lora import (
    LoraConfig,
    adaptable,
    init_lora,
    lora_tensors,
    targeted,
)
from sabia.core.model.storage import hub
from sabia.core.model.storage.peft_adapters import (
    CONFIG,
    WEIGHTS,
    base_fingerprint,
    save_adapter,
    start_adapter,
)
from sabia.core.model.storage.safetensors_file import read_tensors
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.train.optimizer.config import OptimizerConfig, rules

SHAPE = {"hidden": 72, "layers": 2, "vocab": 293, "heads": 6, "kv_heads": 3, "head_dim": 20}
SHAPE |= {"ffn": 104, "context": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": new_config("llama", **SHAPE, tied=False),
    "llama-bias": new_config("llama", **SHAPE) | {"attention_bias": True, "mlp_bias": True},
    "qwen3": new_config("qwen3", **SHAPE, tied=False),
    "olmo2": new_config("llama", **SHAPE) | {"model_type": "olmo2", "head_dim": 12},
}
SPECS = {name: from_config(config) for name, config in CONFIGS.items()}
LORA = LoraConfig(rank=3, alpha=7.0)
IDS = np.random.default_rng(2).integers(0, 293, (2, 11))


def perturbed(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Parameters that make every part of the model matter."""
    rng = np.random.default_rng(0)
    return {
        t.name: rng.standard_normal(t.shape, np.float32)
        * np.float32(1.2 * t.shape[-1] ** -0.5 if len(t.shape) > 1 else 0.2)
        + np.float32(t.init.kind == "ones")
        for t in spec.tensors()
    }


def adapters(spec: ModelSpec, config: LoraConfig, seed: int = 1) -> dict[str, np.ndarray]:
    """Adapters that matter: B drawn too."""
    rng = np.random.default_rng(seed)
    fresh = init_lora(spec, config, seed)
    return {k: v + 0.1 * rng.standard_normal(v.shape, np.float32) for k, v in fresh.items()}


def merge(spec: ModelSpec, params: dict[str, np.ndarray], config: LoraConfig) -> Any:
    """The plain model: targeted matrices plus alpha/rank · B A."""
    plain = {t.name: params[t.name] for t in spec.tensors()}
    for name in (t.name for t in targeted(spec, config)):
        a, b = params[name + ".lora_a"], params[name + ".lora_b"]
        plain[name] = plain[name] + np.float32(config.scale) * (b @ a)
    return plain


def scores(ops: Any, spec: ModelSpec, params: Any, over: Any = None, **settings: Any) -> Any:
    over = over or ops
    return logits(spec, params, hidden(spec, params, IDS, over, **settings), over)


def array(ops: Any, x: Any) -> np.ndarray:
    return ops.to_numpy({"x": x})["x"]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("targets", ["", r"attn\.[qv]$", r"layers\.1\.mlp"])
def test_wrapped_is_merged(ops: Any, name: str, targets: str) -> None:
    spec, config = SPECS[name], LoraConfig(3, 7.0, targets)
    params = perturbed(spec) | adapters(spec, config)
    held = ops.to_device(params)
    wrapped = array(ops, scores(ops, spec, held, build_ops(ops.name, adapters=config)))
    merged = array(ops, scores(ops, spec, ops.to_device(merge(spec, params, config))))
    plain = array(ops, scores(ops, spec, held))
    np.testing.assert_allclose(wrapped, merged, atol=2e-5)
    assert np.abs(wrapped - plain).max() > 0.05


def test_an_adapted_loss_is_that_of_the_merged_model(ops: Any) -> None:
    from sabia.core.train.losses.next_token import next_token_loss

    spec = SPECS["qwen3"]
    params = perturbed(spec) | adapters(spec, LORA)
    batch = {"input_ids": IDS[:, :-1], "targets": IDS[:, 1:]}
    batch = {k: ops.integers(v, ops.zeros((), "float32")) for k, v in batch.items()}
    batch["loss_mask"] = ops.zeros((2, 10), "float32") + 1.0
    held, merged = ops.to_device(params), ops.to_device(merge(spec, params, LORA))
    found, weight, _ = next_token_loss(spec, held, batch, build_ops(ops.name, adapters=LORA))
    wanted, _, _ = next_token_loss(spec, merged, batch, ops)
    assert float(weight) == 20
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_fresh_adapters_change_nothing(ops: Any) -> None:
    spec = SPECS["llama"]
    held = ops.to_device(perturbed(spec) | init_lora(spec, LORA, 0))
    wrapped = array(ops, scores(ops, spec, held, build_ops(ops.name, adapters=LORA)))
    np.testing.assert_array_equal(wrapped, array(ops, scores(ops, spec, held)))


def gradients(name: str, spec: ModelSpec, held: Any, wanted: Any, wrap: bool, remat: str) -> Any:
    """Of the squared scores, with respect to the tensors `wanted`."""
    ops = load_ops(name)

    def loss(some: Any) -> Any:
        params = held | some
        over = build_ops(name, adapters=LORA) if wrap else ops
        return (scores(ops, spec, params, over, remat=remat) ** 2).sum()

    some = {k: held[k] for k in wanted}
    if name == "jax":
        import jax

        return ops.to_numpy(jax.jit(jax.grad(loss))(some))
    import torch

    some = {k: v.requires_grad_() for k, v in some.items()}
    found = torch.autograd.grad(loss(some), list(some.values()))
    return ops.to_numpy(dict(zip(some, found, strict=True)))


@pytest.mark.parametrize(("name", "remat"), [("torch", "none"), ("torch", "full"), ("jax", "full")])
def test_gradients_by_the_chain_rule(name: str, remat: str) -> None:
    """dA = s Bᵀ dW and dB = s dW Aᵀ with dW of the merged model; trained are A and B only."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    spec, ops = SPECS["llama"], load_ops(name)
    params = perturbed(spec) | adapters(spec, LORA)
    table = rules(spec, OptimizerConfig(), lora_tensors(spec, LORA))
    trained = [k for k, rule in table.items() if rule.trained]
    assert set(trained) == set(params) - {t.name for t in spec.tensors()}
    found = gradients(name, spec, ops.to_device(params), trained, True, remat)
    matrices = [t.name for t in targeted(spec, LORA)]
    merged = ops.to_device(merge(spec, params, LORA))
    dw = gradients(name, spec, merged, matrices, False, "none")
    for matrix in matrices:
        a, b = params[matrix + ".lora_a"], params[matrix + ".lora_b"]
        for part, wanted in (
            (".lora_a", LORA.scale * b.T @ dw[matrix]),
            (".lora_b", LORA.scale * dw[matrix] @ a.T),
        ):
            atol = 2e-5 * np.abs(wanted).max()
            np.testing.assert_allclose(found[matrix + part], wanted, atol=atol, rtol=1e-3)


def test_tensors_shard_like_their_matrix() -> None:
    spec = SPECS["llama"]
    table = {t.name: t for t in lora_tensors(spec, LORA)}
    a, b = table["layers.0.attn.o.lora_a"], table["layers.0.attn.o.lora_b"]
    assert (a.shape, a.axes) == ((3, 120), ("lora", "heads"))
    assert (b.shape, b.axes) == ((72, 3), ("embed", "lora"))
    assert a.init.std == pytest.approx(120**-0.5)
    assert b.init.kind == "zeros"
    assert len(table) == 2 * len(adaptable(spec)) == 2 * 7 * 2


@pytest.mark.parametrize("targets", ["", r"attn\.[qv]$", r"layers\.1\.(attn\.o|mlp)"])
def test_files(tmp_path: Path, targets: str) -> None:
    spec, config = SPECS["qwen3"], LoraConfig(4, 6.5, targets)
    params = adapters(spec, config)
    save_adapter(tmp_path / "a", spec, params, config, "some/model")
    arrays = read_tensors(tmp_path / "a" / WEIGHTS)
    names = {t.name: str(t.hf) for t in lora_tensors(spec, config)}
    assert arrays.keys() == set(names.values())
    assert all((arrays[names[k]] == v).all() for k, v in params.items())
    prefix, weight = "base_model.model.model.layers.1.self_attn.o_proj.", ".weight"
    assert ({f"{prefix}lora_A{weight}", f"{prefix}lora_B{weight}"} <= arrays.keys()) == (
        "qv" not in targets
    )
    settings = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 6.5)
    assert (
        settings["target_modules"]
        == {
            "": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
            r"attn\.[qv]$": ["q_proj", "v_proj"],
            r"layers\.1\.(attn\.o|mlp)": [
                "model.layers.1.mlp.down_proj",
                "model.layers.1.mlp.gate_proj",
                "model.layers.1.mlp.up_proj",
                "model.layers.1.self_attn.o_proj",
            ],
        }[targets]
    )


@pytest.fixture(scope="module")
def peft() -> Any:
    pytest.importorskip("torch", reason="peft is a torch package")
    pytest.importorskip("transformers", reason="peft adapts its models")
    return pytest.importorskip("peft", reason="peft is the reference")


@pytest.fixture(scope="module", params=["llama-bias", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = SPECS[request.param]
    path = tmp_path_factory.mktemp("lora") / "model"
    hub.save_model(path, spec, perturbed(spec))
    return spec, path


def reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


def their_scores(module: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return module(torch.from_numpy(IDS)).logits.numpy()


@pytest.mark.parametrize("targets", ["", r"layers\.1\.(attn\.o|mlp)"])
def test_peft_reads_ours(peft: Any, model: Any, tmp_path: Path, targets: str) -> None:
    (spec, path), config = model, LoraConfig(3, 7.0, targets)
    params = perturbed(spec) | adapters(spec, config)
    save_adapter(tmp_path / "a", spec, params, config, str(path))
    adapted = peft.PeftModel.from_pretrained(reference(path), tmp_path / "a")
    ops = load_ops("torch")
    held = ops.to_device(params)
    ours = array(ops, scores(ops, spec, held, build_ops(ops.name, adapters=config)))
    np.testing.assert_allclose(their_scores(adapted), ours, atol=2e-5)
    merged = array(ops, scores(ops, spec, ops.to_device(merge(spec, params, config))))
    np.testing.assert_allclose(their_scores(adapted.merge_and_unload()), merged, atol=2e-5)


@pytest.mark.parametrize("scaled_by_root", [False, True])
def test_training_starts_from_an_adapter_of_peft(
    peft: Any, model: Any, tmp_path: Path, scaled_by_root: bool
) -> None:
    """Equal scores at the start, and after our files are read back."""
    import torch

    spec, path = model
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], use_rslora=scaled_by_root,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(reference(path), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, tensors = start_adapter(tmp_path / "theirs", spec)
    assert (ours.rank, ours.targets) == (3, r"layers\.\d+\.(attn\.q|mlp\.up)$")
    ops = load_ops("torch")
    held = ops.to_device(perturbed(spec) | tensors)
    found = array(ops, scores(ops, spec, held, build_ops(ops.name, adapters=ours)))
    np.testing.assert_allclose(found, their_scores(theirs), atol=1e-5)
    save_adapter(tmp_path / "ours", spec, tensors, ours, str(path))
    again = peft.PeftModel.from_pretrained(reference(path), tmp_path / "ours")
    np.testing.assert_allclose(found, their_scores(again), atol=1e-5)


def test_adapters_of_single_layers_start_as_they_are(tmp_path: Path) -> None:
    spec, config = SPECS["qwen3"], LoraConfig(4, 6.5, r"(layers\.1\.attn\.q|layers\.0\.mlp\.up)$")
    params = adapters(spec, config)
    save_adapter(tmp_path / "a", spec, params, config, base_fingerprint="1f")
    ours, tensors = start_adapter(tmp_path / "a", spec)
    assert targeted(spec, ours) == targeted(spec, config)
    assert (ours.rank, ours.alpha) == (4, pytest.approx(6.5))
    assert all(np.array_equal(tensors[name], array) for name, array in params.items())
    assert tensors.keys() == params.keys()
    assert base_fingerprint(tmp_path / "a") == "1f"


def test_adapters_that_cannot_be_the_start(tmp_path: Path) -> None:
    spec = SPECS["qwen3"]
    config = LoraConfig(4, 6.0, r"attn\.[qo]$")
    save_adapter(tmp_path / "a", spec, adapters(spec, config), config)
    settings = json.loads((tmp_path / "a" / CONFIG).read_text())
    settings["alpha_pattern"] = {"q_proj": 12}
    (tmp_path / "a" / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="modules of 2 ranks and scales"):
        start_adapter(tmp_path / "a", spec)
    wider = from_config(CONFIGS["qwen3"] | {"hidden_size": 80})
    with pytest.raises(UsageError, match="is of another model"):
        start_adapter(tmp_path / "a", wider)
    with pytest.raises(UsageError, match="none has no adapter_config"):
        start_adapter(tmp_path / "none", spec)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank 0"),
        ({"alpha": 0.0}, "alpha 0"),
        ({"targets": "embed|head|norm"}, "matches no matrix"),
    ],
)
def test_refused_settings(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        targeted(SPECS["llama"], LoraConfig(**settings))


def test_stacked_experts_are_not_targets() -> None:
    shape = {"hidden": 32, "layers": 1, "vocab": 97, "heads": 4, "ffn": 64, "tied": False}
    config = new_config("llama", **shape) | {"model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    spec = from_config(config)
    assert {t.name for t in adaptable(spec)} == {f"layers.0.attn.{x}" for x in "qkvo"}
    with pytest.raises(UsageError, match="matches no matrix"):
        targeted(spec, LoraConfig(targets="experts"))
