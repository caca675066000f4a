"""What run.json holds of the options: the names and values of earlier versions, which resume."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.grpo import GrpoOptions
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.options.sft import SftOptions
from sabia.core.options.training import Training
from sabia.core.recipes import training_config
from sabia.core.recipes.grpo import policy_config
from sabia.core.spec import from_config, new_config

TRAINING = {
    "lr": 6e-4, "schedule": "wsd", "warmup": "2%", "decay": "20%", "decay_shape": "linear",
    "final_lr": 0.0, "optimizer": "adamw", "weight_decay": 0.1, "betas": "", "clip_norm": 1.0,
    "mup_base": 0, "freeze": "", "lora_rank": 0, "lora_alpha": 0.0, "lora_targets": "", "batch": 0,
    "batch_tokens": 0, "steps": 0, "tokens": 0, "epochs": 0.0, "precision": "fp32",
    "bf16_tail": False, "z_loss": 0.0, "balance": 0.0, "router_z": 0.0, "bias_rate": 0.001,
    "on_spike": "rewind", "spike_sigmas": 8.0,
}  # fmt: skip
GRPO = {
    "reward": "exact", "steps": 100, "prompts": 32, "group": 16, "updates": 1, "lr": 1e-4,
    "schedule": "constant", "warmup": 10, "decay": 0, "final_lr": 0.0, "max_new_tokens": 256,
    "std": False, "overlong": "keep", "precision": "fp32",
    "loss": {
        "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token", "ratio": "token",
        "dual_clip": 0.0, "beta": 0.0, "kl_times_ratio": False, "correction": "none",
        "correction_cap": 2.0, "temperature": 1.0,
    },
    "optimizer": {
        "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0,
        "name": "adamw", "muon_momentum": 0.95, "muon_nesterov": True, "soap_every": 10,
        "soap_max_dim": 10_000, "lr_scales": {}, "freeze": "",
    },
    "max_unknown": 0.0,
}  # fmt: skip


def test_runs_of_earlier_versions_are_the_same_runs() -> None:
    free = {"compile": True, "save_every": "5", "eval_every": 3, "micro_batch": 2, "remat": "full"}
    options = PretrainOptions(shape="d=8,layers=1", validation="v", **free)
    assert training_config.identity(options) == TRAINING
    own = {"lr": 2e-5, "warmup": "3%", "weight_decay": 0.0}
    assert training_config.identity(SftOptions(model="m")) == TRAINING | own
    assert training_config.identity(Training(steps=5)) == TRAINING | {"steps": 5}


def test_grpo_runs_of_earlier_versions_are_the_same_runs() -> None:
    assert policy_config.identity(GrpoOptions(model="m", micro_tokens=5, save_every="3")) == GRPO
    judged = GrpoOptions(
        model="m", reward="rubric", judge_url="u", judge_model="j", concurrency=3, warmup="5%",
        advantage="std", updates=2, clip_low=0.1,
    )  # fmt: skip
    assert policy_config.identity(judged) == GRPO | {
        "reward": "rubric", "warmup": 5, "std": True, "updates": 2,
        "loss": GRPO["loss"] | {"clip_low": 0.1},
        "judge": {"model": "j", "votes": 1, "items_per_call": 1, "reply_format": "text",
                  "reply_tokens": 1024},
    }  # fmt: skip


def test_steps_and_rows() -> None:
    def steps(**settings) -> int:
        options = Training(**settings)
        rows = training_config.batch_rows(options, 100)
        return training_config.step_count(options, 64, 100, rows)

    assert (steps(), steps(epochs=2.5), steps(steps=7), steps(tokens=9600)) == (2, 5, 7, 3)
    assert steps(batch_tokens=1600) == steps(batch=16) == 4


def test_options_of_experts_need_experts() -> None:
    shape = {"hidden": 32, "layers": 2, "vocab": 97, "heads": 4, "ffn": 64}
    dense, mixture, biased = (
        from_config(new_config(family, **shape, **more))
        for family, more in (("llama", {}), ("mixtral", {"experts": 4, "chosen": 2}),
                             ("deepseek_v3", {"experts": 4, "chosen": 2}))
    )  # fmt: skip
    for spec, settings in ((dense, {}), (mixture, {"balance": 0.0}), (biased, {"bias_rate": 0.0})):
        training_config.check_experts(Training(**settings), spec)
    for spec, name in ((dense, "balance"), (dense, "router_z"), (mixture, "bias_rate")):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: the model has no exp"):
            training_config.check_experts(Training(**{name: 0.0}), spec)
