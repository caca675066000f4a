"""One record makes an optimizer: a new one trains on both backends, and its state is saved."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training_cases import ENVIRONMENT, SHAPE, losses, make_tokens
from whole_state import whole_state

from sabia.core.errors import UsageError
from sabia.core.model.storage.hub import init_params
from sabia.core.numerics.optimizers import LIMITS, OPTIMIZERS, Optimizer, with_setting
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.options.option import Option
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.options.sft import SftOptions
from sabia.core.parallel.mesh import Mesh
from sabia.core.recipes.training_config import check_texts, identity, optimizer_config
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.config import OptimizerConfig
from sabia.core.train.stepper_factory import make_stepper

SIGNSGD = """
import sys
from sabia.core.numerics.optimizers import OPTIMIZERS, Optimizer

def direction(step, g, state):
    m = step.settings["momentum"] * state["m"] + (1 - step.settings["momentum"]) * g
    return step.xp.sign(m), {"m": m}

OPTIMIZERS["signsgd"] = Optimizer(
    name="signsgd", help="uses signs", settings={"momentum": 0.8},
    parts=lambda shape, settings: {"m": (shape, False)}, direction=direction,
)
"""
MAIN = "from sabia.cli.main import main\nmain()\n"
SPEC = from_config(new_config("llama", hidden=16, layers=1, vocab=31, heads=2, kv_heads=1, ffn=24))
VALUES = {"eps": 1e-3, "momentum": 0.7, "nesterov": False, "soap_every": 3, "soap_max_dim": 20}
COMMANDS = (PretrainOptions, SftOptions, ClassifyTrainOptions)


@pytest.fixture
def signsgd():
    before = dict(OPTIMIZERS)
    exec(SIGNSGD, {})
    yield OPTIMIZERS["signsgd"]
    del OPTIMIZERS["signsgd"]
    assert before == OPTIMIZERS


def rows(seed: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 31, (4, 12)).astype(np.int32)
    return {
        "input_ids": ids, "targets": np.roll(ids, -1, 1),
        "loss_mask": np.ones(ids.shape, np.float32),
        "segments": np.ones(ids.shape, np.int32),
        "positions": np.tile(np.arange(12, dtype=np.int32), (4, 1)),
        "source": np.ones((4, 1), np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_registered_optimizer_is_its_formula(backend: str, signsgd: Optimizer) -> None:
    pytest.importorskip(backend)
    assert signsgd.state_per_parameter == 1
    config = OptimizerConfig("signsgd", 0.1, 0.0)
    start = init_params(SPEC, 0)
    one = make_stepper(backend, SPEC, start, next_token_loss, config, mesh=Mesh())
    expected = {name: np.array(array) for name, array in start.items()}
    m = {name: np.zeros_like(array) for name, array in expected.items()}
    decay = {tensor.name: 0.1 * tensor.decay for tensor in SPEC.tensors()}
    for number in range(3):
        for name, g in one.gradients(rows(number), number).items():
            m[name] = 0.8 * m[name] + 0.2 * g
            expected[name] -= 1e-2 * (np.sign(m[name]) + decay[name] * expected[name])
        one.step(rows(number), 1e-2, number=number)
    state = whole_state(one)
    for name, array in expected.items():
        assert np.allclose(state[f"m/{name}"], m[name], atol=1e-6)
        # gradients near zero may have another sign in the step
        share = np.isclose(state[f"param/{name}"], array, atol=1e-6).mean()
        assert share > 0.99, (name, share)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_registered_optimizer_trains_and_resumes(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    tokens, whole, part = make_tokens(tmp_path / "tokens"), tmp_path / "whole", tmp_path / "part"

    def run(out: Path) -> str:
        words = [
            "pretrain", tokens, "--shape", SHAPE, "--steps", "6", "--batch", "8", "-o", out,
            "--save-every", "3", "--optimizer", "signsgd", "--backend", backend,
        ]  # fmt: skip
        command = [sys.executable, "-c", SIGNSGD + MAIN, *map(str, words)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr.decode()
        return done.stderr.decode()

    run(whole)
    assert losses(whole)[6] < losses(whole)[1]
    shutil.copytree(whole, part)
    shutil.rmtree(part / "final")
    shutil.rmtree(part / "checkpoints" / "step-00000006")
    write_json(part / "run.json", read_json(part / "run.json") | {"finished": False})
    assert "resuming at step 3 of 6" in run(part)
    assert losses(whole) == losses(part)
    weights = [(out / "final" / "model.safetensors").read_bytes() for out in (whole, part)]
    assert weights[0] == weights[1]


def test_help_choices_and_planner_read_the_table() -> None:
    script = SIGNSGD + (
        "from sabia.core.options.training import Training\n"
        "from sabia.core.options import about, plan_cluster\n"
        "from sabia.core.plan.memory import RECIPES\n"
        "print(Training.table['optimizer'].choices)\n"
        "print(about.long_help(Training)['optimizer'])\n"
        "print(Training.table['momentum'].unset)\n"
        "print(plan_cluster.PlanOptions.table['state_recipe'].choices)\n"
        "print(RECIPES['signsgd'].bytes_per_param)\n"
        "Training(optimizer='signsgd', momentum=0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    choices, text, momentum, recipes, size = done.stdout.splitlines()
    assert choices.endswith("'signsgd')") and "'signsgd'" in recipes
    assert text.endswith("`signsgd` uses signs.")
    assert momentum == "0.95; 0.8 for signsgd"
    assert float(size) == 2 + 2 + 4 + 4


def test_every_setting_has_limits_and_an_option() -> None:
    settings = {name for record in OPTIMIZERS.values() for name in record.settings}
    assert settings == set(LIMITS)
    for command in COMMANDS:
        assert settings - {"beta1", "beta2"} | {"betas"} <= command.table.keys()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("setting", VALUES)
def test_an_option_reaches_the_optimizers_that_have_it_only(command, setting: str) -> None:
    option: Option = command.table[setting]
    given = {"model": "m", "label": "x", "out": "o", setting: VALUES[setting]}
    given = {name: value for name, value in given.items() if name in command.table}
    for name in OPTIMIZERS:
        if name in with_setting(setting):
            options = command(**given, optimizer=name)
            assert optimizer_config(options).settings[setting] == VALUES[setting]
            assert identity(options)[setting] == VALUES[setting]
            default = OPTIMIZERS[name].settings[setting]
            unchanged = command(**given | {setting: default}, optimizer=name)
            assert setting not in identity(unchanged)
        else:
            text = re.escape(f"{option.flag}: only with --optimizer")
            with pytest.raises(UsageError, match=text):
                command(**given, optimizer=name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "muon", "momentum": 1.0}, "--momentum: 1.0 (expected 0 to below 1)"),
        ({"betas": "0.9,1"}, "--betas: 1.0 (expected 0 to below 1)"),
        ({"betas": "0.9"}, "--betas: '0.9' (expected such as 0.9,0.95)"),
        ({"stage_micro_batches": 2}, "--stage-micro-batches: only with the mesh axis pipe"),
        ({"stage_micro_batches": 2, "mesh": "pipe=1"}, "--stage-micro-batches: only with the"),
    ],
)
def test_refusals(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_texts(SftOptions(model="m", **given))


def test_options_out_of_range() -> None:
    for name, value in (("eps", "0"), ("soap-every", "0"), ("soap-max-dim", "0"),
                        ("momentum", "-0.1"), ("stage-micro-batches", "0")):  # fmt: skip
        with pytest.raises(UsageError, match=f"--{name}: .* is out of range"):
            SftOptions.read({"model": "m", name: value})
