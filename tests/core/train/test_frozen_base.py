"""Frozen matrices of 4 bits beside adapters: the run is that of LoRA on the decoded matrices."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model.lora import LoraConfig, base_names
from sabia.core.model.storage import hub
from sabia.core.numerics import nf4
from sabia.core.numerics.frozen_base import FORMATS, stored_base
from sabia.core.spec import ModelSpec, from_config, new_config
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver
from sabia.core.train.convert import export_checkpoint
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper

torch = pytest.importorskip("torch", reason="codes are decoded in torch")

SHAPE = {"hidden": 40, "layers": 2, "vocab": 67, "heads": 4, "kv_heads": 2, "head_dim": 10}
SHAPE |= {"ffn": 52, "context": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
SPECS = {
    "llama": from_config(new_config("llama", **SHAPE, tied=False)),
    "experts": from_config(new_config("qwen3", **SHAPE) | {"model_type": "qwen3_moe"} | EXPERTS),
    "latent": from_config(new_config("deepseek_v3", hidden=32, layers=2, vocab=67, heads=2,
                                     experts=4, chosen=2, context=64)),
}  # fmt: skip
IDS = np.random.default_rng(1).integers(0, 67, (4, 13))
BATCH = {"input_ids": IDS[:, :-1], "targets": IDS[:, 1:], "loss_mask": np.ones((4, 12), np.float32)}


def drawn(spec: ModelSpec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {t.name: rng.standard_normal(t.shape, np.float32) for t in spec.tensors()}
    return {n: x / np.sqrt(x.shape[-1]) if x.ndim > 1 else 1 + 0.1 * x for n, x in made.items()}


def decoded(spec: ModelSpec, params: dict[str, np.ndarray], base: str) -> dict[str, np.ndarray]:
    held = base_names(spec, LoraConfig(base=base))
    return {n: stored_base(x, base).decoded() if n in held else x for n, x in params.items()}


def stepper(spec: ModelSpec, params: Any, base: str = "", **settings: Any) -> Any:
    remat = settings.pop("remat", "none")

    def loss(*given: Any) -> Any:
        return next_token_loss(*given, remat=remat)

    lora = LoraConfig(3, 7.0, base=base)
    made = make_stepper("torch", spec, params, loss, lora=lora, **settings)
    with torch.no_grad():  # adapters that matter
        for name, p in made.params.items():
            if name.endswith("lora_b"):
                p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
    return made


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("shape", [(5, 64), (7, 36), (3, 33), (130, 1030), (3, 6, 40)])
def test_codes_on_a_device_are_those_of_numpy(base: str, shape: tuple[int, ...]) -> None:
    from sabia.core.ops.stored_torch import codes_on

    weight = np.random.default_rng(3).standard_normal(shape, np.float32) * 0.3
    weight.reshape(-1)[:64] = 0
    stored = stored_base(weight, base)
    codes, values = codes_on(stored, torch.device("cpu")), stored.decoded()
    assert tuple(codes.shape) == shape == values.shape
    np.testing.assert_array_equal(codes.to(torch.float32).numpy(), values)
    assert torch.equal(codes.to(torch.bfloat16), torch.from_numpy(values).bfloat16())
    error = np.abs(values - weight).max() / np.abs(weight).max()
    assert 0 < error < 0.2 and not values.reshape(-1)[:64].any()
    if shape == (130, 1030):
        assert codes.nbytes <= 0.52 * weight.size


def test_nf4_is_the_formula_of_the_paper() -> None:
    """Blocks of 64, the largest values less their mean in 8 bits by blocks of 256."""
    weight = np.random.default_rng(4).standard_normal((40, 500), np.float32)
    largest = np.abs(np.pad(weight.ravel(), (0, -weight.size % 64)).reshape(-1, 64)).max(1)
    table, offset = nf4.dynamic_values(), largest.mean(dtype=np.float32)
    rest = largest - offset
    for start in range(0, len(rest), 256):
        part = rest[start : start + 256]
        step = np.abs(part).max()
        part[:] = table[np.abs(part[:, None] / step - table).argmin(1)] * step
    codes = np.abs(weight.ravel()[:, None] / np.repeat(largest, 64)[: weight.size, None]
                   - nf4.VALUES).argmin(1)  # fmt: skip
    wanted = nf4.VALUES[codes] * np.repeat(rest + offset, 64)[: weight.size]
    found = stored_base(weight, "nf4").decoded()
    np.testing.assert_allclose(found, wanted.reshape(weight.shape), atol=1e-6)


@pytest.mark.parametrize(("name", "base", "more"), [
    ("llama", "nf4", {}),
    pytest.param("llama", "int4", {"remat": "full"}, marks=pytest.mark.slow),
    pytest.param("llama", "nf4", {"precision": "bf16", "micro_batch": 2}, marks=pytest.mark.slow),
    pytest.param("experts", "nf4", {"remat": "matmuls"}, marks=pytest.mark.slow),
    ("experts", "int4", {}),
    pytest.param("latent", "nf4", {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_step_is_that_of_adapters_on_the_decoded_matrices(
    name: str, base: str, more: Any
) -> None:
    """To the last bit: losses, gradients, and the adapters after three steps."""
    spec = SPECS[name]
    params = drawn(spec)
    held, plain = (
        stepper(spec, params, base, **more),
        stepper(spec, decoded(spec, params, base), **more),
    )
    names = base_names(spec, held.setup.lora)
    assert len(names) >= 2 * 5 and not any("router" in n for n in names)
    for n in names:
        assert not isinstance(held.params[n], torch.Tensor)
    ours, theirs = held.gradients(BATCH), plain.gradients(BATCH)
    assert ours.keys() == theirs.keys() and all(".lora_" in n for n in ours)
    assert all(np.abs(g).max() > 0 for g in ours.values())
    for n, gradient in theirs.items():
        np.testing.assert_array_equal(ours[n], gradient)
    for number in range(3):
        one, other = (s.step(BATCH, 1e-2, number=number) for s in (held, plain))
        assert one.loss == other.loss and one.grad_norm == other.grad_norm and one.updated
    for n in ours:
        assert torch.equal(held.params[n], plain.params[n])


def test_the_backward_pass_decodes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no decoded matrix is kept between the passes."""
    from sabia.core.ops import stored_torch

    spec, calls = SPECS["llama"], []
    held = stepper(spec, drawn(spec), "nf4")
    decode = stored_torch.Nf4Codes.to
    monkeypatch.setattr(
        stored_torch.Nf4Codes, "to", lambda *given: (calls.append(1), decode(*given))[1]
    )
    held.evaluate(BATCH)
    forward = len(calls)
    assert forward == len(base_names(spec, held.setup.lora)) == 14
    held.gradients(BATCH)
    # no gradient goes below the first layer's queries, keys and values
    assert len(calls) == 2 * forward + forward - 3


