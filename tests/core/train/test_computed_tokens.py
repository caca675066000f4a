"""Shared beginnings computed once, the last layer for tokens with a loss: equal results."""

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from sabia.core.model import forward
from sabia.core.model.lora import LoraConfig
from sabia.core.model.storage.hub import init_params
from sabia.core.ops.product import Recorder
from sabia.core.parallel.build_ops import build_ops
from sabia.core.parallel.mesh import Mesh
from sabia.core.spec import from_config, new_config
from sabia.core.spec.families import with_classifier
from sabia.core.spec.model import classifier_config
from sabia.core.train.losses.computed_tokens import computed_tokens, no_sharing, whole_rows
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.losses.preference import PreferenceLoss, preference_loss
from sabia.core.train.stepper import Setup
from sabia.core.train.stepper_factory import make_stepper

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 61,
         "max_position_embeddings": 256}  # fmt: skip
LATENT = {"model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 4,
          "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "n_group": 1, "topk_group": 1, "kv_lora_rank": 12, "q_lora_rank": 10,
          "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}  # fmt: skip
HYBRID = {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
          "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "shared_expert_intermediate_size": 16}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "windows": {"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 2},
    "latent": LATENT,
    "latent-dense": LATENT | {"first_k_dense_replace": 2},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "hybrid": HYBRID,
    "dynamic": {"model_type": "llama", "rope_parameters": DYNAMIC, "max_position_embeddings": 8},
}


def spec_of(family: str) -> Any:
    return from_config(SMALL | FAMILIES[family])


def params_of(spec: Any) -> dict[str, np.ndarray]:
    return {name: np.array(3 * x) for name, x in init_params(spec, 0).items()}


def batch(prompt: int, rows: int = 2) -> dict[str, np.ndarray]:
    """Rows of two pairs of answers of 1 to 9 tokens, each to a prompt, which all begin with the
    same `prompt` // 2 tokens; an answer may begin like the other one."""
    rng, made = np.random.default_rng(prompt), []
    system = rng.integers(0, 61, prompt // 2)
    for _ in range(rows):
        columns: list[list[int]] = [[], [], [], []]
        for pair in range(2):
            asked = np.concatenate([system, rng.integers(0, 61, prompt - len(system))])
            start = rng.integers(0, 61, rng.integers(0, 3))
            for side in range(2):
                ids = np.concatenate([asked, start, rng.integers(0, 61, rng.integers(1, 10))])
                mask = np.arange(len(ids)) >= prompt - 1
                mask[-1] = False  # predicts nothing
                number = [2 * pair + side + 1] * len(ids)
                for column, values in zip(
                    columns, (ids, number, range(len(ids)), mask), strict=True
                ):
                    column.extend(values)
        made.append(columns)
    width = max(len(row[0]) for row in made) + 2
    arrays = [
        [np.pad(x, (0, width - len(x))) for x in column] for column in zip(*made, strict=True)
    ]
    ids, segments, positions = (np.array(x, np.int32) for x in arrays[:3])
    rows_of = {"input_ids": ids, "segments": segments, "positions": positions,
               "targets": np.roll(ids, -1, 1)}  # fmt: skip
    rows_of |= {"loss_mask": np.array(arrays[3], np.float32)}
    rows_of |= {"sides": np.tile(np.array([1, -1, 1, -1], np.float32), (rows, 1))}
    rows_of |= {"reference": rng.normal(-20, 3, (rows, 4)).astype(np.float32)}
    rows_of |= {name: np.full((rows, 1), 0.1, np.float32) for name in ("z", "per_token")}
    return rows_of | {"source": np.eye(rows, dtype=np.float32)}


def agree(loss: Any, spec: Any, given: dict[str, np.ndarray], **settings: Any) -> Any:
    """Losses, sums and gradients are those of whole rows; returns the stepper."""
    one, whole = (make_stepper("torch", spec, params_of(spec), loss, **settings) for _ in range(2))
    whole._whole_rows = "as a reference"  # type: ignore[attr-defined]
    a, b = one.evaluate(given), whole.evaluate(given)
    assert a.weight == b.weight
    assert a.loss == pytest.approx(b.loss, rel=1e-6, abs=1e-6)
    for name, value in b.extras.items():
        np.testing.assert_allclose(a.extras[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
    right, held = whole.gradients(given), one.gradients(given)
    largest = max(np.abs(x).max() for x in right.values())
    for name, gradient in right.items():
        # sums in another order; cuts into other rows differ as much
        assert np.abs(held[name] - gradient).max() <= 3e-6 * largest, name
    return one


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "prompt", [12, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))]
)
def test_every_family(family: str, prompt: int) -> None:
    given, spec = batch(prompt), spec_of(family)
    loss = partial(preference_loss, options=PreferenceLoss("dpo", 0.1, nll=0.3))
    one = agree(loss, spec, given)
    assert bool(one.no_sharing) == (family in ("hybrid", "dynamic"))
    agree(next_token_loss, spec, given)


