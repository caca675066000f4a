"""Training, generation and quantization never mix tensors of the CPU and of a GPU.

Checked without a GPU, on tensors that say that they are on one (tests/support/pretended_cuda.py).
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mesh_cases
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from in_process import sabia  # noqa: E402
from pretended_cuda import MixedDevices, pretended_cuda  # noqa: E402
from training_cases import losses, make_tokens  # noqa: E402
from whole_state import reading, whole_state  # noqa: E402

from sabia.core.generate.engine import Engine  # noqa: E402
from sabia.core.generate.requests import Request  # noqa: E402
from sabia.core.model.lora import LoraConfig  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant import hessians  # noqa: E402
from sabia.core.quant.divergence import divergence  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.recipe import load_recipe  # noqa: E402
from sabia.core.spec import from_config  # noqa: E402
from sabia.core.train.optimizer.config import OptimizerConfig  # noqa: E402
from sabia.core.train.stepper_factory import make_stepper  # noqa: E402

DEEP = {"num_hidden_layers": 4, "layer_types": None}


def test_mixed_devices_are_found() -> None:
    here = torch.ones(3)
    with pretended_cuda():
        there = torch.ones(3, device="cuda")
        assert torch.equal((there + there.to(there.device)).cpu(), 2 * here)
        assert (there * torch.tensor(2.0)).device.type == "cuda"
        with pytest.raises(MixedDevices, match="add"):
            there + here
        with pytest.raises(RuntimeError):
            there.numpy()


def trained(name: str, **settings: Any) -> list[float]:
    """Losses of two steps and of evaluations; the state is read and loaded in between."""
    spec, params = mesh_cases.model(name)
    if settings.get("precision") == "nvfp4":  # which leaves the first two layers as they are
        spec = from_config({k: v for k, v in (spec.config | DEEP).items() if v is not None})
        params = mesh_cases.init_params(spec, 3)
    stepper = make_stepper("torch", spec, params, mesh_cases.loss(spec), **settings)
    losses = []
    for number in range(2):
        data = mesh_cases.batch(spec, number, rows=2)
        losses.append(stepper.step(data, 1e-3, np.ones(2), number=number).loss)
        pieces = whole_state(stepper)
        stepper.load(reading(pieces))
        losses.append(stepper.evaluate(data).loss)
        assert all(np.isfinite(array).all() for array in pieces.values())
    assert stepper.gradients(data)
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["dense", "moe", "hybrid", "latent", "sinks", "classifier"])
def test_training(name: str, precision: str) -> None:
    with pretended_cuda():
        on_device = trained(name, precision=precision)
    assert on_device == pytest.approx(trained(name, precision=precision), rel=1e-2)


SETTINGS = {
    **{name: {"precision": name} for name in ("fp8", "fp8-block", "nvfp4", "qat-int8")},
    **{name: {"optimizer": OptimizerConfig(name=name)}
       for name in ("muon", "lion", "adafactor", "soap")},
    "lora": {"lora": LoraConfig(2, 4.0)},
    "micro-batches": {"micro_batch": 1},
    "biases": {"bias_rate": 1e-3},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_settings(setting: str) -> None:
    name = "latent" if setting == "biases" else "moe"
    with pretended_cuda():
        on_device = trained(name, **SETTINGS[setting])
    far = 2e-2 if setting == "nvfp4" else 1e-2  # 4 bits, rounded at random
    assert on_device == pytest.approx(trained(name, **SETTINGS[setting]), rel=far)


class Tokens:
    """A tokenizer of token numbers."""

    stop_ids = (1,)

    def decode(self, tokens: Any) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("name", ["dense", "moe", "latent", "sinks"])
def test_generation(name: str) -> None:
    spec, params = mesh_cases.model(name)
    draw = np.random.default_rng(0)
    settings: Any = ({"temperature": 0.0}, {"n": 3, "top_p": 0.9}, {"n": 2, "stop": ("1",)},
                     {"temperature": 0.5, "top_k": 9}, {"min_p": 0.1})  # fmt: skip
    requests = [
        Request(draw.integers(2, 130, int(draw.integers(1, 14))).tolist(), 6, id=f"{n}", **more)
        for n, more in enumerate(settings)
    ]
    found = []
    for devices in (nullcontext, pretended_cuda):
        with devices():
            engine = Engine(spec, params, Tokens(), slots=4)
            found.append([each.tokens for each in engine.generate(requests)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("recipe", "name"), [("w4", "dense"), ("w8a8", "moe"), ("fp8", "dense")])
def test_quantization(recipe: str, name: str) -> None:
    spec, params = mesh_cases.model(name)
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 130, n).tolist() for n in draw.integers(3, 40, 20)]
    batches, found = hessians.batches(rows, 200), []
    for devices in (nullcontext, pretended_cuda):
        with devices():
            ops = load_ops("torch")
            made = quantize(spec, params, load_recipe(recipe), ops, batches)
            before, after = (ops.to_device(x, "float32") for x in (params, made.params))
            found.append(divergence(spec, before, after, made.linears, batches).kl_nats)
    # a code that flips at a boundary moves the router: 8-bit activations repeat less exactly
    assert found[1] == pytest.approx(found[0], rel=0.15 if recipe == "w8a8" else 1e-2)


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tokens")
    chats, prompts = tmp_path / "chats.jsonl", tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "2 and 3?"}, {"role": "assistant", "content": "5"}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    prompt = {"id": "p", "messages": turns[:1], "answer": "[0-9A-Z]"}
    prompts.write_text((json.dumps(prompt) + "\n") * 4)
    model = tmp_path / "base-cpu" / "final"
    steps = ("--steps", 3, "--save-every", 2)
    size = "d=32,layers=2,heads=2,context=64"
    commands: dict[str, tuple[Any, ...]] = {
        "base": ("pretrain", tokens, "--shape", size, "--batch", 8, *steps),
        "sft": ("sft", chats, "--model", model, "--length", 64, "--batch", 2, *steps),
        "grpo": ("grpo", prompts, "--model", model, "--reward", "regex", "--prompts", 2,
                 "--group", 4, "--max-new-tokens", 4, "--beta", 0.1, "--updates", 2, *steps),
    }  # fmt: skip
    for name, words in commands.items():
        for side, devices in (("cpu", nullcontext), ("device", pretended_cuda)):
            with devices():
                done = sabia(*words, "-o", tmp_path / f"{name}-{side}", "--to", "jsonl")
            assert done.exit_code == 0, done.output
        on_device, on_cpu = (losses(tmp_path / f"{name}-{side}") for side in ("device", "cpu"))
        assert list(on_device.values()) == pytest.approx(list(on_cpu.values()), rel=1e-3, abs=1e-4)