def test_checkpoints_have_no_base_and_final_is_of_the_decoded_one(tmp_path: Path) -> None:
    spec = SPECS["experts"]
    hub.save_model(tmp_path / "model", spec, params := drawn(spec))
    held = stepper(spec, params, "nf4")
    held.step(BATCH, 1e-2)
    with Saver(tmp_path / "saved") as saver:
        saver.save(1, [*held.pieces()], {})
    reader = Reader(latest(tmp_path / "saved"))
    names = base_names(spec, held.setup.lora)
    assert not any(f"param/{n}" in reader for n in names) and "param/embed" in reader
    again = stepper(spec, params, "nf4")
    again.load(reader.read)
    assert again.evaluate(BATCH).loss == held.evaluate(BATCH).loss
    given = (reader, spec, tmp_path / "final", "float32")
    export_checkpoint(*given, lora=held.setup.lora, kept_from=tmp_path / "model")
    final = hub.load_model(tmp_path / "final")[1]
    plain, lora = decoded(spec, params, "nf4"), held.setup.lora
    for n in names:
        change = 0.0
        if n + ".lora_a" in held.params:
            a, b = (held.params[f"{n}.lora_{part}"].detach().numpy() for part in "ab")
            change = np.float32(lora.scale) * (b @ a)
        np.testing.assert_allclose(final[n], plain[n] + change, atol=1e-6)
        assert np.abs(final[n] - params[n] - change).max() > 1e-3
    merged = make_stepper("torch", spec, final, next_token_loss)
    assert merged.evaluate(BATCH).loss == pytest.approx(held.evaluate(BATCH).loss, abs=1e-5)


@pytest.mark.parametrize(("settings", "message"), [
    ({"precision": "fp8"}, "--lora-base: nf4 with --precision fp8 (expected fp32 or bf16)"),
    ({"compiled": True}, "--lora-base: nf4 with --compile"),
    ({"backend": "jax"}, "--lora-base: nf4 with --backend jax (expected torch)"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(settings: dict[str, Any], message: str) -> None:
    backend = settings.pop("backend", "torch")
    pytest.importorskip(backend, reason="the other backend")
    spec = SPECS["llama"]
    with pytest.raises(UsageError, match=re.escape(message)):
        make_stepper(
            backend, spec, drawn(spec), next_token_loss, lora=LoraConfig(base="nf4"), **settings
        )


def test_a_mesh_that_splits_the_model_is_refused() -> None:
    from sabia.core.parallel.mesh import Mesh

    spec = SPECS["llama"]
    with pytest.raises(UsageError, match="--lora-base: nf4 with --mesh"):
        make_stepper("torch", spec, drawn(spec), next_token_loss, mesh=Mesh(fsdp=2),
                     lora=LoraConfig(base="nf4"))  # fmt: skip