@pytest.mark.parametrize("kind", ["ipo", "kto", "simpo", "orpo", "reward"])
def test_every_loss(kind: str) -> None:
    given, spec = batch(6), from_config(new_config(hidden=24, layers=2, heads=4, vocab=61))
    if kind == "reward":
        spec = with_classifier(spec, classifier_config(spec.config, ("reward",), "regression", 0))
        last = np.diff(given["segments"], append=0) != 0
        given["loss_mask"] = (last & (given["segments"] > 0)).astype(np.float32)
    agree(partial(preference_loss, options=PreferenceLoss(kind, 0.2)), spec, given)


@pytest.mark.parametrize(
    "settings",
    [{"micro_batch": 1}, {"lora": LoraConfig(3, 6.0)}],
    ids=lambda x: next(iter(x)),
)
def test_settings(settings: dict[str, Any]) -> None:
    loss = partial(preference_loss, options=PreferenceLoss("dpo", 0.1))
    agree(loss, spec_of("llama"), batch(9), **settings)


@pytest.mark.parametrize("remat", ["matmuls", "full"])
def test_recomputed_layers(remat: str) -> None:
    options = PreferenceLoss("dpo", 0.1)
    agree(partial(preference_loss, options=options, remat=remat), spec_of("llama"), batch(9))


def test_what_is_computed() -> None:
    given = batch(12)
    made = computed_tokens(given, True)
    saved = given["input_ids"].shape[1] - made["input_ids"].shape[1]
    assert saved >= 2 * 12 + 6  # two prompts, and what the second one begins with
    for name in ("input_ids", "positions"):
        again = np.take_along_axis(made[name], made["keys"], 1)
        inside = given["segments"] > 0
        assert (again == given[name])[inside].all()
    counted = int(given["loss_mask"].sum(1).max())
    assert made["outputs"].shape == made["targets"].shape == (2, counted)
    assert made["loss_mask"].sum() == given["loss_mask"].sum()
    spec, recorder = spec_of("llama"), Recorder()
    ops = build_ops("torch", record=recorder)
    names = ("positions", "segments", "keys", "queries", "outputs")
    arrays = {name: made[name] for name in names}
    weights = ops.to_device(params_of(spec), "float32")
    forward.hidden(spec, weights, made["input_ids"], ops, **arrays)
    tokens = {name: x.shape[1] for name, x in recorder.outputs.items()}
    width = made["input_ids"].shape[1]
    assert tokens["layers.0.mlp.down"] == tokens["layers.1.attn.k"] == width
    assert tokens["layers.1.attn.q"] == tokens["layers.1.mlp.down"] == counted


def test_a_batch_of_full_weight_is_left_alone() -> None:
    given = batch(0)
    given["loss_mask"][:] = 1
    assert computed_tokens(given, False).keys() == given.keys()


def test_shared_tokens_that_all_count() -> None:
    given = batch(12)
    given["loss_mask"] = (given["segments"] > 0).astype(np.float32)
    assert "keys" in computed_tokens(given, True)
    agree(next_token_loss, spec_of("llama"), given)


def test_reasons() -> None:
    spec, mesh = spec_of("llama"), Mesh()
    setup = make_stepper("torch", spec, params_of(spec), next_token_loss).setup  # type: ignore
    assert isinstance(setup, Setup)
    assert not whole_rows(setup, mesh, "cpu") and not no_sharing(setup)
    assert whole_rows(setup, mesh, "cuda") == "on cuda"
    assert whole_rows(setup, Mesh(context=2), "cpu") == "--mesh context=2"
    assert not whole_rows(setup, Mesh(data=2, fsdp=2, tensor=2), "cpu")
    experts = spec_of("experts")
    loads = make_stepper("torch", experts, params_of(experts), next_token_loss)
    assert "loads" in loads.no_sharing
